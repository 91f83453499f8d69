"""The command's side of a job on several hosts, with a back end of our own and nobody to talk to."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from deepspeed.launcher.hostfile import encode_world_info
from deepspeed.launcher.link.front import FrontEnd
from deepspeed.launcher.processes import start_process

pytestmark = pytest.mark.alone  # limits of seconds


@pytest.fixture
def front_end() -> FrontEnd:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]  # nobody listens there
    return FrontEnd("127.0.0.1", port, encode_world_info({"a": [0], "b": [0]}), "token")


def _back_end(code: str) -> subprocess.Popen[bytes]:
    return start_process([sys.executable, "-c", code], os.environ, signal.SIGTERM)


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_without_a_link_the_back_ends_word_counts(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, code: str, status: int, is_settled: bool
) -> None:
    if not is_settled:  # as on a kernel before 5.3

        def pidfd_open(_pid: int) -> int:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    assert front_end.attend(_back_end(code)) == status


def test_without_a_link_a_request_ends_the_back_end(front_end: FrontEnd) -> None:
    began = time.monotonic()
    back_end = _back_end("import time; time.sleep(300)")
    asking = threading.Timer(0.3, front_end.stop, [signal.SIGINT])
    asking.start()
    assert front_end.attend(back_end) == 130
    assert time.monotonic() - began < 5
    asking.join()


def test_a_host_whose_session_fails_before_all_have_begun_ends_the_job() -> None:
    """A back end with one child of two, as pdsh has it when ssh does not find the other host."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    world = encode_world_info({"a": [0], "b": [0]})
    front_end = FrontEnd("127.0.0.1", port, world, "token", has_session_per_host=True)
    began = time.monotonic()
    code = "import subprocess; subprocess.run(['false']); subprocess.run(['sleep', '300'])"
    assert front_end.attend(_back_end(code)) == 255
    assert time.monotonic() - began < 8


def test_a_job_that_was_over_before_the_front_end_got_through_has_its_back_ends_status() -> None:
    """Sessions of a quick job end one after the other; none of them tells that a host will never join."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    front = FrontEnd("127.0.0.1", port, encode_world_info({"a": [0], "b": [0]}), "token", has_session_per_host=True)
    code = (
        "import subprocess, sys; all = [subprocess.Popen([sys.executable, '-c', f'import time; time.sleep({s})'])"
        " for s in (1.2, 2.4)]; [each.wait() for each in all]"
    )
    assert front.attend(_back_end(code)) == 0
