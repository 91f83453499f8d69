"""The command `ds_io`: write or read tensors in one way, and print how fast that was.

    ds_io --io_size 1G --folder /local_nvme --queue_depth 16 --read --plot read.svg

Lives here: options, processes, the table. Does not live here: what is timed (`workload`). Files lie in a folder of their
own, whose space is checked before and which is gone after, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import statistics
import sys
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple, NoReturn

from rich.console import Console
from rich.table import Table

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError
from deepspeed.nvme.chart import Bar, bars_svg
from deepspeed.nvme.options import TransferOptions, end_with
from deepspeed.nvme.scratch import scratch_folders
from deepspeed.nvme.sizes import show_nbytes, size_option
from deepspeed.nvme.workload import ENGINES, Loop, Memory, Workload, measure

__all__ = ["Together", "main", "parse_options", "together"]

_GREETING = "Testing DeepNVMe python frontend"  # what scripts that read our output look for
_MEET_SECONDS = 600.0


class Together(NamedTuple):
    """One loop of all processes: it lasts as long as the slowest."""

    seconds: float
    nbytes: int
    cpu_seconds: float
    is_warmup: bool

    @property
    def gb_per_second(self) -> float:
        """10**9 bytes a second."""
        return self.nbytes / self.seconds / 1e9


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; an unusable one ends the process with status 2."""
    parser = TransferOptions("ds_io", "Write or read tensors and print how fast that was.", loops=3, gds="use_gds")
    add, flag = parser.add_argument, parser.flag
    add("--folder", type=Path, help="folder on the disk to measure")
    add("--folder_to_device_mapping", nargs="+", metavar="PATH:ID", help="a process for each, with its folder and device")
    add("--fast_io_size", type=size_option, default=64 << 20, help="buffer of torch_fastio")
    flag("--read", help="read; without it: write")
    add("--multi_process", type=int, default=1, help="processes for each folder")
    add("--block_size", type=size_option, default=1 << 20, help="bytes that are asked of the system at a time")
    add("--queue_depth", type=int, default=32, help="blocks in flight for each thread")
    flag("--single_submit", help="hand over blocks one at a time")
    flag("--sequential_requests", help="wait for all blocks in flight before the next are submitted")
    flag("--validate", help="compare what was moved, within the time")
    add("--engine", choices=ENGINES, default="aio_handle", help="what moves the bytes")
    add("--io_parallel", type=int, default=1, help="threads of each process")
    flag("--slow_bounce_buffer", help="the tensor lies in memory as torch gives it: not aligned, not locked")
    flag("--torch_legacy_save", help="torch's format before zip files")
    flag("--use_accelerator_pin_memory", help="page-locked memory of the accelerator, not our own aligned memory")
    add("--warmup_loops", type=int, default=1, help="transfers before that")
    flag("--include_warmup_time", help="count them too")
    flag("--different_file_each_iteration", help="a new file for each transfer")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the speed of each loop")
    options = parser.parse(arguments)
    _check(parser, options)
    return options


def _check(parser: TransferOptions, options: argparse.Namespace) -> None:
    if (options.folder is None) == (options.folder_to_device_mapping is None):
        parser.error("give either --folder or --folder_to_device_mapping: the folder whose disk is measured")
    parser.require_at_least(1, options, "multi_process", "queue_depth", "io_parallel")
    parser.require_at_least(0, options, "warmup_loops")
    if options.torch_legacy_save and not options.engine.startswith("torch"):
        parser.error(f"--torch_legacy_save with --engine {options.engine}: it is for torch_io and torch_fastio")


def places_of(options: argparse.Namespace) -> list[tuple[Path, int]]:
    """Folder and device of each process."""
    if options.folder is not None:
        return [(options.folder, number) for number in range(options.multi_process)]
    places = []
    for text in options.folder_to_device_mapping:
        path, separator, device = text.rpartition(":")
        if not separator or not device.isdigit():
            raise ArgumentError(f"--folder_to_device_mapping {text}: give PATH:ID, for example /local_nvme:0")
        places += [(Path(path), int(device))] * options.multi_process
    return places


def workload_of(options: argparse.Namespace) -> Workload:
    """What each process measures."""
    memory: Memory = "aligned"
    if options.gpu:
        memory = "device"
    elif options.slow_bounce_buffer:
        memory = "plain"
    elif options.use_accelerator_pin_memory:
        memory = "pinned"
    return Workload(
        options.io_size,
        options.read,
        options.engine,
        memory,
        options.block_size,
        options.queue_depth,
        options.single_submit,
        not options.sequential_requests,
        options.io_parallel,
        options.loops,
        options.warmup_loops,
        options.validate,
        options.fast_io_size,
        not options.torch_legacy_save,
        options.different_file_each_iteration,
    )


def together(loops_of_processes: Sequence[Sequence[Loop]], nbytes: int) -> list[Together]:
    """Put the loops of all processes side by side."""
    return [
        Together(
            max(loop.seconds for loop in loops),
            nbytes * len(loops),
            sum(loop.cpu_seconds for loop in loops),
            loops[0].is_warmup,
        )
        for loops in zip(*loops_of_processes, strict=True)
    ]


def _nobody() -> None:
    """One process meets nobody."""


def _run(workload: Workload, places: Sequence[tuple[Path, int]]) -> list[list[Loop]]:
    """Measure in one process for each place; here, if there is only one."""
    if len(places) == 1:
        _use_device(workload, places[0][1])
        return [measure(workload, places[0][0], _nobody)]
    spawning = multiprocessing.get_context("spawn")  # a fork would share the threads of torch
    barrier = spawning.Barrier(len(places))
    with spawning.Pool(len(places), _share_barrier, (barrier,)) as pool:
        return pool.starmap(_measure_with_others, [(workload, *place) for place in places], chunksize=1)


_shared: list[Barrier] = []
"""The barrier of a child process; pools hand it over by inheritance only."""


def _share_barrier(barrier: Barrier) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    _shared.append(barrier)


def _measure_with_others(workload: Workload, folder: Path, device: int) -> list[Loop]:
    _use_device(workload, device)
    try:
        return measure(workload, folder, lambda: _shared[0].wait(_MEET_SECONDS))
    except BaseException:
        _shared[0].abort()  # the others would wait for this one
        raise


def _use_device(workload: Workload, device: int) -> None:
    if workload.memory == "device":
        get_accelerator().set_device(device % get_accelerator().device_count())


def _report(options: argparse.Namespace, loops: Sequence[Together]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("loop", "seconds", "GB/s", "processor s/GB"):
        table.add_column(name, justify="right")
    for number, loop in enumerate(loops):
        name = f"warm-up {number}" if loop.is_warmup else str(number)
        table.add_row(
            name, f"{loop.seconds:.4f}", f"{loop.gb_per_second:.3f}", f"{loop.cpu_seconds / loop.nbytes * 1e9:.3f}"
        )
    console = Console(highlight=False)
    console.print(table)
    counted = [loop.gb_per_second for loop in loops if options.include_warmup_time or not loop.is_warmup]
    console.print(
        f"{_title(options, loops[0])}: {statistics.median(counted):.3f} GB/s "
        f"(median of {len(counted)}; {min(counted):.3f} to {max(counted):.3f})",
        soft_wrap=True,
    )
    if options.plot is not None:
        bars = [
            Bar(f"{'warm-up' if loop.is_warmup else 'loop'} {number}", loop.gb_per_second, loop.is_warmup)
            for number, loop in enumerate(loops)
        ]
        options.plot.write_text(bars_svg(_title(options, loops[0]), "GB/s", bars))
        console.print(f"drawn: {options.plot}", soft_wrap=True)


def _title(options: argparse.Namespace, loop: Together) -> str:
    processes = loop.nbytes // options.io_size
    return (
        f"{'read' if options.read else 'write'} {processes} x {show_nbytes(options.io_size)} by {options.engine}, "
        f"block {show_nbytes(options.block_size)}, depth {options.queue_depth}, threads {options.io_parallel}"
    )


def _measure_and_report(options: argparse.Namespace) -> None:
    workload, places = workload_of(options), places_of(options)
    needs: dict[Path, int] = {}
    for folder, _ in places:
        needs[folder] = needs.get(folder, 0) + workload.nbytes * workload.file_count
    with scratch_folders(needs) as scratch:
        owns = [(scratch[folder] / str(number), device) for number, (folder, device) in enumerate(places)]
        for own, _ in owns:
            own.mkdir()
        _report(options, together(_run(workload, owns), workload.nbytes))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; exit with 1, and the reason on standard error, when it cannot be measured."""
    options = parse_options(arguments)
    sys.stdout.write(f"{_GREETING}\n")
    end_with("ds_io", lambda: _measure_and_report(options), after_interrupt="its files are removed")
