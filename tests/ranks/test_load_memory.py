"""How much memory a load takes beyond what the engine holds: a rank brings in its own shard, never the whole state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed.accelerator.host_memory import HostMemory
from deepspeed.engine.engine import DeepSpeedEngine
from tests.support.engines import config, make_engine, zero
from tests.support.ranks import run_ranks

_WIDTH, _LAYERS = 1024, 16
_SHARD_NBYTES = _LAYERS * _WIDTH * _WIDTH * (4 + 4 + 4) // 2
"""A weight and two moments in fp32, of a half of the parameters: 100 MB."""

_SLACK_NBYTES = 16 << 20
"""Buffers of fixed size, and what an allocator keeps."""


def _engine(stage: int, *, is_bf16: bool) -> DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return make_engine(model, config(rows=1, bf16={"enabled": is_bf16}, optimizer=optimizer, **zero(stage)))


def _save(rank: int, world_size: int, folder: str, stage: int, is_bf16: bool) -> None:
    engine = _engine(stage, is_bf16=is_bf16)
    engine.backward(engine(torch.ones(1, _WIDTH, dtype=torch.bfloat16 if is_bf16 else torch.float32)).float().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="t")


def _load_twice(rank: int, world_size: int, folder: str, stage: int, is_bf16: bool) -> tuple[int, int]:
    """What two loads after each other held at their peaks, beyond what was held before each."""
    engine = _engine(stage, is_bf16=is_bf16)
    memory = HostMemory()
    grown = []
    for _ in range(2):
        memory.reset_peak()
        before = memory.resident_nbytes()
        engine.load_checkpoint(folder, tag="t")
        grown.append(memory.peak_nbytes() - before)
    return grown[0], grown[1]


@pytest.mark.parametrize(("stage", "is_bf16"), [(1, True), (3, False)])
def test_a_load_on_fewer_ranks_holds_no_more_than_the_own_shard(tmp_path: Path, stage: int, is_bf16: bool) -> None:
    run_ranks(_save, 4, str(tmp_path), stage, is_bf16)
    assert sum(file.stat().st_size for file in (tmp_path / "t").iterdir()) > 2 * _SHARD_NBYTES
    for first, second in run_ranks(_load_twice, 2, str(tmp_path), stage, is_bf16):
        assert first < _SHARD_NBYTES + _SLACK_NBYTES  # a new engine has no moments: they are made
        assert second < _SLACK_NBYTES  # now everything is filled in place
