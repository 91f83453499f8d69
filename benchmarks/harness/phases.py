"""Where the time of a step goes: what cProfile saw, summed by phase of the step and by function.

    cProfile   own time of every function, and for each caller how much of it          (C functions too)
    by phase   own time goes to the phase that `RULES` give its function; a function without rule (torch, a collective, the
               standard library) hands its time on to its callers, in proportion to what each spent in it, and they to theirs
    by function  own time of a Python function and of the C functions that it calls itself

Both cover the whole profile once: the figures of a table add up to the time of the step. Only the thread that ran the step
is seen; what threads of a back end do meanwhile shows where that thread waits for them. No torch here, no processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Function = tuple[str, int, str]
"""File, line and name, as in `pstats`; the file of a C function is "~"."""
Stats = Mapping[Function, tuple[int, int, float, float, Mapping[Function, tuple[int, int, float, float]]]]
"""`pstats.Stats.stats`: calls without recursion, calls, own seconds, cumulative seconds, and the same by caller."""

OTHER = "other"
RULES: Sequence[
    tuple[str, str, str]
] = (  # end of the file's name, name or "" for all of the file, phase; first match counts
    ("~", "run_backward", "backward"),
    ("benchmarks/profile_step.py", "_forward", "forward"),
    ("benchmarks/profile_step.py", "_backward", "backward"),
    ("benchmarks/profile_step.py", "_step", "step"),
    ("zero/master.py", "rewriting", "gather"),
    ("zero/flat.py", "rewriting", "gather"),
    ("zero/flat.py", "gather_whole", "gather"),
    *((f"zero/{file}.py", "", "walk") for file in ("master", "walk", "parameter_sums")),
    *((f"zero/{file}.py", "", "norm") for file in ("norm", "outcome")),
    *((f"zero/{file}.py", "", "reduce") for file in ("reducer", "gradients")),
    *((f"zero/{file}.py", "", "gather") for file in ("coordinator", "hooks", "lookups", "pool", "saved", "states", "trace")),
)
PHASES = ("forward", "backward", "reduce", "gather", "norm", "walk", "step", OTHER)


def rule_of(function: Function, rules: Sequence[tuple[str, str, str]] = RULES) -> str | None:
    """The phase that a rule gives this function itself."""
    file, _, name = function
    for ending, wanted, phase in rules:
        is_name = wanted in ("", name) or (file == "~" and f"'{wanted}'" in name)
        if file.endswith(ending) and is_name:
            return phase
    return None


_ROUNDS = 200  # what a chain of calls that go round in circles has not handed out by then is below every figure shown


class Phases:
    """Own time handed up the graph of calls to the nearest callers with a rule (the method of gprof)."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._weights = {f: _weights(callers) for f, (*_, callers) in stats.items() if rule_of(f) is None}
        self._shares: dict[Function, dict[str, float]] = {}
        for function in stats:
            rule = rule_of(function) or ("" if self._weights[function] else OTHER)
            self._shares[function] = {rule: 1.0} if rule else {}
        for _ in range(_ROUNDS):
            if not self._hand_up():
                break

    def _hand_up(self) -> bool:
        """One round: functions without a rule take the mix of their callers. Returns whether anything moved."""
        moved = False
        for function, weights in self._weights.items():
            if not weights:
                continue
            mix: dict[str, float] = {}
            for caller, weight in weights.items():
                for phase, share in self._shares[caller].items():
                    mix[phase] = mix.get(phase, 0.0) + weight * share
            before = self._shares[function]
            moved = moved or any(abs(share - before.get(phase, 0.0)) > 1e-9 for phase, share in mix.items())
            self._shares[function] = mix
        return moved

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; together they are the own time of everything."""
        total = dict.fromkeys(PHASES, 0.0)
        for function, (_, _, own, _, callers) in self._stats.items():
            if rule_of(function) is None and callers:  # cProfile knows exactly how much of it each caller asked for
                for caller, (_, _, own_from, _) in callers.items():
                    self._add(total, caller, own_from)
            else:
                self._add(total, function, own)
        return total

    def of(self, function: Function) -> str:
        """The phase that most of the function's time belongs to."""
        shares = self._shares[function]
        return max(shares, key=lambda phase: shares[phase], default=OTHER)

    def _add(self, total: dict[str, float], function: Function, seconds: float) -> None:
        shares = self._shares[function]
        for phase, share in shares.items():
            total[phase] += share * seconds
        total[OTHER] += (1.0 - sum(shares.values())) * seconds


def _weights(callers: Mapping[Function, tuple[int, int, float, float]]) -> dict[Function, float]:
    """The part of each caller in the cumulative time; equal parts where the clock saw none."""
    whole = sum(edge[3] for edge in callers.values())
    return {caller: edge[3] / whole if whole > 0 else 1 / len(callers) for caller, edge in callers.items()}


@dataclass(frozen=True)
class FunctionTime:
    """One row: `seconds` are the function's own and those of the C functions it called."""

    place: str
    phase: str
    calls: int
    seconds: float


def by_function(stats: Stats, root: str) -> list[FunctionTime]:
    """Rows of all Python functions (and of C functions with a rule), slowest first; places relative to the folder `root`."""
    phases = Phases(stats)
    seconds: dict[Function, float] = {}
    for function, (_, _, own, _, callers) in stats.items():
        if function[0] == "~" and rule_of(function) is None and callers:
            for caller, (_, _, own_from, _) in callers.items():
                seconds[caller] = seconds.get(caller, 0.0) + own_from
        else:
            seconds[function] = seconds.get(function, 0.0) + own
    rows = [FunctionTime(_place(f, root), phases.of(f), stats[f][1], each) for f, each in seconds.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _place(function: Function, root: str) -> str:
    file, line, name = function
    if file == "~":
        return name.strip("<>")
    short = file.removeprefix(root).lstrip("/")
    return f"{short.rpartition('site-packages/')[2].rpartition('/lib/')[2]}:{line} {name}"


def table(seconds: Mapping[str, float], rows: Sequence[FunctionTime], steps: int, count: int) -> Iterator[str]:
    """Lines: milliseconds per step by phase, then the `count` slowest functions."""
    whole = sum(seconds.values())
    yield f"{'phase':>10} {'ms/step':>9} {'share':>6}"
    for phase, each in seconds.items():
        yield f"{phase:>10} {each / steps * 1e3:9.2f} {each / whole:6.1%}"
    yield f"{'all':>10} {whole / steps * 1e3:9.2f}"
    yield f"{'phase':>10} {'ms/step':>9} {'calls':>7}  function, with the C functions it calls"
    for row in rows[:count]:
        yield f"{row.phase:>10} {row.seconds / steps * 1e3:9.2f} {row.calls / steps:7.0f}  {row.place}"
