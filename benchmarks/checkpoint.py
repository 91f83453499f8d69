"""How long do saving and loading a checkpoint take, at ZeRO stages 1 to 3?

Goal: a blocking save in at most 0.7x the original's time and 1.0x that of torch's distributed checkpoint (DCP); a load in at
most 0.5x and 1.0x, out of the page cache; where the disk must be read first, where all wait for the same bytes, 1.0x both. A
load of what another number of ranks wrote takes at most 1.3x a load of what the same number wrote; an asynchronous save
holds training for at most 0.15 s per GB that a rank writes, and no longer than DCP's; hashing is at most 5 % of writing.

Two ranks train a decoder of 98 million parameters with AdamW in bf16 for one step (few tokens: it is not timed). DCP saves
the state of the same model under FSDP2, whose shards and moments are fp32 like the masters that engines keep; it is the peer
at every stage, as ZeroRedundancyOptimizer has no sharded checkpoint. Times run from a barrier to a barrier:

    save_s, second_save_s   until every byte is on the disk; a new tag each. DCP and ours flush their files themselves; of
                            the original's each rank flushes half (fsync), within the time
    load_s                  of the second tag, all of its files in the page cache
    cold_load_s             the same after its files were dropped from the page cache (posix_fadvise)
    held_s_per_gb           how long the second asynchronous save holds training, per GB that one rank writes: its call, and
                            what the next `step` takes more than the median of those before (it may wait for a copy)
    slowed_s_per_gb         the same of the call and the whole next iteration: also what it loses to the thread that writes
    hash_share              processor seconds in the hash over seconds of writing a file with it, fsync included
    save_peak_mib           the most that was resident during the second save, beyond what was before
    load_peak_mib           the same of the load from the page cache

Ours compares every byte with its hash before it loads anything; the others have no hashes. Before each save and load all
that is dirty is flushed.

    dcp                     what its documentation shows: `FileSystemWriter` as it is, which flushes; state collected within
                            the time (`get_state_dict`) and handed back after a load (`set_state_dict`)
    dcp, best               a writer with two threads; state collected beforehand and loaded in place
    dcp, async              `async_save` as it is
    ours, async             `checkpoint.async_save`
    ours, other ranks       loads what three ranks wrote

A slow disk is a part of every save. `--work FOLDER` in memory (/dev/shm) shows what the processor has to do.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.models import blocks_of, build_model, make_batches
from benchmarks.harness.probes import memory, peak_rss_mib, reset_peak
from benchmarks.harness.ranks import Interpreters, run_case
from benchmarks.harness.trainers import Training, adamw, engine_config, join, rank

DCP = "dcp"
DCP_BEST = "dcp, best"
DCP_ASYNC = "dcp, async"
OURS_ASYNC = "ours, async"
OTHER_RANKS = "ours, other ranks"
_OF_TORCH = (DCP, DCP_BEST, DCP_ASYNC)
_RANKS = 2
_OTHER_RANKS = 3
_SECOND = "second"
_ITERATIONS = 5
MODEL = {
    "width": 768,
    "layers": 12,
    "heads": 12,
    "vocabulary": 8192,
    "positions": 2,
}  # few tokens: the step before the saves is not timed
_READ_NBYTES = 8 << 20
_HASH_NBYTES = 1 << 20


def _case(stage: int) -> Case:
    saves, loads = ("save_s", "second_save_s"), ("load_s", "cold_load_s")
    return Case(
        f"checkpoint stage {stage}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, DCP, DCP_BEST, ORIGINAL, OTHER_RANKS, OURS_ASYNC, DCP_ASYNC),
        figures=(
            "second_save_s",
            "save_s",
            *loads,
            "held_s_per_gb",
            "slowed_s_per_gb",
            "hash_share",
            "mib",
            "save_peak_mib",
            "load_peak_mib",
        ),
        of=DCP,
        ranks=_RANKS,
        goals=(
            *(Goal(figure, 0.7, of=ORIGINAL) for figure in saves),
            *(Goal(figure, 1.0, of=dcp) for dcp in (DCP, DCP_BEST) for figure in saves),
            Goal("load_s", 0.5, of=ORIGINAL),
            Goal("cold_load_s", 1.0, of=ORIGINAL),
            *(Goal(figure, 1.0, of=dcp) for dcp in (DCP, DCP_BEST) for figure in loads),
            *(Goal(figure, 1.3, of=OURS, contender=OTHER_RANKS) for figure in loads),
            Goal("hash_share", 0.05),
            Goal("held_s_per_gb", 0.15, contender=OURS_ASYNC),
            Goal("held_s_per_gb", 1.0, of=DCP_ASYNC, contender=OURS_ASYNC),
        ),
        pairs=3,
        arguments={"dtype": "bf16", "stage": stage, "rows": 1, "model": MODEL},
    )


CASES = tuple(_case(stage) for stage in (1, 2, 3))


class _Checkpoints(Protocol):
    """What a contender does with checkpoints. Every call is collective."""

    def save(self, tag: str) -> object:
        """Write a checkpoint. It is on the disk afterwards, or after `wait` where the save is asynchronous."""

    def wait(self) -> object:
        """Wait for the asynchronous save."""

    def compute(self) -> object:
        """Forward and backward."""

    def step(self) -> object:
        """Update."""

    def load(self, tag: str) -> object:
        """Bring one back."""


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    folder = Path(arguments.get("save_into") or Path(arguments["scratch"]) / "checkpoints")
    folder.mkdir(exist_ok=True)
    join(ORIGINAL if contender == ORIGINAL else "torch" if contender in _OF_TORCH else OURS)
    checkpoints: _Checkpoints = (_Dcp if contender in _OF_TORCH else EngineCheckpoints)(contender, arguments, folder)
    if "save_into" in arguments:
        checkpoints.save(_SECOND)
        return Measured({"save_s": 0.0})
    if contender in (OURS_ASYNC, DCP_ASYNC):
        return Measured(_held(checkpoints, folder))
    if contender == OTHER_RANKS:
        _save_at_other_ranks(arguments, folder)
        return Measured(_loads(checkpoints, folder))
    share = {"hash_share": _hash_share(folder / "hashed")} if contender == OURS else {}
    return Measured({**_saves(checkpoints, folder), **_loads(checkpoints, folder), **share})


def _saves(checkpoints: _Checkpoints, folder: Path) -> dict[str, float]:
    first_s = _seconds(lambda: checkpoints.save("first"))
    second_s, peak_mib = _with_peak(lambda: checkpoints.save(_SECOND))
    return {
        "save_s": first_s,
        "second_save_s": second_s,
        "save_peak_mib": peak_mib,
        "mib": _nbytes(folder / _SECOND) / 2**20,
    }


def _loads(checkpoints: _Checkpoints, folder: Path) -> dict[str, float]:
    read_all(folder / _SECOND)
    warm_s, peak_mib = _with_peak(lambda: checkpoints.load(_SECOND))
    _forget(folder / _SECOND)
    return {"load_s": warm_s, "load_peak_mib": peak_mib, "cold_load_s": _seconds(lambda: checkpoints.load(_SECOND))}


def _held(checkpoints: _Checkpoints, folder: Path) -> dict[str, float]:
    """How long asynchronous saves hold training; the first one makes the memory that later ones use again."""
    alone = [_iteration(checkpoints) for _ in range(_ITERATIONS)]
    step_s, iteration_s = (statistics.median(each[number] for each in alone) for number in (0, 1))
    held_s, slowed_s = [], []
    for tag in ("first", _SECOND):
        dist.barrier()
        began = time.perf_counter()
        checkpoints.save(tag)
        call_s = time.perf_counter() - began
        step_after_s, iteration_after_s = _iteration(checkpoints)
        held_s.append(call_s + max(0.0, step_after_s - step_s))
        slowed_s.append(call_s + iteration_after_s - iteration_s)
        checkpoints.wait()
        dist.barrier()
    gb_per_rank = _nbytes(folder / _SECOND) / _RANKS / 1e9
    return {
        "first_held_s_per_gb": held_s[0] / gb_per_rank,
        "held_s_per_gb": held_s[1] / gb_per_rank,
        "slowed_s_per_gb": slowed_s[1] / gb_per_rank,
    }


def _iteration(checkpoints: _Checkpoints) -> tuple[float, float]:
    """Seconds of `step`, and of the whole iteration."""
    began = time.perf_counter()
    checkpoints.compute()
    computed = time.perf_counter()
    checkpoints.step()
    ended = time.perf_counter()
    return ended - computed, ended - began


def _hash_share(file: Path) -> float:
    """Processor seconds in the hash over seconds of writing a file of 256 MB per rank to the disk, fsync included."""
    from deepspeed.checkpoint.disk.storage import Storage

    storage, data = Storage(), torch.ones(64 << 20).view(torch.uint8).numpy().data
    with storage.create(file.with_name(f"{file.name}-{rank()}")) as written:
        for start in range(0, len(data), _HASH_NBYTES):
            written.write(data[start : start + _HASH_NBYTES])
        written.finish()
    return storage.written.hash_seconds / storage.written.seconds


class EngineCheckpoints:
    """Ours or the original, whichever the interpreter has."""

    def __init__(self, contender: str, arguments: Mapping[str, Any], folder: Path) -> None:
        import deepspeed

        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._flushes = contender == ORIGINAL
        training = Training.of(arguments)
        model = build_model(arguments)
        self._batch = make_batches(model, training.rows, rank())[0]
        config = engine_config(ORIGINAL if contender == ORIGINAL else OURS, training)
        if contender == OURS_ASYNC:
            config["checkpoint"] = {"async_save": True}
        self._engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        self.compute()
        self.step()

    def save(self, tag: str) -> None:
        self._engine.save_checkpoint(str(self._folder), tag=tag)
        if self._flushes:
            dist.barrier()
            for file in files_of(self._folder / tag)[rank() :: _RANKS]:
                flush(file)
            flush(self._folder / tag)

    def compute(self) -> None:
        self._engine.backward(self._engine(self._batch))

    def step(self) -> None:
        self._engine.step()

    def wait(self) -> None:
        self._engine.wait_for_checkpoint()

    def load(self, tag: str) -> None:
        self._engine.load_checkpoint(str(self._folder), tag=tag)


class _Dcp:
    """torch.distributed.checkpoint of the state of the same model under FSDP2."""

    def __init__(self, contender: str, arguments: Mapping[str, Any], folder: Path) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._folder = folder
        training = Training.of(arguments)
        self._model = build_model(arguments)
        mesh = init_device_mesh("cpu", (_RANKS,))
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for piece in (*blocks_of(self._model), self._model):
            fully_shard(piece, mesh=mesh, mp_policy=bf16 if training.is_bf16 else MixedPrecisionPolicy())
        self._optimizer = adamw(self._model)
        self._batch = make_batches(self._model, training.rows, rank())[0]
        self.compute()
        self.step()
        self._kept = self._collect() if contender == DCP_BEST else None
        self._is_async = contender == DCP_ASYNC
        self._aside = dist.new_group() if self._is_async else None  # its thread must not meet training's collectives
        self._saving: Any = None

    def save(self, tag: str) -> None:
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")

        threads = 1 if self._kept is None else _RANKS
        writer = dcp.FileSystemWriter(self._folder / tag, thread_count=threads)
        if not self._is_async:
            dcp.save(self._state(), storage_writer=writer)
            return
        self._saving = dcp.async_save(self._state(), storage_writer=writer, process_group=self._aside)

    def compute(self) -> None:
        self._model(self._batch).backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def wait(self) -> None:
        self._saving.result()

    def load(self, tag: str) -> None:
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=self._folder / tag)
        if self._kept is None:
            of_model, of_optimizer = state["model"], state["optimizer"]
            set_state_dict(self._model, self._optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)

    def _state(self) -> dict[str, Any]:
        return self._collect() if self._kept is None else self._kept

    def _collect(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        of_model, of_optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": of_model, "optimizer": of_optimizer}


def _seconds(call: Callable[[], object]) -> float:
    if rank() == 0:
        os.sync()
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def _with_peak(call: Callable[[], object]) -> tuple[float, float]:
    before_mib = memory().rss_mib
    reset_peak()
    return _seconds(call), peak_rss_mib() - before_mib


def _save_at_other_ranks(arguments: Mapping[str, Any], folder: Path) -> None:
    """Let three fresh ranks write the tag that is loaded; the ranks here wait."""
    if rank() == 0:
        writing = Case(
            "other ranks",
            benchmark="checkpoint",
            contenders=(OURS,),
            figures=("save_s",),
            of=OURS,
            ranks=_OTHER_RANKS,
            arguments={**arguments, "save_into": str(folder)},
        )
        run = run_case(writing, OURS, 0, Interpreters(Path(arguments["scratch"])))
        if run.error is not None:
            raise RuntimeError(f"{_OTHER_RANKS} ranks could not save: {run.error}")
    dist.barrier()


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_of(folder))


def read_all(folder: Path) -> None:
    """Bring every file into the page cache."""
    for file in files_of(folder)[rank() :: _RANKS]:
        with file.open("rb", buffering=0) as stream:
            while stream.read(_READ_NBYTES):
                pass


def _forget(folder: Path) -> None:
    """Drop every file from the page cache."""
    dist.barrier()  # nobody reads any more
    for file in files_of(folder)[rank() :: _RANKS]:
        flush(file)  # what is dirty stays
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
