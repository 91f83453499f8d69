"""Sections about the model: its pipeline, its experts, its modules."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.run_log import Profile, Schedule
from deepspeed.run_report import facts, texts
from deepspeed.run_report.charts import Mark, line_chart
from deepspeed.run_report.grids import around_even, grid, joined, timeline
from deepspeed.run_report.reading import Run
from deepspeed.run_report.scales import Tick
from deepspeed.run_report.sections.kinds import ROWS, Absent, Block, Section, left_out
from deepspeed.run_report.segments import loads
from deepspeed.run_report.tables import Table

__all__ = ["experts", "modules", "pipeline"]


def pipeline(run: Run) -> Section | Absent | None:
    """The schedule of a batch."""
    schedules = run.told_by_one(Schedule)
    if not schedules:
        return Absent("Pipeline schedule", "a PipelineModule's engine writes the schedule of a batch")
    schedule = schedules[-1]
    blocks: list[Block] = []
    lanes = timeline(schedule)
    if lanes is not None:
        blocks.append(Block("timeline", lanes))
    if schedule.text:
        blocks.append(Block("preformatted", schedule.text[:20_000], "The same as text"))
    if not blocks:
        return None
    bubble = (
        f"Bubble: stages stand idle for {texts.share(schedule.bubble)} of the batch." if schedule.bubble is not None else ""
    )
    return Section("pipeline", "Pipeline schedule", bubble, tuple(blocks))


def experts(run: Run, marks: Sequence[Mark]) -> Section | Absent:
    """Tokens per expert, at the last record and over the run."""
    told = facts.experts(run)
    latest = told.latest
    layers = loads(latest) if latest else {}
    if latest is None or not layers:
        return Absent("Expert load", "models with MoE layers write each expert's share of tokens with each reported step")
    names = list(layers)[:64]
    full = [layers[name] for name in names]
    narrow = [joined([row], 64)[0] for row in full]
    widest = max(len(row) for row in narrow)
    rows = tuple(
        (
            name,
            f"{max(load):.2f}",
            str(load.index(max(load))),
            f"{min(load):.2f}",
            str(sum(1 for value in load if value < 0.1)),
        )
        for name, load in zip(names, full, strict=True)
    )
    table = Table("Load by layer, in times the even share", ("layer", "highest", "of expert", "lowest", "almost idle"), rows)
    merged = (
        "Of more than 64 experts, neighbours are joined and the fullest of them is shown."
        if widest < max(map(len, full))
        else ""
    )
    made = grid(
        "grid-experts",
        f"Tokens per expert at step {latest.step:,}",
        "A row for each layer, its experts from left to right. Pale is an even share of tokens, blue less, orange more.",
        list(zip(names, narrow, strict=True)),
        [[around_even(load) for load in row] for row in narrow],
        x_ticks=_expert_ticks(max(map(len, full)), widest),
        legend=("none", "4 times and more"),
        is_around=True,
        table=table,
        note=" ".join(filter(None, (merged, left_out(len(layers), "layers", 64)))),
    )
    chart = line_chart(
        "chart-experts",
        "Fullest expert over the run, in times the even share",
        [
            facts.curve("fullest layer", told.rows, "fullest"),
            facts.curve("mean of layers", told.rows, "mean"),
        ],
        texts.number,
        marks=marks,
        from_zero=True,
    )
    blocks = [Block("grid", made), *([Block("line_chart", chart)] if chart else [])]
    return Section(
        "experts", "Expert load", "1 is an even share: every expert gets as many tokens as the others.", tuple(blocks)
    )


def _expert_ticks(experts: int, columns: int) -> list[Tick]:
    """Numbers of experts below their columns."""
    if columns < experts:
        return [Tick(0, "expert 0"), Tick(100, f"{experts - 1}")]
    return [Tick(100 * (at + 0.5) / columns, f"{at}") for at in range(0, columns, max(1, columns // 8))]


def modules(run: Run) -> Section | Absent:
    """The FLOPS profiler's tree."""
    profiles = [each for each in run.told_by_one(Profile) if each.tree]
    if not profiles:
        return Absent("Modules", '"flops_profiler": {"enabled": true} counts parameters, FLOPs and time of every module')
    tree = profiles[-1].tree or ()
    rows = tuple(
        (
            "\u00a0\u00a0" * min(row.depth, 12) + row.name,
            texts.count(row.parameters),
            texts.count(row.flops),
            texts.seconds(row.seconds),
            texts.share(row.share),
        )
        for row in tree[:ROWS]
    )
    head = ("module", "parameters", "FLOPs", "seconds", "share")
    table = Table(f"Modules at step {profiles[-1].step}", head, rows, note=left_out(len(tree), "modules"))
    return Section(
        "modules", "Modules", "Counted by the FLOPS profiler in one step.", (Block("folded_table", table, "All modules"),)
    )
