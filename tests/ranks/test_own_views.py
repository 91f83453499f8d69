"""ZeRO stage 3 with one rank: parameters are used where their shards rest, and nobody can tell but by address and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.offload import placement
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.support.engines import Outcome, config, make_engine, train, zero
from tests.support.models import TiedGpt, build, cast_batches, make_batches
from tests.support.ranks import run_ranks

OFFLOADS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _engine(precision: str, keys: dict[str, Any]) -> DeepSpeedEngine:
    blocks: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    settings = config(1, **blocks, **zero(3, stage3_param_persistence_threshold=0, **keys))
    model = build(TiedGpt)
    return make_engine(model, settings, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-2))


def _places_of(engine: DeepSpeedEngine) -> list[range]:
    """The memory in which this rank's shards rest."""
    values = [flat.values for flat in engine._parts.partition.sharded]
    return [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in values]


def _train(precision: str, keys: dict[str, Any]) -> tuple[Outcome, set[bool]]:
    engine = _engine(precision, keys)
    places, seen = _places_of(engine), set()

    def look(module: nn.Module, _args: Any) -> None:
        own = [param for param in module.parameters(recurse=False) if param.numel()]
        seen.update(any(param.data_ptr() in place for place in places) for param in own)

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
    batches = cast_batches(make_batches(build(TiedGpt), 4, 1, 1), PRECISIONS[precision])
    outcome = train(engine, batches, 0)
    assert all(param.numel() == 0 for param in engine.module.parameters())
    engine.destroy()
    return outcome, seen


def _as_gathered(rank: int, _: int, precision: str, offload: str) -> list[str]:
    placement.is_host_apart = lambda device: False
    got, are_there = _train(precision, OFFLOADS[offload])
    placement.is_host_apart = lambda device: True  # shards in other memory than the device's: a gather copies them
    want, are_elsewhere = _train(precision, {**OFFLOADS[offload], "offload_param": {"device": "cpu"}})
    found = [] if (are_there, are_elsewhere) == ({True}, {False}) else [f"shown: {are_there}, {are_elsewhere}"]
    found += [name for name in ("losses", "norms") if getattr(got, name) != getattr(want, name)]
    for name in ("weights", "model_weights"):
        theirs, ours = getattr(want, name), getattr(got, name)
        found += [f"{name} {each}" for each in theirs if not torch.equal(ours[each], theirs[each])]
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_training_on_the_shards_gives_the_bits_of_training_on_gathered_copies(precision: str, offload: str) -> None:
    assert run_ranks(_as_gathered, 1, precision, offload) == [[]]


def _edit_amid_a_forward(rank: int, _: int, precision: str) -> tuple[bool, float, float]:
    engine = _engine(precision, OFFLOADS["both"])
    block = next(module for module in engine.module.modules() if isinstance(module, nn.LayerNorm))
    before: list[Tensor] = []

    def edit(module: nn.Module, _args: Any) -> None:
        before.append(module.weight.detach().clone())
        safe_set_full_fp32_param(module.weight, torch.full(module.weight.shape, 5.0))
        before.append(module.weight.detach().clone())

    hook = block.register_forward_pre_hook(edit)
    batch = cast_batches(make_batches(build(TiedGpt), 1, 1, 1), PRECISIONS[precision])[0][0][0]
    with torch.no_grad():
        engine(*batch)
    hook.remove()
    was_kept = torch.equal(*before)
    shown: list[Tensor] = []
    block.register_forward_pre_hook(lambda module, _args: shown.append(module.weight.detach().clone()))
    with torch.no_grad():
        engine(*batch)
    master = safe_get_full_fp32_param(block.weight)
    assert master is not None
    return was_kept, float(shown[0].float().min()), float(master.min())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_module_that_runs_keeps_its_values_while_they_are_edited(precision: str) -> None:
    assert run_ranks(_edit_amid_a_forward, 1, precision) == [(True, 5.0, 5.0)]
