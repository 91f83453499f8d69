"""Command-line flags that name a configuration."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from deepspeed.config.arguments import add_config_arguments, config_from_args
from deepspeed.errors import ArgumentError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert add_config_arguments(parser) is parser
    return parser.parse_args(argv)


def test_the_documented_flags_are_added() -> None:
    assert vars(parse()) == {
        "deepspeed": False,
        "deepspeed_config": None,
        "deepscale": False,
        "deepscale_config": None,
    }
    assert parse("--deepspeed").deepspeed
    assert parse("--deepscale").deepscale


def test_the_config_is_found_in_a_namespace() -> None:
    assert config_from_args(parse("--deepspeed_config", "ds.json")) == "ds.json"
    assert config_from_args(parse("--deepscale_config", "ds.json")) == "ds.json"


def test_the_config_is_found_in_a_property() -> None:
    class Args:
        @property
        def deepspeed_config(self) -> dict[str, int]:
            return {"train_batch_size": 1}

    assert config_from_args(Args()) == {"train_batch_size": 1}


@pytest.mark.parametrize("args", [None, {}, {"local_rank": 0}, argparse.Namespace(device_rank=None), object()])
def test_args_without_a_config_are_accepted(args: Any) -> None:
    assert config_from_args(args) is None


def test_the_config_is_found_in_a_dict() -> None:
    assert config_from_args({"local_rank": 0, "deepspeed_config": "ds.json"}) == "ds.json"


def test_both_spellings_at_once_are_refused() -> None:
    with pytest.raises(ArgumentError, match="Keep deepspeed_config") as error:
        config_from_args(parse("--deepspeed_config", "a", "--deepscale_config", "b"))
    assert isinstance(error.value, AssertionError)
