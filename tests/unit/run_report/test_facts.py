"""What happened, in numbers: over restarts, ranks and phases."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.run_report import facts, read_run
from deepspeed.run_report.summary import findings, summarise
from tests.support import run_logs
from tests.support.run_logs import BEGIN, end, rank_step, start, step, write


def test_a_restart_replaces_the_steps_that_it_computes_again(tmp_path: Path) -> None:
    first = [start(0), *(step(at, BEGIN + at, loss=float(at)) for at in range(1, 7))]
    second = [start(0, BEGIN + 50, restarts=1, step=0), *(step(at, BEGIN + 50 + at, loss=10.0 * at) for at in range(5, 9))]
    told = facts.steps(read_run(write(tmp_path, {0: [*first, *second]})))
    assert told.kept.values("step").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert told.kept.values("loss").tolist() == [1, 2, 3, 4, 50, 60, 70, 80]
    assert (told.redone.values("step").tolist(), told.redone.values("loss").tolist()) == ([5, 6], [5, 6])


def test_a_restart_that_reports_seldom_replaces_from_its_checkpoint_on(tmp_path: Path) -> None:
    """It loaded step 4 and reported step 8 first: step 6 of the attempt before is not of these weights."""
    load = {"kind": "checkpoint", "time": BEGIN + 51, "action": "load", "step": 4}
    first = [start(0), *(step(at, BEGIN + at) for at in (2, 4, 6))]
    told = facts.steps(read_run(write(tmp_path, {0: [*first, start(0, BEGIN + 50, restarts=1), load, step(8, BEGIN + 58)]})))
    assert told.kept.values("step").tolist() == [2, 4, 8]
    assert told.redone.values("step").tolist() == [6]


def test_a_start_that_trained_nothing_replaces_nothing(tmp_path: Path) -> None:
    told = facts.steps(read_run(write(tmp_path, {0: [start(0), step(1, BEGIN), step(2, BEGIN), start(0, BEGIN + 50)]})))
    assert told.kept.values("step").tolist() == [1, 2]


@given(spans=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=5))
def test_kept_steps_ascend_and_each_record_is_kept_or_redone(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for attempt, (begin, count) in enumerate(spans):
        time = BEGIN + 1000 * attempt
        steps = (step(at, time + at) for at in range(begin, begin + count))
        write(folder, {0: [start(0, time, restarts=attempt), *steps]})  # all by one launcher: one run, wherever they begin
    told = facts.steps(read_run(folder))
    at = told.kept.values("step").tolist()
    assert at == sorted(set(at))
    assert len(told.kept) + len(told.redone) == sum(count for _, count in spans)
    assert at[-1] == sum(spans[-1]) - 1


def test_phases_are_means_over_ranks_and_steps_the_largest_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        {0: [start(0), rank_step(1, BEGIN, phases={"a": 1.0, "b": 2.0}), rank_step(2, BEGIN, phases={"b": 4.0, "c": None})]},
    )
    write(
        tmp_path, {1: [start(1), rank_step(1, BEGIN, phases={"a": 3.0, "b": 6.0}), rank_step(2, BEGIN, phases={"b": 8.0})]}
    )
    phases = facts.phases(read_run(tmp_path))
    assert phases.steps.tolist() == [1, 2]
    assert {name: means.tolist() for name, means in phases.seconds.items()} == {"b": [4.0, 6.0], "a": [2.0, 0.0]}
    assert list(phases.seconds) == ["b", "a"]
    assert phases.by_rank == {"b": {0: 3.0, 1: 7.0}, "a": {0: 1.0, 1: 3.0}}
    assert phases.mean("b") == 5.0


def test_who_waits_least_is_waited_for(tmp_path: Path) -> None:
    waited = {0: 0.4, 1: 0.02, 2: 0.5}
    for rank, seconds in waited.items():
        records = [rank_step(at, BEGIN + at, waited_seconds=seconds) for at in range(1, 11)]
        write(tmp_path, {rank: [start(rank, world_size=3), *records]})
    run = read_run(tmp_path)
    found = facts.waits(run)
    assert found.straggler == 1
    assert found.seconds == pytest.approx({0: 4.0, 1: 0.2, 2: 5.0})
    assert found.covered_seconds == 10.0
    assert found.lost_seconds == pytest.approx(4.3)  # the median of ranks 0 and 2, less that of rank 1
    (said,) = [each.text for each in findings(run, BEGIN + 11) if each.section == "waits"]
    assert (
        said == "Rank 1 keeps the others waiting: they stood 4.30 s longer in collectives than it did, 43.0 % of the time."
    )


def test_no_rank_is_blamed_where_they_wait_alike(tmp_path: Path) -> None:
    for rank, seconds in enumerate((0.105, 0.100, 0.110)):
        records = [rank_step(at, BEGIN + at, waited_seconds=seconds) for at in range(1, 11)]
        write(tmp_path, {rank: [start(rank, world_size=3), *records]})
    assert facts.waits(read_run(tmp_path)).straggler is None


def test_operations_are_means_over_ranks_with_their_throughput(tmp_path: Path) -> None:
    def comm(count: int, nbytes: float, seconds: float) -> dict[str, dict[str, float]]:
        return {"all_reduce": {"count": count, "nbytes": nbytes, "seconds": seconds}}

    write(
        tmp_path, {0: [start(0), rank_step(1, BEGIN, comm=comm(2, 4e9, 1.0)), rank_step(2, BEGIN, comm=comm(2, 4e9, 1.0))]}
    )
    write(
        tmp_path, {1: [start(1), rank_step(1, BEGIN, comm=comm(2, 4e9, 2.0)), rank_step(2, BEGIN, comm=comm(2, 4e9, 4.0))]}
    )
    (only,) = facts.operations(read_run(tmp_path))
    assert (only.name, only.count, only.nbytes, only.seconds) == ("all_reduce", 4, 8e9, 4.0)
    assert only.bytes_per_second == 2e9


def test_memory_is_the_devices_where_a_rank_knows_it_and_peaks_are_its_own(tmp_path: Path) -> None:
    device = [rank_step(1, BEGIN, device_bytes=5e9, device_peak_bytes=7e9), rank_step(2, BEGIN, device_bytes=6e9)]
    memory = facts.memory(
        read_run(write(tmp_path, {0: [start(0), *device], 1: [start(1), rank_step(1, BEGIN, device_bytes=8e9)]}))
    )
    assert memory.place == "device"
    assert memory.peaks == {0: 7e9, 1: 8e9}
    assert memory.fullest == 1
    assert memory.plan == pytest.approx(sum(run_logs.PLAN.values()))


def test_a_host_run_tells_the_memory_of_its_processes(tmp_path: Path) -> None:
    memory = facts.memory(read_run(write(tmp_path, {0: [start(0, plan=None), rank_step(1, BEGIN)]})))
    assert (memory.place, memory.peaks, memory.plan) == ("host", {0: 1e9}, None)


def test_a_summary_has_what_one_asks_first(tmp_path: Path) -> None:
    summary = summarise(read_run(run_logs.whole(tmp_path, steps=200)))
    assert (summary.state, summary.attempts, summary.first_step, summary.last_step) == ("done", 2, 1, 200)
    assert (summary.redone, summary.world_size, summary.skipped) == (10, 4, 1)
    assert summary.hosts == ("node0", "node1")


def test_the_error_of_a_failed_run_is_found_with_its_ranks(tmp_path: Path) -> None:
    cause = "Traceback (most recent call last):\n  File ...\nOverflowError: too far"
    write(tmp_path, {rank: [start(rank), step(1, BEGIN), end(1, BEGIN + 1, cause)] for rank in (0, 1)})
    first = findings(read_run(tmp_path), BEGIN + 2)[0]
    assert (first.level, first.text) == ("bad", "Ranks 0, 1 failed: OverflowError: too far")


def test_a_run_without_an_end_is_told_with_its_age(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, {0: [start(0, world_size=1), step(1, BEGIN)]}))
    (only,) = findings(run, BEGIN + 95)
    assert only.text == "No end is recorded: the run goes on or was killed. Its last record is 1 min 35 s old."


def test_losses_that_are_not_finite_missing_ranks_and_hot_experts_stand_out(tmp_path: Path) -> None:
    shares = {"kind": "experts", "time": BEGIN, "step": 2, "layers": {"mlp": [0.97, 0.01, 0.01, 0.01]}}
    write(tmp_path, {0: [start(0, world_size=3), step(1, BEGIN), step(2, BEGIN, loss=None), shares, end(2, BEGIN)]})
    said = [each.text for each in findings(read_run(tmp_path), BEGIN)]
    assert said == [
        "1 reported step(s) have no finite loss, the first is step 2.",
        "Ranks 1, 2 of 3 left no record; what is said of ranks leaves them out.",
        "mlp: one expert gets 3.9 times its even share of tokens; 3 of 4 experts are almost idle.",
    ]


def test_a_run_that_grows_slower_is_told(tmp_path: Path) -> None:
    rates = [100.0] * 20 + [60.0] * 10
    steps = [step(at, BEGIN + at, samples_per_second=rate) for at, rate in enumerate(rates, start=1)]
    said = [
        each.text
        for each in findings(read_run(write(tmp_path, {0: [start(0, world_size=1), *steps, end(30, BEGIN)]})), BEGIN)
    ]
    assert said == ["Throughput fell: the last fifth of the run is 40.0 % slower than its best."]


def test_an_uneventful_run_has_no_findings(tmp_path: Path) -> None:
    steps = [step(at, BEGIN + at, samples_per_second=100.0) for at in range(1, 30)]
    assert findings(read_run(write(tmp_path, {0: [start(0, world_size=1), *steps, end(30, BEGIN + 30)]})), BEGIN) == []


def _host_run(folder: Path, before: float | None, plan: float) -> facts.Memory:
    records = [
        start(0, host_bytes=before, plan={"weights": plan, "moments (nvme)": 9e9}),
        rank_step(1, BEGIN, host_bytes=3e9),
    ]
    return facts.memory(read_run(write(folder, {0: records})))


def test_a_process_is_compared_with_its_plan_without_what_it_held_before(tmp_path: Path) -> None:
    memory = _host_run(tmp_path / "large", 1e9, 1.8e9)
    assert (memory.peaks, memory.before) == ({0: 2e9}, 1e9)
    assert memory.plan == memory.comparable_plan == 1.8e9  # what rests in files is no memory
    small = _host_run(tmp_path / "small", 1e9, 7e5)
    assert (small.peaks, small.plan, small.comparable_plan) == ({0: 2e9}, 7e5, None)
    older = _host_run(tmp_path / "older", None, 1.8e9)
    assert (older.peaks, older.before, older.comparable_plan) == ({0: 3e9}, None, None)


def test_what_rests_on_the_host_is_no_memory_of_the_device(tmp_path: Path) -> None:
    plan = {"weights": 1e9, "masters (host)": 2e9, "moments (nvme)": 4e9}
    memory = facts.memory(read_run(write(tmp_path, {0: [start(0, plan=plan), rank_step(1, BEGIN, device_bytes=1e9)]})))
    assert memory.plan == memory.comparable_plan == 1e9


def test_each_attempts_process_has_what_it_held_before(tmp_path: Path) -> None:
    first = [start(0, host_bytes=1e9), rank_step(1, BEGIN, host_bytes=3e9)]
    again = [start(0, BEGIN + 9, host_bytes=2e9, restarts=1), rank_step(2, BEGIN + 10, host_bytes=3e9)]
    memory = facts.memory(read_run(write(tmp_path, {0: [*first, *again]})))
    assert memory.by_rank[0].values.tolist() == [2e9, 1e9]


def test_the_first_error_is_the_cause_and_what_it_did_to_others_comes_after_it(tmp_path: Path) -> None:
    ends = {0: end(3, BEGIN + 9, "CommError: rank 1 is gone"), 1: end(3, BEGIN + 9.5, "RuntimeError: disk on fire")}
    run = read_run(write(tmp_path, {rank: [start(rank, world_size=3), told] for rank, told in ends.items()}))
    assert summarise(run).cause == "RuntimeError: disk on fire"
    assert [each.text for each in findings(run, BEGIN + 20) if each.level == "bad"] == [
        "Rank 1 failed: RuntimeError: disk on fire",
        "Rank 0 failed: CommError: rank 1 is gone",
    ]


def test_a_rank_without_an_end_among_others_is_named(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0), end(3, BEGIN + 9, "CommError: rank 1 is gone")], 1: [start(1)]})
    texts = [each.text for each in findings(read_run(tmp_path), BEGIN + 20) if each.level == "bad"]
    assert texts[-1].startswith("Rank 1 left no end: killed")


def test_a_run_whose_losses_are_all_unknown_says_so(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, {0: [start(0), *(step(at, BEGIN + at, None) for at in range(1, 4))]}))
    assert "No reported step has a loss that is known and finite." in [each.text for each in findings(run, BEGIN)]


def test_a_clock_that_was_set_back_makes_no_straggler(tmp_path: Path) -> None:
    """29 s, of which one rank waits 10 ms more per second than the other."""
    times = [BEGIN + at - (5000 if at > 10 else 0) for at in range(1, 31)]
    for rank in (0, 1):
        steps = [rank_step(at, time, waited_seconds=0.01 * (1 + rank)) for at, time in enumerate(times, start=1)]
        write(tmp_path, {rank: [start(rank), *steps]})
    waits = facts.waits(read_run(tmp_path))
    assert waits.covered_seconds == pytest.approx(29)
    assert waits.straggler is None


def test_the_last_step_is_known_without_the_first_ranks_file(tmp_path: Path) -> None:
    assert summarise(read_run(write(tmp_path, {1: [start(1), rank_step(7, BEGIN)]}))).last_step == 7
