from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import Piece, open_checkpoint
from deepspeed.checkpoint.save.description import Descriptions
from deepspeed.checkpoint.save.writer import Content, start_checkpoint
from deepspeed.errors import CheckpointError
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads


class _Counting(ThreadRanks):
    """How many bytes each gather brought from this rank."""

    def __init__(self, ranks: ThreadRanks) -> None:
        super().__init__(ranks.rank, ranks.world_size, ranks._meeting)
        self.gathered: list[int] = []

    def gather(self, payload: bytes) -> list[bytes]:
        self.gathered.append(len(payload))
        return super().gather(payload)


def _half(rank: int, values: torch.Tensor) -> list[Piece]:
    own = values[:3] if rank == 0 else values[3:]
    return [Piece("w", (values.numel(),), 3 * rank, own)]


def _on_two_ranks(folder: Path, pieces: list[Any]) -> list[Any]:
    """One save after the other, `pieces[save](rank)` in each; texts of errors and what starts sent, by rank."""

    def body(ranks: ThreadRanks) -> tuple[list[str], list[int]]:
        counting, said, errors = _Counting(ranks), Descriptions(), []
        sent = []
        for number, of_save in enumerate(pieces):
            content = Content(of_save(ranks.rank), dict, dict, dict)
            try:
                started = start_checkpoint(folder, f"t{number}", content, counting, descriptions=said)
            except CheckpointError as error:
                errors.append(str(error))
            else:
                started.finish(ranks)
            sent.append(counting.gathered[-1])
        return errors, sent

    return run_threads(2, body)


def test_the_second_save_of_a_layout_is_not_described_and_holds_its_own_values(tmp_path: Path) -> None:
    first, second = torch.arange(5.0), torch.arange(5.0) + 10
    met = _on_two_ranks(tmp_path, [lambda rank: _half(rank, first), lambda rank: _half(rank, second)])
    assert [errors for errors, _ in met] == [[], []]
    assert all(sent[1] < sent[0] for _, sent in met)
    assert open_checkpoint(tmp_path, "t0").read("w").tolist() == first.tolist()
    assert open_checkpoint(tmp_path, "t1").read("w").tolist() == second.tolist()


def test_a_layout_that_changes_on_one_rank_alone_is_joined_with_what_the_other_said(tmp_path: Path) -> None:
    values = torch.arange(5.0)

    def more(rank: int) -> list[Piece]:
        return _half(rank, values) + ([Piece.whole("b", torch.ones(2))] if rank == 1 else [])

    met = _on_two_ranks(tmp_path, [lambda rank: _half(rank, values), more, lambda rank: _half(rank, values)])
    assert [errors for errors, _ in met] == [[], []]
    assert open_checkpoint(tmp_path, "t1").names() == ["b", "w"]
    assert open_checkpoint(tmp_path, "t1").read("b").tolist() == [1.0, 1.0]
    assert open_checkpoint(tmp_path, "t2").names() == ["w"]


@pytest.mark.parametrize("fault", ["hole", "sparse"])
def test_after_a_save_that_was_refused_everything_is_said_again(tmp_path: Path, fault: str) -> None:
    values = torch.arange(5.0)

    def bad(rank: int) -> list[Piece]:
        if rank == 0:
            return _half(rank, values)
        return [] if fault == "hole" else [Piece.whole("s", torch.eye(2).to_sparse())]

    saves = [lambda rank: _half(rank, values), bad, lambda rank: _half(rank, values)]
    met = _on_two_ranks(tmp_path, saves)
    assert all(len(errors) == 1 and ("hole" in errors[0] or "dense" in errors[0]) for errors, _ in met)
    assert all(sent[2] == sent[0] for _, sent in met)
    assert open_checkpoint(tmp_path, "t2").read("w").tolist() == values.tolist()


def test_what_all_ranks_share_completes_the_state_or_refuses_the_save(tmp_path: Path) -> None:
    def complete(state: Any, shared: list[Any]) -> Any:
        if None in shared:
            raise CheckpointError("a rank shares nothing")
        return {**state, "shared": shared}

    def body(ranks: ThreadRanks) -> None:
        for tag, lacks in (("whole", False), ("refused", True)):
            mine = None if lacks and ranks.rank else ranks.rank + 1
            content = Content([], lambda: {"a": 1}, dict, dict, lambda mine=mine: mine, complete)
            start_checkpoint(tmp_path, tag, content, ranks).finish(ranks)

    errors = run_threads(2, body)
    assert [str(error) for error in errors] == ["a rank shares nothing"] * 2
    assert open_checkpoint(tmp_path).state == {"a": 1, "shared": [1, 2]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "whole"]
