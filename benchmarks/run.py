"""Run the benchmarks side by side and print them as tables.

    python benchmarks/run.py [--peer PATH_TO_PYTHON] [--only NAME] [--pairs N] [--out FILE] [--noise] [--cold]

`ours` is measured under the interpreter that runs this, the original under `--peer` (or the environment variable
BENCH_PEER_PYTHON); without one its rows are left out and that is said. benchmarks/README.md explains how to read the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(_ROOT)  # instead of this folder, whose files must not pass for top-level modules

from benchmarks import (  # noqa: E402
    activation_checkpointing,
    checkpoint,
    checkpoint_export,
    disk_io,
    host_step,
    import_time,
    initialize,
    launch,
    memory,
    moe_layer,
    native_twins,
    observability,
    offload_step,
    overhead,
    pipeline_step,
    plan_time,
    reduce_update,
    step_walk,
    tensor_step,
    train_step,
    trainer_step,
    ulysses,
    zero_step,
)
from benchmarks.harness.cases import AGAIN, ORIGINAL, OURS, Case, Run, check_losses, runs_of  # noqa: E402
from benchmarks.harness.models import bf16_slowdown  # noqa: E402
from benchmarks.harness.ranks import Interpreters, run_case  # noqa: E402
from benchmarks.harness.report import as_json, case_lines, machine_facts  # noqa: E402

_MODULES = (
    import_time,
    launch,
    plan_time,
    initialize,
    train_step,
    trainer_step,
    ulysses,
    zero_step,
    offload_step,
    activation_checkpointing,
    reduce_update,
    overhead,
    observability,
    moe_layer,
    pipeline_step,
    memory,
    checkpoint,
    checkpoint_export,
    disk_io,
    step_walk,
    tensor_step,
    native_twins,
    host_step,
)
_BF16_SLOWDOWN_LIMIT = 4.0  # hardware that multiplies bf16 is at 1 or below; emulation by torch's loops is far above
_COMPILING_SECONDS = 1200.0
_RUN_SECONDS = 600.0  # a bf16 step without bf16 instructions takes a minute


def choose(only: Sequence[str]) -> list[Case]:
    """The cases whose title begins with one of `only`; all, when it is empty."""
    cases = [case for module in _MODULES for case in module.CASES]
    unknown = [name for name in only if not any(case.title.startswith(name) for case in cases)]
    if unknown:
        raise SystemExit(f"--only {unknown[0]!r}: no such benchmark. There are: {', '.join(case.title for case in cases)}.")
    return [case for case in cases if not only or any(case.title.startswith(name) for name in only)]


def with_contenders(case: Case, *, has_peer: bool, noise: bool = False) -> Case:
    """`case` with those contenders that there are, and ours twice for `noise`."""
    names = [name for name in case.contenders if has_peer or name != ORIGINAL]
    if noise:
        names.insert(1, AGAIN)
    return dataclasses.replace(case, contenders=tuple(names))


def schedule(cases: Sequence[Case], pairs: int | None) -> list[tuple[int, Case, str]]:
    """(pair, case, contender) in the order of running: pair after pair over all cases, so each case sees the whole time."""
    last = max((case.pairs if pairs is None else pairs for case in cases), default=0)
    return [(pair, case, name) for pair in range(last) for case in cases for name in case.contenders_in(pair, pairs)]


def _run_all(cases: Sequence[Case], pairs: int | None, interpreters: Interpreters, *, is_cold: bool) -> Iterator[Run]:
    planned = schedule(cases, pairs)
    timeout_seconds = _COMPILING_SECONDS if is_cold else _RUN_SECONDS
    for number, (pair, case, name) in enumerate(planned, start=1):
        run = run_case(case, name, pair, interpreters, timeout_seconds=timeout_seconds, is_cold=is_cold)
        _say(f"{number}/{len(planned)} {case.title}, pair {pair}, {name}: {_brief(case, run)} ({run.wall_seconds:.1f} s)")
        yield run


def _brief(case: Case, run: Run) -> str:
    if run.measured is None:
        return f"FAILED: {run.error}"
    figure = next(figure for figure in case.figures if figure in run.measured.figures)
    return f"{figure} {run.measured.figures[figure]:.4g}"


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def warm_ups(cases: Sequence[Case]) -> list[Case]:
    """Runs of the original that make it compile what it needs for `cases`: no pair waits for a compiler."""
    with_original = [case for case in cases if ORIGINAL in case.contenders]
    own = [case.warm_up for case in with_original if case.warm_up is not None]
    return [*initialize.WARM_UP, *own] if with_original else []


def _warm_up(cases: Sequence[Case], interpreters: Interpreters) -> None:
    for case in warm_ups(cases):
        _say("the original compiles what it has not compiled before: minutes at the first time, seconds later")
        run = run_case(case, ORIGINAL, 0, interpreters, timeout_seconds=_COMPILING_SECONDS)
        if run.measured is None:
            raise SystemExit(f"the interpreter given by --peer cannot run the original package. {run.error}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", default=os.environ.get("BENCH_PEER_PYTHON"), help="Python that has the original package")
    parser.add_argument("--only", action="append", default=[], help="cases whose title begins so; repeat for more")
    parser.add_argument("--pairs", type=int, help="pairs of every contender; default: each case its own number")
    parser.add_argument("--out", type=Path, help="write everything that was measured as JSON")
    parser.add_argument(
        "--work", type=Path, default=_ROOT / "runs" / "bench", help="scratch, and what the original compiled"
    )
    parser.add_argument("--noise", action="store_true", help="run ours twice per pair: the ratio that means no difference")
    parser.add_argument("--cold", action="store_true", help="only the first start with nothing compiled: minutes")
    parser.add_argument("--slow-bf16", action="store_true", help="run bf16 models where bf16 products are emulated, too")
    parser.add_argument("--list", action="store_true", help="print the titles and leave")
    options = parser.parse_args()
    if options.pairs is not None and options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1 is needed")
    return options


def plan(options: argparse.Namespace, slowdown: Callable[[], float] = bf16_slowdown) -> tuple[list[Case], list[str]]:
    """What to run, and a line for everything that is left out."""
    cases, notes = [initialize.COLD] if options.cold else choose(options.only), []
    if (
        not options.slow_bf16
        and any(case.multiplies_bf16 for case in cases)
        and (times := slowdown()) > _BF16_SLOWDOWN_LIMIT
    ):
        left_out = ", ".join(case.title for case in cases if case.multiplies_bf16)
        cases = [case for case in cases if not case.multiplies_bf16]
        notes.append(
            f"left out: {left_out}. On this processor torch takes {times:.0f} times as long for a matrix product in bf16 "
            "as in fp32: a step would measure that alone, for minutes. --slow-bf16 runs them all the same."
        )
    if not options.peer:
        notes.append(f"left out: {ORIGINAL}. No --peer and no BENCH_PEER_PYTHON was given (docs/guide/benchmarks.md).")
    return [with_contenders(case, has_peer=bool(options.peer), noise=options.noise) for case in cases], notes


def main() -> None:
    """Run what the command line asks for; the exit status is 1 when a run failed or losses differ."""
    options = _options()
    if options.list:
        print("\n".join(case.title for case in choose(options.only)))
        return
    cases, notes = plan(options)
    for note in notes:
        _say(note)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended on the way out
    interpreters = Interpreters(options.work.absolute(), os.path.abspath(options.peer) if options.peer else None)
    began, before = time.time(), machine_facts()
    if not options.cold:
        _warm_up(cases, interpreters)
    runs: list[Run] = []
    machine = before
    for run in _run_all(cases, options.pairs, interpreters, is_cold=options.cold):
        runs.append(run)
        machine = {**before, "load_after": machine_facts()["load"], "minutes": round((time.time() - began) / 60, 1)}
        if options.out is not None:
            options.out.write_text(json.dumps(as_json(cases, runs, machine, notes), indent=1) + "\n")
    _print_tables(cases, runs, machine, notes)
    if any(run.error is not None for run in runs) or any(check_losses(case, runs_of(case, runs)).faults for case in cases):
        raise SystemExit(1)


def _print_tables(cases: Sequence[Case], runs: Sequence[Run], machine: Mapping[str, object], notes: Sequence[str]) -> None:
    print("machine:", ", ".join(f"{key} {value}" for key, value in machine.items()))
    for name in (OURS, ORIGINAL):
        versions = next((run.versions for run in runs if run.contender == name and run.versions), None)
        if versions is not None:
            print(f"{name}:", ", ".join(f"{key} {value}" for key, value in versions.items()))
    print(*notes, sep="\n", end="\n" if notes else "")
    for case in cases:
        print("\n".join(case_lines(case, runs_of(case, runs))))


if __name__ == "__main__":
    main()
