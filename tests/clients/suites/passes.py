"""The list of a client's tests that pass: a text file that may only grow. Pure: names in, names out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verdict:
    """What a run says about a list.

    Args:
        lost: listed tests that failed, were skipped or are gone.
        new: tests that passed and are not listed yet.
        failed: tests that failed and are not listed.
    """

    lost: tuple[str, ...]
    new: tuple[str, ...]
    failed: tuple[str, ...]


def judge(listed: Iterable[str], results: Mapping[str, bool]) -> Verdict:
    """Compare the tests of a list with what ran; `results` tells for each test that ran whether it passed."""
    known = set(listed)
    passed = {name for name, has_passed in results.items() if has_passed}
    return Verdict(_in_order(known - passed), _in_order(passed - known), _in_order(set(results) - passed - known))


def read(path: Path) -> tuple[str, ...]:
    """Names in the list, one a line; lines that begin with # tell why. Nothing is listed where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return tuple(line for line in lines if line and not line.startswith("#"))


def add(path: Path, names: Iterable[str]) -> None:
    """Put `names` on the list. What stands there stays, passed or not, and so do remarks at its top."""
    lines = path.read_text().splitlines() if path.exists() else []
    remarks = [line for line in lines if line.startswith("#")]
    path.write_text("\n".join([*remarks, *_in_order({*read(path), *names})]) + "\n")


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
