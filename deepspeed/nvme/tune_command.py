"""The command `ds_nvme_tune`: try settings of the `aio` block on a disk, and print the best.

    ds_nvme_tune --nvme_dir /local_nvme

    every combination once, shuffled ---> the best few again ---> the block to paste, a log and a picture

One tensor for each folder is written and read back by all of them at once, past the page cache. Lives here: options,
measuring, what is printed. Does not live here: which settings, and which are best (`sweep`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.nvme.chart import Bar, bars_svg
from deepspeed.nvme.options import TransferOptions, end_with
from deepspeed.nvme.scratch import scratch_folders
from deepspeed.nvme.sizes import show_nbytes
from deepspeed.nvme.sweep import DEFAULT_SWEEP, Point, Speed, aio_block, best, points_of, read_sweep
from deepspeed.nvme.workload import Workload, make_tensor
from deepspeed.ops.aio.handle import AioHandle

__all__ = ["main", "parse_options"]

_FINALISTS = 3
_FINAL_LOOPS = 3
"""The best of many measured once is partly luck, so the best few are measured so often again."""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; an unusable one ends the process with status 2."""
    text = "Try settings of the `aio` block on a disk and print the best."
    parser = TransferOptions("ds_nvme_tune", text, io_size=400 << 20, loops=1, gds="gds")
    add, flag = parser.add_argument, parser.flag
    add("--nvme_dir", nargs="+", type=Path, required=True, help="folder on the disk; several are used at once")
    add("--sweep_config", type=Path, metavar="FILE", help="JSON object of lists: block_size, queue_depth, ...")
    flag("--no_read", help="do not measure reading")
    flag("--no_write", help="do not measure writing")
    flag("--flush_page_cache", help="drop the system's page cache before each reading; needs root or sudo")
    add("--log_dir", type=Path, default=Path("_aio_bench_logs"), help="folder for sweep.jsonl and sweep.svg")
    flag("--verbose", help="print every combination")
    options = parser.parse(arguments)
    if options.no_read and options.no_write:
        parser.error("--no_read and --no_write together leave nothing to measure: leave one out")
    return options


class _Disk:
    """One tensor and a file in each folder, moved with the settings of a point."""

    def __init__(self, options: argparse.Namespace, folders: Sequence[Path]) -> None:
        self._options = options
        self._tensor: Tensor = make_tensor(Workload(options.io_size, memory="device" if options.gpu else "aligned"))
        self._found = torch.empty_like(self._tensor)
        self._files = [folder / "file" for folder in folders]
        self._nbytes = self._tensor.nbytes * len(folders)
        with AioHandle() as handle:  # the space of the files is taken now, not in the first measurement
            self._all(handle.async_pwrite, self._tensor, handle)

    def speed(self, point: Point, loops: int) -> Speed:
        with AioHandle(
            point.block_nbytes, point.queue_depth, point.single_submit, point.overlap_events, point.threads
        ) as handle:
            write = read = None
            if not self._options.no_write:
                write = self._median(lambda: self._all(handle.async_pwrite, self._tensor, handle), loops)
            if not self._options.no_read:
                read = self._median(lambda: self._all(handle.async_pread, self._found, handle), loops)
            return Speed(read, write)

    def _all(self, move: Callable[[Tensor, Path], int], tensor: Tensor, handle: AioHandle) -> None:
        for file in self._files:
            move(tensor, file)
        handle.wait()

    def _median(self, move: Callable[[], None], loops: int) -> float:
        speeds = []
        for _ in range(loops):
            if self._options.flush_page_cache:
                _drop_page_cache()
            began = time.perf_counter()
            move()
            speeds.append(self._nbytes / (time.perf_counter() - began) / 1e9)
        return statistics.median(speeds)


def _drop_page_cache() -> None:
    os.sync()
    command = ["sh", "-c", "echo 1 > /proc/sys/vm/drop_caches"]
    done = subprocess.run(
        command if os.geteuid() == 0 else ["sudo", "-n", *command], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UsageError(
            f"--flush_page_cache: the page cache cannot be dropped: {done.stderr.strip()}. Run as root, or leave it out: "
            "reads go past the cache anyway."
        )


def _sweep(options: argparse.Namespace, disk: _Disk, points: Sequence[Point]) -> dict[Point, Speed]:
    """Measure all points, then the best again; write the log on the way. Returns the best first."""
    options.log_dir.mkdir(parents=True, exist_ok=True)
    speeds: dict[Point, Speed] = {}
    with (options.log_dir / "sweep.jsonl").open("w") as log:

        def note(number: int, count: int, point: Point, loops: int) -> None:
            speeds[point] = disk.speed(point, loops)
            log.write(json.dumps({**vars(point), "loops": loops, **speeds[point]._asdict()}) + "\n")
            log.flush()
            if options.verbose:
                sys.stdout.write(f"{number}/{count}  {point}: {_show(speeds[point])}\n")

        for number, point in enumerate(points, start=1):
            note(number, len(points), point, options.loops)
        finalists = best(speeds, _FINALISTS)
        for number, point in enumerate(finalists, start=1):
            note(number, len(finalists), point, max(_FINAL_LOOPS, options.loops))
    final = best({point: speeds[point] for point in finalists}, _FINALISTS)
    others = [point for point in best(speeds, len(speeds)) if point not in finalists]
    return {point: speeds[point] for point in (*final, *others)}


def _show(speed: Speed) -> str:
    return ", ".join(f"{name} {value:.2f} GB/s" for name, value in speed._asdict().items() if value is not None)


def _report(options: argparse.Namespace, speeds: Mapping[Point, Speed]) -> None:
    for name in ("read", "write"):
        measured = {point: value for point, speed in speeds.items() if (value := speed._asdict()[name]) is not None}
        if measured:
            point = max(measured, key=lambda one: measured[one])
            sys.stdout.write(f"best {name}: {measured[point]:.2f} GB/s with {point}\n")
    chosen = next(iter(speeds))
    sys.stdout.write(f"best for both: {_show(speeds[chosen])} with {chosen}\n\n{aio_block(chosen)}\n")
    bars = [
        Bar(f"{point} {name}", value, name == "write")
        for point, speed in speeds.items()
        for name, value in speed._asdict().items()
        if value is not None
    ]
    title = f"{show_nbytes(options.io_size)} in each of {len(options.nvme_dir)} folders, best first"
    (options.log_dir / "sweep.svg").write_text(bars_svg(title, "GB/s", bars))
    sys.stderr.write(f"log and picture: {options.log_dir}/sweep.jsonl, sweep.svg\n")


def _tune(options: argparse.Namespace) -> None:
    sweep = DEFAULT_SWEEP if options.sweep_config is None else read_sweep(options.sweep_config.read_text())
    points = points_of(sweep)
    with scratch_folders(dict.fromkeys(options.nvme_dir, options.io_size)) as scratch:
        _report(options, _sweep(options, _Disk(options, list(scratch.values())), points))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; exit with 1, and the reason on standard error, when it cannot be measured."""
    options = parse_options(arguments)
    left = "its files are removed, the log so far is kept"
    end_with("ds_nvme_tune", lambda: _tune(options), after_interrupt=left)
