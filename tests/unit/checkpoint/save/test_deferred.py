"""Pieces that are read when they are written: state that is never in memory all at once."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint import Piece, open_checkpoint
from deepspeed.checkpoint.agreement import ranks_of
from deepspeed.checkpoint.save.snapshot import SnapshotMemory
from deepspeed.checkpoint.save.writer import Content, start_checkpoint
from deepspeed.common.deferred import DeferredTensor
from deepspeed.errors import CheckpointError, FileIoError
from tests.support.checkpoints import write_checkpoint


class _State:
    """Values on a pretended disk, and how often they were read."""

    def __init__(self) -> None:
        self.values = torch.arange(6.0)
        self.reads = 0

    def piece(self) -> Piece:
        return Piece("optimizer/w/exp_avg", (2, 3), 0, DeferredTensor(6, torch.float32, self._read))

    def _read(self) -> Tensor:
        self.reads += 1
        return self.values.clone()


def _failing() -> Tensor:
    raise FileIoError(errno.EIO, "cannot read /nvme/states: Input/output error.")


def test_a_deferred_piece_is_written_like_any_other(tmp_path: Path) -> None:
    state = _State()
    write_checkpoint(tmp_path, "t", [state.piece()], {}, {}, rank=0, world_size=1)
    assert torch.equal(open_checkpoint(tmp_path).read("optimizer/w/exp_avg"), torch.arange(6.0))
    assert state.reads == 1


def test_a_snapshot_reads_it_at_once(tmp_path: Path) -> None:
    state = _State()
    content = Content([state.piece()], dict, dict, dict)
    started = start_checkpoint(tmp_path, "t", content, ranks_of(0, 1), hold=SnapshotMemory().hold)
    assert state.reads == 1
    state.values.zero_()  # training goes on
    started.finish(ranks_of(0, 1))
    assert torch.equal(open_checkpoint(tmp_path).read("optimizer/w/exp_avg"), torch.arange(6.0))


@pytest.mark.parametrize("is_held", [False, True])
def test_state_that_cannot_be_read_fails_the_save_and_says_why(tmp_path: Path, is_held: bool) -> None:
    content = Content([Piece("w", (6,), 0, DeferredTensor(6, torch.float32, _failing))], dict, dict, dict)
    hold = SnapshotMemory().hold if is_held else None
    started = start_checkpoint(tmp_path, "t", content, ranks_of(0, 1), hold=hold)
    with pytest.raises(CheckpointError, match=r"'t'.*cannot read /nvme/states: Input/output error"):
        started.finish(ranks_of(0, 1))
    assert list(tmp_path.iterdir()) == []
