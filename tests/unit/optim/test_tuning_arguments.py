"""Tuning flags become scheduler blocks."""

from __future__ import annotations

import argparse

import pytest
import torch

from deepspeed.optim import schedules
from deepspeed.optim.tuning_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    parse_arguments,
)


def test_defaults_are_the_published_ones() -> None:
    args = add_tuning_arguments(argparse.ArgumentParser()).parse_args([])
    assert vars(args) == {
        "lr_schedule": None,
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_step_size": 1000,
        "lr_range_test_staircase": False,
        "cycle_first_step_size": 1000,
        "cycle_first_stair_count": -1,
        "cycle_second_step_size": -1,
        "cycle_second_stair_count": -1,
        "decay_step_size": 1000,
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "decay_lr_rate": 0.0,
        "cycle_momentum": False,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "warmup_min_ratio": 0.01,
        "cos_min_ratio": 0.01,
    }


def test_flags_that_are_not_ours_are_handed_back() -> None:
    args, rest = parse_arguments(["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7", "--data", "x"])
    assert (args.lr_schedule, args.warmup_num_steps, rest) == ("WarmupLR", 7, ["--data", "x"])


@pytest.mark.parametrize("name", schedules.VALID_LR_SCHEDULES)
def test_each_block_builds_its_schedule(name: str) -> None:
    args, _ = parse_arguments(["--lr_schedule", name])
    block, reason = get_config_from_args(args)
    assert reason is None
    assert block is not None
    assert block["type"] == name
    required = {"total_num_steps": 10} if name in ("WarmupDecayLR", "WarmupCosineLR") else {}
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    getattr(schedules, name)(optimizer, **block["params"], **required)


def test_a_command_line_without_schedule_says_so() -> None:
    assert get_config_from_args(parse_arguments([])[0]) == (None, "--lr_schedule was not given on the command line")
    assert "Nope is unknown" in str(get_config_from_args(parse_arguments(["--lr_schedule", "Nope"])[0])[1])


def test_the_rate_of_a_block_is_its_highest_one() -> None:
    assert get_lr_from_config({"type": "OneCycle", "params": {"cycle_max_lr": 0.3}}) == (0.3, "")
    assert get_lr_from_config({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1}}) == (0.1, "")
    assert get_lr_from_config({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.2}}) == (0.2, "")


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({}, "type"),
        ({"type": "WarmupLR"}, "params"),
        ({"type": "WarmupLR", "params": {}}, "warmup_max_lr"),
        ({"type": "WarmupCosineLR", "params": {}}, "names no rate"),
    ],
)
def test_a_block_without_a_rate_says_what_is_missing(block: dict, reason: str) -> None:
    rate, text = get_lr_from_config(block)
    assert rate is None
    assert reason in text
