from __future__ import annotations

import errno
import gc
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.accelerator.cpu import NullEvent
from deepspeed.checkpoint import Piece
from deepspeed.checkpoint.save import snapshot as snapshots
from deepspeed.checkpoint.save.snapshot import SnapshotMemory, needed_nbytes
from deepspeed.common.deferred import DeferredTensor
from deepspeed.errors import FileIoError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64)


def _pieces(numels: list[int], seed: int = 0) -> list[Piece]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randint(0, 2, (numel,), generator=generator) for numel in numels]
    return [Piece.whole(f"t{n}", value.to(DTYPES[n % len(DTYPES)])) for n, value in enumerate(values)]


def _held(memory: SnapshotMemory, pieces: list[Piece]) -> list[Piece]:
    snapshot = memory.hold(pieces)
    assert snapshot is not None
    return snapshot.pieces()


def _addresses(pieces: list[Piece]) -> list[int]:
    return [piece.data.data_ptr() for piece in pieces]


@given(numels=st.lists(st.integers(0, 300), max_size=12))
def test_a_snapshot_holds_every_value_and_shares_no_memory_with_the_state(numels: list[int]) -> None:
    pieces = _pieces(numels)
    wanted = [piece.data.clone() for piece in pieces]
    held = _held(SnapshotMemory(), pieces)
    for piece in pieces:
        piece.data.zero_()
    assert [(piece.name, piece.shape, piece.start) for piece in held] == [(p.name, p.shape, p.start) for p in pieces]
    assert all(torch.equal(piece.data, value) for piece, value in zip(held, wanted, strict=True))
    assert all(piece.data.dtype == value.dtype for piece, value in zip(held, wanted, strict=True))


def test_strides_and_views_come_out_in_row_major_order() -> None:
    whole = torch.arange(24.0).view(4, 6)
    pieces = [Piece("turned", (6, 4), 0, whole.t()), Piece("part", (24,), 8, whole.view(-1)[8:12])]
    held = _held(SnapshotMemory(), pieces)
    assert torch.equal(held[0].data.reshape(-1), whole.t().reshape(-1))
    assert held[1].data.tolist() == [8.0, 9.0, 10.0, 11.0]


def test_the_second_snapshot_takes_no_new_memory() -> None:
    memory = SnapshotMemory()
    first = _held(memory, _pieces([1000, 7, 300]))
    nbytes = memory.nbytes
    second = _held(memory, _pieces([1000, 7, 300], seed=1))
    assert _addresses(first) == _addresses(second)
    assert memory.nbytes == nbytes


def test_memory_made_ready_ahead_serves_the_save_that_brings_a_little_more() -> None:
    memory = SnapshotMemory()
    memory.prepare(_pieces([100_000]))
    memory._finish_making()
    nbytes = memory.nbytes
    assert nbytes > 400_000
    _held(memory, _pieces([100_000, 5000]))
    assert memory.nbytes == nbytes


def test_a_larger_snapshot_takes_more_memory() -> None:
    memory = SnapshotMemory()
    _held(memory, _pieces([10]))
    _held(memory, _pieces([2_000_000]))
    assert memory.nbytes >= 8_000_000


@pytest.mark.parametrize("is_prepared", [False, True])
def test_nothing_is_copied_over_the_limit(is_prepared: bool) -> None:
    pieces = _pieces([1000])
    memory = SnapshotMemory(limit_nbytes=needed_nbytes(pieces) - 1)
    if is_prepared:
        memory.prepare(pieces)
    assert memory.hold(pieces) is None
    assert memory.nbytes == 0


def test_a_snapshot_as_large_as_the_limit_is_taken() -> None:
    pieces = _pieces([1000])
    memory = SnapshotMemory(limit_nbytes=needed_nbytes(pieces))
    _held(memory, pieces)
    assert memory.nbytes == needed_nbytes(pieces)


def test_released_memory_is_taken_again_by_the_next_snapshot() -> None:
    memory = SnapshotMemory()
    _held(memory, _pieces([10]))
    memory.release()
    assert memory.nbytes == 0
    _held(memory, _pieces([10]))


def test_places_of_the_last_snapshot_serve_the_next_only_where_the_pieces_are_alike() -> None:
    memory = SnapshotMemory()
    for pieces in (
        [Piece.whole("a", torch.ones(4)), Piece.whole("b", torch.ones(4))],
        [Piece.whole("a", torch.ones(4) * 2), Piece.whole("b", torch.ones(4) * 3)],
        [Piece.whole("b", torch.ones(4)), Piece.whole("a", torch.ones(4))],
        [Piece.whole("b", torch.ones(4, dtype=torch.int32)), Piece.whole("a", torch.ones(2, 2))],
        [Piece("b", (8,), 4, torch.ones(4, dtype=torch.int32)), Piece.whole("a", torch.ones(0))],
    ):
        held = _held(memory, pieces)
        assert [(p.name, p.shape, p.start) for p in held] == [(p.name, p.shape, p.start) for p in pieces]
        for copy, piece in zip(held, pieces, strict=True):
            assert (copy.data.dtype, copy.data.shape) == (piece.data.dtype, piece.data.shape)
            assert torch.equal(copy.data, piece.data)


def test_a_snapshot_taken_in_inference_mode_is_filled_by_threads_that_are_not_in_it() -> None:
    turned = torch.arange(24.0).view(4, 6).t()  # goes by torch's copy
    read_later = DeferredTensor(3, torch.float32, lambda: torch.ones(3))
    memory = SnapshotMemory()
    with torch.inference_mode():
        first = memory.hold([Piece("turned", (6, 4), 0, turned), Piece("later", (3,), 0, read_later)])
    assert first is not None
    assert torch.equal(first.pieces()[0].data, turned)  # type: ignore[arg-type]
    second = _held(memory, [Piece("turned", (6, 4), 0, turned * 2), Piece("later", (3,), 0, read_later)])
    assert torch.equal(second[0].data, turned * 2)  # type: ignore[arg-type]


def _private(value: float) -> Piece:
    return Piece("master/w", (5,), 0, torch.full((5,), value), is_private=True)


def test_a_read_that_fails_is_told_when_the_thread_writes_to_the_memory_no_more() -> None:
    def refuse() -> torch.Tensor:
        raise FileIoError(errno.EIO, "the disk is gone")

    gate, copied = threading.Event(), snapshots._copy_private

    def late(*moves: Any) -> None:
        assert gate.wait(30)
        copied(*moves)

    memory = SnapshotMemory()
    with mock.patch.object(snapshots, "_copy_private", late):
        failing = memory.hold([_private(1.0), Piece("later", (3,), 0, DeferredTensor(3, torch.float32, refuse))])
    assert failing is not None
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    with pytest.raises(FileIoError, match="the disk is gone"):
        failing.pieces()
    assert gate.is_set()
    assert failing._private.done()
    opener.join()


def test_the_thread_of_a_snapshot_that_nobody_took_over_ends() -> None:
    snapshot = SnapshotMemory().hold([_private(1.0)])
    assert snapshot is not None
    ends = snapshot._private
    del snapshot
    gc.collect()
    ends.result(timeout=30)


def test_what_changes_the_state_of_a_device_comes_after_the_copies_on_whatever_stream() -> None:
    calls: list[str] = []

    class Event(NullEvent):
        def record(self, stream: Any = None) -> None:
            calls.append("recorded")

        def wait(self, stream: Any = None) -> None:
            calls.append("the current stream waits")

    accelerator = mock.Mock(Event=Event, register_host_memory=lambda tensor: False)
    with (
        mock.patch.object(snapshots, "_is_on_a_device", return_value=True),
        mock.patch.object(snapshots, "get_accelerator", return_value=accelerator),
    ):
        snapshot = SnapshotMemory().hold([_private(1.0)])
    assert snapshot is not None
    snapshot.wait_shared()
    assert calls == ["recorded"]
    snapshot.wait()
    assert calls == ["recorded", "the current stream waits"]
