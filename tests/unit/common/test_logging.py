from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deepspeed.common import logging as ours
from deepspeed.errors import ArgumentError


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    level = ours.logger.level
    ours.forget_warnings()
    yield
    ours.set_rank(None)
    ours.forget_warnings()
    ours.logger.setLevel(level)


def _printed_by(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_the_logger_is_the_stdlib_logger_named_deepspeed() -> None:
    assert ours.logger is logging.getLogger("DeepSpeed")
    assert ours.logger.level == logging.INFO


def test_module_loggers_are_children_of_it() -> None:
    child = ours.get_logger("deepspeed.engine.engine")
    assert child.name == "DeepSpeed.engine.engine"
    assert ours.get_logger("deepspeed") is ours.logger
    ours.logger.setLevel(logging.ERROR)
    assert not child.isEnabledFor(logging.WARNING)


def test_log_dist_logs_on_rank_zero_unless_told_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    ours.set_rank(1)
    ours.log_dist("default")
    ours.log_dist("named", ranks=[0, 1])
    ours.log_dist("all", ranks=[-1])
    ours.log_dist("other", ranks=[2])
    assert caplog.messages == ["named", "all"]


def test_a_process_without_a_rank_counts_as_the_first(caplog: pytest.LogCaptureFixture) -> None:
    ours.log_dist("hello 100%s", level=logging.WARNING)
    assert caplog.record_tuples == [("DeepSpeed", logging.WARNING, "hello 100%s")]
    assert caplog.records[0].filename == "test_logging.py"


def test_once_only_messages_appear_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        ours.log_dist_once("a text")
        ours.warn_once("key", "set %s to %d", "x", 3)
        ours.warn_once(("key", 2), "another")
    assert caplog.messages == ["a text", "set x to 3", "another"]


def test_a_warning_is_for_rank_zero_or_the_ranks_named(caplog: pytest.LogCaptureFixture) -> None:
    ours.set_rank(3)
    ours.warn_once("a", "silent here")
    ours.warn_once("b", "mine", ranks=[3])
    assert caplog.messages == ["mine"]


@pytest.mark.parametrize(("name", "level"), [("debug", 10), ("INFO", 20), ("critical", 50)])
def test_levels_are_set_by_name(name: str, level: int) -> None:
    other = logging.getLogger("someone.else")
    ours.set_log_level_from_string(name)
    ours.set_log_level_from_string(name, other)
    assert ours.logger.level == other.level == level


def test_an_unknown_level_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"'loud' is unknown; give one of debug, info"):
        ours.set_log_level_from_string("loud")


def test_without_handlers_of_the_user_records_go_to_standard_error_with_the_rank() -> None:
    printed = _printed_by(
        "from deepspeed.common.logging import get_logger, set_rank\n"
        "set_rank(5)\n"
        "get_logger('deepspeed.comm').warning('late %s', 'peer')\n"
    )
    assert printed.count("late peer") == 1
    assert "[WARNING] [rank 5 DeepSpeed.comm] late peer" in printed


def test_with_handlers_of_the_user_records_are_printed_once_in_the_users_format() -> None:
    printed = _printed_by(
        "import logging; logging.basicConfig(format='USER %(message)s')\n"
        "from deepspeed.common.logging import logger\n"
        "logger.info('hello')\n"
    )
    assert printed == "USER hello\n"
