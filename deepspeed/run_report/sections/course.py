"""Sections about the run's course and surroundings: attempts, checkpoints, hosts, configuration, the log itself."""

from __future__ import annotations

import json
from collections.abc import Sequence

from deepspeed.run_log import Checkpoint
from deepspeed.run_report import facts, texts
from deepspeed.run_report.grids import history, span_of
from deepspeed.run_report.reading import Attempt, Run
from deepspeed.run_report.sections.kinds import ROWS, Absent, Block, Section, left_out
from deepspeed.run_report.summary import short
from deepspeed.run_report.tables import Table

__all__ = ["config", "log", "ranks", "restarts"]


def restarts(run: Run) -> Section:
    """Attempts and checkpoints, over the time of the clock and as tables."""
    told = facts.checkpoints(run)
    begin = run.attempts[0].begin
    rows = tuple(_attempt_row(at, attempt) for at, attempt in enumerate(run.attempts, start=1))[-ROWS:]
    note = f"The last {ROWS} of {len(run.attempts)} are listed." if len(run.attempts) > ROWS else ""
    head = ("attempt", "begin (UTC)", "lasted", "ranks", "steps", "end")
    starts = Table("Starts and ends", head, rows, is_numeric=False, note=note, is_wide=True)
    blocks = [Block("timeline", history(run, told)), Block("table", starts)]
    blocks += [Block("table", _runs(run))] if len(run.runs) > 1 else []
    if told:
        blocks.append(Block("table", _checkpoint_table(told, begin)))
    blocks += _errors(run)
    intro = "" if told else "No checkpoint is recorded: engine.save_checkpoint() writes one."
    return Section("restarts", "Checkpoints and restarts", intro, tuple(blocks))


def _runs(run: Run) -> Table:
    """The runs of the folder, a line each: where it began, and how its last attempt ended."""
    rows = []
    for number, attempts in enumerate(run.runs, start=1):
        _, _, _, ranks, steps, end = _attempt_row(1, attempts[-1])
        rows.append((str(number), texts.clock(attempts[0].begin), str(len(attempts)), ranks, steps, end))
    head = ("run", "begin (UTC)", "starts", "ranks", "steps of the last start", "end")
    note = f"The last {ROWS} of {len(rows)} are listed." if len(rows) > ROWS else ""
    return Table("Runs in this folder", head, tuple(rows[-ROWS:]), is_numeric=False, note=note, is_wide=True)


def _attempt_row(at: int, attempt: Attempt) -> tuple[str, ...]:
    span = span_of(attempt) or texts.UNKNOWN
    worst = short(attempt.failures[0][1]) if attempt.failures else "done" if attempt.ends else "not recorded"
    lasted = texts.duration(attempt.end - attempt.begin)
    return (str(at), texts.clock(attempt.begin), lasted, str(attempt.world_size), span, worst)


def _errors(run: Run) -> list[Block]:
    """The whole text of each attempt's first error that has more than one line."""
    blocks = []
    for at, attempt in enumerate(run.attempts, start=1):
        causes = [(rank, cause) for rank, cause in attempt.failures if "\n" in cause.strip()]
        if causes:
            rank, cause = causes[0]
            blocks.append(Block("preformatted", cause[:20_000], f"Error of attempt {at}, rank {rank}"))
    return blocks[-5:]


def _checkpoint_table(told: Sequence[Checkpoint], begin: float) -> Table:
    rows = tuple(
        (
            each.tag or texts.UNKNOWN,
            "loaded" if each.action == "load" else "saved in the background" if each.is_async else "saved",
            texts.UNKNOWN if each.step is None else f"{each.step:,}",
            texts.duration(each.time - begin),
            texts.seconds(each.seconds),
            texts.nbytes(each.nbytes),
        )
        for each in told[-ROWS:]
    )
    head = ("tag", "what", "step", "after", "held up training for", "bytes of rank 0")
    note = f"The last {ROWS} of {len(told)} are listed." if len(told) > ROWS else ""
    return Table("Checkpoints", head, rows, is_numeric=False, note=note, is_wide=True)


def ranks(run: Run) -> Section:
    """Hosts, devices and processes."""
    attempt = run.attempts[-1]
    rows = tuple(
        (str(rank), start.host or texts.UNKNOWN, start.device or texts.UNKNOWN, str(start.pid or texts.UNKNOWN))
        for rank, start in list(attempt.starts.items())[:ROWS]
    )
    table = Table(
        "Ranks of the last attempt",
        ("rank", "host", "device", "process"),
        rows,
        False,
        left_out(len(attempt.starts), "ranks"),
    )
    return Section("ranks", "Ranks", "", (Block("folded_table", table, "Hosts, devices and processes"),))


def config(run: Run) -> Section | Absent:
    """The configuration as the engine used it."""
    first = run.attempts[-1].first
    if first is None or first.config is None:
        return Absent("Configuration", "the record `start` of rank 0 has it; its line could not be read")
    text = json.dumps(first.config, indent=2, ensure_ascii=False)
    return Section(
        "config", "Configuration", "", (Block("preformatted", text[:200_000], "As the engine used it, secrets removed"),)
    )


def log(run: Run) -> Section | None:
    """Lines that were left out; None: none were."""
    rows = [(each.file, each.place, each.why) for each in run.unread[:ROWS]]
    rows += [(name, "last line", "cut off: the rank was killed while it wrote it, or writes it now") for name in run.cut_off]
    rows += [
        ("", f"{count} line(s)", f"kind {kind!r}, which this version does not know")
        for kind, count in run.unknown_kinds.items()
    ]
    if not rows:
        return None
    table = Table(
        "Lines that were left out", ("file", "where", "why"), tuple(rows), False, left_out(run.unread_count, "lines")
    )
    return Section("log", "The log itself", "", (Block("folded_table", table, f"{len(rows)} note(s) about lines left out"),))
