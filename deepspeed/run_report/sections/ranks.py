"""Sections about ranks side by side: memory, where time goes, communication, waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deepspeed.run_report import facts, texts
from deepspeed.run_report.charts import Mark, line_chart, stacked_chart
from deepspeed.run_report.columns import Numbers
from deepspeed.run_report.grids import grid, of_one
from deepspeed.run_report.reading import Run
from deepspeed.run_report.scales import step_scale, step_ticks
from deepspeed.run_report.sections.kinds import ROWS, Absent, Block, Section, left_out, per_second
from deepspeed.run_report.tables import Table, bar_table

__all__ = ["communication", "memory", "phases", "waits"]

_DRAWN_RANKS = 8
_GRID_COLUMNS = 60


def memory(run: Run, marks: Sequence[Mark]) -> Section | Absent:
    """Memory over steps against the plan, peaks by rank, the plan by term."""
    memory = facts.memory(run)
    if not memory.by_rank:
        return Absent("Memory", "every rank writes its memory with each reported step (run_log.every); none did yet")
    drawn = _drawn_ranks(memory)
    chart = line_chart(
        "chart-memory",
        f"{memory.place.capitalize()} memory in use",
        [memory.by_rank[rank] for rank in drawn],
        texts.nbytes,
        "bytes",
        levels=[("plan", memory.comparable_plan)] if memory.comparable_plan else [],
        marks=marks,
        from_zero=True,
        is_wide=True,
    )
    plan = memory.comparable_plan
    rows = [
        (f"rank {rank}", peak, texts.nbytes(peak), (texts.share(peak / plan),) if plan else ())
        for rank, peak in sorted(memory.peaks.items())
    ]
    head = ("rank", "peak", *(("of the plan",) if plan else ()))
    peaks = bar_table("Peak by rank", head, rows[:ROWS], note=left_out(len(rows), "ranks"))
    few = (
        f" The {len(drawn)} ranks drawn are the fullest, the emptiest and those between."
        if len(drawn) < len(memory.by_rank)
        else ""
    )
    blocks = [Block("line_chart", chart)] if chart else []
    blocks += [Block("table", peaks), *_plan_terms(facts.plan_terms(run, memory.place))]
    return Section("memory", "Memory", f"What each rank holds: {_what(memory)}{few}", tuple(blocks))


def _what(memory: facts.Memory) -> str:
    if memory.place == "device":
        return "memory of the device."
    if memory.before is None:
        return "memory of the process on a host, Python and libraries included."
    text = f"memory of the process beyond {texts.nbytes(memory.before)} for Python, libraries and data before the engine."
    if memory.plan and memory.comparable_plan is None:
        text += f" The plan of {texts.nbytes(memory.plan)} is too small to be seen beside them."
    return text


def _plan_terms(terms: Mapping[str, float]) -> list[Block]:
    if not terms:
        return []
    largest_first = sorted(terms.items(), key=lambda term: -term[1])
    rows = [(name, nbytes, texts.nbytes(nbytes), ()) for name, nbytes in largest_first if nbytes]
    return [Block("table", bar_table("The plan, by term", ("term", "bytes"), rows))]


def _drawn_ranks(memory: facts.Memory) -> list[int]:
    """All ranks, or eight of many, spread from the fullest to the emptiest."""
    by_peak = sorted(memory.by_rank, key=lambda rank: (-memory.peaks[rank], rank))
    if len(by_peak) > _DRAWN_RANKS:
        by_peak = [by_peak[round(at * (len(by_peak) - 1) / (_DRAWN_RANKS - 1))] for at in range(_DRAWN_RANKS)]
    return sorted(by_peak)


def phases(run: Run, marks: Sequence[Mark]) -> Section | Absent:
    """Where a step's time goes."""
    phases = facts.phases(run)
    if len(phases.steps) == 0:
        return Absent(
            "Where a step's time goes",
            "every rank writes the seconds of forward, backward, reduction and step with each reported step; none did yet",
        )
    layers = list(phases.seconds.items())
    chart = stacked_chart(
        "chart-phases", "Time of a step by phase, mean over ranks", phases.steps, layers, texts.seconds, "seconds", marks
    )
    total = sum(phases.mean(name) for name in phases.seconds) or 1.0
    rows = [
        (
            name,
            phases.mean(name),
            texts.seconds(phases.mean(name)),
            (texts.share(phases.mean(name) / total), _slowest(by_rank)),
        )
        for name, by_rank in phases.by_rank.items()
    ]
    table = bar_table("Mean of a step by phase", ("phase", "seconds", "share", "slowest rank"), rows, styled=True)
    blocks = [Block("line_chart", chart)] if chart else []
    return Section("phases", "Where a step's time goes", "", (*blocks, Block("table", table)))


def _slowest(by_rank: Mapping[int, float]) -> str:
    rank = max(by_rank, key=lambda each: (by_rank[each], -each))
    return f"{rank} ({texts.seconds(by_rank[rank])})" if len(by_rank) > 1 else texts.UNKNOWN


def communication(run: Run) -> Section | Absent:
    """Collectives by operation."""
    found = facts.operations(run)
    if not found:
        return Absent("Communication", "every rank writes its collectives with each reported step; one rank alone has none")
    rows = [
        (
            each.name,
            each.seconds,
            texts.seconds(each.seconds),
            (texts.count(each.count), texts.nbytes(each.nbytes), per_second(each.bytes_per_second)),
        )
        for each in found[:ROWS]
    ]
    head = ("operation", "seconds", "calls", "bytes", "throughput")
    table = bar_table("Collectives by operation", head, rows, note=left_out(len(found), "operations"))
    return Section(
        "communication", "Communication", "Of one rank over the whole run: the mean over ranks.", (Block("table", table),)
    )


def waits(run: Run) -> Section | Absent:
    """How long each rank stood in collectives, and who is waited for."""
    found = facts.waits(run)
    if len(found.seconds) < 2:
        return Absent("Who waits for whom", "needs two ranks or more that tell how long they stood in collectives")
    rows = [
        (_role(rank, found), seconds, texts.seconds(seconds), (_part(seconds, found.covered_seconds),))
        for rank, seconds in sorted(found.seconds.items())
    ]
    table = bar_table(
        "Waited in collectives, by rank",
        ("rank", "waited", "of the time"),
        rows[:ROWS],
        note=left_out(len(rows), "ranks"),
    )
    intro = "The rank that waits least is the one that the others wait for."
    if found.straggler is None:
        intro += f" None stands out here: they differ by {texts.seconds(abs(found.lost_seconds))}."
    else:
        intro += f" Here it is rank {found.straggler}."
    return Section("waits", "Who waits for whom", intro, (Block("table", table), *_wait_grid(found)))


def _role(rank: int, found: facts.Waits) -> str:
    return f"rank {rank}: waited for" if rank == found.straggler else f"rank {rank}"


def _wait_grid(found: facts.Waits) -> list[Block]:
    """Waits of each rank over steps, as parts of the longest wait of those steps."""
    steps = np.unique(np.concatenate([curve.steps for curve in found.by_step.values()]))
    if len(steps) < 2:
        return []
    drawn = {f"rank {rank}": found.by_step[rank] for rank in sorted(found.by_step)[:64]}
    waited = np.stack([_longest_waits(curve, steps) for curve in drawn.values()])
    longest = waited.max(axis=0)
    parts = waited / np.where(longest, longest, 1.0)
    table = Table(
        "Waited seconds over the run, by rank",
        ("rank", "first third", "second third", "last third"),
        tuple(
            (name, *(texts.number(float(third.sum())) for third in np.array_split(curve.values, 3)))
            for name, curve in drawn.items()
        ),
    )
    made = grid(
        "grid-waits",
        "Who waits when",
        "A row for each rank, steps from left to right. Strong: none waits longer there. Weak: the others wait for it.",
        list(zip(drawn, waited.tolist(), strict=True)),
        [[of_one(part) for part in row] for row in parts.tolist()],
        x_ticks=step_ticks(step_scale(steps[[0, -1]].tolist())),
        legend=("is waited for", "waits longest"),
        table=table,
        note=left_out(len(found.by_step), "ranks", 64),
    )
    return [Block("grid", made)]


def _longest_waits(curve: facts.Curve, steps: Numbers) -> Numbers:
    """The longest wait in each of at most 60 parts of the steps."""
    columns = min(len(steps), _GRID_COLUMNS)
    found = np.zeros(columns)
    np.maximum.at(found, np.searchsorted(steps, curve.steps) * columns // len(steps), curve.values)
    return found


def _part(value: float, of: float) -> str:
    return texts.share(value / of) if of > 0 else texts.UNKNOWN
