"""How few and how many hosts an elastic job may have: the flags of the two command lines made one.

Pure. Called by `runner`, `elastic_front` and `elastic_host`.
"""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from deepspeed.launcher.hostfile import ResourceError

__all__ = ["ElasticLimits", "check_limits", "elastic_words", "limits_of", "range_after_flag"]

_RANGE = re.compile(r"\d+:\d+")


class ElasticLimits(NamedTuple):
    """Hosts of an elastic job."""

    fewest: int
    most: int


def limits_of(args: argparse.Namespace, hosts: int) -> ElasticLimits:
    """The limits that flags give for a job that may use `hosts` hosts.

    Args:
        args: with `min_elastic_nodes` and `max_elastic_nodes`, -1 where they were not given, and `max_restarts`.
        hosts: hosts that the job knows.

    Raises:
        ResourceError: they contradict each other or the hosts.
    """
    fewest = 1 if args.min_elastic_nodes == -1 else args.min_elastic_nodes
    most = hosts if args.max_elastic_nodes == -1 else args.max_elastic_nodes
    if not 1 <= fewest <= most <= hosts:
        raise ResourceError(
            f"an elastic job of {fewest} to {most} hosts, where {hosts} are chosen: needed 1 <= MIN <= MAX <= {hosts}. "
            "Change --elastic_training MIN:MAX (--min_elastic_nodes, --max_elastic_nodes), or choose more hosts."
        )
    if args.max_restarts < 0:
        raise ResourceError(f"--max_restarts {args.max_restarts}: needed 0 or more.")
    return ElasticLimits(fewest, most)


def check_limits(args: argparse.Namespace, hosts: int) -> None:
    """See that an elastic job of up to `hosts` hosts can be, and that only such a job has limits.

    Raises:
        ResourceError: see `limits_of`; or there are limits, but no `--elastic_training`.
    """
    if args.elastic_training:
        limits_of(args, hosts)
    elif (args.min_elastic_nodes, args.max_elastic_nodes) != (-1, -1):
        raise ResourceError(
            "--min_elastic_nodes and --max_elastic_nodes need --elastic_training. Give it, or leave them out."
        )


def elastic_words(args: argparse.Namespace) -> list[str]:
    """The flags of `launch` for what flags of `deepspeed` ask; empty for a job that is not elastic."""
    if not args.elastic_training:
        return []
    limits = [f"--{flag}={getattr(args, flag)}" for flag in ("min_elastic_nodes", "max_elastic_nodes", "max_restarts")]
    return ["--enable_elastic_training", *limits]


def range_after_flag(words: list[str], script_at: int) -> tuple[int, int] | None:
    """The MIN:MAX that stands where argparse saw the script, right behind `--elastic_training`; None when it is a script.

    Args:
        words: a command line.
        script_at: where in it the script was found.
    """
    if script_at < 1 or words[script_at - 1] != "--elastic_training" or not _RANGE.fullmatch(words[script_at]):
        return None
    fewest, most = words[script_at].split(":")
    return int(fewest), int(most)
