"""What a host of an elastic job does next, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.elasticity.policy import CALM_SECONDS, LOST_SECONDS, Action, Attempts, MemberState, Seen, decide

RUNNING, FINISHED, FAILED = MemberState.RUNNING, MemberState.FINISHED, MemberState.FAILED
RESTARTING, LEFT = MemberState.RESTARTING, MemberState.LEFT


@pytest.mark.parametrize(
    ("own", "more", "action"),
    [
        (RUNNING, {}, Action.GO_ON),
        (RUNNING, {"peers": [RUNNING, RUNNING]}, Action.GO_ON),
        (RUNNING, {"peers": [RUNNING, FAILED]}, Action.GO_ON),  # its own launcher decides; it will say "restarting"
        (RUNNING, {"peers": [RUNNING, RESTARTING]}, Action.RESTART),
        (RUNNING, {"peers": [RUNNING], "lost": 1}, Action.RESTART),
        (RUNNING, {"waiting": 1}, Action.RESTART),
        (RUNNING, {"waiting": 1, "peers": [FINISHED]}, Action.GO_ON),
        (RUNNING, {"peers": [FINISHED, RUNNING]}, Action.GO_ON),
        (RUNNING, {"has_ended": True}, Action.END),
        (FAILED, {"attempts_left": 1}, Action.RETRY),
        (FAILED, {"attempts_left": 1, "lost": 1}, Action.RESTART),
        (FAILED, {"attempts_left": 0}, Action.GIVE_UP),
        (FAILED, {"attempts_left": 0, "peers": [RUNNING], "failed_seconds": LOST_SECONDS / 2}, Action.GO_ON),
        (FAILED, {"attempts_left": 0, "peers": [RUNNING], "failed_seconds": LOST_SECONDS + 1}, Action.GIVE_UP),
        (FAILED, {"attempts_left": 0, "peers": [RUNNING], "lost": 1}, Action.RESTART),
        (FAILED, {"attempts_left": 1, "has_ended": True}, Action.END),
        (FINISHED, {}, Action.DONE),
        (FINISHED, {"peers": [FINISHED, LEFT]}, Action.DONE),
        (FINISHED, {"peers": [FINISHED, RUNNING]}, Action.GO_ON),
        (FINISHED, {"peers": [FINISHED], "waiting": 1}, Action.DONE),
        (FINISHED, {"peers": [RUNNING], "lost": 1}, Action.RESTART),
        (FINISHED, {"peers": [RESTARTING]}, Action.RESTART),
        (FINISHED, {"peers": [RUNNING], "has_ended": True}, Action.END),
    ],
)
def test_the_next_action(own: MemberState, more: dict[str, Any], action: Action) -> None:
    assert decide(Seen(own, **more)) is action


def test_failures_in_a_row_use_attempts_up() -> None:
    attempts = Attempts(2)
    attempts.failed()
    attempts.failed()
    assert attempts.left == 0


def test_a_long_run_starts_the_count_anew() -> None:
    attempts = Attempts(2)
    attempts.failed()
    attempts.ran(CALM_SECONDS - 1)
    assert attempts.left == 1
    attempts.ran(CALM_SECONDS)
    assert attempts.left == 2


def test_a_failure_that_came_with_a_lost_host_costs_nothing() -> None:
    attempts = Attempts(1)
    attempts.failed()
    attempts.joined(frozenset({"a", "b"}), frozenset({"a", "b", "c"}), by_failure=True)
    assert attempts.left == 0
    attempts.joined(frozenset({"a", "b"}), frozenset({"a"}), by_failure=True)
    assert attempts.left == 1
    attempts.joined(frozenset({"a", "b"}), frozenset({"a"}), by_failure=False)
    assert attempts.left == 1
