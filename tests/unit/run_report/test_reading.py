"""Reading logs: whatever lines there are, while they are written, over restarts; and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.run_report import RunLogNotFoundError, RunReader, read_run
from tests.support import run_logs
from tests.support.run_logs import BEGIN, end, rank_step, start, step, write


def _two_steps(folder: Path) -> Path:
    return write(
        folder, {0: [start(0), step(1, BEGIN + 1), rank_step(1, BEGIN + 1)], 1: [start(1), rank_step(1, BEGIN + 1)]}
    )


def test_a_run_has_its_ranks_and_their_records(tmp_path: Path) -> None:
    run = read_run(_two_steps(tmp_path))
    (attempt,) = run.attempts
    assert sorted(attempt.ranks) == [0, 1]
    assert attempt.world_size == 2
    assert attempt.missing_ranks == ()
    assert attempt.steps.column("step").tolist() == [1]
    assert {rank: len(told.rank_steps) for rank, told in attempt.ranks.items()} == {0: 1, 1: 1}
    assert attempt.first is not None
    assert attempt.first.model == "GPT"
    assert (run.unread, run.cut_off, run.unknown_kinds) == ((), (), {})


def test_a_line_that_is_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    _two_steps(tmp_path)
    with (tmp_path / "rank-00001.jsonl").open("a") as file:
        file.write('{"kind": "rank_step", "time": 17')
    run = read_run(tmp_path)
    assert run.cut_off == ("rank-00001.jsonl",)
    assert run.unread == ()
    assert len(run.attempts[0].ranks[1].rank_steps) == 1


def test_unknown_kinds_and_keys_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0, colour="red"), {"kind": "weather", "time": 1.0}, step(1, BEGIN, mood="good")]})
    run = read_run(tmp_path)
    assert run.unknown_kinds == {"weather": 1}
    assert run.unread == ()
    assert len(run.attempts[0].steps) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting property name"),
        ("[1, 2]", 'no object with a "kind"'),
        ('{"kind": 3}', 'no object with a "kind"'),
        ('{"kind": "step", "time": 1.0, "step": "many"}', "step, step: Input should be a valid integer"),
        ('{"kind": "step", "time": 1.0}', "step, step: Field required"),
        ('{"kind": "step", "time": 1.0, "step": 1, "loss": 1e999}', "step, loss: Input should be a finite number"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "Expecting value"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path, line: str, why: str) -> None:
    _two_steps(tmp_path)
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write(f"\n{line}\n" + json.dumps(step(2, BEGIN + 2)) + "\n")
    run = read_run(tmp_path)
    (unread,) = run.unread
    assert (unread.file, unread.line) == ("rank-00000.jsonl", 5)
    assert why in unread.why
    assert run.attempts[0].steps.column("step").tolist() == [1, 2]


def test_values_that_are_null_or_nan_are_not_known(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0)]})
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write('{"kind": "step", "time": 1.0, "step": 1, "loss": NaN, "lr": [null], "grad_norm": null}\n')
    told = read_run(tmp_path).attempts[0].steps
    unknown = [told.column("loss"), told.column("0", "lr"), told.column("grad_norm"), told.column("seconds")]
    assert np.isnan(unknown).tolist() == [[True]] * 4


def test_restarts_make_attempts_over_all_ranks(tmp_path: Path) -> None:
    for attempt in range(3):
        begin = BEGIN + 100 * attempt
        for rank in (0, 1):
            write(tmp_path, {rank: [start(rank, begin + rank, restarts=attempt), rank_step(1, begin + 5)]})
    run = read_run(tmp_path)
    assert [sorted(attempt.ranks) for attempt in run.attempts] == [[0, 1]] * 3
    assert [attempt.starts[1].restarts for attempt in run.attempts] == [0, 1, 2]


def test_a_rank_that_never_started_again_does_not_shift_the_others(tmp_path: Path) -> None:
    """Rank 1 died before its second start: its third must not be taken for the second."""
    write(tmp_path, {0: [start(0, BEGIN, restarts=0), start(0, BEGIN + 100, restarts=1), start(0, BEGIN + 200, restarts=2)]})
    write(tmp_path, {1: [start(1, BEGIN + 1, restarts=0), start(1, BEGIN + 199, restarts=2)]})
    run = read_run(tmp_path)
    assert [sorted(attempt.ranks) for attempt in run.attempts] == [[0, 1], [0], [0, 1]]
    assert run.attempts[1].missing_ranks == (1,)


def test_a_restart_on_fewer_ranks_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, {rank: [start(rank, BEGIN, world_size=3)] for rank in range(3)})
    write(tmp_path, {rank: [start(rank, BEGIN + 50, world_size=2)] for rank in range(2)})
    assert [attempt.world_size for attempt in read_run(tmp_path).attempts] == [3, 2]


def _launch(folder: Path, begin: float, first: int, last: int, **more: Any) -> Path:
    for rank in (0, 1):
        lines = [start(rank, begin, **more)]
        if first > 1:
            lines.append({"kind": "checkpoint", "time": begin + 1, "action": "load", "tag": "t", "step": first - 1})
        for at in range(first, last + 1):
            lines += [step(at, begin + at)] if rank == 0 else []
            lines.append(rank_step(at, begin + at))
        write(folder, {rank: lines})
    return folder


def test_a_launch_that_begins_with_the_first_step_again_is_a_run_of_its_own(tmp_path: Path) -> None:
    _launch(tmp_path, BEGIN, 1, 5)
    _launch(tmp_path, BEGIN + 100, 4, 8)  # goes on after a checkpoint of step 3
    _launch(tmp_path, BEGIN + 200, 1, 3)  # from scratch
    run = read_run(tmp_path)
    assert (run.number, [len(attempts) for attempts in run.runs]) == (2, [2, 1])
    assert [attempt.steps.column("step").tolist() for attempt in run.attempts] == [[1, 2, 3]]
    first = read_run(tmp_path, 1)
    assert (first.number, [attempt.steps.column("step").tolist() for attempt in first.attempts]) == (
        1,
        [[1, 2, 3, 4, 5], [4, 5, 6, 7, 8]],
    )
    for number in (0, 3):
        with pytest.raises(
            RunLogNotFoundError, match=rf"run {number} was asked for, and there are 2\. Give a number from 1 to 2"
        ):
            read_run(tmp_path, number)


def test_what_an_elastic_launcher_starts_anew_is_the_same_run_wherever_it_begins(tmp_path: Path) -> None:
    _launch(tmp_path, BEGIN, 1, 2)
    _launch(tmp_path, BEGIN + 100, 1, 4, restarts=1)  # there was no checkpoint yet
    assert [len(attempts) for attempts in read_run(tmp_path).runs] == [2]


@pytest.mark.parametrize("steps", [(0, 3), (3, 0)])
def test_a_launch_without_a_step_is_an_attempt_of_the_run_before_it(tmp_path: Path, steps: tuple[int, int]) -> None:
    """It failed before its first step, or has only just begun: it may load a checkpoint yet."""
    for number, last in enumerate(steps):
        _launch(tmp_path, BEGIN + 100 * number, 1, last)
    run = read_run(tmp_path)
    assert (run.number, len(run.attempts)) == (1, 2)


def test_logs_of_engines_beside_this_one_are_named(tmp_path: Path) -> None:
    _launch(tmp_path, BEGIN, 1, 2)
    assert read_run(tmp_path).engines == ()
    for number in (2, 3):
        _launch(tmp_path / f"engine-{number}", BEGIN, 1, 2)
    assert read_run(tmp_path).engines == ("engine-2", "engine-3")


def test_ranks_without_a_file_are_missing(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0, world_size=4)], 2: [start(2, world_size=4)]})
    assert read_run(tmp_path).attempts[0].missing_ranks == (1, 3)


def test_a_lost_start_line_costs_what_it_tells_alone(tmp_path: Path) -> None:
    write(tmp_path, {0: [step(1, BEGIN), end(1, BEGIN + 1)]})
    (attempt,) = read_run(tmp_path).attempts
    assert (attempt.first, len(attempt.steps), attempt.world_size) == (None, 1, 1)


def test_a_reader_takes_what_was_appended_once_its_line_has_ended(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0)]})
    reader = RunReader(tmp_path)
    assert reader.read_more()
    assert not reader.read_more()
    line = json.dumps(step(1, BEGIN)) + "\n"
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        assert not reader.read_more()
        assert reader.run().cut_off == ("rank-00000.jsonl",)
        file.write(line[20:])
        file.flush()
        assert reader.read_more()
    assert reader.run().attempts[0].steps.column("step").tolist() == [1]
    write(tmp_path, {1: [start(1)]})  # a rank whose file comes later
    assert reader.read_more()
    assert sorted(reader.run().attempts[0].ranks) == [0, 1]


def test_a_file_that_began_anew_is_read_anew(tmp_path: Path) -> None:
    _two_steps(tmp_path)
    reader = RunReader(tmp_path)
    reader.read_more()
    (tmp_path / "rank-00000.jsonl").write_text(json.dumps(start(0, model="Other")) + "\n")
    reader.read_more()
    first = reader.run().attempts[0].first
    assert first is not None
    assert first.model == "Other"


def test_no_folder_says_which_setting_writes_one(tmp_path: Path) -> None:
    with pytest.raises(RunLogNotFoundError, match=r'nowhere: no such folder. Give the folder .*"run_log": {"enabled": true'):
        read_run(tmp_path / "nowhere")


def test_an_empty_folder_says_which_setting_fills_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no rank-\*\.jsonl in it\. Give the folder .* output_path/job_name"):
        read_run(tmp_path)


def test_the_folder_above_a_log_says_where_the_log_is(tmp_path: Path) -> None:
    _two_steps(tmp_path / "job")
    with pytest.raises(RunLogNotFoundError, match=r"no rank-\*\.jsonl here, but in .*job: give one of these"):
        read_run(tmp_path)


def test_files_without_a_record_say_so(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").write_text("nonsense\n")
    with pytest.raises(
        RunLogNotFoundError, match=r"1 file\(s\) .* \(rank-00000.jsonl, line 1: .*\)\. A run writes its first"
    ):
        read_run(tmp_path)


_LINES = st.one_of(
    st.binary(max_size=40),
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(
                ["start", "step", "rank_step", "experts", "schedule", "checkpoint", "profile", "end", "?"]
            )
        },
        optional={
            name: st.one_of(
                st.none(), st.floats(), st.integers(-5, 5), st.text(max_size=3), st.lists(st.floats(), max_size=2)
            )
            for name in ("time", "step", "rank", "loss", "world_size", "layers", "works", "phases", "plan", "config")
        },
    ).map(lambda values: json.dumps(values).encode()),
)


@given(lines=st.lists(_LINES, max_size=8))
def test_every_line_is_a_record_or_named(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("run")
    lines = [line.replace(b"\n", b" ") for line in lines]
    head = json.dumps(start(0)).encode()
    (folder / "rank-00000.jsonl").write_bytes(b"".join(line + b"\n" for line in [head, *lines]))
    run = read_run(folder)
    records = sum(mine.count for attempt in run.attempts for mine in attempt.ranks.values())
    blank = sum(1 for line in lines if not line.strip())
    assert records + len(run.unread) + sum(run.unknown_kinds.values()) + blank == 1 + len(lines)


def test_the_made_up_run_reads_without_a_fault(tmp_path: Path) -> None:
    run = read_run(run_logs.whole(tmp_path, steps=60))
    assert (run.unread, run.unknown_kinds, run.cut_off) == ((), {}, ())
    assert len(run.attempts) == 2
    assert [sorted(attempt.starts) for attempt in run.attempts] == [[0, 1, 2, 3]] * 2
    assert run.attempts[-1].steps.column("step")[-1] == 60


def test_absent_values_of_every_kind_are_not_known(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"kind": "start", "time": 1.0, "rank": 0},
        {"kind": "step", "time": 1.0, "step": 1},
        {"kind": "rank_step", "time": 1.0, "step": 1},
        {"kind": "experts", "time": 1.0, "step": 1, "layers": {}},
        {"kind": "schedule", "time": 1.0},
        {"kind": "checkpoint", "time": 1.0},
        {"kind": "profile", "time": 1.0},
        {"kind": "end", "time": 1.0},
    ]
    run = read_run(write(tmp_path, {0: kinds}))
    assert run.unread == ()
    assert run.attempts[0].ranks[0].count == len(kinds)


def test_a_clock_that_was_set_back_does_not_turn_attempts_round(tmp_path: Path) -> None:
    """The order of lines in a file is that of events; here a third rank starts once, so times decide over ranks."""
    first = [start(0), step(1, BEGIN + 1), end(1, BEGIN + 2, "RuntimeError: x")]
    again = [start(0, BEGIN - 1000), step(2, BEGIN - 999), end(2, BEGIN - 998)]
    write(tmp_path, {0: [*first, *again], 1: [start(1), end(1, BEGIN + 2, "RuntimeError: x"), start(1, BEGIN - 1000)]})
    write(tmp_path, {2: [start(2)]})
    attempts = read_run(tmp_path).attempts
    assert [attempt.steps.column("step").tolist() for attempt in attempts] == [[1], [2]]
    assert [sorted(attempt.ranks) for attempt in attempts] == [[0, 1, 2], [0, 1]]


def test_hosts_whose_clocks_are_far_apart_share_their_attempts(tmp_path: Path) -> None:
    """Attempts follow each other in 30 s, and the second host's clock is 100 s ahead."""
    for rank in (0, 1):
        for begin in (0, 30, 60):
            write(tmp_path, {rank: [start(rank, BEGIN + begin + 100 * rank), rank_step(1, BEGIN + begin + 100 * rank + 1)]})
    assert [sorted(attempt.ranks) for attempt in read_run(tmp_path).attempts] == [[0, 1]] * 3


def test_a_file_that_cannot_be_opened_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0), step(1, BEGIN)]})
    (tmp_path / "rank-00001.jsonl").mkdir()  # as one of another user's: opening it fails
    run = read_run(tmp_path)
    assert [str(each) for each in run.unread] == ["rank-00001.jsonl, the whole file: Is a directory"]
    assert run.attempts[0].steps.column("step").tolist() == [1]


def test_a_folder_whose_files_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").mkdir()
    with pytest.raises(RunLogNotFoundError, match=r"1 file.* the whole file: Is a directory"):
        read_run(tmp_path)


def test_a_folder_that_may_not_be_listed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(RunLogNotFoundError, match=r"cannot be listed \(Permission denied\)"):
        read_run(tmp_path)


def test_many_ranks_that_lack_are_counted_not_listed(tmp_path: Path) -> None:
    """A damaged line may tell of more ranks than there is room for."""
    write(tmp_path, {0: [start(0, world_size=10**15)]})
    (attempt,) = read_run(tmp_path).attempts
    assert attempt.missing_ranks == tuple(range(1, 10))
    assert attempt.missing_count == 10**15 - 1


def test_texts_lose_what_steers_a_terminal_or_fits_no_file(tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07 \x9b31m \ud800 \x7f \x00 two\nlines\tand a tab"
    config = {name: [name]}
    (only,) = read_run(write(tmp_path, {0: [start(0, model=name, config=config)]})).attempts[0].starts.values()
    plain = "\ufffd]0;owned\ufffd \ufffd31m \ufffd \ufffd \ufffd two\nlines\tand a tab"
    assert (only.model, only.config) == (plain, {plain: [plain]})
