"""How often does a job on several hosts that breaks leave something behind, or end with the wrong status?

    python benchmarks/host_failures.py [--repeats N] [--only NAME] [--launcher NAME] [--out FILE]

Goal: 50 repeats of each failure, 0 orphans, always the right status, within 5 s, or 10 s where a host cannot be reached.

Each of the failures of `tests/support/host_failures.py` is really done, N times one after another, to a job of 3 hosts with
2 ranks each, out of namespaces of this machine. It needs root and what `.ci/run` installs. One failure takes some
3 to 12 s, mostly of waiting. Run by itself; `run.py` does not know it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(_ROOT)  # instead of this folder, whose files must not pass for top-level modules

from tests.support.host_failures import FAILURES, LAUNCHERS, Failure, Outcome, break_job  # noqa: E402
from tests.support.hosts import Hosts, hosts  # noqa: E402
from tests.support.signals import hear_signals  # noqa: E402
from tests.support.slurm import slurm  # noqa: E402


def main() -> None:
    """Run what the command line asks for; the exit status is 1 when a repeat was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], help="failures whose name begins so; repeat for more")
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="default: all")
    parser.add_argument("--out", type=Path, help="write every outcome as JSON, one a line, as it comes")
    options = parser.parse_args()
    hear_signals()
    rows = []
    for launcher in options.launcher or LAUNCHERS:
        with _cluster(launcher) as (cluster, environment):
            for failure in FAILURES:
                is_wanted = not options.only or any(failure.name.startswith(each) for each in options.only)
                if launcher in failure.launchers and is_wanted:
                    rows.append(_repeat(failure, launcher, cluster, environment, options))
                    print(_HEAD.format(*_TITLES) if len(rows) == 1 else "", end="\n" if len(rows) == 1 else "")
                    print(_HEAD.format(*rows[-1][:6]), flush=True)
    sys.exit(0 if all(row[-1] for row in rows) else 1)


_HEAD = "{:<9} {:<36} {:>7} {:>7} {:>9} {:>10}"
_TITLES = ("launcher", "failure", "repeats", "orphans", "not right", "longest s")


@contextlib.contextmanager
def _cluster(launcher: str) -> Iterator[tuple[Hosts, Mapping[str, str]]]:
    with hosts(3, slots=2) as cluster:
        if launcher != "slurm":
            yield cluster, {}
            return
        with slurm(cluster) as made:
            yield cluster, made.environment


def _repeat(
    failure: Failure, launcher: str, cluster: Hosts, environment: Mapping[str, str], options: argparse.Namespace
) -> tuple[str, str, int, int, int, str, bool]:
    orphans = wrong = 0
    longest = 0.0
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="ds-failure-") as folder:
            outcome = break_job(failure, cluster, Path(folder), launcher, environment)
        is_right = _is_right(failure, outcome)
        orphans += len(outcome.orphans) + len(outcome.remains)
        wrong += not is_right
        longest = max(longest, outcome.seconds)
        if options.out is not None:
            record = {"time": time.strftime("%H:%M:%S"), "launcher": launcher, "failure": failure.name, "is_right": is_right}
            told = {} if is_right and not outcome.orphans else {"output": outcome.output}
            fields = {"statuses": outcome.statuses, "seconds": outcome.seconds, "left": outcome.orphans + outcome.remains}
            with options.out.open("a") as file:
                file.write(json.dumps(record | fields | told) + "\n")
    is_good = not orphans and not wrong and longest <= failure.seconds
    return launcher, failure.name, options.repeats, orphans, wrong, f"{longest:.2f}", is_good


def _is_right(failure: Failure, outcome: Outcome) -> bool:
    """Whether the user saw the right status and reads the cause once on each terminal at most."""
    if failure.status is None:
        return True
    return set(outcome.statuses) == {failure.status} and 1 <= outcome.output.count(failure.told) <= len(outcome.statuses)


if __name__ == "__main__":
    main()
