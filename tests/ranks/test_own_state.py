"""Buffers and extra state that differ between ranks: as many ranks get each its own back, any others rank 0's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.checkpoint import open_checkpoint, resolve_tag
from deepspeed.errors import CheckpointError
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks

Kept = dict[str, Any]


class Normed(Mlp):
    """An Mlp with a batch norm, which keeps statistics of the batches, a buffer that nothing changes, and a plain count."""

    constant: Tensor

    def __init__(self, hidden: int = 13) -> None:
        super().__init__(hidden)
        self.norm = nn.BatchNorm1d(self.VALUES)
        self.register_buffer("constant", torch.rand(5))
        self.total = 0.0

    def get_extra_state(self) -> dict[str, float]:
        return {"total": self.total}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.total = state["total"]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.total += float(inputs[0, 0])
        return super().forward(self.norm(inputs), targets)


def _engine(stage: int, seed: int = 0, **blocks: Any) -> Any:
    model = build(Normed, seed=seed)
    return make_engine(model, config(**zero(stage), **blocks), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def _kept(engine: Any) -> Kept:
    return {name: b.clone() for name, b in engine.module.named_buffers()} | {"total": engine.module.total}


def _same(one: Kept, other: Kept) -> bool:
    return one.keys() == other.keys() and all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)


def _save(rank: int, world_size: int, folder: str, stage: int, blocks: dict[str, Any]) -> tuple[Kept, Kept, list[float]]:
    """What this rank's model keeps when it is saved, and after three steps more; the losses of these."""
    engine, batches = _engine(stage, **blocks), make_batches(build(Normed), 6, 1, world_size)
    train(engine, batches[:3], rank)
    engine.save_checkpoint(folder)
    at_save = _kept(engine)
    losses = train(engine, batches[3:], rank).losses
    after = _kept(engine)
    engine.destroy()
    return at_save, after, losses


def _resume(
    rank: int, world_size: int, folder: str, stage: int, arguments: dict[str, Any]
) -> tuple[Kept, Kept, list[float]]:
    engine = _engine(stage, seed=5)
    path, _ = engine.load_checkpoint(folder, **arguments)
    assert path is not None
    at_load = _kept(engine)
    losses = train(engine, make_batches(build(Normed), 6, 1, world_size)[3:], rank).losses
    after = _kept(engine)
    engine.destroy()
    return at_load, after, losses


@pytest.mark.parametrize(("stage", "blocks"), [(0, {}), (3, {"checkpoint": {"async_save": True}})])
def test_each_rank_goes_on_with_its_own(tmp_path: Path, stage: int, blocks: dict[str, Any]) -> None:
    saved = run_ranks(_save, 2, str(tmp_path), stage, blocks)
    for name in ("norm.running_mean", "norm.running_var", "total"):  # else this test would show nothing
        assert not torch.equal(torch.as_tensor(saved[0][0][name]), torch.as_tensor(saved[1][0][name]))
    for wanted, got in zip(saved, run_ranks(_resume, 2, str(tmp_path), stage, {}), strict=True):
        assert _same(got[0], wanted[0])
        assert _same(got[1], wanted[1])
        assert got[2] == wanted[2]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_with_those_of_rank_0_and_of_no_other(tmp_path: Path, ranks: int) -> None:
    wanted = run_ranks(_save, 2, str(tmp_path), 1, {})[0][0]
    for at_load, *_ in run_ranks(_resume, ranks, str(tmp_path), 1, {}):
        assert _same(at_load, wanted)


def test_loading_the_module_alone_gives_each_rank_its_own(tmp_path: Path) -> None:
    saved = run_ranks(_save, 2, str(tmp_path), 1, {})
    for wanted, got in zip(saved, run_ranks(_resume, 2, str(tmp_path), 1, {"load_module_only": True}), strict=True):
        assert _same(got[0], wanted[0])


def test_exported_weights_have_the_buffers_of_rank_0(tmp_path: Path) -> None:
    wanted = run_ranks(_save, 3, str(tmp_path), 2, {})[0][0]
    exported = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert all(torch.equal(exported[name], value) for name, value in wanted.items() if name != "total")


def test_what_is_equal_on_all_ranks_is_stored_once(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path), 1, {})
    tag = resolve_tag(tmp_path, None, rank=0, world_size=1, prefer_universal=False)
    assert tag is not None
    source = open_checkpoint(tmp_path, tag, rank=0, world_size=1)
    assert not source.rank_state(0).keys() & {"buffers", "extra_state"}
    own = source.rank_state(1)
    assert set(own["buffers"]) == {"norm.running_mean", "norm.running_var"}
    assert own["extra_state"].keys() == {""}


def _save_other_shapes(rank: int, world_size: int, folder: str) -> str:
    engine = _engine(1)
    engine.module.constant = torch.ones(4 + rank)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


def test_buffers_of_another_shape_than_on_rank_0_are_refused_on_all_ranks(tmp_path: Path) -> None:
    first, *others = run_ranks(_save_other_shapes, 3, str(tmp_path))
    assert (
        "'constant' is torch.float32 of shape (5,) on data-parallel rank 1 and torch.float32 of shape (4,) on rank 0"
        in first
    )
    assert "persistent=False" in first
    assert others == [first, first]
    assert not any(tmp_path.iterdir())
