from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.errors import ArgumentError, DeepSpeedError, FileIoError, UsageError
from deepspeed.ops.aio.backend import Outcome, Ticket, Transfer
from deepspeed.ops.aio.engine import IoEngine, IoRequest, IoSettings, aligned_empty
from deepspeed.ops.aio.threads import ThreadsBackend
from tests.unit.ops.aio.kinds import KINDS, make_engine

PAGE = 4096
SMALL = IoSettings(block_nbytes=2 * PAGE, queue_depth=3, threads=2)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    with make_engine(request.param, SMALL) as engine:
        yield engine


def noise(nbytes: int, seed: int = 0) -> Tensor:
    """Bytes in memory that files can be moved to and from directly."""
    memory = aligned_empty(nbytes)
    memory.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return memory


def test_what_was_written_is_read_back(engine: IoEngine, tmp_path: Path) -> None:
    data = noise(100 * PAGE)
    with engine.open(tmp_path / "file", data.nbytes, create=True) as file:
        assert file.nbytes == data.nbytes
        engine.write(file, 0, data).wait()
        found = aligned_empty(data.nbytes)
        engine.read(file, 0, found).wait()
    assert torch.equal(found, data)
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, 3 * PAGE),
    nbytes=st.integers(0, 9 * PAGE),
    shift=st.sampled_from([0, 1, 64, 512, PAGE - 1]),
)
def test_any_offset_length_and_address_moves_exactly_its_bytes(
    engine: IoEngine, tmp_path: Path, offset: int, nbytes: int, shift: int
) -> None:
    path, before = tmp_path / "file", noise(13 * PAGE, seed=1)
    path.write_bytes(before.numpy().tobytes())
    data = noise(nbytes + shift, seed=2)[shift:]
    with engine.open(path) as file:
        engine.write(file, offset, data).wait()
        expected = before.clone()
        expected[offset : offset + nbytes] = data
        assert path.read_bytes() == expected.numpy().tobytes()
        found = torch.zeros(nbytes + shift + 1, dtype=torch.uint8)
        engine.read(file, offset, found[shift : shift + nbytes]).wait()
    assert torch.equal(found[shift : shift + nbytes], data)
    assert not found[:shift].any()
    assert found[-1] == 0


@pytest.mark.parametrize("single_submit", [False, True])
@pytest.mark.parametrize("overlap_events", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_change_no_bytes(kind: str, overlap_events: bool, single_submit: bool, tmp_path: Path) -> None:
    how = IoSettings(PAGE + 1, 4, 1, single_submit=single_submit, overlap_events=overlap_events)
    data, found = noise(50 * PAGE + 17), aligned_empty(50 * PAGE + 17)
    with make_engine(kind, how) as engine, engine.open(tmp_path / "file", create=True) as file:
        engine.write(file, 0, data).wait()
        engine.read(file, 0, found).wait()
    assert torch.equal(found, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_type_and_shape_keep_their_bytes(engine: IoEngine, tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.randn(37, 5, 11).to(dtype)
    with engine.open(tmp_path / "file", create=True) as file:
        engine.write(file, 3, data).wait()
        found = torch.empty_like(data)
        engine.read(file, 3, found).wait()
    assert torch.equal(found, data)


def test_requests_are_in_flight_together_and_done_in_any_order_of_waiting(engine: IoEngine, tmp_path: Path) -> None:
    parts = [noise(5 * PAGE + number, seed=number) for number in range(20)]
    with engine.open(tmp_path / "file", create=True) as file:
        writes = [engine.write(file, number * 8 * PAGE, part) for number, part in enumerate(parts)]
        for write in reversed(writes):
            write.wait()
            assert write.is_done
        found = [torch.empty_like(part) for part in parts]
        reads = [engine.read(file, number * 8 * PAGE, part) for number, part in enumerate(found)]
        for read in reads:
            read.wait()
            read.wait()  # again: the same answer
    assert all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))


def test_many_threads_share_an_engine_and_a_file(engine: IoEngine, tmp_path: Path) -> None:
    wrong: list[int] = []
    with engine.open(tmp_path / "file", create=True) as file:

        def work(number: int) -> None:
            for turn in range(10):
                data = noise(3 * PAGE + 5, seed=number * 100 + turn)
                found = aligned_empty(data.nbytes)
                engine.write(file, number * 4 * PAGE, data).wait()
                engine.read(file, number * 4 * PAGE, found).wait()
                if not torch.equal(found, data):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_file_that_ends_early_is_an_error_with_the_numbers(engine: IoEngine, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(3 * PAGE + 100))
    with engine.open(path) as file:
        request = engine.read(file, PAGE, aligned_empty(10 * PAGE))
        for _ in range(2):
            with pytest.raises(FileIoError) as caught:
                request.wait()
        assert request.is_done
        with pytest.raises(FileIoError, match=f"0 could be read: the file ends at byte {3 * PAGE + 100}"):
            engine.read(file, 9 * PAGE, aligned_empty(PAGE)).wait()
    text = str(caught.value)
    assert f"cannot read {path}: {10 * PAGE} bytes at offset {PAGE} were asked for" in text
    assert f"{2 * PAGE + 100} could be read: the file ends at byte {3 * PAGE + 100}." in text
    assert caught.value.errno == errno.ENODATA
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, DeepSpeedError)


def test_opening_a_file_that_is_shorter_than_needed_is_refused(engine: IoEngine, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(FileIoError, match="has 100 bytes, but 4096 were needed") as caught:
        engine.open(tmp_path / "short", PAGE)
    assert caught.value.errno == errno.ENODATA


def test_more_space_than_there_is_is_refused_before_work_and_nothing_is_left(engine: IoEngine, tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    wanted = disk.f_blocks * disk.f_frsize + PAGE
    with pytest.raises(FileIoError, match=rf"needs {wanted} bytes, \d+ are free on its disk: No space") as caught:
        engine.open(tmp_path / "file", wanted, create=True)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_a_limit_on_file_sizes_is_an_error_that_names_the_limit(engine: IoEngine, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * PAGE, hard))
    try:
        with engine.open(tmp_path / "file", create=True) as file:
            with pytest.raises(FileIoError, match=r"cannot write .*File too large. Raise the limit .*ulimit -f") as caught:
                engine.write(file, 0, noise(32 * PAGE)).wait()
            with pytest.raises(FileIoError, match="File too large"):
                engine.open(tmp_path / "other", 32 * PAGE, create=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "other").exists()


def test_a_full_disk_is_an_error_that_says_so(engine: IoEngine, tmp_path: Path) -> None:
    with (
        engine.open("/dev/full") as file,
        pytest.raises(FileIoError, match=r"No space left on device\. Free space") as caught,
    ):
        engine.write(file, 0, noise(3 * PAGE)).wait()
    assert caught.value.errno == errno.ENOSPC


def test_a_failing_disk_is_an_error_that_says_where(tmp_path: Path) -> None:
    class Failing(ThreadsBackend):
        def submit(self, transfer: Transfer) -> Ticket:
            super().submit(transfer).wait(10)
            return Failed()

    class Failed:
        def wait(self, seconds: float) -> bool:
            return True

        def outcome(self) -> Outcome:
            return Outcome(errno.EIO, 2 * PAGE)

    with IoEngine(SMALL, Failing(SMALL)) as engine, engine.open(tmp_path / "file", create=True) as file:
        request = engine.write(file, 0, noise(3 * PAGE))
        with pytest.raises(FileIoError, match=rf"{2 * PAGE} could be written: Input/output error\. The disk") as caught:
            request.wait()
    assert caught.value.errno == errno.EIO


def test_a_file_that_does_not_exist_is_named(engine: IoEngine, tmp_path: Path) -> None:
    with pytest.raises(FileIoError, match=f"cannot open {tmp_path}/none: No such file"):
        engine.open(tmp_path / "none")
    with pytest.raises(FileIoError, match=f"cannot create {tmp_path}/none/file: No such file"):
        engine.open(tmp_path / "none" / "file", create=True)


def test_a_folder_is_no_file(engine: IoEngine, tmp_path: Path) -> None:
    with pytest.raises(FileIoError, match=r"Is a directory. Give the path of a file in it"):
        engine.open(tmp_path, create=True)


def test_closed_files_are_refused(engine: IoEngine, tmp_path: Path) -> None:
    file = engine.open(tmp_path / "file", PAGE, create=True)
    file.close()
    file.close()
    for start in (engine.read, engine.write):
        with pytest.raises(FileIoError, match=r"it is closed\. Open the file") as caught:
            start(file, 0, aligned_empty(PAGE))
        assert caught.value.errno == errno.EBADF
    with pytest.raises(FileIoError, match="is closed, its length"):
        _ = file.nbytes


def test_a_descriptor_that_was_closed_by_somebody_else_is_an_error(engine: IoEngine, tmp_path: Path) -> None:
    file = engine.open(tmp_path / "file", PAGE, create=True)
    buffered_fd, direct_fd = file.buffered_fd, file.direct_fd
    file.buffered_fd = file.direct_fd = 10_000
    with pytest.raises(FileIoError, match="Bad file descriptor"):
        engine.write(file, 0, noise(PAGE)).wait()
    file.buffered_fd, file.direct_fd = buffered_fd, direct_fd
    file.close()


def test_memory_that_files_cannot_reach_is_refused(engine: IoEngine, tmp_path: Path) -> None:
    with engine.open(tmp_path / "file", PAGE, create=True) as file:
        with pytest.raises(ArgumentError, match="not contiguous"):
            engine.write(file, 0, torch.zeros(8, 8).t()[1:])
        with pytest.raises(ArgumentError, match="a tensor on meta"):
            engine.read(file, 0, torch.zeros(8, device="meta"))
        for offset in (-1, 1.5):
            with pytest.raises(ArgumentError, match=f"offset={offset}, but it is a whole number"):
                engine.read(file, offset, torch.zeros(8))  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="list was given"):
            engine.read(file, 0, [1.0])  # type: ignore[arg-type]


def test_a_file_of_another_engine_is_refused(engine: IoEngine, tmp_path: Path) -> None:
    with IoEngine(SMALL) as other, other.open(tmp_path / "file", PAGE, create=True) as file:
        with pytest.raises(ArgumentError, match="was not opened by this IoEngine"):
            engine.read(file, 0, aligned_empty(PAGE))
        other.read(file, 0, aligned_empty(PAGE)).wait()


@pytest.mark.parametrize("room", [0, 1])
def test_without_descriptors_opening_is_refused_and_none_is_lost(engine: IoEngine, tmp_path: Path, room: int) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + room, hard))
    try:
        with pytest.raises(FileIoError, match=r"Too many open files. Each open file takes two .*ulimit -n") as caught:
            engine.open(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE
    assert os.listdir("/proc/self/fd") == before


def test_settings_beyond_sense_are_refused_before_a_thread_starts() -> None:
    for name, value in (("queue_depth", 2**31), ("threads", 1000), ("block_nbytes", 2**40), ("queue_depth", 0)):
        with pytest.raises(ArgumentError, match=f"{name}={value} was given .* it is a whole number from 1 to"):
            IoSettings(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="there are only auto, io_uring, libaio, threads"):
        IoSettings(kind="aio")  # type: ignore[arg-type]


def test_closing_a_file_or_an_engine_waits_for_what_is_in_flight(tmp_path: Path, engine: IoEngine) -> None:
    data = noise(200 * PAGE)
    file = engine.open(tmp_path / "one", create=True)
    write = engine.write(file, 0, data)
    file.close()
    assert write.is_done
    other = engine.open(tmp_path / "other", create=True)
    write = engine.write(other, 0, data)
    engine.close()
    engine.close()
    assert write.is_done
    other.close()
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes() == data.numpy().tobytes()
    with pytest.raises(UsageError, match="is closed"):
        engine.open(tmp_path / "one")


def test_buffers_in_flight_outlive_their_owners(engine: IoEngine, tmp_path: Path) -> None:
    data = noise(64 * PAGE)
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    with engine.open(tmp_path / "file") as file:
        for _ in range(50):
            engine.read(file, 0, aligned_empty(64 * PAGE))
            gc.collect()
        for number in range(50):
            engine.write(file, number * 64 * PAGE, data.clone())
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes() * 50


def test_an_engine_that_is_dropped_finishes_first(tmp_path: Path) -> None:
    before = threading.active_count()
    data = noise(300 * PAGE)

    def start() -> IoRequest:
        engine = IoEngine(SMALL)
        return engine.write(engine.open(tmp_path / "file", create=True), 0, data)

    request = start()
    request.wait()
    del request
    gc.collect()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
    assert threading.active_count() == before


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("native", ["0", "1"])
def test_the_interpreter_ends_with_an_open_engine_and_finishes_writes(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_NATIVE", native)
    code = """
        import sys, torch
        from deepspeed.ops.aio.engine import IoEngine
        engine = IoEngine()
        file = engine.open(sys.argv[1], create=True)
        requests = [engine.write(file, k << 20, torch.full((1 << 20,), k, dtype=torch.uint8)) for k in range(64)]
        del requests
        """
    done = run(code, str(tmp_path / "file"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    data = (tmp_path / "file").read_bytes()
    assert all(data[k << 20] == data[((k + 1) << 20) - 1] == k for k in range(64))


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_forked_process_is_settled_to_make_its_own_engine(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_NATIVE", native)
    code = """
        import os, sys, torch
        from deepspeed.errors import UsageError
        from deepspeed.ops.aio.engine import IoEngine
        torch.set_num_threads(1)  # torch's own threads do not survive a fork
        engine = IoEngine()
        file = engine.open(sys.argv[1], create=True)
        data = torch.arange(1 << 20)
        engine.write(file, 0, data).wait()
        if os.fork() == 0:
            try:
                engine.read(file, 0, torch.empty_like(data))
            except UsageError as error:
                print("refused:", "was forked" in str(error), flush=True)
            file.close()
            engine.close()
            with IoEngine() as own:
                found = torch.empty_like(data)
                own.read(own.open(sys.argv[1]), 0, found).wait()
                print("own:", torch.equal(found, data), flush=True)
        else:
            print("child:", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
            found = torch.empty_like(data)
            engine.read(file, 0, found).wait()
            print("parent:", torch.equal(found, data))
        """
    done = run(code, str(tmp_path / "file"))
    assert done.stdout.splitlines() == ["refused: True", "own: True", "child: 0", "parent: True"]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process has mapped on Linux alone")
def test_threads_of_the_twin_take_little_of_a_limit_of_memory() -> None:
    def mapped_nbytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))

    before, usual = mapped_nbytes(), threading.stack_size()
    backend = ThreadsBackend(IoSettings(queue_depth=8, threads=2))
    assert mapped_nbytes() - before < 16 << 20
    assert threading.stack_size() == usual
    backend.close()
