"""The command `deepspeed verify`: the first steps of a script at ZeRO stage 0 and as configured, compared parameter by
parameter.

    words --> two jobs, one after the other, each told by a variable where to record (`verification`) --> two folders of
    files
          --> per parameter the largest difference, where it first appears --> a table, exit status 0 or 1

    a difference counts when it exceeds      tolerance x the largest change of the parameter since the start
                                           + 4 roundings of its largest value

A rounding of a value is not a fault, while a wrong gradient shows in the change however small the learning rate.

Does not live here: the recording (`engine.recording`), starting jobs: `runner` hands that in, and calls this.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.checkpoint.disk.container import Header, read_header, read_range
from deepspeed.errors import LaunchError
from deepspeed.launcher.arguments import parse_verify_args
from deepspeed.launcher.verification import VARIABLE, Verification

__all__ = ["Difference", "Recorded", "compare", "difference", "report", "verify"]

_SHOWN = 40
_ROUNDINGS = 4


@dataclass(frozen=True)
class Difference:
    """The largest difference of one parameter between two runs, at its worst step."""

    name: str
    step: int
    absolute: float
    relative: float
    """To the largest value in the baseline."""

    of_change: float
    """To the largest change since the start in the baseline."""

    excess: float
    """Beyond what `_ROUNDINGS` roundings explain, to the largest change."""


def difference(name: str, step: int, start: Tensor, baseline: Tensor, other: Tensor) -> Difference:
    """Compare one parameter, all three of one shape; a value that is NaN or infinite in one only is infinitely off."""
    if torch.equal(baseline, other):
        return Difference(name, step, 0.0, 0.0, 0.0, 0.0)
    rounding = _ROUNDINGS * torch.finfo(baseline.dtype).eps
    start, baseline, other = start.double(), baseline.double(), other.double()
    is_same = (baseline == other) | (baseline.isnan() & other.isnan())
    off = torch.where(is_same, 0.0, (baseline - other).abs().nan_to_num(math.inf, math.inf))
    absolute, value, change = float(off.max()), float(baseline.abs().max()), float((baseline - start).abs().max())
    excess = max(0.0, absolute - rounding * value) if math.isfinite(absolute) else math.inf
    return Difference(name, step, absolute, _ratio(absolute, value), _ratio(absolute, change), _ratio(excess, change))


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole > 0 and math.isfinite(part) else math.inf


class Recorded:
    """The files of one run."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self._headers: dict[Path, Header] = {}

    def steps(self, engine: int) -> list[int]:
        """The steps that were recorded, from 0 (before the first)."""
        found = range(self._verification.steps + 1)
        return [step for step in found if self._verification.file(engine, step).exists()]

    def header(self, engine: int, step: int) -> Header:
        """What the file of a step holds."""
        path = self._verification.file(engine, step)
        if path not in self._headers:
            self._headers[path] = read_header(path)
        return self._headers[path]

    def fact(self, engine: int, step: int, name: str) -> str:
        """A fact that was recorded with a step: "stage", "ranks", "loss"."""
        return self.header(engine, step).metadata[name]

    def tensor(self, engine: int, step: int, name: str) -> Tensor:
        """A recorded parameter, flat."""
        located = self.header(engine, step).tensors[name]
        values = torch.empty(located.numel, dtype=located.dtype)
        read_range(self._verification.file(engine, step), located, 0, values)
        return values


def verify(words: Sequence[str], run: Callable[[argparse.Namespace], int]) -> int:
    """Run the command; `words` follow `deepspeed verify`, and `run` starts a job and returns its exit status.

    Raises:
        LaunchError: a job cannot be started, or recorded nothing.
    """
    args = parse_verify_args(words)
    with _folder(args.keep) as folder:
        wishes = [Verification(str(folder / name), args.steps, name == "stage0") for name in ("stage0", "configured")]
        for wish in wishes:
            Path(wish.folder).mkdir(parents=True)
            with _told(wish):
                status = run(args)
            if status:
                at = "at ZeRO stage 0" if wish.is_baseline else "as configured"
                sys.stdout.write(f"The script failed {at}, with exit status {status}: nothing can be compared.\n")
                return status
        return report(Recorded(wishes[0]), Recorded(wishes[1]), args.tolerance)


@contextlib.contextmanager
def _folder(kept: str | None) -> Iterator[Path]:
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="deepspeed-verify-") as name:
            yield Path(name)
        return
    folder = Path(kept).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(f"--keep {kept}: it exists and is not an empty folder. Name a new one.")
    yield folder


@contextlib.contextmanager
def _told(wish: Verification) -> Iterator[None]:
    """Ranks started inside find the wish in their environment."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = wish.to_text()
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def compare(baseline: Recorded, other: Recorded, engine: int, steps: Sequence[int]) -> list[Difference]:
    """The worst difference of each parameter of an engine over `steps`; the earliest step among equal ones."""
    names = list(baseline.header(engine, 0).tensors)
    missing = set(names) ^ set(other.header(engine, 0).tensors)
    if missing:
        raise LaunchError(
            f"the two runs train different parameters: {sorted(missing)[:3]} in one only. The script must build the same "
            "model at every ZeRO stage."
        )
    worst = []
    for name in names:
        start = baseline.tensor(engine, 0, name)
        found = [difference(name, s, start, baseline.tensor(engine, s, name), other.tensor(engine, s, name)) for s in steps]
        worst.append(max(found, key=lambda each: each.excess or each.absolute * 1e-300))
    return worst


def report(baseline: Recorded, other: Recorded, tolerance: float) -> int:
    """Print what was found, and return the exit status."""
    verdicts = []
    engine = 0
    while baseline.steps(engine) and other.steps(engine):
        verdicts.append(_report_engine(baseline, other, engine, tolerance))
        engine += 1
    if not verdicts:
        raise LaunchError(
            "no engine was recorded. The script must call deepspeed.initialize() with an optimizer in the ranks that "
            "`deepspeed verify` starts."
        )
    return 0 if all(verdicts) else 1


def _report_engine(baseline: Recorded, other: Recorded, engine: int, tolerance: float) -> bool:
    steps = [step for step in baseline.steps(engine) if step in other.steps(engine) and step > 0]
    stage, ranks = other.fact(engine, 0, "stage"), other.fact(engine, 0, "ranks")
    write = sys.stdout.write
    write(f"\nengine {engine}: ZeRO stage 0 against stage {stage}, {ranks} rank(s), {len(steps)} step(s)\n")
    losses = [(float(baseline.fact(engine, s, "loss")), float(other.fact(engine, s, "loss"))) for s in steps]
    for step, (first, second) in zip(steps, losses, strict=True):
        write(f"  step {step}: loss {first:.9g} at stage 0, {second:.9g} at stage {stage}\n")
    found = compare(baseline, other, engine, [0, *steps])
    starts_apart = any(each.step == 0 and each.absolute for each in compare(baseline, other, engine, [0]))
    differing = sorted((each for each in found if each.absolute), key=lambda each: (-each.excess, -each.absolute))
    if differing:
        width = max(len("parameter"), *(len(each.name) for each in differing[:_SHOWN]))
        write(f"  {'parameter':<{width}}  step  difference  of largest value  of largest change\n")
        for each in differing[:_SHOWN]:
            cells = f"{each.step:4}  {each.absolute:10.3g}  {each.relative:16.3g}  {each.of_change:17.3g}"
            write(f"  {each.name:<{width}}  {cells}{'  <-- too much' if each.excess > tolerance else ''}\n")
        if len(differing) > _SHOWN:
            write(f"  ... and {len(differing) - _SHOWN} more, less different\n")
    write(f"  {len(found) - len(differing)} of {len(found)} parameters are equal in every bit\n")
    agrees = bool(steps) and all(each.excess <= tolerance for each in found)
    write(f"  {_conclusion(agrees, bool(steps), starts_apart, losses, tolerance)}\n")
    return agrees


def _conclusion(
    agrees: bool, has_steps: bool, starts_apart: bool, losses: Sequence[tuple[float, float]], tolerance: float
) -> str:
    if not has_steps:
        return "NOT COMPARED: the script ended before the first step."
    if agrees:
        return f"AGREES within {tolerance:g} of the largest change of each parameter."
    if starts_apart:
        return "DIFFERS before the first step: its weights are random. Seed them (torch.manual_seed), then verify again."
    if losses and losses[0][0] != losses[0][1] and not all(map(math.isnan, losses[0])):
        return (
            "DIFFERS, and the losses of step 1 already do, from equal weights: the order of data or something random "
            "(dropout) is probably not seeded. Seed it, then verify again; if it is seeded, the forward is at fault."
        )
    return "DIFFERS: gradients or updates are not the same. Please report this with the table above."
