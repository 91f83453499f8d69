"""Runs as a table to read and as JSON to keep."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.cases import Case, Goal, Run, Spread, check_losses, figures_by_pair, goal_spread, runs_of


def case_lines(case: Case, runs: Sequence[Run]) -> Iterator[str]:
    """The table of one case: a row per contender, then its goals and whether losses agree."""
    yield f"\n== {case.title}: {case.ranks} rank{'s' if case.ranks > 1 else ''} =="
    width = max(12, *(len(name) for name in case.contenders)) + 1
    columns = [f"{figure:>26}" for figure in case.figures]
    yield f"{'':{width}}{'n':>3} {''.join(columns)}  {case.figures[0]} / {case.of}, pair by pair"
    for name in case.contenders:
        yield f"{name:{width}}" + _row(case, name, runs)
    for goal in case.goals:
        yield "  goal  " + _goal_text(goal, runs)
    if case.loss_tolerance is not None:
        check = check_losses(case, runs)
        agree = f"  losses: {check.compared} compared with ours, equal to {case.loss_tolerance:g}"
        yield agree if not check.faults else "  VOID: losses differ: " + "; ".join(check.faults)


def _row(case: Case, name: str, runs: Sequence[Run]) -> str:
    mine = [run for run in runs if run.contender == name]
    good = [run.measured for run in mine if run.measured is not None]
    failed = next((run.error for run in mine if run.error is not None), None)
    if not good:
        return f"  FAILED: {failed}" if failed is not None else "  not run"
    cells = []
    for figure in case.figures:
        values = [{**measured.figures, **_prefixed(measured.losses)}.get(figure) for measured in good]
        known = [value for value in values if value is not None]
        cells.append(f"{Spread.of(known) if known else '-'!s:>26}")
    ratio = goal_spread(Goal(case.figures[0], 0, of=case.of, contender=name), runs) if name != case.of else None
    note = f"   {len(mine) - len(good)} FAILED: {failed}" if failed is not None else ""
    return f"{len(good):>3} {''.join(cells)}  {ratio if ratio is not None else ''}{note}"


def _prefixed(losses: Mapping[str, float]) -> dict[str, float]:
    return {f"{key}_loss": value for key, value in losses.items()}


def _goal_text(goal: Goal, runs: Sequence[Run]) -> str:
    spread = goal_spread(goal, runs)
    if spread is None:
        return f"{goal} <= {goal.at_most:g}: not measured (needs {', '.join(sorted(goal.needs))} in one pair)"
    verdict = "met" if spread.median <= goal.at_most else "MISSED"
    return f"{goal} <= {goal.at_most:g}: {spread} in {spread.count} pairs, {verdict}"


def as_json(cases: Sequence[Case], runs: Sequence[Run], machine: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Everything that was measured, and the summary that the tables show."""
    return {
        "machine": dict(machine),
        "notes": list(notes),
        "cases": [{"title": case.title, **_summary(case, runs_of(case, runs))} for case in cases],
        "runs": [dataclasses.asdict(run) for run in runs],
    }


def _summary(case: Case, runs: Sequence[Run]) -> dict[str, Any]:
    by_pair = figures_by_pair(runs)
    figures = {
        name: {
            key: dataclasses.asdict(Spread.of([pair[name][key] for pair in by_pair.values() if name in pair]))
            for key in next(pair[name] for pair in by_pair.values() if name in pair)
        }
        for name in case.contenders
        if any(name in pair for pair in by_pair.values())
    }
    goals = []
    for goal in case.goals:
        spread = goal_spread(goal, runs)
        measured = dataclasses.asdict(spread) if spread is not None else None
        goals.append({"goal": str(goal), "at_most": goal.at_most, "measured": measured})
    return {
        "arguments": dict(case.arguments),
        "figures": figures,
        "goals": goals,
        "losses": dataclasses.asdict(check_losses(case, runs)),
    }


def machine_facts() -> dict[str, Any]:
    """What a reader needs to know of the machine; `load` is the number of runnable processes, averaged over a minute."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    except FileNotFoundError:  # no Linux
        return platform.processor() or "unknown"
