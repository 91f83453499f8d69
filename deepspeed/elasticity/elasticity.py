"""The functions that schedulers and clients call about the block `elasticity`.

Does not live here: the arithmetic (`config.elastic_batch`), the limits as an object (`config`). Called by users, by
`command`, and by `deepspeed.initialize`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from deepspeed.common.logging import log_dist
from deepspeed.config.elastic_batch import ElasticBatch, elastic_batch, elastic_sizes
from deepspeed.elasticity.config import ElasticityConfig
from deepspeed.errors import ElasticityConfigError, ElasticityError

__all__ = ["compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config"]

SCHEDULER_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
"""JSON of the block that a scheduler scales the job by."""

_OLDEST_VERSION = (0, 3, 8)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a configuration, as a dict, asks for an elastic batch."""
    block = ds_config.get("elasticity")
    return isinstance(block, Mapping) and block.get("enabled", False) is True


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The global batch of an elastic job, and the numbers of ranks that can train with it.

    Args:
        ds_config: the whole configuration as a dict.
        target_deepspeed_version: version that will run the job.
        world_size: ranks of the job, model-parallel ones included. 0: not known yet, or what the variable WORLD_SIZE says
            where a number of ranks is needed.
        return_microbatch: also give the micro-batch of these ranks. It is given whenever `world_size` is.

    Returns:
        (train_batch_size, counts of data-parallel ranks) or (train_batch_size, counts, train_micro_batch_size_per_gpu).

    Raises:
        ElasticityError: a version that has no elasticity.
        ElasticityConfigError: the block is not there, not enabled or wrong; or a micro-batch is asked for without ranks.
        ElasticityIncompatibleWorldSize: the batch does not divide over these ranks.
    """
    _check_version(target_deepspeed_version)
    if not isinstance(ds_config, Mapping) or "elasticity" not in ds_config:
        raise ElasticityConfigError("the configuration has no block elasticity. Give one, with enabled: true.")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity is not enabled. Set "enabled": true in the block to get an elastic batch.')
    block = ElasticityConfig(ds_config["elasticity"])
    if not world_size and not (return_microbatch or block.version >= 0.2):
        return _pair(elastic_batch(block))
    ranks = world_size or _started_ranks()
    if ranks is None:
        if return_microbatch:
            raise ElasticityConfigError(
                "return_microbatch without world_size, and WORLD_SIZE is not set: the micro-batch depends on the number of "
                "ranks. Give world_size."
            )
        return _pair(elastic_batch(block))
    if not world_size and not return_microbatch:
        return _pair(elastic_batch(block, ranks))
    sizes = elastic_sizes(block, ranks)
    return sizes.train, sizes.counts, sizes.micro


def _pair(batch: ElasticBatch) -> tuple[int, list[int]]:
    return batch.train, batch.counts


def _started_ranks() -> int | None:
    """Ranks of the job that this process belongs to."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None or tuple(int(number or 0) for number in numbers.groups()) < _OLDEST_VERSION:
        needed = ".".join(map(str, _OLDEST_VERSION))
        raise ElasticityError(f"target version {version!r}: needed {needed} or newer, which have elasticity. Upgrade it.")


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """See that the job has the elastic limits that its scheduler was told, in the variable `DEEPSPEED_ELASTICITY_CONFIG`.

    Args:
        runtime_elastic_config_dict: the block `elasticity` of the job.

    Raises:
        ElasticityConfigError: they differ, or the variable holds no such block.
    """
    text = os.environ.get(SCHEDULER_VARIABLE)
    if text is None:
        log_dist(f"{SCHEDULER_VARIABLE} is not set: nothing says by which counts a scheduler scales this job")
        return
    try:
        told = json.loads(text)
    except ValueError as error:
        raise ElasticityConfigError(
            f"{SCHEDULER_VARIABLE} is no JSON ({error}). Let it hold the block elasticity."
        ) from None
    if not isinstance(told, Mapping):
        raise ElasticityConfigError(f"{SCHEDULER_VARIABLE} holds a {type(told).__name__}: needed the block elasticity.")
    theirs, ours = ElasticityConfig(told), ElasticityConfig(runtime_elastic_config_dict)
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        wanted, given = getattr(theirs, key), getattr(ours, key)
        if wanted != given:
            raise ElasticityConfigError(
                f"elasticity.{key} is {given}, but the scheduler was told {wanted} ({SCHEDULER_VARIABLE}): the job would be "
                "scaled to counts that do not fit. Give both the same."
            )
