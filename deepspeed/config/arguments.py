"""The command-line flags that name a configuration.

Lives here: adding them to a parser and reading them back. Does not live here: parsing the configuration. Called by
`deepspeed.add_config_arguments` and `deepspeed.initialize`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from deepspeed.common.logging import warn_once
from deepspeed.config.load import Source
from deepspeed.errors import ArgumentError

__all__ = ["add_config_arguments", "config_from_args"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "DeepSpeed" with `--deepspeed`, `--deepspeed_config` and their two old spellings; return the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="say that this run uses DeepSpeed; scripts read it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    group.add_argument("--deepscale", action="store_true", help="old spelling of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="old spelling of --deepspeed_config")
    return parser


def config_from_args(args: object) -> Source | None:
    """Return what `deepspeed_config` holds, or None when it is absent or empty.

    Args:
        args: a Namespace, any object (an attribute or property may hold a path, base64 or a dict), a dict, or None.

    Raises:
        ArgumentError: when the old spelling `deepscale_config` is given as well.
    """
    config = _get(args, "deepspeed_config")
    old = _get(args, "deepscale_config")
    if old is None:
        return config
    if config is not None:
        raise ArgumentError(
            f"args has both deepspeed_config={config!r} and its old spelling deepscale_config={old!r}; needed one. "
            "Keep deepspeed_config."
        )
    warn_once("deepscale_config", "--deepscale_config is deprecated: use --deepspeed_config")
    return old


def _get(args: object, name: str) -> Source | None:
    value: Source | None = args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
    return value
