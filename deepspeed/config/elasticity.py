"""The block `elasticity`: batch sizes that stay the same on many numbers of ranks.

Lives here: keys and ranges. Does not live here: which sizes and counts fit (`elastic_batch`),
the environment variable of schedulers (`deepspeed.elasticity`), loading (`engine.resuming`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal, refuse
from deepspeed.config.values import NonNegativeNumber, PositiveWhole

__all__ = ["ElasticityConfig"]


def _version(value: object) -> object:
    """Read 0.1 and 0.2, as number or text."""
    if str(value) not in ("0.1", "0.2"):
        raise refuse("needed 0.1 or 0.2", "The default is 0.2.")
    return float(str(value))


class ElasticityConfig(ConfigModel):
    """`elasticity`: choose a global batch that many numbers of ranks can train with, and go on where training stood."""

    enabled: bool = False
    """Choose the batch sizes; `train_batch_size` and its relatives then stay out of the configuration."""

    max_train_batch_size: PositiveWhole | None = None
    """Upper limit of the global batch; required when enabled."""

    micro_batch_sizes: list[PositiveWhole] | None = Field(None, min_length=1)
    """Micro-batches to choose from, each > 0; required when enabled."""

    min_gpus: PositiveWhole = 1
    """Fewest ranks; > 0."""

    max_gpus: PositiveWhole = 10_000
    """Most ranks."""

    min_time: NonNegativeNumber = 0.0
    """Minutes between changes of the number of ranks; for the scheduler's information."""

    num_gpus_per_node: PositiveWhole = 1
    """Devices per node; > 0."""

    model_parallel_size: PositiveWhole = 1
    """Model-parallel ranks; above 1 with version 0.2 only."""

    prefer_larger_batch: bool = True
    """Of two batches that fit as many numbers of ranks, take the larger."""

    ignore_non_elastic_batch_info: bool = False
    """Ignore batch sizes that stand in the configuration instead of refusing them."""

    version: Annotated[float, BeforeValidator(_version)] = 0.2
    """Version of the rule, 0.1 or 0.2."""

    auto_resume: Path | None = None
    """Folder of checkpoints; `initialize` loads the newest whole one before it returns, if there is one, on any number of
    ranks. Works with and without `enabled`."""

    def check(self) -> Iterable[Refusal]:
        """Enabled, it needs its limits; versions differ in what they know."""
        if not self.enabled:
            return
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if getattr(self, key) is None:
                yield Refusal(key, "needed when elasticity is enabled", "Give it, for example 2000 and [2, 4, 6].")
        if self.max_gpus < self.min_gpus:
            yield Refusal("max_gpus", f"needed at least min_gpus, {self.min_gpus}", "Raise it.")
        if self.model_parallel_size > 1 and self.version < 0.2:
            yield Refusal("model_parallel_size", "needed 1 with version 0.1", "Use version 0.2.")
        if self.num_gpus_per_node % self.model_parallel_size:
            needed = f"needed a divisor of num_gpus_per_node, {self.num_gpus_per_node}"
            yield Refusal("model_parallel_size", needed, "Change one of the two.")
