"""The front end of a job on other hosts: waits for the back end's process, hears over the link why the job ends, and sees
that it ends here too.

```
   deepspeed --(starts)--> pdsh | mpirun | srun --> launchers on all hosts
       '-------- link: Stop ->, <- Stop(cause), Done -------'
```

[Note: whose word counts] pdsh, mpirun and srun each make something else of exit statuses, and wait for a frozen host for
ever. So the cause that came over the link is the job's status, and a back end that does not end soon after the job
is ended. Without a link (a firewall between here and the first host) the back end's word counts, and to end it ends the job:
launchers see that nobody reads their output any more (`hangup`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import psutil

from deepspeed.common.logging import get_logger
from deepspeed.launcher.hostfile import decode_world_info
from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.client import MemberLink
from deepspeed.launcher.link.job import linked_job
from deepspeed.launcher.link.member import Member
from deepspeed.launcher.loop import Loop
from deepspeed.launcher.processes import end_processes, signal_name

__all__ = ["FrontEnd"]

logger = get_logger("deepspeed.launcher.runner")  # the name under which users know these messages

_OUTPUT_SECONDS = 2.0
"""What a back end gets to pass on the last output and end by itself, once the job is over."""

_STOP_SECONDS = 9.0
"""What a job gets that was asked to end: 3 s for ranks, what their helpers need, and 4 s to see that a host is lost."""

_KILL_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_END_LOOK_SECONDS = 0.1
_SAME_LOOKS = 5
"""So many looks that see as many sessions say that the back end starts and ends no more: one may have failed before the
first look, and those of a job that was over before we were let in end one soon after the other."""


class FrontEnd:
    """One job's front end; see the picture.

    Args:
        address: where ranks meet, as `--master_addr`.
        port: as `--master_port`.
        world_info: as `--world_info`.
        token: what the launchers have as DS_JOB_TOKEN.
        has_session_per_host: whether the back end's process has one child per host while the host's launcher runs (pdsh).
    """

    def __init__(self, address: str, port: int, world_info: str, token: str, *, has_session_per_host: bool = False) -> None:
        hosts = decode_world_info(world_info)
        # Whether a member is a host or a rank is for the launchers to know: here the hosts are enough.
        self._job = linked_job(hosts, address, port, token, has_front_end=True, is_per_rank=False)
        self._sessions = len(hosts) if has_session_per_host else 0
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def stop(self, signum: int) -> None:
        """Ask the job to end as if by signal `signum`; a second time: without waiting for ranks to end by themselves.

        Any thread and a signal handler may call this, before and during `attend`.
        """
        with contextlib.suppress(BlockingIOError):  # what is full already says enough
            self._writer.send(bytes([signum]))

    def attend(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the job that `process`, the back end, runs, and return the job's exit status.

        Call it once, inside `adopting_orphans`. On return nothing of the job is left on this host.
        """
        others = {child.pid for child in psutil.Process().children()} - {process.pid}
        with Loop() as loop:
            member = Member(
                None, self._job.hosts[0], socket.gethostname(), os.getpid(), self._job.description, {}, self._job.token
            )
            link = MemberLink(self._job, member, loop, float("inf"))
            attendance = _Attendance(process, link, self._sessions)
            loop.watch(self._reader, lambda: attendance.asked(self._reader.recv(64)))
            with _ended(process, loop) as pause_seconds:
                while not attendance.tick(time.monotonic()):
                    loop.wait(min(attendance.next_time, time.monotonic() + pause_seconds))
                    link.tick()
            link.close()
        end_processes(spared=others, seconds=_KILL_SECONDS)
        self._reader.close()
        return attendance.told()


class _Attendance:
    """One wait for the end of a job: what is done to the back end, and when."""

    def __init__(self, process: subprocess.Popen[bytes], link: MemberLink, sessions: int) -> None:
        self._process = process
        self._link = link
        self._sessions = sessions
        self._had_all_sessions = False
        self._running = 0  # sessions at the last look
        self._same_looks = 0  # that saw as many in a row
        self._cause: Cause | None = None
        self._requests = 0
        self._said: set[str] = set()
        self._next_look = 0.0
        self._end_at = float("inf")  # when the back end is asked to end
        self._kill_at = float("inf")

    @property
    def next_time(self) -> float:
        """When `tick` must be called again."""
        times = (self._kill_at, self._next_look) if self._process.returncode is None else ()
        return min(self._link.next_time, self._end_at, *times)

    def asked(self, signums: bytes) -> None:
        """The user wants the job to end."""
        for signum in signums:
            self._requests += 1
            name = signal_name(signum)
            cause = Cause(128 + signum, f"received {name}: ending the job", signum=signum)
            if self._requests == 1:
                logger.info("%s", cause.text)
                self._said.add(cause.text)
            self._end_job(cause)

    def tick(self, now: float) -> bool:
        """Do what is to be done now; True when nothing is left to wait for."""
        has_ended = self._process.poll() is not None
        if self._link.is_over and self._end_at == float("inf"):
            self._end_at = now + _OUTPUT_SECONDS
        if has_ended:
            return self._is_settled(now)
        if now >= self._kill_at:
            self._process.kill()
        elif now >= self._end_at:
            self._end_back_end(now)
        if now >= self._next_look:
            self._look_at_sessions(now)
        return False

    def told(self) -> int:
        """Tell the user why the job ended, unless it has been told; return its exit status."""
        cause = self._link.cause or self._cause
        if cause is None:
            code = self._process.returncode
            return 128 - code if code < 0 else code
        if cause.member is None and cause.text not in self._said:
            logger.error("%s", cause.text)
        return cause.status

    def _is_settled(self, now: float) -> bool:
        """The back end has ended. Whoever is left hears of it over the link, and ends as well."""
        if self._link.is_over or not self._link.is_heard:
            return True
        if self._link.cause is None:
            status = self._process.returncode
            self._end_job(Cause(255, f"the command that started the launchers ended (status {status}) before the job"))
        return now >= self._end_at

    def _end_job(self, cause: Cause) -> None:
        now = time.monotonic()
        self._cause = self._cause or cause
        if self._link.is_heard and self._requests <= 2:
            self._link.asked(cause)
            self._end_at = min(self._end_at, now + _STOP_SECONDS)
        else:
            self._end_back_end(now)

    def _end_back_end(self, now: float) -> None:
        if self._kill_at == float("inf"):
            self._process.terminate()
            self._kill_at = now + _KILL_SECONDS

    def _look_at_sessions(self, now: float) -> None:
        """Before the start, a host whose session ends will never join, and the others would wait for it."""
        self._next_look = now + _LOOK_SECONDS
        if not self._sessions or self._link.may_start or self._link.cause is not None:
            self._next_look = float("inf")
            return
        running = _count_running_children(self._process.pid)
        self._same_looks = self._same_looks + 1 if running == self._running else 0
        self._running = running
        is_before_start = self._had_all_sessions and self._link.is_heard
        if 0 < running < self._sessions and (is_before_start or self._same_looks >= _SAME_LOOKS):
            self._end_job(Cause(255, "a host's launcher ended before the job had started: see above"))
        self._had_all_sessions = self._had_all_sessions or running == self._sessions


def _count_running_children(pid: int) -> int:
    try:
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return 0


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes], loop: Loop) -> Iterator[float]:
    """Within the context, the end of `process` ends a wait of `loop`; gives how long a wait may last all the same."""
    try:
        fd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or one before 5.3: somebody must look
        yield _END_LOOK_SECONDS
        return
    loop.watch(fd, lambda: loop.forget(fd))
    try:
        yield float("inf")
    finally:
        loop.forget(fd)
        os.close(fd)
