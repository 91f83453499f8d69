"""Command-line flags for tuning a schedule, and the config block they describe.

Called by user scripts only (`deepspeed.runtime.lr_schedules`); the engine reads the config.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from deepspeed.optim.schedules import (
    LR_RANGE_TEST,
    ONE_CYCLE,
    VALID_LR_SCHEDULES,
    WARMUP_COSINE_LR,
    WARMUP_DECAY_LR,
    WARMUP_LR,
)

_FLAGS: dict[str, tuple[type, object, str]] = {
    "lr_range_test_min_lr": (float, 0.001, "first rate of the range test"),
    "lr_range_test_step_rate": (float, 1.0, "growth per interval of the range test, as a share of its first rate"),
    "lr_range_test_step_size": (int, 1000, "steps of one interval of the range test"),
    "lr_range_test_staircase": (bool, False, "grow only at the end of an interval"),
    "cycle_first_step_size": (int, 1000, "steps of the cycle's rise"),
    "cycle_first_stair_count": (int, -1, "jumps of the cycle's rise; -1 is a straight line"),
    "cycle_second_step_size": (int, -1, "steps of the cycle's fall; -1 takes those of the rise"),
    "cycle_second_stair_count": (int, -1, "jumps of the cycle's fall; -1 is a straight line"),
    "decay_step_size": (int, 1000, "steps of one decay interval after the cycle"),
    "cycle_min_lr": (float, 0.01, "lowest rate of the cycle"),
    "cycle_max_lr": (float, 0.1, "highest rate of the cycle"),
    "decay_lr_rate": (float, 0.0, "decay of the rate per interval"),
    "cycle_momentum": (bool, False, "move the momentum against the rate"),
    "cycle_min_mom": (float, 0.8, "lowest momentum of the cycle"),
    "cycle_max_mom": (float, 0.9, "highest momentum of the cycle"),
    "decay_mom_rate": (float, 0.0, "growth of the momentum per decay interval"),
    "warmup_min_lr": (float, 0, "rate at the start of the warm-up"),
    "warmup_max_lr": (float, 0.001, "rate at the end of the warm-up"),
    "warmup_num_steps": (int, 1000, "steps of the warm-up"),
    "warmup_type": (str, "log", "shape of the warm-up: log or linear"),
    "warmup_min_ratio": (float, 0.01, "share of the rate at the start of the cosine warm-up"),
    "cos_min_ratio": (float, 0.01, "share of the rate at the end of the cosine"),
}

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
_KEYS: dict[str, tuple[str, ...]] = {
    LR_RANGE_TEST: tuple(key for key in _FLAGS if key.startswith("lr_range_test_")),
    ONE_CYCLE: tuple(key for key in _FLAGS if key.startswith(("cycle_", "decay_"))),
    WARMUP_LR: _WARMUP,
    WARMUP_DECAY_LR: _WARMUP,
    WARMUP_COSINE_LR: ("warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
}
_RATE_KEY = {
    LR_RANGE_TEST: "lr_range_test_min_lr",
    ONE_CYCLE: "cycle_max_lr",
    WARMUP_LR: "warmup_max_lr",
    WARMUP_DECAY_LR: "warmup_max_lr",
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and one flag per schedule parameter to `parser`, and return it."""
    group = parser.add_argument_group("Convergence Tuning", "Learning-rate schedule")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for key, (kind, default, text) in _FLAGS.items():
        if kind is bool:
            group.add_argument(f"--{key}", default=default, action="store_true", help=text)
        else:
            group.add_argument(f"--{key}", type=kind, default=default, help=f"{text} (default {default})")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Read the tuning flags from `argv` (None: the process's own); returns them and what was not understood."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args(argv)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Turn tuning flags into a scheduler block: `(block, None)`, or `(None, reason)` when they name no schedule.

    -1 stands for "not given" in the cycle's second half and stair counts, so such values are left out of the block.
    """
    schedule = getattr(args, "lr_schedule", None)
    if schedule is None:
        return None, "--lr_schedule was not given on the command line"
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"--lr_schedule {schedule} is unknown; choose from {', '.join(VALID_LR_SCHEDULES)}"
    given = {key: getattr(args, key, None) for key in _KEYS[schedule]}
    params = {key: value for key, value in given.items() if value is not None and value != -1}
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Rate that a scheduler block names for the optimizer: `(rate, "")`, or `(None, reason)`."""
    schedule = config.get("type")
    if schedule is None:
        return None, 'the scheduler block has no "type"'
    if "params" not in config:
        return None, 'the scheduler block has no "params"'
    key = _RATE_KEY.get(schedule)
    if key is None:
        return None, f'schedule type "{schedule}" names no rate; give "lr" to the optimizer'
    if key not in config["params"]:
        return None, f'params of "{schedule}" lack "{key}"'
    return config["params"][key], ""
