"""A run's present state as one frame of text, drawn again and again.

    gpt: GPT, 124 M parameters, 4 ranks, NVIDIA H200                            training
    step 600   loss 2.11   lr 0.0006   grad norm 0.51   0.25 s per step   256 samples/s
    loss   10.4 #*+=-..  2.11
    rank 0   4.71 GB ######    waits 16 % ##

A frame is made of what was read and the present time, without reading anything itself. Called by `top_command`. Does not
live here: reading (`reading`), numbers (`facts`, `summary`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from deepspeed.common.wording import some
from deepspeed.run_report import columns, facts, texts
from deepspeed.run_report.columns import Numbers, Rows
from deepspeed.run_report.reading import Run
from deepspeed.run_report.sampling import averaged
from deepspeed.run_report.summary import Summary, short, summarise

__all__ = ["frame", "silence", "sparkline"]

_RANKS = 16
_RECENT = 50  # records of a rank that its waits are taken from
_QUIET_SECONDS = 10.0
_QUIET_TIMES = 5.0  # so many times longer than records usually take is worth a word
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BLOCKS = "_.-=+*%#"


def frame(run: Run, now: float) -> RenderableType:
    """What there is to see at a moment.

    Args:
        run: what was read so far.
        now: seconds of the Unix clock.
    """
    summary, kept = summarise(run), facts.steps(run).kept
    parts: list[RenderableType] = [_head(run, summary, now), _values(kept, summary), Text()]
    losses, rates = kept.known("loss"), kept.known("samples_per_second")
    parts += [_Spark("loss", losses)] if len(losses) else []
    parts += [_Spark("samples/s", rates, from_zero=True)] if len(rates) else []
    parts += [Text(), _ranks(run, summary)]
    parts += [Text(), _checkpoint(run, now), *_silence(run, summary, now)]
    return Group(*parts)


def silence(run: Run, now: float) -> tuple[float, float | None]:
    """Seconds since the last record, and how long records of steps usually take; None: too few to tell.

    Args:
        run: what was read so far.
        now: seconds of the Unix clock.
    """
    last = run.attempts[-1]
    times = last.steps.column("time")[-_RECENT:]
    usual = float(np.median(np.diff(times))) if len(times) > 2 else None
    return max(0.0, now - last.end), usual


def sparkline(values: Numbers | Sequence[float], width: int, blocks: str = _BLOCKS, *, from_zero: bool = False) -> str:
    """Values as bars of at most `width` letters.

    Args:
        values: one or more.
        width: in letters.
        blocks: a letter for each height, the lowest first.
        from_zero: the lowest height is that of zero, else that of the lowest value.
    """
    shown = averaged(values, width).tolist()
    low, high = min([*shown, 0.0] if from_zero else shown), max(shown)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return blocks[len(blocks) // 2] * len(shown)
    last = len(blocks) - 1
    return "".join(blocks[round(last * ((value - low) / (high - low)))] for value in shown)


@dataclass(frozen=True)
class _Spark:
    """A name, the first value, bars as wide as there is room, the last value."""

    name: str
    values: Numbers
    from_zero: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, last = texts.number(float(self.values[0])), texts.number(float(self.values[-1]))
        room = max(4, min(options.max_width - 12 - 11 - 2 - len(last), len(self.values), 80))
        bars = sparkline(self.values, room, _ASCII_BLOCKS if options.ascii_only else _BLOCKS, from_zero=self.from_zero)
        yield Text.assemble(
            (f"{self.name:<12}", "dim"), f"{first:>9}  ", (bars, "cyan"), f"  {last}", no_wrap=True, overflow="crop"
        )


def _head(run: Run, summary: Summary, now: float) -> Table:
    model = f", {summary.model}" if summary.model else ""
    parameters = f" with {texts.count(summary.parameters)} parameters" if summary.parameters else ""
    ranks = "1 rank" if summary.world_size == 1 else f"{summary.world_size} ranks"
    about = f"{run.name}{model}{parameters}, {ranks}" + (f", {summary.device}" if summary.device else "")
    state, style = {"done": ("done", "green"), "failed": ("failed", "red"), "open": ("training", "cyan")}[summary.state]
    again = f", start {summary.attempts}" if summary.attempts > 1 else ""
    ended = now if summary.state == "open" else summary.end
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1, overflow="fold")
    table.add_column(justify="right", overflow="fold")
    table.add_row(Text(about, "bold"), Text(f"{state}{again}, {texts.duration(ended - summary.begin)}", style))
    if summary.cause:
        table.add_row(Text(short(summary.cause), "red"), "")
    return table


def _values(kept: Rows, summary: Summary) -> RenderableType:
    if len(kept) == 0:
        of_ranks = "" if summary.last_step is None else f" Step {summary.last_step:,}, say other ranks than the first."
        return Text(f"No step is reported yet.{of_ranks}", "dim")
    scale = kept.last("loss_scale")
    told = [
        ("step", f"{kept.last('step'):,.0f}"),
        ("loss", texts.number(kept.last("loss"))),
        ("lr", texts.number(kept.last("0", "lr"), 3)),
        ("grad norm", texts.number(kept.last("grad_norm"), 3)),
        ("scale", texts.number(scale) if scale not in (None, 1.0) else texts.UNKNOWN),
        ("skipped", str(summary.skipped) if summary.skipped else texts.UNKNOWN),
        ("per step", texts.seconds(kept.last("seconds"))),
        ("samples/s", texts.number(kept.last("samples_per_second"))),
        ("MFU", texts.share(kept.last("mfu"))),
    ]
    return _Values(tuple((name, value) for name, value in told if value != texts.UNKNOWN))


@dataclass(frozen=True)
class _Values:
    """Names with their values, as many in a line as there is room for; none is broken."""

    told: tuple[tuple[str, str], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(no_wrap=True, overflow="crop")
        for name, value in self.told:
            if line and len(line) + 3 + len(name) + 1 + len(value) > options.max_width:
                yield line
                line = Text(no_wrap=True, overflow="crop")
            line.append_text(Text.assemble("   " if line else "", (f"{name} ", "dim"), (value, "bold")))
        yield line


def _ranks(run: Run, summary: Summary) -> RenderableType:
    by_rank = {rank: told.rank_steps for rank, told in run.attempts[-1].ranks.items() if len(told.rank_steps)}
    if not by_rank:
        return Text("No rank has told its memory yet.", "dim")
    curves = facts.memory(run).by_rank
    held = {rank: curves[rank].last if rank in curves else None for rank in by_rank}
    waited = {rank: _waited_part(table) for rank, table in by_rank.items()}
    most = summary.plan_nbytes or max((nbytes for nbytes in held.values() if nbytes is not None), default=None)
    of = "memory, of the plan" if summary.plan_nbytes else "memory, of the fullest"
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    drawn.add_column("rank", justify="right", overflow="fold")
    drawn.add_column(of, overflow="fold")
    drawn.add_column("waits, of the time", overflow="fold")
    drawn.add_column("last record", justify="right", overflow="fold")
    newest = max(table.column("time")[-1] for table in by_rank.values())
    for rank, table in list(by_rank.items())[:_RANKS]:
        behind = newest - table.column("time")[-1]
        late = texts.duration(behind) + " behind" if behind >= 1 else f"step {table.column('step')[-1]:,.0f}"
        drawn.add_row(
            str(rank),
            _bar(held[rank], most, texts.nbytes(held[rank])),
            _bar(waited[rank], 1.0, texts.share(waited[rank])),
            late,
        )
    more: list[RenderableType] = [Text(f"and {len(by_rank) - _RANKS} more ranks", "dim")] if len(by_rank) > _RANKS else []
    waited_for = _waited_for(waited)
    more += [Text(f"rank {waited_for} is waited for", "yellow")] if waited_for is not None else []
    missing, count = run.attempts[-1].missing_ranks, run.attempts[-1].missing_count
    named = some([str(rank) for rank in missing], 8, count=count)
    more += [Text(f"without a record: ranks {named}", "yellow")] if missing else []
    return Group(drawn, *more)


@dataclass(frozen=True)
class _Bar:
    """A text, and a bar of up to 12 letters."""

    part: float | None
    label: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        letters = 0 if self.part is None else round(12 * min(1.0, max(0.0, self.part)))
        sign = "#" if options.ascii_only else "\u2588"
        over = self.part is not None and self.part > 1
        yield Text.assemble(
            f"{self.label:>8} ", (f"{sign * letters:<12}", "yellow" if over else "cyan"), no_wrap=True, overflow="crop"
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(9, options.max_width), min(21, options.max_width))


def _bar(value: float | None, most: float | None, label: str) -> _Bar:
    return _Bar(value / most if value is not None and most else None, label)


def _waited_part(told: columns.Table) -> float | None:
    """Waited seconds over the time of the last records that they were counted in; the first one's began before."""
    waited = told.column("waited_seconds")[-_RECENT:][1:]
    seconds = facts.elapsed(told.column("time")[-_RECENT:])
    return float(np.nansum(waited)) / seconds if not np.isnan(waited).all() and seconds > 0 else None


def _waited_for(parts: Mapping[int, float | None]) -> int | None:
    """The rank that waits less than half as long as the median of the others, if these wait more than 2 % of their time."""
    known = {rank: part for rank, part in parts.items() if part is not None}
    if len(known) < 2:
        return None
    least = min(known, key=lambda rank: (known[rank], rank))
    others = statistics.median(part for rank, part in known.items() if rank != least)
    return least if others > max(0.02, 2 * known[least]) else None


def _checkpoint(run: Run, now: float) -> Text:
    saves = [each for each in facts.checkpoints(run) if each.action != "load"]
    if not saves:
        return Text("last checkpoint: none yet", "dim")
    last = saves[-1]
    took = f", held up training for {texts.seconds(last.seconds)}" if last.seconds is not None else ""
    size = f", {texts.nbytes(last.nbytes)} of rank 0" if last.nbytes else ""
    return Text(
        f"last checkpoint: {last.tag or 'without a tag'}, {texts.duration(max(0.0, now - last.time))} ago{took}{size}"
    )


def _silence(run: Run, summary: Summary, now: float) -> list[Text]:
    if summary.state != "open":
        return []
    age, usual = silence(run, now)
    if age > max(_QUIET_SECONDS, _QUIET_TIMES * (usual or 0.0)):
        usually = f" (a step takes {texts.seconds(usual)})" if usual is not None else ""
        return [Text(f"no record for {texts.duration(age)}{usually}: hung, saving, or killed?", "bold red")]
    return [Text(f"last record: {texts.duration(age)} ago", "dim")]
