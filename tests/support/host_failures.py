"""What can go wrong with a job on several hosts, each as something that is really done to it, and what must then be seen.

`tests/jobs/test_hosts_ends.py` does each of these once, `benchmarks/host_failures.py` many times. Every rank has a helper in
a session of its own, which nothing but the launcher's care ends. All hosts share the folder of the job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.hosts import LOCAL_FOLDER, Host, Hosts, inner
from tests.support.launching import Job, wait_until

__all__ = ["FAILURES", "LAUNCHERS", "Failure", "Outcome", "Running", "break_job"]

REACHABLE_SECONDS = 5.0
UNREACHABLE_SECONDS = 10.0
LAUNCHERS = ("pdsh", "openmpi", "mpich", "slurm", "no_ssh")
_MPI = ("pdsh", "openmpi", "mpich", "slurm")
_ALL = LAUNCHERS
_PORT = 29500

SCRIPT = """
import os, subprocess, sys, time
rank = int(os.environ["RANK"])
subprocess.Popen(["sleep", "300"], start_new_session=True)
print(f"rank {rank} works", flush=True)
BEFORE
with open(f"ready{rank}", "w"): pass
if rank == 3:
    while not os.path.exists("go"): time.sleep(0.02)
    print("last words", flush=True)
    FAIL
while True: time.sleep(300)
"""

_STUBBORN = """
import signal
def note(signum, frame):
    with open(f"got{rank}", "a") as file: file.write(signal.Signals(signum).name + " ")
for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, note)
"""

# Ranks that are always inside a collective: their peers meet an error as soon as one ends.
_COLLECTIVE = """
import threading, torch, deepspeed
deepspeed.init_distributed()
def work():
    while True: deepspeed.comm.all_reduce(torch.ones(1000))
if rank != 3: threading.Thread(target=work).start()
"""


@dataclass
class Running:
    """A job that runs on all hosts."""

    cluster: Hosts
    folder: Path
    launcher: str
    jobs: list[Job]
    """What the user started: one command, or with no_ssh one per host."""

    def processes(self, host: Host | None = None) -> list[psutil.Process]:
        """The job's processes, on all hosts or on one, without what only waits to be reaped and what leads onto a host."""
        marks = {job.mark for job in self.jobs}
        leading = {job.process.pid for job in self.jobs}
        on_host = None if host is None else {process.pid for process in host.processes()}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get("DS_TEST_MARK") in marks and process.status() != psutil.STATUS_ZOMBIE
                if is_ours and process.pid not in leading and (on_host is None or process.pid in on_host):
                    found.append(process)
        return found

    def launchers(self, host: Host) -> list[psutil.Process]:
        """The launchers on `host`, each guard before what it guards."""
        found = [each for each in self.processes(host) if "deepspeed.launcher.launch" in each.cmdline()]
        return sorted(found, key=lambda each: len(each.parents()))

    @property
    def front_end(self) -> psutil.Process:
        """The command that the user started (with no_ssh that of the first host)."""
        return inner(self.jobs[0].process)

    @property
    def output(self) -> str:
        """What the user sees."""
        return "".join(job.output for job in self.jobs)

    def go(self) -> None:
        """Let rank 3 do what its script says."""
        (self.folder / "go").touch()


@dataclass(frozen=True)
class Failure:
    """One way to break a job."""

    name: str
    act: Callable[[Running], object]
    """Breaks it, and returns at once."""

    status: int | None
    """What the command must exit with; None: it is killed itself."""

    told: str
    """What the user must read, exactly once; with no_ssh, on each host."""

    launchers: tuple[str, ...] = ("pdsh",)
    fail: str = ""
    before: str = ""
    seconds: float = REACHABLE_SECONDS
    words: tuple[str, ...] = ()
    unreachable: int | None = None
    """Number of a host that can do nothing; after all others have ended it is mended, and must clear up as well."""

    prepare: Callable[[Hosts], object] = field(default=lambda _cluster: None)

    @property
    def is_waited_for(self) -> bool:
        """Whether its end has waits of seconds in it, so that little of its time is left for a busy machine."""
        return self.before == _STUBBORN or self.seconds > REACHABLE_SECONDS


@dataclass(frozen=True)
class Outcome:
    """What became of a job that was broken."""

    statuses: tuple[int | None, ...]
    seconds: float
    """From the break until nothing of the job was left, on the hosts that could be reached."""

    orphans: tuple[str, ...]
    """What was left when its time was over."""

    remains: tuple[str, ...]
    """Files and ports that were not given back."""

    output: str


def _signal_front_end(signum: signal.Signals, times: int = 1) -> Callable[[Running], None]:
    def act(running: Running) -> None:
        running.front_end.send_signal(signum)
        for _ in range(times - 1):
            wait_until(lambda: len(list(running.folder.glob("got*"))) == 6, "the first request has reached all ranks")
            running.front_end.send_signal(signum)

    return act


def _kill_launcher(number: int, which: int) -> Callable[[Running], None]:
    return lambda running: running.launchers(running.cluster[number])[which].kill()


def _kill_ssh(running: Running) -> None:
    for process in running.processes(running.cluster[1]):
        if process.name() == "ssh" and "node2" in process.cmdline():
            process.kill()
            return
    raise AssertionError("no ssh to node2 runs")


def _kill_session(running: Running) -> None:
    host = running.cluster[2]
    sessions = [process for process in host.jobs() if process.name() == "sshd"]
    assert sessions, "no ssh session runs on node2"
    for session in sessions:
        with contextlib.suppress(psutil.NoSuchProcess):
            session.kill()


def _fill_logs(cluster: Hosts) -> None:
    for host in cluster:
        done = host.run("sh", "-c", f"mkdir -p {_LOGS} && mount -t tmpfs -o size=64k tmpfs {_LOGS}")
        assert done.returncode == 0, done.stderr


_LOGS = LOCAL_FOLDER / "logs"
_LOST = "was lost: not heard from for"

FAILURES = (
    Failure("exit status", Running.go, 7, "rank 3 on host node2 failed first, with exit status 7", _ALL, "sys.exit(7)"),
    Failure("exception", Running.go, 1, "[rank 3] ValueError: no such thing", fail="raise ValueError('no such thing')"),
    Failure(
        "SIGSEGV", Running.go, 139, "rank 3 on host node2 failed first, with signal 11", fail="os.kill(os.getpid(), 11)"
    ),
    Failure(
        "SIGKILL of a rank",
        Running.go,
        137,
        "rank 3 on host node2 failed first, with signal 9",
        _ALL,
        "os.kill(os.getpid(), 9)",
    ),
    Failure(
        "SIGKILL of a rank amid collectives",
        Running.go,
        137,
        "rank 3 on host node2 failed first, with signal 9",
        ("pdsh", "slurm"),
        "os.kill(os.getpid(), 9)",
        _COLLECTIVE,
    ),
    Failure(
        "SIGKILL of a host's launcher", _kill_launcher(2, -1), 255, "host node2 was lost: its launcher ended", ("pdsh",)
    ),
    Failure("SIGKILL of a launcher's guard", _kill_launcher(2, 0), 143, "the launcher on host node2 received SIGTERM"),
    Failure(
        "SIGKILL of rank 0's launcher", _kill_launcher(1, -1), 255, "host node1, where the launcher of rank 0 runs, was lost"
    ),
    Failure("SIGKILL of the command", lambda running: running.front_end.kill(), None, "", _MPI),
    Failure("Ctrl-C", _signal_front_end(signal.SIGINT), 130, "received SIGINT: ending the job", _MPI),
    Failure("SIGHUP", _signal_front_end(signal.SIGHUP), 129, "received SIGHUP: ending the job", ("pdsh", "mpich")),
    Failure("SIGTERM", _signal_front_end(signal.SIGTERM), 143, "received SIGTERM: ending the job", before=_STUBBORN),
    Failure(
        "SIGTERM twice", _signal_front_end(signal.SIGTERM, 2), 143, "received SIGTERM: ending the job", before=_STUBBORN
    ),
    Failure("lost ssh, killed here", _kill_ssh, 255, "host node2 lost the connection to the command"),
    Failure("lost ssh, killed there", _kill_session, 255, "host node2 lost the connection to the command"),
    Failure("cut cable", lambda running: running.cluster[2].cut(), 255, f"host node2 {_LOST}", seconds=UNREACHABLE_SECONDS),
    Failure(
        "black hole",
        lambda running: running.cluster[2].hole(),
        255,
        f"host node2 {_LOST}",
        seconds=UNREACHABLE_SECONDS,
    ),
    Failure(
        "frozen host",
        lambda running: running.cluster[2].freeze(),
        255,
        f"node2 {_LOST}",
        _ALL,
        seconds=UNREACHABLE_SECONDS,
        unreachable=2,
    ),
    Failure(
        "frozen host amid collectives",
        lambda running: running.cluster[2].freeze(),
        255,
        f"host node2 {_LOST}",
        before=_COLLECTIVE,
        seconds=UNREACHABLE_SECONDS,
        unreachable=2,
    ),
    Failure(
        "power loss",
        lambda running: running.cluster[2].kill(),
        255,
        f"host node2 {_LOST}",
        seconds=UNREACHABLE_SECONDS,
        unreachable=2,
    ),
    Failure(
        "memory limit",
        Running.go,
        137,
        "which the kernel sends when memory runs out",
        fail="taken = [bytearray(16 << 20) for _ in range(100)]",
        prepare=lambda cluster: cluster[2].limit_memory(400 << 20),
    ),
    Failure(
        "full disk for logs",
        Running.go,
        1,
        "; its disk is full",
        fail="\n    while True: print('x' * 1000, flush=True)",
        words=("--enable_each_rank_log", str(_LOGS)),
        prepare=_fill_logs,
    ),
)


@contextlib.contextmanager
def _started(
    cluster: Hosts, folder: Path, launcher: str, words: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Running]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "-H", str(cluster.hostfile)]
    with contextlib.ExitStack() as ending:
        jobs = []
        if launcher == "no_ssh":
            for number, host in enumerate(cluster):
                place = ["--no_ssh", "--node_rank", str(number), "--master_addr", cluster[1].address]
                jobs.append(ending.enter_context(Job(folder, [*place, *words], environment, command=host.command(*command))))
        else:
            front_end = cluster[1].command(*command, "--launcher", launcher)
            jobs.append(ending.enter_context(Job(folder, words, environment, command=front_end)))
        running = Running(cluster, folder, launcher, jobs)
        wait_until(lambda: _is_ready(running), "all ranks are ready")
        yield running


def _is_ready(running: Running) -> bool:
    assert all(job.process.poll() is None for job in running.jobs), running.output
    return len(list(running.folder.glob("ready*"))) == 6


def break_job(
    failure: Failure, cluster: Hosts, folder: Path, launcher: str = "pdsh", environment: Mapping[str, str] | None = None
) -> Outcome:
    """Start a job in the empty `folder`, break it, and see what becomes of it. The hosts are then as before."""
    (folder / "job.py").write_text(SCRIPT.replace("BEFORE", failure.before).replace("FAIL", failure.fail or "pass"))
    failure.prepare(cluster)
    before = Path.cwd()
    os.chdir(folder)  # `Host.command` takes the folder of whoever calls it
    try:
        with _started(cluster, folder, launcher, ["--save_pid", *failure.words, "job.py"], environment or {}) as running:
            began = time.monotonic()
            failure.act(running)
            return _watched(failure, running, began)
    finally:
        os.chdir(before)
        cluster.reset()


def _watched(failure: Failure, running: Running, began: float) -> Outcome:
    """Wait for the end of everything, at most as long as it may take."""
    away = None if failure.unreachable is None else running.cluster[failure.unreachable]
    left = _left(running, away)
    while left and time.monotonic() < began + failure.seconds + 10:  # longer than allowed, to see how much longer
        time.sleep(0.02)
        left = _left(running, away)
    seconds = time.monotonic() - began
    orphans = [f"{process.pid}" for process in left]
    if away is not None and away.is_up:
        away.thaw()
        away.heal()
        away.fill()
        for job in running.jobs:
            job.process.send_signal(signal.SIGCONT)  # what leads onto a host stops with what it leads to
        mended = time.monotonic()
        while (rest := running.processes(away)) and time.monotonic() < mended + failure.seconds:
            time.sleep(0.02)
        orphans += [f"on {away.name}: {process.pid}" for process in rest]
    statuses = tuple(job.process.poll() if orphans else job.wait(5) for job in running.jobs)
    return Outcome(statuses, seconds, tuple(orphans), tuple(_remains(running)), running.output)


def _left(running: Running, away: Host | None) -> list[psutil.Process]:
    gone = set() if away is None else {process.pid for process in away.processes()}
    return [process for process in running.processes() if process.pid not in gone]


def _remains(running: Running) -> Iterator[str]:
    yield from (str(path) for path in (running.folder / "tmp").iterdir())
    for host in running.cluster:
        if host.is_up:
            lines = host.run("cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
            if any(
                line.split()[1].endswith(f":{_PORT:04X}") and line.split()[3] == "0A"
                for line in lines
                if ":" in line.split()[0]
            ):
                yield f"port {_PORT} on {host.name}"


def clear(folder: Path) -> None:
    """Make `folder` new and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
