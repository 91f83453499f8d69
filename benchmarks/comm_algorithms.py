"""Flat buffers over the ranks of one host: gloo's own collectives, our way through gloo, and shared memory, in turns.

    python benchmarks/comm_algorithms.py [--ranks 2] [--rounds 20] [--only reduce-scatter]

    all-reduce       FlatAllReducer, one range
    reduce-scatter   FlatReduceScatterer, one range, in place        ... sum: added to an fp32 shard
    all-gather       FlatGatherer.gather_in_place                    ... out: FlatGatherer.gather

One line per operation, dtype and size: the median time of each way, GB/s counted as bytes of the whole range (all ranks'
parts) over time (in brackets: of the fastest round), and the median of the ratio of gloo's own to shared memory taken round
by round, which is what to trust on a machine that does other things. gloo's own figures are the sum alone; ours include
the division, and waiting until the buffer may be written again. The small buffers are moved many times in a row: their
figures are latencies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepspeed.comm.algorithms import flat_all_reducer, flat_gatherer, flat_reduce_scatterer

Call = Callable[[], object]


class _Case(NamedTuple):
    operation: str
    dtype: torch.dtype
    nbytes: int
    calls: int  # per timing


_OPERATIONS = ("all-reduce", "reduce-scatter", "reduce-scatter sum", "all-gather", "all-gather out")
_SIZES = [
    (torch.float32, 64 << 20, 1),
    (torch.bfloat16, 64 << 20, 1),
    (torch.float16, 64 << 20, 1),
    (torch.float32, 1 << 20, 20),
    (torch.bfloat16, 1 << 20, 20),
    (torch.float32, 4 << 10, 200),
]
_WAYS = ("gloo's own", "through gloo", "shared memory")


def _contenders(case: _Case, left: ExitStack) -> list[Call]:
    """One call per way, on buffers of its own, which `left` closes."""
    numel = case.nbytes // case.dtype.itemsize
    plain = torch.zeros(numel, dtype=case.dtype)
    if case.operation == "all-reduce":
        return [lambda: dist.all_reduce(plain), *(_all_reduce(case, numel, share, left) for share in (False, True))]
    own = torch.zeros(numel // dist.get_world_size(), dtype=case.dtype)
    if case.operation.startswith("reduce-scatter"):
        ours = [_reduce_scatter(case, numel, share, left) for share in (False, True)]
        return [lambda: dist.reduce_scatter_tensor(own, plain), *ours]
    ours = [_gather(case, plain, share, left) for share in (False, True)]
    return [lambda: dist.all_gather_into_tensor(plain, own), *ours]


def _all_reduce(case: _Case, numel: int, is_shared: bool, left: ExitStack) -> Call:
    reducer = flat_all_reducer(numel, case.dtype, may_share_memory=is_shared)
    left.callback(reducer.close)
    return lambda: reducer.launch(0, numel).wait()


def _reduce_scatter(case: _Case, numel: int, is_shared: bool, left: ExitStack) -> Call:
    is_sum = case.operation.endswith("sum")
    shard = torch.zeros(numel // dist.get_world_size()) if is_sum else None
    scatterer = flat_reduce_scatterer(numel, case.dtype, may_share_memory=is_shared)
    left.callback(scatterer.close)
    return lambda: scatterer.launch(0, numel, shard, accumulate=is_sum).wait_free()


def _gather(case: _Case, into: torch.Tensor, is_shared: bool, left: ExitStack) -> Call:
    part_numel, is_out = len(into) // dist.get_world_size(), case.operation.endswith("out")
    gatherer = flat_gatherer(part_numel if is_out else len(into), case.dtype, may_share_memory=is_shared)
    left.callback(gatherer.close)

    def update_and_gather() -> None:
        gatherer.begin_update()
        gatherer.publish()
        (gatherer.gather(0, part_numel, into) if is_out else gatherer.gather_in_place(0, len(into))).wait()

    return update_and_gather


def _seconds(call: Call, calls: int) -> float:
    """Time per call of something that all ranks do together, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _times(case: _Case, rounds: int) -> list[list[float]]:
    """Per round the seconds of each way; the order turns from round to round."""
    with ExitStack() as left:
        contenders = _contenders(case, left)
        times = []
        for index in range(rounds + 2):
            took = {}
            for step in range(len(contenders)):
                which = (index + step) % len(contenders)
                took[which] = _seconds(contenders[which], case.calls)
            times.append([took[which] for which in range(len(contenders))])
        return times[2:]  # the first two touch the memory


def _figure(case: _Case, median: float, best: float) -> str:
    return f"{median * 1e6:9.0f} us {case.nbytes / median / 1e9:5.1f} ({case.nbytes / best / 1e9:4.1f})"


def _rank_main(rank: int, ranks: int, rounds: int, only: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    if rank == 0:
        columns = " ".join(f"{way:>24}" for way in _WAYS)
        print(f"{ranks} ranks, {rounds} rounds\n{'operation':18} {'dtype':9} {'bytes':>9} {columns} {'ratio':>6}")
    for operation in [each for each in _OPERATIONS if each.startswith(only)]:
        for case in [_Case(operation, *size) for size in _SIZES]:
            times = _times(case, rounds)
            medians = [statistics.median(each[which] for each in times) for which in range(len(_WAYS))]
            ratio = statistics.median(each[0] / each[-1] for each in times)
            if rank == 0:
                name = str(case.dtype).removeprefix("torch.")
                best = [min(each[which] for each in times) for which in range(len(_WAYS))]
                figures = " ".join(_figure(case, *pair) for pair in zip(medians, best, strict=True))
                print(f"{operation:18} {name:9} {case.nbytes:9} {figures} {ratio:5.1f}x", flush=True)
    barrier_us = statistics.median(_seconds(dist.barrier, 200) for _ in range(rounds)) * 1e6
    if rank == 0:
        print(f"gloo barrier {barrier_us:.0f} us: shared memory would need two per call if it used them")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="operations that begin so")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.rounds, options.only, f"{folder}/rendezvous")
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main()
