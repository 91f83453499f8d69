"""Mean of a gradient buffer over the ranks of one host: gloo's all-reduce against shared memory, in alternating pairs.

    python benchmarks/comm_algorithms.py [--ranks 2] [--pairs 20]

One line per dtype and size: the median time of each, GB/s counted as bytes of the buffer over time, and the median of the
ratio taken pair by pair, which is what to trust on a machine that does other things. gloo's figure is the sum alone; ours
includes the division. The small buffers are reduced many times in a row: their figures are latencies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepspeed.comm.algorithms import flat_all_reducer

_CASES = [  # dtype, bytes of the buffer, calls per timing
    (torch.float32, 64 << 20, 1),
    (torch.bfloat16, 64 << 20, 1),
    (torch.float16, 64 << 20, 1),
    (torch.float32, 1 << 20, 20),
    (torch.float32, 4 << 10, 200),
]


def _seconds(call: Callable[[], None], calls: int) -> float:
    """Time per call of something that all ranks do together, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _pair_times(dtype: torch.dtype, nbytes: int, calls: int, pairs: int) -> list[tuple[float, float]]:
    numel = nbytes // dtype.itemsize
    plain = torch.zeros(numel, dtype=dtype)
    reducer = flat_all_reducer(numel, dtype)
    contenders = (lambda: _check(dist.all_reduce(plain)), lambda: reducer.launch(0, numel).wait())
    times = []
    for index in range(pairs + 2):
        order = (0, 1) if index % 2 else (1, 0)
        took = {which: _seconds(contenders[which], calls) for which in order}
        times.append((took[0], took[1]))
    reducer.close()
    return times[2:]  # the first two touch the memory


def _check(result: object) -> None:
    assert result is None  # a synchronous collective returns no handle


def _rank_main(rank: int, ranks: int, pairs: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    if rank == 0:
        print(f"{ranks} ranks, {pairs} pairs\n{'dtype':9} {'bytes':>9} {'gloo':>21} {'shared memory':>21} {'ratio':>7}")
    for dtype, nbytes, calls in _CASES:
        times = _pair_times(dtype, nbytes, calls, pairs)
        gloo, shared = (statistics.median(each[which] for each in times) for which in (0, 1))
        ratio = statistics.median(before / after for before, after in times)
        if rank == 0:
            name = str(dtype).removeprefix("torch.")
            figures = " ".join(f"{took * 1e6:9.0f} us {nbytes / took / 1e9:4.1f} GB/s" for took in (gloo, shared))
            print(f"{name:9} {nbytes:9} {figures} {ratio:6.1f}x", flush=True)
    barrier_us = statistics.median(_seconds(lambda: _check(dist.barrier()), 200) for _ in range(pairs)) * 1e6
    if rank == 0:
        print(f"gloo barrier {barrier_us:.0f} us: shared memory would need two per mean if it used them")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.pairs, f"{folder}/rendezvous")
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
