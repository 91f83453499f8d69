"""`deepspeed report`: a run's log as one HTML page, or its figures as JSON.

    deepspeed report runs/my_job
    deepspeed report runs/my_job --out my_job.html
    deepspeed report runs/my_job --json

Called by `launcher.runner`. Does not live here: what is in them (`sections`, `summary`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepspeed.common.pages import write_page
from deepspeed.errors import DeepSpeedError
from deepspeed.run_report import facts
from deepspeed.run_report.page import render
from deepspeed.run_report.reading import Run, read_run
from deepspeed.run_report.summary import findings, summarise

__all__ = ["as_dict", "main"]


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, or 2 where there is no log, no jinja2 or no place for the page."""
    args = _parser().parse_args(words)
    try:
        run = read_run(args.run_dir, args.run)
        if args.json:
            sys.stdout.write(json.dumps(as_dict(run, time.time()), indent=1, allow_nan=False) + "\n")
            return 0
        path = args.out or Path(args.run_dir) / "report.html"
        write_page(path, render(run, time.time()), "--out FILE.html says where else.")
    except DeepSpeedError as error:
        sys.stderr.write(f"deepspeed report: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


def as_dict(run: Run, now: float) -> dict[str, Any]:
    """The figures of a run as plain values: seconds, bytes, and null for what is not known.

    Args:
        run: what was read.
        now: seconds of the Unix clock, which a run without an end is compared with.
    """
    memory, phases, waits = facts.memory(run), facts.phases(run), facts.waits(run)
    told = {
        "run_dir": str(run.folder),
        "run": run.number,
        "runs": max(1, len(run.runs)),
        "other_engines": list(run.engines),
        **asdict(summarise(run)),
        "findings": [asdict(each) for each in findings(run, now)],
        "peak_nbytes_by_rank": dict(memory.peaks),
        "phase_seconds": {name: phases.mean(name) for name in phases.seconds},
        "operations": [{**asdict(each), "bytes_per_second": each.bytes_per_second} for each in facts.operations(run)],
        "waited_seconds_by_rank": dict(waits.seconds),
        "straggler": waits.straggler,
        "checkpoints": [asdict(each) for each in facts.checkpoints(run)],
        "unread_lines": [asdict(each) for each in run.unread],
        "unread_count": run.unread_count,
    }
    return {name: _finite(value) for name, value in told.items()}


def _finite(value: Any) -> Any:
    """The same with null for what is not finite, such as a sum of values near the largest that there is."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed report",
        description="Write one HTML page about a run: loss, speed, memory, where time goes, who waits for whom.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder that run_log wrote: output_path/job_name")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="where the page goes; default: RUN_DIR/report.html")
    parser.add_argument("--run", type=int, metavar="N", help="which run of a folder that has several; default: the newest")
    parser.add_argument("--json", action="store_true", help="print figures instead of writing a page")
    return parser
