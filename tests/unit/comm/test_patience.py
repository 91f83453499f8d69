from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deepspeed.comm.patience import Patience, ProcessIdentity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and yields as Linux does")


class _Time:
    """A clock that only sleeping and yielding move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []
        self.yields = 0

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def give_way(self) -> None:
        self.yields += 1
        self.now += 1e-5

    def patience(self, timeout_seconds: float) -> Patience:
        return Patience(timeout_seconds, lambda: self.now, self.sleep, self.give_way)


def _never() -> bool:
    return False


def test_what_is_ready_costs_no_look_yield_or_sleep() -> None:
    time = _Time()

    assert time.patience(1.0).until(lambda: True, pytest.fail)
    assert (time.sleeps, time.yields) == ([], 0)


def test_a_wait_ends_as_soon_as_it_is_ready() -> None:
    time = _Time()

    assert time.patience(10.0).until(lambda: time.now > 0.5, lambda: None)
    assert time.now < 0.51


def test_a_wait_without_end_ends_at_the_time_out() -> None:
    time = _Time()

    assert not time.patience(3.0).until(_never, lambda: None)
    assert 3.0 <= time.now < 3.01


def test_a_long_wait_yields_first_and_then_sleeps_ever_longer_up_to_a_limit() -> None:
    time = _Time()

    time.patience(3.0).until(_never, lambda: None)

    assert 10 < time.yields < 1000
    assert time.sleeps == sorted(time.sleeps)
    assert time.sleeps[0] < 5e-4
    assert time.sleeps[-1] == 1e-3


def test_a_long_wait_looks_around_about_ten_times_a_second() -> None:
    time = _Time()
    looks: list[float] = []

    time.patience(3.0).until(_never, lambda: looks.append(time.now))

    assert 25 <= len(looks) <= 30


def test_a_look_may_end_the_wait() -> None:
    def look() -> None:
        raise RuntimeError("somebody died")

    with pytest.raises(RuntimeError, match="somebody died"):
        _Time().patience(3.0).until(_never, look)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


def test_this_process_is_alive() -> None:
    me = ProcessIdentity.of(os.getpid())

    assert me is not None
    assert me.is_alive()


def test_a_child_is_alive_until_it_ends_even_while_nobody_has_asked_for_its_status(child: subprocess.Popen[bytes]) -> None:
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None
    assert identity.is_alive()

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and left a zombie

    assert not identity.is_alive()


def test_another_process_of_the_same_id_is_not_the_one_we_knew() -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None

    assert not me._replace(start_ticks=me.start_ticks - 1).is_alive()


def test_no_process_has_no_identity() -> None:
    assert ProcessIdentity.of(2**22 + 1) is None  # beyond the largest process id of Linux
