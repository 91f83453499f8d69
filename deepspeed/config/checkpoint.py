"""Blocks about saving: `checkpoint`, `nebula`, `datastates_ckpt`.

Lives here: keys and defaults. Does not live here: the format on disk (`checkpoint`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.values import PositiveNumber, PositiveWhole, UpperCase

__all__ = ["CheckpointConfig", "DataStatesConfig", "NebulaConfig", "ParallelWriteConfig", "WriterConfig"]


def _capital(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWriteConfig(ConfigModel):
    """`checkpoint.parallel_write`: which ranks write."""

    pipeline_stage: bool = False
    """Data-parallel ranks share the work of writing the layers of a pipeline stage."""


class WriterConfig(ConfigModel):
    """`checkpoint.writer`: a faster way to the disk."""

    type: Annotated[Literal["MOCK", "PYTHON", "FAST"], UpperCase] = "FAST"
    """Writer, in any case. MOCK writes nothing."""

    decoupled: bool = False
    """Write in the background; the next accumulation boundary waits for it."""

    io_buffer_size: PositiveWhole = 67_108_864
    """Bytes per buffer; > 0."""

    io_buffer_double: bool = True
    """Fill one buffer while the other is written."""

    io_multiplier: PositiveWhole = 1
    """Buffers per writer; > 0."""

    show_statistics: bool = False
    """Log the speed of each save."""

    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], UpperCase] | None = None
    """Which data-parallel ranks share the work, in any case."""


class CheckpointConfig(ConfigModel):
    """`checkpoint`: how checkpoints are saved and loaded."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capital)] = "Warn"
    """What to do when ranks save under different tags, in any case."""

    load_universal: bool = False
    """Load a checkpoint in the universal layout. Every load recognises the layout by itself; kept for old files."""

    use_node_local_storage: bool = False
    """Every node writes and reads its own disk."""

    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig)
    """Which ranks write."""

    checkpoint_serialization: bool = True
    """Zip format of pickled files. Accepted: checkpoints hold no pickle."""

    writer: WriterConfig | None = None
    """A faster way to the disk."""


class NebulaConfig(ConfigModel):
    """`nebula`: the checkpoint service of Azure."""

    enabled: bool = False
    """Save through it; needs the package `torch_nebula`."""

    nebula_load_path: str | None = None
    """Where to load from, when not from the last save."""

    enable_nebula_load: bool = True
    """Load through it as well."""

    persistent_storage_path: str | None = None
    """Directory for checkpoints that stay."""

    persistent_time_interval: PositiveNumber = 100.0
    """Seconds between saves that stay; > 0."""

    num_of_version_in_retention: PositiveWhole = 2
    """Checkpoints kept; > 0."""


class DataStatesConfig(ConfigModel):
    """`datastates_ckpt` (also `data_states`): background saves by the package `datastates`, which reads further keys."""

    model_config = ConfigDict(extra="allow")

    host_cache_size: PositiveNumber | None = None
    """Pinned host memory for the cache, in GB; > 0."""
