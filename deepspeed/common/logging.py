"""One logger tree, named `DeepSpeed`, that knows its rank.

Lives here: the logger, its only handler, messages for chosen ranks, warnings given once. Does not live here: what is
worth a message. Everyone calls it; `comm.world` tells it the rank.

[Note: who prints] Records propagate to Python's root logger. When the user has configured that (`logging.basicConfig`, a
test runner, a notebook), the user's handlers print them and ours stays quiet; otherwise ours prints to standard error.
So nothing is printed twice, and a program that never heard of logging still sees the messages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Sequence

from deepspeed.errors import ArgumentError

__all__ = [
    "forget_warnings",
    "get_logger",
    "get_rank",
    "log_dist",
    "log_dist_once",
    "logger",
    "set_log_level_from_string",
    "set_rank",
    "warn_once",
]

_ROOT_NAME = "DeepSpeed"
_FORMAT = "[%(asctime)s] [%(levelname)s] [%(where)s%(name)s] %(message)s"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

logger = logging.getLogger(_ROOT_NAME)
"""The root of our tree, a plain `logging.Logger`; clients set its level and add handlers to it."""


class _Handler(logging.Handler):
    """Prints to standard error, with the rank, unless the user's own handlers print ([Note: who prints])."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: int | None = None
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        record.where = "" if self.rank is None else f"rank {self.rank} "
        sys.stderr.write(self.format(record) + "\n")  # looked up each time: test runners and notebooks replace it


_handler = _Handler()
_warned: set[Hashable] = set()

if not logger.handlers:
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)


def get_logger(module_name: str) -> logging.Logger:
    """Return the logger of one of our modules: `deepspeed.engine.engine` gets `DeepSpeed.engine.engine`."""
    return logging.getLogger(_ROOT_NAME + module_name.removeprefix("deepspeed"))


def set_rank(rank: int | None) -> None:
    """Say which global rank this process is; None takes it back. Called by `comm.world` when the process group starts."""
    _handler.rank = rank


def get_rank() -> int:
    """Return the rank that `set_rank` was told, or 0: a process without a process group counts as the first."""
    return _handler.rank or 0


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on some ranks only.

    Args:
        message: the finished text.
        ranks: global ranks that log it; None means rank 0, a -1 among them means all.
        level: a level of the `logging` module.
    """
    if _is_chosen(ranks):
        logger.log(level, "%s", message, stacklevel=2)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, but each text is logged once in the life of the process."""
    if _is_chosen(ranks) and _is_first((_ROOT_NAME, message)):
        logger.log(level, "%s", message, stacklevel=2)


def warn_once(key: Hashable, message: str, *args: object, ranks: Sequence[int] | None = None) -> None:
    """Warn once per `key` in the life of the process.

    Args:
        key: what the warning is about, for example the config key or function name.
        message: what the user should change, with `%` placeholders for `args`.
        args: values for the placeholders.
        ranks: global ranks that warn; None means rank 0, a -1 among them means all.
    """
    if _is_chosen(ranks) and _is_first(key):
        logger.warning(message, *args, stacklevel=2)


def forget_warnings() -> None:
    """Let every once-only message appear again; for tests."""
    _warned.clear()


def set_log_level_from_string(level: str, target: logging.Logger | None = None) -> None:
    """Set the level of `target` (our logger when None) by name.

    Args:
        level: debug, info, warning, error or critical, in any case.
        target: the logger to set.

    Raises:
        ArgumentError: for any other name.
    """
    if level.lower() not in _LEVELS:
        raise ArgumentError(f"log level {level!r} is unknown; give one of {', '.join(_LEVELS)}.")
    (target or logger).setLevel(_LEVELS[level.lower()])


def _is_chosen(ranks: Sequence[int] | None) -> bool:
    return get_rank() == 0 if ranks is None else -1 in ranks or get_rank() in ranks


def _is_first(key: Hashable) -> bool:
    if key in _warned:
        return False
    _warned.add(key)
    return True
