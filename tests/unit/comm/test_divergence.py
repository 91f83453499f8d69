"""The judgement over reports: certain or not, and in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.divergence import (
    ANY_NBYTES,
    Call,
    ChannelReport,
    Judge,
    RankReport,
    WaitReport,
    deadlocked,
    positions,
    shortened,
)

REDUCE = Call("all_reduce", 64, "module 'a'")
LATE = 10.0


def _channel(*calls: Call, ranks: tuple[int, ...] = (0, 1), launched: int | None = None) -> ChannelReport:
    return ChannelReport(ranks, len(calls) if launched is None else launched, calls)


def _waiting(rank: int, key: str, *, clock: int = 5, stamp: int = 1, **channels: ChannelReport) -> RankReport:
    """A rank that waits in its last call of channel `key`."""
    channel = channels[key]
    wait = WaitReport(channel.recent[-1], key, channel.launched, (), LATE)
    return RankReport(rank, clock, stamp, waits=(wait,), is_waiting=True, channels=channels)


def _two_looks(*reports: RankReport) -> str:
    judge = Judge(5.0)
    by_rank = {report.rank: report for report in reports}
    assert judge.look(by_rank) == ""
    return judge.look({rank: replace(each, stamp=each.stamp + 1, looks=each.looks + 1) for rank, each in by_rank.items()})


def _crossed() -> tuple[RankReport, RankReport]:
    """Two ranks in the calls of two groups, in different order."""
    return _waiting(0, "a", a=_channel(REDUCE)), _waiting(1, "b", b=_channel(REDUCE))


def test_ranks_in_two_groups_in_different_order_wait_for_each_other() -> None:
    text = _two_looks(*_crossed())
    assert text.startswith("ranks wait for each other and can never go on: each of ranks [0, 1] waits in all_reduce") or (
        "rank 0 waits in" in text and "rank 1 waits in" in text
    )
    assert "All ranks of a group must make the same calls" in text


@pytest.mark.parametrize(
    "change",
    [
        {"waits": (), "is_waiting": False},  # in user code
        {"is_waiting": False},  # another of its threads may still call
    ],
)
def test_nothing_is_certain_while_one_of_them_may_still_come(change: dict[str, object]) -> None:
    first, second = _crossed()
    assert _two_looks(first, replace(second, **change)) == ""  # type: ignore[arg-type]


def test_a_rank_that_moved_between_the_looks_is_not_judged() -> None:
    first, second = _crossed()
    judge = Judge(5.0)
    assert judge.look({0: first, 1: second}) == ""
    assert judge.look({0: replace(first, stamp=2), 1: replace(second, stamp=2, clock=6)}) == ""
    assert judge.look({0: replace(first, stamp=3), 1: replace(second, stamp=2, clock=6)}) == "", "the same report again"
    assert judge.look({0: replace(first, stamp=4), 1: replace(second, stamp=3, clock=6)}) != ""


def test_short_waits_are_not_asked_about() -> None:
    reports = [replace(report, waits=tuple(replace(wait, seconds=1.0) for wait in report.waits)) for report in _crossed()]
    assert _two_looks(*reports) == ""


def test_a_slow_transfer_in_which_all_take_part_is_no_deadlock() -> None:
    assert _two_looks(*(_waiting(rank, "a", a=_channel(REDUCE, REDUCE)) for rank in (0, 1))) == ""


def test_a_call_with_an_ended_rank_cannot_end() -> None:
    ended = RankReport(1, 4, 9, has_ended=True, last=str(REDUCE), channels={"a": _channel(REDUCE)})
    text = _two_looks(_waiting(0, "a", a=_channel(REDUCE, REDUCE)), ended)
    assert "rank 1 has ended; its last call was all_reduce of 64 bytes (module 'a')" in text
    assert _two_looks(_waiting(0, "a", a=_channel(REDUCE)), ended) == "", "it has done its part"


def test_a_wait_in_shared_memory_counts_by_the_ranks_it_names() -> None:
    shared = RankReport(0, 1, 1, waits=(WaitReport(Call("mean"), "", 0, (1,), LATE),), is_waiting=True)
    other = _waiting(1, "a", a=_channel(REDUCE))
    assert "waits in mean for rank(s) [1]" in _two_looks(shared, other)
    free = replace(shared, waits=(replace(shared.waits[0], awaits=(2,)),))
    assert _two_looks(free, other) == "", "rank 2 has not reported"


def test_a_rank_that_may_be_at_work_inside_its_wait_is_not_judged() -> None:
    shared = RankReport(0, 1, 1, waits=(WaitReport(Call("mean"), "", 0, (1,), LATE),), is_waiting=True)
    other = _waiting(1, "a", a=_channel(REDUCE))
    judge = Judge(5.0)
    assert judge.look({0: shared, 1: other}) == ""
    assert judge.look({0: replace(shared, stamp=2), 1: replace(other, stamp=2)}) == "", "no look since: it may be reducing"
    assert judge.look({0: replace(shared, stamp=3, looks=1), 1: replace(other, stamp=3)}) != ""


@pytest.mark.parametrize(
    "other", [Call("broadcast", 64, "module 'a'"), Call("all_reduce", 128, "module 'b'")], ids=["call", "size"]
)
def test_different_calls_under_one_number_are_told_at_once(other: Call) -> None:
    reports = {0: _waiting(0, "a", a=_channel(REDUCE, REDUCE)), 1: _waiting(1, "a", a=_channel(REDUCE, other, REDUCE))}
    text = Judge(5.0).look(reports)
    assert f"as call 2 of their group rank 0 made {REDUCE}, but rank 1 {other}" in text


def test_names_and_sizes_that_may_differ_do_not_part_ranks() -> None:
    assert not REDUCE.differs(Call("all_reduce", 64, "elsewhere"))
    assert not Call("all_to_all", ANY_NBYTES).differs(Call("all_to_all", 8))
    reports = {rank: _waiting(rank, "a", a=_channel(Call("all_reduce", 64, str(rank)))) for rank in (0, 1)}
    assert Judge(5.0).look(reports) == ""


def test_where_names_began_to_differ_is_settled_with_a_deadlock() -> None:
    head, body = Call("gather", 64, "head"), Call("gather", 64, "body")
    first = _waiting(0, "b", a=_channel(body, body), b=_channel(REDUCE))
    second = _waiting(1, "a", a=_channel(body, head, head))
    text = _two_looks(first, second)
    assert "They parted at call 2: rank 0 made gather of 64 bytes (body), rank 1 gather of 64 bytes (head)" in text


def test_calls_too_old_to_be_remembered_are_not_compared() -> None:
    channel = _channel(REDUCE, launched=40)
    assert channel.call(40) == REDUCE
    assert channel.call(39) is None
    assert channel.call(41) is None


@st.composite
def _worlds(draw: st.DrawFn) -> dict[int, RankReport]:
    """Ranks in user code, ended, or waiting in shared memory for arbitrary others."""
    size = draw(st.integers(1, 6))
    reports = {}
    for rank in range(size):
        kind = draw(st.sampled_from(["user", "ended", "waiting"]))
        awaits = tuple(draw(st.sets(st.integers(0, size - 1), max_size=3)))
        wait = WaitReport(Call("mean"), "", 0, awaits, LATE)
        reports[rank] = RankReport(
            rank,
            0,
            1,
            waits=(wait,) if kind == "waiting" else (),
            is_waiting=kind == "waiting",
            has_ended=kind == "ended",
        )
    return reports


@given(reports=_worlds())
def test_who_is_not_deadlocked_can_finish_when_all_in_user_code_do_their_part(reports: dict[int, RankReport]) -> None:
    held = deadlocked(reports)
    done = {rank for rank, report in reports.items() if not report.waits and not report.has_ended}
    while True:  # a wait ends when all it awaits have done their part; then that rank does its own
        more = {
            rank
            for rank, report in reports.items()
            if report.waits and rank not in done and set(report.waits[0].awaits) <= done
        }
        if not more:
            break
        done |= more
    assert held == set(reports) - done


def test_ranks_at_one_place_are_told_together() -> None:
    reports = [replace(_waiting(rank, "a", a=_channel(REDUCE, ranks=tuple(range(20)))), step=3) for rank in range(19)]
    text = positions([*reports, RankReport(19, 0, 1, place="train.py:8 in main")])
    assert text == (
        f"each of ranks {shortened(range(19))} waits in {REDUCE}, call 1 of ranks {shortened(range(20))}, step 3; "
        "rank 19 is not in a collective, at train.py:8 in main; its last call was none"
    )
    assert shortened([0, 1, 2], most=2) == "[0, 1, ... 3 in all]"


def test_a_report_survives_as_text() -> None:
    report = replace(_crossed()[0], step=7, place="x.py:1 in f", last="y", has_ended=True)
    assert RankReport.from_text(report.to_text()) == report


FOREIGN = Call("torch.distributed.all_reduce")


def _in_torchs_own_call(rank: int, channel: ChannelReport) -> RankReport:
    wait = WaitReport(FOREIGN, "a", 0, (), LATE, is_foreign=True)
    return RankReport(rank, 5, 1, waits=(wait,), is_waiting=True, channels={"a": channel})


def _counted(calls: int, marks: tuple[int, ...], foreign: int) -> ChannelReport:
    return ChannelReport((0, 1), calls, (REDUCE,) * len(marks), foreign, marks)


def test_a_call_of_torchs_own_that_the_other_rank_has_not_made_takes_part() -> None:
    here = _in_torchs_own_call(0, _counted(2, (0, 0), 1))
    there = _waiting(1, "a", a=_counted(3, (0, 0, 0), 0))
    text = _two_looks(here, there)
    assert "rank 0 waits in torch.distributed.all_reduce of ranks [0, 1]" in text
    assert "rank 1 waits in all_reduce of 64 bytes (module 'a'), call 3" in text


@pytest.mark.parametrize(
    "there",
    [
        _counted(3, (0, 0, 1), 1),  # made right before its next call: the one here may only be slow
        _counted(3, (0, 0, 0), 1),  # begun since
        _counted(60, (7,) * 32, 7),  # so far on that nobody remembers what came after call 2
    ],
)
def test_a_call_of_torchs_own_that_the_other_rank_may_have_made_is_no_fault(there: ChannelReport) -> None:
    assert _two_looks(_in_torchs_own_call(0, _counted(2, (0, 0), 1)), _waiting(1, "a", a=there)) == ""


def test_reports_survive_the_way_through_the_store() -> None:
    report = _in_torchs_own_call(0, _counted(2, (0, 0), 1))
    assert RankReport.from_text(report.to_text()) == report
