"""What damaged, foreign and huge logs make of a report: a page, a frame and figures, or an error that says why."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from deepspeed.run_report import RunLogNotFoundError, RunReader, facts, files, read_run
from deepspeed.run_report.command import as_dict, main
from deepspeed.run_report.page import render
from deepspeed.run_report.summary import findings, summarise
from deepspeed.run_report.top import frame
from tests.support import run_logs
from tests.support.run_logs import BEGIN, end, rank_step, start, step, write


def _shown(folder: Path) -> tuple[str, str, dict[str, Any]]:
    """The page, the terminal's frame, and the figures as strict JSON."""
    run = read_run(folder)
    console = Console(file=io.StringIO(), width=80)
    console.print(frame(run, BEGIN))
    assert isinstance(console.file, io.StringIO)
    told = json.loads(json.dumps(as_dict(run, BEGIN), allow_nan=False))
    return render(run, BEGIN), console.file.getvalue(), told


_ODD = st.sampled_from([None, 0, -1, 1e308, -1e308, 5e-324, 2**70, 10**400, 1.5, "nan", float("nan"), float("inf")])
_NAMED = st.dictionaries(st.sampled_from(["a", "b", ""]), _ODD, max_size=2)
_STEP = st.fixed_dictionaries(
    {"kind": st.just("step"), "time": _ODD, "step": st.one_of(st.integers(-2, 4), _ODD)},
    optional={
        **dict.fromkeys(("loss", "grad_norm", "loss_scale", "skipped", "seconds", "samples_per_second", "mfu"), _ODD),
        "lr": st.lists(_ODD, max_size=2),
        "more": _NAMED,
    },
)
_COMM = st.fixed_dictionaries({"count": _ODD, "nbytes": _ODD, "seconds": _ODD})
_RANK_STEP = st.fixed_dictionaries(
    {"kind": st.just("rank_step"), "time": _ODD, "step": st.one_of(st.integers(-2, 4), _ODD)},
    optional={
        **dict.fromkeys(("host_bytes", "device_bytes", "device_peak_bytes", "waited_seconds"), _ODD),
        "phases": _NAMED,
        "comm": st.dictionaries(st.sampled_from(["x", "y"]), _COMM, max_size=2),
    },
)
_OTHERS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["start", "experts", "schedule", "checkpoint", "profile", "end"]), "time": _ODD},
    optional={
        **dict.fromkeys(("rank", "world_size", "step", "seconds", "nbytes", "host_bytes", "bubble", "restarts"), _ODD),
        "layers": st.dictionaries(st.sampled_from(["l", "m"]), st.lists(_ODD, max_size=3), max_size=2),
        "works": st.lists(st.tuples(st.integers(0, 2), _ODD, _ODD, st.sampled_from("FBW?"), _ODD), max_size=3),
        "tree": st.lists(st.fixed_dictionaries({"name": st.just("n"), "flops": _ODD, "share": _ODD}), max_size=2),
        "plan": _NAMED,
    },
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(told=st.lists(st.lists(st.one_of(_STEP, _RANK_STEP, _OTHERS), max_size=8), min_size=1, max_size=3))
def test_no_value_stops_a_page_a_frame_or_figures(
    tmp_path_factory: pytest.TempPathFactory, told: list[list[dict[str, Any]]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for rank, records in enumerate(told):
        lines = [json.dumps(each) for each in (start(rank), *records)]
        (folder / f"rank-{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")
    page, text, figures = _shown(folder)
    assert page.count("</html>") == 1
    assert text
    assert figures["world_size"] >= len(told)


def test_steps_told_twice_or_in_any_order_are_shown_once_and_in_order(tmp_path: Path) -> None:
    order = [3, 1, 2, 2, 5, 4]
    told = [step(at, BEGIN + place, loss=10.0 * at + place) for place, at in enumerate(order)]
    own = [rank_step(at, BEGIN + place, waited_seconds=1.0) for place, at in enumerate(order)]
    run = read_run(write(tmp_path, {0: [start(0), *told, *own], 1: [start(1), *own]}))
    kept = facts.steps(run).kept
    assert (kept.values("step").tolist(), kept.values("loss").tolist()) == ([1, 2, 3, 4, 5], [11, 23, 30, 45, 54])
    assert facts.waits(run).by_step[1].steps.tolist() == [1, 2, 3, 4, 5]
    assert "Steps 1 to 5." in render(run, BEGIN)


def test_steps_that_take_no_time_have_no_throughput_and_no_fault(tmp_path: Path) -> None:
    comm = {"all_reduce": {"count": 1, "nbytes": 8, "seconds": 0}}
    own = [rank_step(at, BEGIN, waited_seconds=0, phases={"forward": 0}, comm=comm) for at in (1, 2)]
    told = [step(at, BEGIN, seconds=0.0, samples_per_second=None) for at in (1, 2)]
    page, _, figures = _shown(write(tmp_path, {rank: [start(rank), *told, *own] for rank in (0, 1)}))
    assert (figures["step_seconds"], figures["operations"][0]["bytes_per_second"], figures["straggler"]) == (0, None, None)
    assert "0 s" in page


def test_five_hundred_restarts_are_one_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        records = [
            each
            for attempt in range(500)
            for each in (
                start(rank, BEGIN + 10 * attempt, restarts=attempt),
                *(step(attempt + at, BEGIN + 10 * attempt + at) for at in (1, 2) if rank == 0),
                *(rank_step(attempt + at, BEGIN + 10 * attempt + at, waited_seconds=0.1) for at in (1, 2)),
            )
        ]
        write(tmp_path, {rank: records})
    page, _, figures = _shown(tmp_path)
    assert (figures["attempts"], figures["last_step"], figures["redone"]) == (500, 501, 499)
    assert "The last 200 of 500 are listed." in page
    assert len(page) < 1_000_000


def test_a_thousand_ranks_are_one_run(tmp_path: Path) -> None:
    for rank in range(1000):
        own = [rank_step(at, BEGIN + at, waited_seconds=0.5 - 0.4 * (rank == 77)) for at in range(1, 11)]
        write(tmp_path, {rank: [start(rank, world_size=1000), *own]})
    page, text, figures = _shown(tmp_path)
    assert (figures["world_size"], figures["straggler"], len(figures["peak_nbytes_by_rank"])) == (1000, 77, 1000)
    assert "and 984 more ranks" in text
    assert len(page) < 1_000_000


def test_a_line_cut_in_the_middle_of_each_file_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run_logs.whole(tmp_path, steps=40, ranks=3)
    lines = {}
    for path in tmp_path.iterdir():
        told = path.read_bytes().splitlines(keepends=True)
        lines[path.name] = len(told) // 2 + 1
        told[len(told) // 2] = told[len(told) // 2][:20] + b"\n"  # a killed writer's; the next one began a line of its own
        path.write_bytes(b"".join(told) + b'{"kind": "rank_st')
    run = read_run(tmp_path)
    assert {each.file: each.line for each in run.unread} == lines
    assert sorted(run.cut_off) == sorted(lines)
    assert len(facts.steps(run).kept) in (39, 40)


def test_files_of_other_programs_are_passed_over_or_named(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0, world_size=1), step(1, BEGIN)]})
    (tmp_path / "rank-00001.jsonl").write_bytes(os.urandom(3000).replace(b"\n", b" ") + b"\n" + b'{"level": "info"}\n' * 500)
    (tmp_path / "rank-00002.jsonl").write_text("")
    (tmp_path / "events.out.tfevents.1").write_bytes(os.urandom(100))
    (tmp_path / "rank-x.jsonl").write_text("{}\n")
    os.mkfifo(tmp_path / "rank-00003.jsonl")  # opening it would wait for a writer
    run = read_run(tmp_path)
    assert [sorted(attempt.ranks) for attempt in run.attempts] == [[0]]
    assert {each.file for each in run.unread} == {"rank-00001.jsonl", "rank-00003.jsonl"}
    assert (run.unread_count, len(run.unread)) == (502, 201)  # 200 of a file are named, all are counted
    page, _, figures = _shown(tmp_path)
    assert "The first 200 of 502 lines are shown." in page
    assert figures["unread_count"] == 502
    assert "502 line(s) of the log could not be read" in [each.text for each in findings(run, BEGIN)][-1]


def test_two_files_of_one_rank_are_both_read(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0, world_size=1), step(1, BEGIN)]})
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(start(0, BEGIN + 5, restarts=1, world_size=1)) + "\n")
    reader = RunReader(tmp_path)
    assert (reader.read_more(), reader.read_more()) == (True, False)
    assert len(reader.run().attempts) == 2


def test_bytes_that_are_no_text_cost_their_line(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0)]})
    with (tmp_path / "rank-00000.jsonl").open("ab") as file:
        file.write(b'{"kind": "end", "time": 1.0, "cause": "\xff\xfe"}\n' + json.dumps(step(1, BEGIN)).encode() + b"\n")
    run = read_run(tmp_path)
    assert [each.line for each in run.unread] == [2]
    assert "utf-8" in run.unread[0].why
    assert run.attempts[0].steps.column("step").tolist() == [1]


def test_a_line_without_end_costs_no_more_memory_than_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LONGEST", 1 << 20)
    write(tmp_path, {0: [start(0)]})
    with (tmp_path / "rank-00000.jsonl").open("ab") as file:
        file.write(b"x" * (5 << 20) + b"\n" + json.dumps(step(1, BEGIN)).encode() + b"\n")
    run = read_run(tmp_path)
    assert [str(each) for each in run.unread] == ["rank-00000.jsonl, line 2: longer than 1 MiB"]
    assert run.attempts[0].steps.column("step").tolist() == [1]


class _GrowsWhileRead:
    """A file that another line is appended to with every read."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path

    def read(self, size: int) -> bytes:
        with self._path.open("ab") as more:
            more.write(json.dumps(step(9, BEGIN)).encode() + b"\n")
        return self._file.read(size)


def test_a_file_that_grows_while_it_is_read_is_read_to_where_it_ended(tmp_path: Path) -> None:
    path = write(tmp_path, {0: [start(0), step(1, BEGIN)]}) / "rank-00000.jsonl"
    told = files.RankFile(0, path)
    with path.open("rb") as file:
        told._read(_GrowsWhileRead(file, path), path.stat().st_size)  # type: ignore[arg-type]
    assert told.segments[0].steps.column("step").tolist() == [1]
    assert told.read_more()
    assert told.segments[0].steps.column("step").tolist() == [1, 9, 9]


@pytest.mark.parametrize("is_same_size", [True, False])
def test_a_file_that_was_replaced_is_read_anew_however_long_it_is(tmp_path: Path, is_same_size: bool) -> None:
    write(tmp_path, {0: [start(0), step(1, BEGIN)]})
    reader = RunReader(tmp_path)
    reader.read_more()
    path = tmp_path / "rank-00000.jsonl"
    path.unlink()
    write(tmp_path, {0: [start(0), step(2, BEGIN)] if is_same_size else [start(0), step(2, BEGIN), step(3, BEGIN)]})
    assert reader.read_more()
    assert reader.run().attempts[0].steps.column("step").tolist() == ([2] if is_same_size else [2, 3])


def test_what_was_read_costs_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of `top` reads what was appended, and no file that is as it was."""
    run_logs.whole(tmp_path, steps=50, ranks=2)
    reader = RunReader(tmp_path)
    reader.read_more()
    lines: list[bytes] = []
    read = files.record_of
    monkeypatch.setattr(files, "record_of", lambda line: (lines.append(line), read(line))[1])
    assert not reader.read_more()
    write(tmp_path, {1: [rank_step(51, BEGIN)]})
    assert reader.read_more()
    assert [json.loads(line)["step"] for line in lines] == [51]


def test_a_run_that_is_still_read_keeps_the_length_it_had(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0), *(step(at, BEGIN + at) for at in range(10))]})
    reader = RunReader(tmp_path)
    reader.read_more()
    curve = facts.curve("loss", facts.steps(reader.run()).kept, "loss")
    write(tmp_path, {0: [step(at, BEGIN + at, loss=7.0) for at in range(10, 10_000)]})
    reader.read_more()
    assert curve.values.tolist() == [1.0] * 10
    assert len(facts.steps(reader.run()).kept) == 10_000


def test_names_beyond_counting_keep_the_first_ones(tmp_path: Path) -> None:
    own = [rank_step(at, BEGIN + at, phases={f"phase {at}": 1.0}) for at in range(1000)]
    run = read_run(write(tmp_path, {0: [start(0), *own]}))
    assert len(facts.phases(run).seconds) == 256
    assert len(render(run, BEGIN)) < 4_000_000


def test_a_log_of_a_later_format_says_so(tmp_path: Path) -> None:
    told = findings(read_run(write(tmp_path, {0: [start(0, format=2, world_size=1), end(1, BEGIN)]})), BEGIN)
    assert [each.text for each in told if each.section == "log" or "format" in each.text] == [
        "The log has format 2, this version reads 1: values may mean something else. Read it with the version that wrote it."
    ]


def test_a_page_in_the_read_folder_is_not_read_and_may_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0), step(1, BEGIN)]})
    assert (main([str(tmp_path)]), main([str(tmp_path)])) == (0, 0)
    run = read_run(tmp_path)
    assert (run.unread, run.unknown_kinds) == ((), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.jsonl", "report.html"]


def test_where_the_disk_is_full_the_page_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {0: [start(0), step(1, BEGIN)]})
    assert main([str(tmp_path)]) == 0
    before = (tmp_path / "report.html").read_text()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    assert main([str(tmp_path)]) == 2
    assert "could not be written there (No space left on device); --out FILE.html" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.jsonl", "report.html"]


def test_a_folder_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {0: [start(0)]})

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RunLogNotFoundError, match=r"rank-00000\.jsonl, the whole file: Permission denied"):
        read_run(tmp_path)


def test_many_steps_take_the_room_of_their_numbers(tmp_path: Path) -> None:
    """Eight columns or so of eight bytes each; a record as an object takes a kilobyte."""
    path = tmp_path / "rank-00000.jsonl"
    line = json.dumps(rank_step(0, BEGIN, waited_seconds=0.5, phases={"forward": 0.25})).replace('"step": 0', '"step": %d')
    with path.open("w") as file:
        file.write(json.dumps(start(0, world_size=1)) + "\n")
        file.writelines(line % at + "\n" for at in range(20_000))
    run = read_run(tmp_path)
    told = run.attempts[0].ranks[0].rank_steps
    assert len(told) == 20_000
    assert np.array_equal(told.column("forward", "phases"), np.full(20_000, 0.25))
    held = sum(each._data.nbytes for each in (told._numbers, *told._groups["phases"].values()))
    assert held < 20_000 * 8 * 8 * 1.5
    assert summarise(run).last_step == 19_999
