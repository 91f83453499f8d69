"""How fast does the I/O engine move bytes past the page cache, and what does it cost?

Goal: at least 95 % of the speed of `fio` with the same block size, depth and kind of access, reading and writing; that is
at most 1.053x its seconds per GB.

One file on the disk of the scratch folder (`--work`), written whole before, is read or written from its beginning to its
end by O_DIRECT. Both have memory for the blocks in flight and no more: where the disk is a virtual one, its host copies
the bytes, and what the processor's cache holds is copied faster (with 64 MiB here: a fifth slower). Neither flushes at
the end: a direct write is with the disk when it is done. fio is the program of that name (Debian: apt install fio);
without it its rows fail and say so.

    s_per_gb       wall time for 10**9 bytes
    cpu_s_per_gb   processor time for them, of the process and of the kernel in its name
    ours           what `IoSettings(kind="auto")` takes: io_uring where the kernel allows it
    twin           Python threads, as without the native library
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cases import OURS, Case, Goal, Measured

_FIO = "fio"
_KINDS = {OURS: "auto", "libaio": "libaio", "threads": "threads", "twin": "twin"}
_FILE_NBYTES = 2 << 30


def _case(direction: str, block_nbytes: int, depth: int, contenders: tuple[str, ...]) -> Case:
    return Case(
        f"disk_io {direction} block {block_nbytes >> 10}K depth {depth}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, _FIO, *contenders),
        figures=("s_per_gb", "cpu_s_per_gb"),
        of=_FIO,
        goals=(Goal("s_per_gb", 1 / 0.95, of=_FIO),),
        arguments={"direction": direction, "block_nbytes": block_nbytes, "depth": depth},
    )


CASES = tuple(
    _case(direction, block_nbytes, depth, contenders)
    for direction in ("read", "write")
    for block_nbytes, depth, contenders in (
        (1 << 20, 8, ("libaio", "threads", "twin")),
        (128 << 10, 32, ("twin",)),
        (8 << 20, 4, ()),
    )
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    path = Path(arguments["scratch"]) / "file"
    _write_file(path)
    run = _run_fio if contender == _FIO else _run_ours
    seconds, cpu_seconds = run(contender, arguments, path)
    gigabytes = _FILE_NBYTES / 1e9
    return Measured({"s_per_gb": seconds / gigabytes, "cpu_s_per_gb": cpu_seconds / gigabytes})


def _write_file(path: Path) -> None:
    """All of its space taken and its bytes on the disk, so that no run pays for that."""
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).numpy().tobytes()
    with path.open("wb") as file:
        for _ in range(_FILE_NBYTES >> 20):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run_ours(contender: str, arguments: Mapping[str, Any], path: Path) -> tuple[float, float]:
    from deepspeed.ops.aio.engine import IoEngine, IoSettings, aligned_empty
    from deepspeed.ops.aio.threads import ThreadsBackend

    settings = IoSettings(block_nbytes=arguments["block_nbytes"], queue_depth=arguments["depth"])
    kind = _KINDS[contender]
    if kind == "twin":
        engine = IoEngine(settings, ThreadsBackend(settings))
    else:
        engine = IoEngine(dataclasses.replace(settings, kind=kind))
    nbytes = arguments["block_nbytes"] * arguments["depth"]
    buffer = aligned_empty(nbytes).fill_(1)  # its memory is there before the clock starts
    with engine, engine.open(path) as file:
        start = engine.read if arguments["direction"] == "read" else engine.write
        cpu, began = time.process_time(), time.perf_counter()
        requests = [start(file, offset, buffer) for offset in range(0, _FILE_NBYTES, nbytes)]
        for request in requests:
            request.wait()
        return time.perf_counter() - began, time.process_time() - cpu


def _run_fio(contender: str, arguments: Mapping[str, Any], path: Path) -> tuple[float, float]:
    program = shutil.which(_FIO)
    if program is None:
        raise SystemExit("there is no fio on PATH to compare with. Install it (Debian: apt install fio).")
    direction = arguments["direction"]
    command = [program, "--name=disk_io", f"--filename={path}", f"--rw={direction}", f"--bs={arguments['block_nbytes']}"]
    command += [f"--iodepth={arguments['depth']}", "--ioengine=io_uring", "--direct=1", f"--size={_FILE_NBYTES}"]
    done = subprocess.run([*command, "--overwrite=1", "--output-format=json"], capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    seconds = job[direction]["runtime"] / 1e3
    return seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
