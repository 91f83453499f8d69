"""The run in a few values, and the sentences about what stands out in it. Pure.

Called by `sections` and `top`. Does not live here: curves and tables (`facts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepspeed.common.wording import some
from deepspeed.run_log import FORMAT, Schedule
from deepspeed.run_report import facts, texts
from deepspeed.run_report.columns import Numbers
from deepspeed.run_report.reading import Run
from deepspeed.run_report.segments import loads

__all__ = ["Finding", "Summary", "findings", "short", "summarise"]

Level = Literal["bad", "watch", "note"]
State = Literal["done", "failed", "open"]

_SLOWER = 0.8  # of the fastest part's throughput
_HOT, _COLD = 3.0, 0.1  # times the even share of tokens
_OVER_PLAN = 1.05
_BUBBLE = 0.3
_IN_COLLECTIVES = 0.3


@dataclass(frozen=True)
class Summary:
    """What one wants to know first. None: not known."""

    state: State
    cause: str | None
    """The error's text where `state` is `failed`."""
    begin: float
    end: float
    """When the last record was written."""
    model: str | None
    parameters: int | None
    world_size: int
    hosts: tuple[str, ...]
    device: str | None
    mesh: dict[str, int]
    version: str | None
    attempts: int
    first_step: int | None
    last_step: int | None
    redone: int
    first_loss: float | None
    loss: float | None
    """The last one known."""
    lr: float | None
    skipped: int | None
    step_seconds: float | None
    samples_per_second: float | None
    mfu: float | None
    """These three: medians over reported steps."""
    peak_nbytes: float | None
    """On a host without what a process held before its engine was built, where the log tells that."""
    plan_nbytes: float | None
    """None also where the peak says nothing about the plan: see `facts.Memory.comparable_plan`."""

    @property
    def seconds(self) -> float:
        """From the first record to the last."""
        return max(0.0, self.end - self.begin)


@dataclass(frozen=True)
class Finding:
    """Something that a person should see; worst level first: bad, watch, note."""

    level: Level
    text: str
    section: str = ""
    """The section of the page that shows it."""


def summarise(run: Run) -> Summary:
    """The run in a few values."""
    told, memory = facts.steps(run), facts.memory(run)
    last = run.attempts[-1]
    first = last.first
    losses, rates = told.kept.known("loss"), told.kept.known("0", "lr")
    steps, skipped = told.kept.values("step"), told.kept.known("skipped")
    state, cause = _state(run)
    starts = [start for attempt in run.attempts for start in attempt.starts.values()]
    return Summary(
        state=state,
        cause=cause,
        begin=min(attempt.begin for attempt in run.attempts),
        end=last.end,
        model=first.model if first else None,
        parameters=first.parameters if first else None,
        world_size=last.world_size,
        hosts=tuple(sorted({start.host for start in starts if start.host})),
        device=first.device if first else None,
        mesh=dict(first.mesh or {}) if first else {},
        version=first.version if first else None,
        attempts=len(run.attempts),
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else _last_of_ranks(run),
        redone=len(told.redone),
        first_loss=float(losses[0]) if len(losses) else None,
        loss=float(losses[-1]) if len(losses) else None,
        lr=float(rates[-1]) if len(rates) else None,
        skipped=int(skipped.max()) if len(skipped) else None,
        step_seconds=_median(told.kept.known("seconds")),
        samples_per_second=_median(told.kept.known("samples_per_second")),
        mfu=_median(told.kept.known("mfu")),
        peak_nbytes=max(memory.peaks.values(), default=None),
        plan_nbytes=memory.comparable_plan,
    )


def findings(run: Run, now: float) -> list[Finding]:
    """What stands out, the worst first.

    Args:
        run: what was read.
        now: seconds of the Unix clock, which a run without an end is compared with.
    """
    summary = summarise(run)
    found = [*_of_ends(run, summary, now), *_of_ranks(run), *_of_training(run, summary), *_of_memory(summary)]
    found += [*_of_waits(run), *_of_experts(run), *_of_pipeline(run), *_of_folder(run), *_of_log(run)]
    return sorted(found, key=lambda each: ("bad", "watch", "note").index(each.level))


def _state(run: Run) -> tuple[State, str | None]:
    """How the last attempt ended: by the error that came first, if there was one."""
    failures = run.attempts[-1].failures
    if failures:
        return "failed", failures[0][1]
    return ("done" if run.attempts[-1].ends else "open"), None


def _last_of_ranks(run: Run) -> int | None:
    """The last step that any rank tells, where the first rank's file lacks."""
    told = [each.rank_steps.column("step")[-1:] for each in run.attempts[-1].ranks.values()]
    return max((int(step) for last in told for step in last), default=None)


def _of_ends(run: Run, summary: Summary, now: float) -> Iterable[Finding]:
    if summary.state == "failed":
        causes: dict[str, list[int]] = {}
        for rank, cause in run.attempts[-1].failures:
            causes.setdefault(cause, []).append(rank)
        for cause, ranks in causes.items():
            yield Finding("bad", f"{_ranks(ranks)} failed: {short(cause)}", "restarts")
    elif summary.state == "open":
        age = max(0.0, now - summary.end)
        yield Finding(
            "watch",
            f"No end is recorded: the run goes on or was killed. Its last record is {texts.duration(age)} old.",
            "restarts",
        )
    endless = run.attempts[-1].endless_ranks
    if summary.state != "open" and endless:
        yield Finding(
            "bad" if summary.state == "failed" else "watch",
            f"{_ranks(endless)} left no end: killed (by the kernel, for want of memory?), or still at work.",
            "restarts",
        )
    if summary.attempts > 1:
        lost = f"; {summary.redone} reported step(s) of earlier starts were given up" if summary.redone else ""
        yield Finding("watch", f"The run was started {summary.attempts} times{lost}.", "restarts")


def _of_ranks(run: Run) -> Iterable[Finding]:
    last = run.attempts[-1]
    missing, count, of = last.missing_ranks, last.missing_count, last.world_size
    if missing:
        named = _ranks(missing, count)
        yield Finding("watch", f"{named} of {of} left no record; what is said of ranks leaves them out.", "ranks")


def _of_training(run: Run, summary: Summary) -> Iterable[Finding]:
    kept = facts.steps(run).kept
    blanks = kept.values("step")[np.isnan(kept.values("loss"))]
    if len(blanks) and len(blanks) == len(kept):
        yield Finding("watch", "No reported step has a loss that is known and finite.", "training")
    elif len(blanks):
        yield Finding(
            "bad", f"{len(blanks)} reported step(s) have no finite loss, the first is step {blanks[0]:.0f}.", "training"
        )
    if summary.skipped and summary.last_step:
        part = summary.skipped / summary.last_step
        level: Level = "watch" if part > 0.02 else "note"
        yield Finding(
            level, f"{summary.skipped:,} step(s) were skipped ({texts.share(part)}): gradients overflowed.", "precision"
        )
    yield from _of_throughput(kept.known("samples_per_second"))


def _of_throughput(rates: Numbers) -> Iterable[Finding]:
    """Compare the last fifth with the fastest fifth."""
    part = len(rates) // 5
    if part < 3:
        return
    fifths = [float(np.median(rates[at : at + part])) for at in range(0, 5 * part, part)]
    if fifths[-1] < _SLOWER * max(fifths):
        slower = texts.share(1 - fifths[-1] / max(fifths))
        yield Finding("watch", f"Throughput fell: the last fifth of the run is {slower} slower than its best.", "speed")


def _of_memory(summary: Summary) -> Iterable[Finding]:
    peak, plan = summary.peak_nbytes, summary.plan_nbytes
    if peak is not None and plan and peak > _OVER_PLAN * plan:
        yield Finding(
            "note",
            f"The fullest rank held {texts.nbytes(peak)}, the plan says {texts.nbytes(plan)} without what it leaves out.",
            "memory",
        )


def _of_waits(run: Run) -> Iterable[Finding]:
    waits = facts.waits(run)
    if waits.straggler is not None:
        part = texts.share(waits.lost_seconds / waits.covered_seconds) if waits.covered_seconds else "much"
        yield Finding(
            "watch",
            f"Rank {waits.straggler} keeps the others waiting: they stood {texts.seconds(waits.lost_seconds)} longer in "
            f"collectives than it did, {part} of the time.",
            "waits",
        )


def _of_experts(run: Run) -> Iterable[Finding]:
    latest = facts.experts(run).latest
    for name, known in (loads(latest) if latest else {}).items():
        if max(known) > _HOT:
            idle = sum(1 for load in known if load < _COLD)
            also = f"; {idle} of {len(known)} experts are almost idle" if idle else ""
            yield Finding(
                "watch",
                f"{name}: one expert gets {texts.number(max(known), 2)} times its even share of tokens{also}.",
                "experts",
            )


def _of_pipeline(run: Run) -> Iterable[Finding]:
    schedules = run.told_by_one(Schedule)
    bubble = schedules[-1].bubble if schedules else None
    if bubble is not None and bubble > _BUBBLE:
        yield Finding(
            "note",
            f"Pipeline stages stand idle for {texts.share(bubble)} of a batch: more micro-batches lower that.",
            "pipeline",
        )
    covered = facts.waits(run).covered_seconds
    seconds = sum(each.seconds for each in facts.operations(run))
    if covered and seconds > _IN_COLLECTIVES * covered:
        yield Finding("note", f"A rank spends {texts.share(seconds / covered)} of its time in collectives.", "communication")


def _of_folder(run: Run) -> Iterable[Finding]:
    if len(run.runs) > 1:
        yield Finding(
            "note",
            f"This is run {run.number} of {len(run.runs)} in this folder: each began with the first step. "
            "deepspeed report --run 1 shows the first.",
            "restarts",
        )
    if run.engines:
        yield Finding(
            "note",
            f"Other engines trained in the same processes: {some(run.engines, 5)} in this folder. Each has its own report.",
        )


def _of_log(run: Run) -> Iterable[Finding]:
    formats = {start.format or FORMAT for attempt in run.attempts for start in attempt.starts.values()}
    if max(formats, default=FORMAT) > FORMAT:
        yield Finding(
            "watch",
            f"The log has format {max(formats)}, this version reads {FORMAT}: values may mean something else. Read it with "
            "the version that wrote it.",
            "log",
        )
    if run.unread:
        first = run.unread[0]
        yield Finding(
            "watch",
            f"{run.unread_count} line(s) of the log could not be read, the first is "
            f"{first.place} of {first.file}: {first.why}.",
            "log",
        )


def _ranks(ranks: Iterable[int], count: int | None = None) -> str:
    listed = sorted(ranks)
    return ("Rank " if len(listed) == 1 else "Ranks ") + some([str(rank) for rank in listed], 8, count=count)


def short(text: str) -> str:
    """The last line with text: of a traceback that is the error itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "without a text"


def _median(known: Numbers) -> float | None:
    return float(np.median(known)) if len(known) else None
