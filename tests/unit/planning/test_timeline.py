"""Timelines: three blocks stand for many, and what a setting makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.planning import tracing
from deepspeed.planning.passes import PlannedBucket, PlannedUnit, busiest_moment
from deepspeed.planning.timeline import BACKWARD, Mark, Stretch, Timeline
from deepspeed.planning.tracing import trace_pass
from deepspeed.precision.policy import DtypePolicy
from deepspeed.zero.prefetch import GatherSettings


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between a table and a head; some keep their outputs to the end, as a cache does."""

    def __init__(self, depth: int, *, keeps: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(depth))
        self.head = nn.Linear(16, 50)
        self.keeps, self.recomputes = keeps, recomputes

    def forward(self, tokens: Tensor) -> Any:
        x, kept = self.table(tokens), []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            kept.append(x.detach() * 2 if self.keeps else None)
        return {"loss": self.head(x).square().mean(), "kept": kept}


@pytest.mark.parametrize("options", [{}, {"keeps": True}, {"recomputes": True}])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_three_blocks_stand_for_eight(
    options: dict[str, bool], autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, policy = ((torch.zeros(4, 10, dtype=torch.long),), {}), DtypePolicy(autocast=autocast)
    short = trace_pass(Net(8, **options), batch, policy)
    monkeypatch.setattr(tracing, "_repeated", lambda module: None)
    whole = trace_pass(Net(8, **options), batch, policy)
    assert [each.mark for each in short.stretches] == [each.mark for each in whole.stretches]
    assert short.stretches == whole.stretches
    assert 0 < whole.kept_nbytes <= whole.peak_nbytes


def test_blocks_that_do_not_run_in_a_row_are_traced_whole() -> None:
    class Twice(Net):
        def forward(self, tokens: Tensor) -> Any:
            x = self.table(tokens)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x).sum()

    batch = ((torch.zeros(4, 10, dtype=torch.long),), {})
    found = trace_pass(Twice(5), batch, DtypePolicy())
    entered = [each.mark.name for each in found.stretches if each.mark.kind == "enter" and each.mark.name.count(".") == 1]
    assert entered == [f"blocks.{number}" for number in (*range(5), *range(5))]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-9, 9)), min_size=1, max_size=20))
def test_a_peak_is_the_most_of_a_running_sum(given_stretches: list[tuple[int, int]]) -> None:
    stretches = tuple(Stretch(Mark("enter", "x"), max(peak, net, 0), net) for peak, net in given_stretches)
    starts = [sum(each.net_nbytes for each in stretches[:at]) for at in range(len(stretches))]
    most = max(start + each.peak_nbytes for start, each in zip(starts, stretches, strict=True))
    assert Timeline(stretches).peak_nbytes == max(0, most)


def _timeline(*marks: tuple[Mark, int]) -> Timeline:
    return Timeline(tuple(Stretch(mark, max(0, net), net) for mark, net in marks))


_TWO = _timeline(
    (Mark("enter", "a"), 10),
    (Mark("leave", "a"), 0),
    (Mark("enter", "b"), 10),
    (Mark("leave", "b"), 0),
    (BACKWARD, 0),
    (Mark("back", "b"), 0),
    (Mark("gradient", "b.w"), -10),
    (Mark("back", "a"), 0),
    (Mark("gradient", "a.w"), -10),
)


@pytest.mark.parametrize(("buckets", "waiting"), [([["a.w", "b.w"]], 200), ([["a.w"], ["b.w"]], 100), ([], 0)])
def test_gradients_wait_until_their_bucket_is_full(buckets: list[list[str]], waiting: int) -> None:
    planned = [PlannedBucket(dict.fromkeys(names, 100), number) for number, names in enumerate(buckets)]
    found = busiest_moment(_TWO, planned, [], GatherSettings(), is_in_order=False)
    assert (found.waiting_nbytes, found.gathered_nbytes) == (waiting, 0)
    assert found.activation_nbytes == (20 if waiting < 200 else 10)  # both wait when the second one's activations remain


def test_in_the_order_of_all_ranks_a_full_bucket_waits_for_the_one_before() -> None:
    planned = [PlannedBucket({"b.w": 100}, 0), PlannedBucket({"a.w": 100}, 1)]  # the order expects a's first
    assert busiest_moment(_TWO, planned, [], GatherSettings(), is_in_order=False).waiting_nbytes == 100
    assert busiest_moment(_TWO, planned, [], GatherSettings(), is_in_order=True).waiting_nbytes == 200


def test_units_are_whole_as_long_as_the_budgets_say() -> None:
    units = [PlannedUnit(5, 500, "a", "a"), PlannedUnit(5, 500, "b", "b")]
    buckets = [PlannedBucket({"a.w": 1}, 0, 0), PlannedBucket({"b.w": 1}, 1, 1)]
    kept = busiest_moment(_TWO, buckets, units, GatherSettings(), is_in_order=True)
    assert (kept.gathered_nbytes, kept.stays_gathered) == (1000, True)
    tight = GatherSettings(prefetch_numel=0, max_reuse_numel=0, max_live_numel=5)
    one = busiest_moment(_TWO, buckets, units, tight, is_in_order=True)
    assert (one.gathered_nbytes, one.stays_gathered) == (500, False)  # b is used again at once, a is gathered anew
