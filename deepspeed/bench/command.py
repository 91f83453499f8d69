"""`ds_bench`: the command line, and the walk over operations, dtypes and sizes.

    ds_bench FLAGS                                        starts itself on this machine, with the deepspeed command
    deepspeed [-H FILE] [--launcher L] --module deepspeed.bench FLAGS     on any hosts, over any launcher

Does not live here: one measurement (`bench.measure`), tables and plots (`bench.table`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.bench.measure import OPERATIONS, largest_numel, measure
from deepspeed.bench.table import UNITS, Measurement, lines, plot
from deepspeed.common.logging import get_logger
from deepspeed.errors import ArgumentError, DeepSpeedError

__all__ = ["launcher_argv", "main", "numels", "parse", "run"]

logger = get_logger(__name__)

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
_SCHEDULER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "MV2_COMM_WORLD_RANK")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="ds_bench", description="Measure the bandwidth of collectives.")
    parser.add_argument("--local_rank", type=int, help="set by launchers")
    parser.add_argument("--trials", type=int, default=5, help="timed calls per size")
    parser.add_argument("--warmups", type=int, default=1, help="calls before these")
    parser.add_argument("--maxsize", type=int, default=24, help="largest tensor: 2^MAXSIZE elements")
    parser.add_argument("--async-op", action="store_true", help="start calls asynchronously, then wait")
    parser.add_argument("--bw-unit", choices=list(UNITS), default="Gbps", help="unit of bandwidths")
    parser.add_argument("--backend", choices=["nccl", "ccl", "mpi", "gloo"], help="back end; the accelerator's own")
    parser.add_argument("--dist", choices=["deepspeed", "torch"], default="deepspeed", help="library that is called")
    parser.add_argument("--scan", action="store_true", help="all sizes up to the largest")
    parser.add_argument("--raw", action="store_true", help="plain bytes and seconds")
    for name in OPERATIONS:
        parser.add_argument(f"--{name}", action="store_true", help=f"measure {name}; without such a flag: all of them")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], help="of the elements, as torch calls them; several allowed"
    )
    parser.add_argument("--mem-factor", type=float, default=0.3, help="share of the free memory that buffers may take")
    parser.add_argument("--debug", action="store_true", help="say on every rank which size is measured")
    parser.add_argument("--device", help="accelerator, as DS_ACCELERATOR names it, where ds_bench starts itself")
    parser.add_argument("--ranks", type=int, help="ranks, where ds_bench starts itself: every device, two on a CPU")
    parser.add_argument("--plot", type=Path, help="file for a picture of bus bandwidth over size")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(words)
    for name in args.dtype:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            parser.error(f"--dtype {name}: needed is a dtype of torch, for example float32 or bfloat16")
    if min(args.trials, args.maxsize + 1, args.warmups + 1) < 1 or not 0 < args.mem_factor <= 1:
        parser.error("--trials must be at least 1, --warmups and --maxsize at least 0, --mem-factor above 0 and at most 1")
    return args


def numels(maxsize: int, multiple: int, *, is_scan: bool) -> Iterator[int]:
    """Elements of each rank's tensor, growing: powers of two up to 2^maxsize, rounded up to whole multiples."""
    sizes = range(maxsize + 1) if is_scan else [maxsize]
    yield from dict.fromkeys(-(-(2**size) // multiple) * multiple for size in sizes)


def run(args: argparse.Namespace) -> list[Measurement]:
    """Measure what `args` ask for; every rank calls it, and rank 0 prints.

    Raises:
        ArgumentError: there is one rank alone.
    """
    comm.init_distributed(args.backend)
    ranks, is_first = comm.get_world_size(), comm.get_rank() == 0
    if ranks < 2:
        raise ArgumentError("ds_bench measures what passes between ranks, and there is one. Give --ranks 2, or more hosts.")
    accelerator = get_accelerator()
    available_nbytes = torch.tensor(accelerator.available_memory() // ranks, device=accelerator.current_device_name())
    comm.all_reduce(available_nbytes, op=comm.ReduceOp.MIN)  # sizes must be the same on all ranks
    chosen = [name for name in OPERATIONS if getattr(args, name.replace("-", "_"))] or OPERATIONS
    found: list[Measurement] = []
    for operation in chosen:
        for dtype in (getattr(torch, name) for name in args.dtype):
            largest = largest_numel(operation, dtype, args.mem_factor, int(available_nbytes), ranks)
            before = len(found)
            for numel in numels(args.maxsize, ranks, is_scan=args.scan):
                if numel > largest:
                    break
                if args.debug:
                    logger.info("%s of %d elements of %s", operation, numel, dtype)
                found.append(
                    measure(
                        operation,
                        dtype,
                        numel,
                        trials=args.trials,
                        warmups=args.warmups,
                        is_async=args.async_op,
                        uses_torch=args.dist == "torch",
                    )
                )
            if is_first:
                _print(found[before:], args)
    return found


def _print(found: Sequence[Measurement], args: argparse.Namespace) -> None:
    text = lines(found, args.bw_unit, raw=args.raw) or ["nothing measured: the smallest size does not fit --mem-factor"]
    sys.stdout.write("\n".join(text) + "\n\n")
    sys.stdout.flush()


def launcher_argv(args: argparse.Namespace, words: Sequence[str], devices: int) -> list[str]:
    """The command that starts `ds_bench WORDS` on every device of this machine, at least two ranks."""
    ranks = args.ranks or max(2, devices)
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--quiet"]
    return [*launcher, "--module", "deepspeed.bench", *words]


def _is_started(environ: Mapping[str, str]) -> bool:
    return all(name in environ for name in _RANK_VARIABLES) or any(name in environ for name in _SCHEDULER_VARIABLES)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line `words` (None: that of this process)."""
    given = sys.argv[1:] if words is None else list(words)
    args = parse(given)
    if not _is_started(os.environ):
        environ = {**os.environ, **({"DS_ACCELERATOR": args.device} if args.device else {})}
        sys.exit(
            subprocess.run(launcher_argv(args, given, get_accelerator().device_count()), env=environ, check=False).returncode
        )
    try:
        found = run(args)
        if comm.get_rank() == 0 and args.json is not None:
            args.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n", encoding="utf-8")
        if comm.get_rank() == 0 and args.plot is not None and found:
            plot(found, args.bw_unit, args.plot)
        comm.barrier()
        comm.destroy_process_group()
    except DeepSpeedError as error:
        logger.error("%s", error)
        sys.exit(1)
