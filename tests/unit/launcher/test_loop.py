"""`launcher.loop`: what can be read is told before a time is over."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import psutil

from deepspeed.launcher.loop import Loop
from tests.support.launching import wait_until

WAIT = """
import socket, sys, time
from deepspeed.launcher.loop import Loop
sock = socket.socket(fileno=int(sys.argv[1]))
told = []
with Loop() as loop:
    loop.watch(sock, lambda: told.append(sock.recv(100)))
    print("waits", flush=True)
    loop.wait(time.monotonic() + 0.5)
print(told, flush=True)
"""


def test_what_came_while_the_process_was_stopped_is_settled_though_the_time_is_over() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-c", WAIT, str(theirs.fileno())]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, pass_fds=(theirs.fileno(),)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, "it waits in the kernel")
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
            ours.send(b"beat")
            time.sleep(0.7)  # its time is over by then
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "[b'beat']\n"


def test_a_wait_ends_with_its_time_and_calls_nobody_in_vain() -> None:
    ours, theirs = socket.socketpair()
    told: list[str] = []
    with ours, theirs, Loop() as loop:
        loop.watch(theirs, lambda: told.append("ready"))
        began = time.monotonic()
        loop.wait(began + 0.05)
        assert time.monotonic() - began >= 0.05
        assert told == []
        ours.send(b"x")
        loop.wait(began)  # over already
        assert told == ["ready"]
        loop.forget(theirs)
        loop.wait(began)
        assert told == ["ready"]
