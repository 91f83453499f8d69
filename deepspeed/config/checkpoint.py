"""Blocks about saving: `checkpoint`, `nebula`, `datastates_ckpt`.

Lives here: keys and defaults. Does not live here: the format on disk (`checkpoint`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.values import PositiveNumber, PositiveWhole, UpperCase

__all__ = ["CheckpointConfig", "DataStatesConfig", "NebulaConfig", "ParallelWriteConfig", "WriterConfig"]


def _absolute(path: str | None) -> str | None:
    """A path from the folder that is the current one now: it may be another when a copy is made in the background."""
    return None if path is None else str(Path(path).absolute())


def _capital(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWriteConfig(ConfigModel):
    """`checkpoint.parallel_write`: which ranks write."""

    pipeline_stage: bool = False
    """Data-parallel ranks share the work of writing the layers of a pipeline stage."""


class WriterConfig(ConfigModel):
    """`checkpoint.writer`: how bytes get to the disk. The files are the same whatever stands here."""

    type: Annotated[Literal["MOCK", "PYTHON", "FAST"], UpperCase] = "FAST"
    """Writer, in any case. FAST goes past the page cache where the file system can, PYTHON through it. MOCK writes
    nothing, to time a run without the disk: no checkpoint comes of it."""

    decoupled: bool = False
    """Write in the background, like `async_save`, but the end of the next step of the optimizer waits for the commit."""

    io_buffer_size: PositiveWhole = 67_108_864
    """Bytes per buffer of FAST, which is one write of the system; > 0."""

    io_buffer_double: bool = True
    """Twice as many buffers: one is filled while another is written."""

    io_multiplier: PositiveWhole = 1
    """Buffers of FAST per rank, before they are doubled; > 0."""

    show_statistics: bool = False
    """Log bytes, seconds and speed of each save, on rank 0."""

    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], UpperCase] | None = None
    """Which of the ranks that hold the same values share in writing them, in any case: all (REPLICA, and when left out), one
    per processor socket, or one per machine."""


class CheckpointConfig(ConfigModel):
    """`checkpoint`: how checkpoints are saved and loaded."""

    async_save: bool = False
    """Save in the background: `save_checkpoint` copies what the rank writes into host memory and returns; the copy is
    written and committed while training goes on. The next save, a load, `engine.wait_for_checkpoint()`, `engine.destroy()`
    and the end of the process wait for it; the first four raise its error. Not a key of the original."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capital)] = "Warn"
    """What to do when ranks save under different tags, in any case."""

    load_universal: bool = False
    """Load a checkpoint in the universal layout. Every load recognises the layout by itself; kept for old files."""

    use_node_local_storage: bool = False
    """Every node writes what its own ranks need to its own disk, under the same path, and reads it from there. The nodes
    commit together or not at all. Resuming needs the same ranks on the same nodes; for anything else, and for the command
    line tools, put the nodes' folders together with `deepspeed-checkpoint merge`."""

    keep_last: PositiveWhole | None = None
    """After a save, remove older checkpoints of `save_dir`, whatever their tags, but for the newest so many; > 0. Left out:
    remove none. What `latest` names stays, and so does a folder in which there is any file of your own. Not a key of the
    original."""

    keep_every: PositiveWhole | None = None
    """Besides the newest, keep the first checkpoint of each so many global steps for good; > 0. Given without `keep_last`,
    that one is 1. Not a key of the original."""

    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig)
    """Which ranks write."""

    checkpoint_serialization: bool = True
    """Zip format of pickled files. Accepted: checkpoints hold no pickle."""

    writer: WriterConfig | None = None
    """How bytes get to the disk."""


class NebulaConfig(ConfigModel):
    """`nebula`: two tiers, a fast one for the newest checkpoints and one for those that stay.

    The original hands this block to a service of Azure (package `torch_nebula`). Here both tiers are folders, and no service
    and no package is needed: `save_dir` is the fast tier, for example on a local disk. What takes the service still:
    checkpoints in the memory of other nodes that outlive their own, and uploads to storage that is not mounted.
    """

    enabled: bool = False
    """Use two tiers."""

    nebula_load_path: Annotated[str | None, AfterValidator(_absolute)] = None
    """Folder of tags in which a load looks second, when the folder that it was given does not have the checkpoint."""

    enable_nebula_load: bool = True
    """A load also looks in `nebula_load_path` and `persistent_storage_path`."""

    persistent_storage_path: Annotated[str | None, AfterValidator(_absolute)] = None
    """Folder of tags, on any mounted file system, that checkpoints are copied to in the background. The copy is compared
    with its hashes and committed there like a save. Left out: no copies."""

    persistent_time_interval: PositiveNumber = 100.0
    """Seconds from the beginning of a copy until another may begin; checkpoints saved meanwhile are in the fast tier only;
    > 0."""

    num_of_version_in_retention: PositiveWhole = 2
    """Checkpoints that the fast tier keeps, where `checkpoint.keep_last` gives no other number; > 0. The other tier keeps
    all."""


class DataStatesConfig(ConfigModel):
    """`datastates_ckpt` (also `data_states`): saves in the background, as `checkpoint.async_save`.

    The original hands this block to the package `datastates`, whose further keys are accepted and have no effect.
    """

    model_config = ConfigDict(extra="allow")

    host_cache_size: PositiveNumber | None = None
    """The most host memory that a rank's copy of its state may take, in GB; > 0. A save in which any rank needs more is
    written in the foreground, with a warning."""
