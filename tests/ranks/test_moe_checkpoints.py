"""Experts go out and come back whole: other ranks, another ep_size, another ZeRO stage, exports of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.engines import config, make_engine, masters, moments, train, zero
from tests.support.models import Batches, make_batches
from tests.support.moe_models import MoeNet, moe_net
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference
from tests.support.sweeps import IS_SWEEP

ROWS = 4  # of the whole batch: 1, 2 and 4 ranks divide it
BEFORE, AFTER = 3, 2
EXPERTS = (4, 8)
KEYS = {"stage3_param_persistence_threshold": 20, "stage3_gather_16bit_weights_on_model_save": True}


def _engine(ep_size: int, stage: int, world_size: int, *, offset: float = 0.0, **blocks: Any) -> Any:
    model = moe_net(EXPERTS, ep_size, k=2)
    if offset:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(offset)
    settings = config(1, ROWS // world_size, **zero(stage, **KEYS), **blocks)
    return make_engine(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def _batches(model: MoeNet, world_size: int) -> Batches:
    """Tokens are routed one by one, and nothing depends on how many ranks share a batch but the balancing loss."""
    whole = make_batches(model, BEFORE + AFTER, 1, 1, rows=ROWS)
    return [[[tuple(t.chunk(world_size)[r] for t in micro[0]) for r in range(world_size)] for micro in s] for s in whole]


def _save(rank: int, world_size: int, folder: str, ep_size: int, stage: int) -> Any:
    engine = _engine(ep_size, stage, world_size)
    data = _batches(engine.module, world_size)
    train(engine, data[:BEFORE], rank)
    engine.save_checkpoint(folder, tag="here")
    engine.save_16bit_model(folder, "weights.bin")
    engine.save_16bit_model(folder, "weights.safetensors")
    consolidated = engine._consolidated_16bit_state_dict()
    return masters(engine), moments(engine), {n: b.clone() for n, b in engine.module.named_buffers()}, consolidated


def _load(rank: int, world_size: int, folder: str, ep_size: int, stage: int) -> Any:
    engine = _engine(ep_size, stage, world_size, offset=1.0)
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.global_steps == BEFORE
    buffers = {n: b.clone() for n, b in engine.module.named_buffers()}
    found = masters(engine), moments(engine), buffers
    outcome = train(engine, _batches(engine.module, world_size)[BEFORE:], rank)
    assert all(torch.isfinite(value).all() for value in outcome.weights.values())
    return found


def _joined(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for of_rank in of_ranks:
        joined |= of_rank
    return joined


def _flat(of_names: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}/{key}": value for name, of_name in of_names.items() for key, value in of_name.items()}


MOVES = [
    ((2, 2, 0), (1, 1, 0)),
    ((2, 2, 2), (4, 4, 1)),
    ((4, 2, 1), (4, 4, 3)),
    ((4, 2, 3), (2, 2, 0)),
    ((4, 4, 0), (2, 1, 2)),
    ((1, 1, 1), (2, 2, 3)),
]
"""(ranks, ep_size, ZeRO stage) of the save and of the load."""

if IS_SWEEP:
    PLACES = [(ranks, ep, stage) for ranks in (1, 2, 4) for ep in (1, 2, 4) if ranks % ep == 0 for stage in range(4)]
    MOVES = [(one, PLACES[(n * 7 + m) % len(PLACES)]) for n, one in enumerate(PLACES) for m in range(4)]


@pytest.mark.parametrize(("saved", "loaded"), MOVES, ids=str)
def test_a_model_with_experts_resumes_on_other_ranks(
    tmp_path: Path, saved: tuple[int, int, int], loaded: tuple[int, int, int]
) -> None:
    folder = str(tmp_path)
    (ranks, ep_size, stage), (other_ranks, other_ep_size, other_stage) = saved, loaded
    weights, state, buffers, consolidated = zip(*run_ranks(_save, ranks, folder, ep_size, stage), strict=True)
    want = _joined(list(weights))
    assert want.keys() == dict(moe_net(EXPERTS).named_parameters()).keys()
    _require_complete_exports(tmp_path, want, consolidated[0])

    got_weights, got_state, got_buffers = zip(
        *run_ranks(_load, other_ranks, folder, other_ep_size, other_stage), strict=True
    )
    assert relative_difference(_joined(list(got_weights)), want) == 0.0
    assert relative_difference(_flat(_joined(list(got_state))), _flat(_joined(list(state)))) == 0.0
    first = _joined(list(reversed(buffers)))  # of ranks that hold the same expert the first one's counts
    assert {n: float(b) for n, b in _joined(list(reversed(got_buffers))).items()} == {n: float(b) for n, b in first.items()}


def _require_complete_exports(folder: Path, want: dict[str, Tensor], consolidated: dict[str, Tensor]) -> None:
    from safetensors.torch import load_file

    names = moe_net(EXPERTS).state_dict().keys()
    exported = get_fp32_state_dict_from_zero_checkpoint(str(folder), "here")
    assert exported.keys() == names
    assert relative_difference({name: exported[name].double() for name in want}, want) <= 1e-7  # rounded to fp32
    files = [torch.load(folder / "weights.bin", weights_only=True), load_file(folder / "weights.safetensors"), consolidated]
    for state_dict in files:
        assert state_dict.keys() == names
        assert relative_difference({name: state_dict[name] for name in want}, want) == 0.0
    moe_net(EXPERTS).load_state_dict(files[0])


def _go_on(rank: int, world_size: int, folder: str, ep_size: int, stage: int, is_resumed: bool) -> dict[str, Tensor]:
    engine = _engine(ep_size, stage, world_size)
    data = _batches(engine.module, world_size)
    if is_resumed:
        engine.load_checkpoint(folder)
    else:
        train(engine, data[:BEFORE], rank)
        engine.save_checkpoint(folder)
    return train(engine, data[BEFORE:], rank).weights


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, stage: int) -> None:
    """At ep_size 1, 2 and 4 on as many ranks: the batches are the same, so the numbers are, up to the order of sums."""
    want = _joined(run_ranks(_go_on, 4, str(tmp_path), 2, stage, False))
    for ep_size in (2, 4, 1):
        got = _joined(run_ranks(_go_on, 4, str(tmp_path), ep_size, stage, True))
        assert relative_difference(got, want) <= FP64_ROUNDING


def _whole_state_dict(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    engine = _engine(2, stage, world_size, offset=1.0)
    engine.load_module_state_dict(moe_net(EXPERTS).state_dict())
    return masters(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_state_dict_of_a_whole_model_loads_on_ranks_with_some_of_its_experts(stage: int) -> None:
    want = dict(moe_net(EXPERTS).named_parameters())
    got = _joined(run_ranks(_whole_state_dict, 2, stage))
    assert relative_difference(got, {name: param.detach() for name, param in want.items()}) == 0.0


def _frozen(rank: int, world_size: int, folder: str, stage: int) -> dict[str, Tensor]:
    model = moe_net(EXPERTS, 2)
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("last"))
    settings = config(1, ROWS // world_size, **zero(stage, **KEYS))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = make_engine(model, settings, optimizer=torch.optim.AdamW(trained, lr=0.01))
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    return {}


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_experts_are_in_a_checkpoint_and_its_exports(tmp_path: Path, stage: int) -> None:
    run_ranks(_frozen, 2, str(tmp_path), stage)
    want = {name: param.detach() for name, param in moe_net(EXPERTS).named_parameters()}
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    written = torch.load(tmp_path / "weights.bin", weights_only=True)
    for found in (exported, written):
        assert relative_difference({name: found[name].double() for name in want}, want) <= 1e-7


def _shared_layer_net(ep_size: int) -> MoeNet:
    model = moe_net(EXPERTS[:1] * 2, ep_size, k=2)
    model.layers[1] = model.layers[0]
    return model


def _shared_layer(rank: int, world_size: int, folder: str, stage: int) -> Any:
    model = _shared_layer_net(2)
    settings = config(1, ROWS // world_size, **zero(stage, **KEYS))
    engine = make_engine(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    train(engine, _batches(engine.module, world_size)[:BEFORE], rank)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    return masters(engine), engine._consolidated_16bit_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_of_experts_in_two_places_is_saved_under_both_names(tmp_path: Path, stage: int) -> None:
    weights, consolidated = zip(*run_ranks(_shared_layer, 2, str(tmp_path), stage), strict=True)
    want = _joined(list(weights))
    names = _shared_layer_net(1).state_dict().keys()
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    written = torch.load(tmp_path / "weights.bin", weights_only=True)
    for found in (exported, written, consolidated[0]):
        assert found.keys() == names
        both = {name.replace("layers.0", "layers.1"): value for name, value in want.items()} | want
        assert relative_difference({name: found[name].double() for name in both}, both) <= 1e-7  # fp32 in one of them


def _in_other_ways(rank: int, world_size: int, folder: str, block: dict[str, Any]) -> tuple[bool, bool]:
    engine = _engine(2, 1, world_size, checkpoint=block)
    train(engine, _batches(engine.module, world_size)[:BEFORE], rank)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    other = _engine(2, 1, world_size, offset=1.0, checkpoint=block)
    other.load_checkpoint(folder)
    want, got = (masters(each) for each in (engine, other))
    state, loaded = (_flat(moments(each)) for each in (engine, other))
    return relative_difference(got, want) == 0.0, relative_difference(loaded, state) == 0.0


@pytest.mark.parametrize(
    "block", [{"use_node_local_storage": True}, {"async_save": True}, {"writer": {"data_parallel": "MACHINE"}}], ids=str
)
def test_every_way_of_saving_keeps_experts(tmp_path: Path, block: dict[str, Any]) -> None:
    assert run_ranks(_in_other_ways, 4, str(tmp_path), block) == [(True, True)] * 4


def _load_universal(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    engine = _engine(2, 3, world_size, offset=1.0, checkpoint={"load_universal": True})
    engine.load_checkpoint(folder)
    return masters(engine)


def test_a_universal_folder_holds_the_experts_of_all_ranks(tmp_path: Path) -> None:
    weights, *_ = zip(*run_ranks(_save, 4, str(tmp_path), 4, 1), strict=True)
    convert(["--input_folder", str(tmp_path / "here"), "--output_folder", str(tmp_path / "here_universal")])
    got = _joined(run_ranks(_load_universal, 2, str(tmp_path)))
    assert relative_difference(got, _joined(list(weights))) <= 1e-7  # the original's layout is fp32
