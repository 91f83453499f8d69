"""`optimizer.parameter_offload`: hooks that a client takes off to generate, and puts on again, change no training."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import ArgumentError
from deepspeed.zero import GatheredParameters, ZeroParamStatus
from tests.support.engines import config, make_engine, masters, zero
from tests.support.models import TiedGpt, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
STEPS = 4


def _hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _take_hooks_off(engine: DeepSpeedEngine) -> None:
    """As TRL does it: by the names of the original, through whatever the parameters and modules offer."""
    assert engine.optimizer is not None
    offload = engine.optimizer.parameter_offload
    module: Any = offload.module
    for _, param in itertools.chain(module.named_parameters(recurse=True), module.ds_external_parameters()):
        param.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


def _generate_between_steps(rank: int, world_size: int, persistent_numel: int) -> dict[str, Any]:
    model = build(TiedGpt, dtype=torch.float64)
    engine = make_engine(
        model,
        config(**zero(3, stage3_param_persistence_threshold=persistent_numel)),
        optimizer=ADAM(model.parameters()),
    )
    assert engine.optimizer is not None
    offload = engine.optimizer.parameter_offload
    batches = make_batches(model, STEPS, 1, world_size)
    found: dict[str, Any] = {"hooks": [_hooks_of(model)], "is_unknown": [offload.param_coordinator.is_invalid_trace()]}
    losses = []
    for step, (micro,) in enumerate(batches):
        loss = engine(*micro[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 1:
            with GatheredParameters(model.parameters()):
                _take_hooks_off(engine)
                found["hooks"].append(_hooks_of(model))
                with torch.no_grad():
                    found["generated"] = [model(*micro[rank]).item() for _ in range(3)]
                offload._register_deepspeed_module(offload.module)
                offload._register_deepspeed_module(offload.module)  # each hook is on once
            found["hooks"].append(_hooks_of(model))
            assert {p.ds_status for p in model.parameters() if p.numel()} <= {ZeroParamStatus.AVAILABLE}  # type: ignore[attr-defined]
            assert all(
                (p.numel() > 0) is (persistent_numel >= whole.numel())
                for p, whole in zip(model.parameters(), build(TiedGpt, dtype=torch.float64).parameters(), strict=True)
            )
        if step == 2:
            found["is_unknown"].append(offload.param_coordinator.is_invalid_trace())
            offload.param_coordinator._invalidate_trace()
            found["is_unknown"].append(offload.param_coordinator.is_invalid_trace())
    return {
        **found,
        "loss": losses,
        "weights": masters(engine),
        "is_known_at_the_end": not offload.param_coordinator.is_invalid_trace(),
    }


ALL, SOME, NONE = 0, 100, 10**6
"""Parameters up to this many elements stay whole: all are sharded, or some, or none."""


@pytest.mark.parametrize(("world_size", "persistent_numel"), [(1, ALL), (2, ALL), (2, SOME), (2, NONE)])
def test_training_goes_on_as_if_nothing_had_been_generated(world_size: int, persistent_numel: int) -> None:
    is_sharded = persistent_numel != NONE
    model = build(TiedGpt, dtype=torch.float64)
    batches = make_batches(model, STEPS, 1, world_size)
    early = build(TiedGpt, dtype=torch.float64)
    train_reference(early, ADAM, batches, 2)
    wanted = train_reference(model, ADAM, batches)
    for rank, found in enumerate(run_ranks(_generate_between_steps, world_size, persistent_numel)):
        before, without, after = found["hooks"]
        assert (without, after) == (0, before)
        assert (before > 0) is is_sharded
        assert found["is_unknown"] == [True, not is_sharded, True]
        assert found["is_known_at_the_end"] is is_sharded
        assert relative_difference(found["weights"], wanted.weights) <= FP64_ROUNDING
        with torch.no_grad():
            assert found["generated"] == pytest.approx([early(*batches[1][0][rank]).item()] * 3, rel=FP64_ROUNDING)


def _ask_elsewhere(rank: int, world_size: int) -> list[bool]:
    found = []
    for stage in (0, 1, 2, 3):
        model = build(TiedGpt, dtype=torch.float64)
        engine = make_engine(model, config(**zero(stage)), optimizer=ADAM(model.parameters()))
        found.append(hasattr(engine.optimizer, "parameter_offload"))
    assert engine.optimizer is not None
    with pytest.raises(ArgumentError, match="hooks are put on the whole model at once"):
        engine.optimizer.parameter_offload._register_deepspeed_module(nn.Linear(1, 1))
    return found


def test_only_stage_3_has_it_for_clients_ask_and_it_knows_its_model_only() -> None:
    assert run_ranks(_ask_elsewhere, 1) == [[False, False, False, True]]
