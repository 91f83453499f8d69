"""`deepspeed top`: a run's present state in the terminal, until it is done or Ctrl-C.

    deepspeed top runs/my_job
    deepspeed top runs/my_job --once

Called by `launcher.runner`. Does not live here: what a frame shows (`top`).
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live

from deepspeed.errors import DeepSpeedError
from deepspeed.run_report.reading import RunReader
from deepspeed.run_report.summary import summarise
from deepspeed.run_report.top import frame

__all__ = ["main", "watch"]


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, or 2 where there is no log."""
    args = _parser().parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may have a name that the terminal has no letters for
    reader, console = RunReader(args.run_dir), Console()
    try:
        reader.read_more()
        reader.run()  # a folder without a log is told before the screen is taken
        if args.once:
            console.print(frame(reader.run(), time.time()))
        else:
            watch(reader, console, args.interval)
    except DeepSpeedError as error:
        sys.stderr.write(f"deepspeed top: {error}\n")
        return 2
    except KeyboardInterrupt:  # the usual way out
        pass
    return 0


def watch(
    reader: RunReader,
    console: Console,
    interval: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw frames until the run is done; one that failed may be started again, and is waited for.

    Args:
        reader: of the run's folder.
        console: where frames are drawn, each in the place of the one before.
        interval: seconds between frames.
        clock: seconds of the Unix clock.
        sleep: waits.
    """
    with Live(frame(reader.run(), clock()), console=console, auto_refresh=False) as live:
        while summarise(reader.run()).state != "done":
            sleep(interval)
            reader.read_more()
            live.update(frame(reader.run(), clock()), refresh=True)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} given; 0.05 to 86400 seconds between frames are needed")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed top", description="Show how a run is doing now, again and again. Ctrl-C ends it."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder that run_log writes: output_path/job_name")
    parser.add_argument("--once", action="store_true", help="one frame, then end")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between frames; default: 1")
    return parser
