"""Checkpoints of spread decoders are those of the unmodified model: they load at any size, and without AutoEP."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.engines import config, gathered, make_engine, masters, moments, train, zero
from tests.support.models import Batches, make_batches
from tests.support.moe_decoders import moe_decoder
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference

KIND, STEPS, ROWS, WORLD_SIZE, EP_SIZE = "mixtral", 4, 2, 2, 2
SAVED_AT = STEPS // 2
STAGES = (0, 1, 3)
FROZEN = "decoder.model.layers.1.mlp.experts.down_proj"


def _model() -> nn.Module:
    model = moe_decoder(KIND)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def _engine(stage: int, ep_size: int | None) -> DeepSpeedEngine:
    block = {} if ep_size is None else {"expert_parallel": {"enabled": True, "autoep_size": ep_size}}
    model = _model()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    return make_engine(
        model, config(1, ROWS, **zero(stage, gather_16bit_weights_on_model_save=True), **block), optimizer=optimizer
    )


def _batches() -> Batches:
    return make_batches(moe_decoder(KIND), STEPS, 1, WORLD_SIZE, ROWS)


@dataclass
class Held:
    """What a rank's engine holds; `later` after the last step."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    frozen: Tensor | None = None
    later: dict[str, Tensor] = field(default_factory=dict)


def _held(engine: DeepSpeedEngine) -> Held:
    frozen = engine.module.get_parameter(FROZEN)
    with torch.no_grad():
        return Held(masters(engine), moments(engine), _whole(engine, frozen))


def _whole(engine: DeepSpeedEngine, param: nn.Parameter) -> Tensor:
    with gathered(engine, [param]):
        return param.detach().clone()


def _write(rank: int, world_size: int, folder: Path) -> dict[int, Held]:
    found = {}
    for stage in STAGES:
        engine, batches = _engine(stage, EP_SIZE), _batches()
        train(engine, batches[:SAVED_AT], rank)
        engine.save_checkpoint(folder / str(stage))
        engine.save_16bit_model(folder / str(stage), "model.bin")
        found[stage] = _held(engine)
        found[stage].later = train(engine, batches[SAVED_AT:], rank).weights
        engine.destroy()
    return found


def _read(rank: int, world_size: int, folder: Path, stage: int, ep_size: int | None) -> dict[int, Held]:
    found = {}
    for written in STAGES:
        engine = _engine(stage, ep_size)
        with torch.no_grad():
            for param in engine.module.parameters():
                if param.numel() and not param.requires_grad:
                    param.zero_()
        path, _ = engine.load_checkpoint(folder / str(written))
        assert path is not None
        found[written] = _held(engine)
        if world_size == WORLD_SIZE:
            found[written].later = train(engine, _batches()[SAVED_AT:], rank).weights
        engine.destroy()
    return found


def _joined(of_ranks: list[dict[str, Tensor]], ep_size: int | None) -> dict[str, Tensor]:
    return {
        name: torch.cat([of[name] for of in of_ranks[: ep_size or 1]]) if ".mlp.experts." in name else of_ranks[0][name]
        for name in of_ranks[0]
    }


def _state(of_ranks: list[Held], ep_size: int | None) -> dict[str, Tensor]:
    """Weights, moments and the frozen weights, whole, under one set of names."""
    flat = [
        held.weights
        | {f"{name}/{key}": value for name, of_name in held.moments.items() for key, value in of_name.items()}
        | {FROZEN: held.frozen}
        for held in of_ranks
    ]
    return _joined(flat, ep_size)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, Held]]]:
    """A folder of each stage's checkpoint and model file, and what the ranks held."""
    folder = tmp_path_factory.mktemp("auto_ep")
    return folder, run_ranks(_write, WORLD_SIZE, folder, timeout_seconds=120)


def test_a_checkpoint_of_spread_experts_loads_at_other_sizes_and_without_auto_ep(run: tuple[Path, Any]) -> None:
    folder, written = run
    for world_size, stage, ep_size in ((2, 1, 1), (2, 0, 2), (1, 0, None), (4, 3, 4), (4, 2, 2)):
        read = run_ranks(_read, world_size, folder, stage, ep_size, timeout_seconds=120)
        for saved in STAGES:
            want = _state([each[saved] for each in written], EP_SIZE)
            got = _state([each[saved] for each in read], ep_size)
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want), (saved, world_size, stage, ep_size)
            if world_size == WORLD_SIZE:
                later = _joined([each[saved].later for each in written], EP_SIZE)
                resumed = _joined([each[saved].later for each in read], ep_size)
                assert relative_difference(resumed, later) <= FP64_ROUNDING


def test_exports_fit_the_unmodified_model(run: tuple[Path, Any]) -> None:
    folder, written = run
    for saved in STAGES:
        want = _state([each[saved] for each in written], EP_SIZE)
        model = _model()
        model.load_state_dict(torch.load(folder / str(saved) / "model.bin", weights_only=True), strict=True)
        exported = get_fp32_state_dict_from_zero_checkpoint(folder / str(saved))
        for name, param in model.named_parameters():
            assert torch.equal(param, want[name]), (saved, name)
            torch.testing.assert_close(exported[name], want[name].float(), rtol=0, atol=0)


def _whole_state_dict(rank: int, world_size: int, stage: int) -> tuple[Any, ...]:
    engine = _engine(stage, world_size)
    given: dict[str, Any] = {name: value * 2 for name, value in _model().state_dict().items()}
    engine.load_module_state_dict(given)
    whole = engine._consolidated_16bit_state_dict()
    assert (whole is None) == (rank > 0)
    return given, whole


def test_state_dicts_of_the_unmodified_model_load_and_come_back() -> None:
    for stage in (1, 3):
        given, whole = run_ranks(_whole_state_dict, 2, stage, timeout_seconds=60)[0]
        assert given.keys() == whole.keys()
        assert all(torch.equal(given[name], whole[name]) for name in given)
