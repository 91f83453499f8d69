"""Shards of sharded parameters (ZeRO stage 3) that rest in a file: read for each gather, written after each update.

    file      | shard of unit 2 | shard of unit 3 | ...              this rank's own, each at a page of its own
                    | read                ^ write behind the update
                    v                     |
    buffers   | slot | slot | ...     windows of `offload.write_behind`
                    | all ranks together (`comm.staged`)
                    v
              gathered buffer

Lives here: the file and its two directions. Does not live here: which shards rest here (`offload.parameter_plan`), who
gathers when (`zero.coordinator`), shards in memory (`zero.flat`). Made by `engine.parameter_tier`, used by `zero.flat`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepspeed.comm.algorithms import Stage, Work
from deepspeed.comm.flat import Publication
from deepspeed.errors import UsageError
from deepspeed.offload.parameter_plan import ParameterPlan
from deepspeed.offload.sub_groups import PAGE_NBYTES, aligned
from deepspeed.offload.swap_folder import SwapFolder
from deepspeed.offload.write_behind import WriteBehind
from deepspeed.ops.aio.engine import IoEngine, IoFile, IoRequest, aligned_empty

__all__ = ["ParameterFile", "ParameterTier", "TieredShards"]

_FILE_NAME = "parameters"


class ParameterFile:
    """One rank's file, its space reserved, in a folder that goes with it.

    Args:
        io: moves bytes; closed with the file.
        folder: of this process's own; removed with the file.
        nbytes: of the file.

    Raises:
        FileIoError: there is no space for it; the text has the numbers.
    """

    def __init__(self, io: IoEngine, folder: SwapFolder, nbytes: int) -> None:
        self.io = io
        self._folder = folder
        self.file: IoFile = io.open(folder.path / _FILE_NAME, nbytes, create=True)
        self.writes = WriteBehind(io, self.file)

    def close(self) -> None:
        """Remove the file; a second call does nothing."""
        self.writes.close()
        self.io.close()
        self._folder.close()


class ParameterTier:
    """What rests in one rank's file, of all flat groups of an engine.

    Args:
        plan: where in the file.
        file: opened, as large as the plan says.
        stage: brings together what ranks read; its slots are as large as the plan says.
    """

    def __init__(self, plan: ParameterPlan, file: ParameterFile, stage: Stage) -> None:
        self.plan = plan
        self.file = file
        self.stage = stage
        self._has_failed = False
        self._users = 0

    @property
    def is_broken(self) -> bool:
        """Whether an error has left values in the file that nobody knows."""
        return self._has_failed or self.stage.is_broken

    def fail(self) -> None:
        """Remember that a rank could not write its file."""
        self._has_failed = True

    def check_usable(self) -> None:
        """Raise UsageError after an error."""
        if self.is_broken:
            raise UsageError(
                f"parameters rest in {self.file.file.path}, which could not be read or written before (see the first "
                "error), so they are lost. Mend the disk, call engine.destroy(), build the model and the engine anew, and "
                "load a checkpoint."
            )

    def shards(self, group: int, dtype: torch.dtype, numels: Mapping[int, int]) -> TieredShards | None:
        """What rests here of flat group number `group`; None where nothing does.

        Args:
            group: as in the plan.
            dtype: of its values.
            numels: number of a bucket -> elements of a rank's shard of it; of all buckets.
        """
        offsets = {bucket: start for (number, bucket), start in self.plan.offsets.items() if number == group}
        if not offsets:
            return None
        self._users += 1
        return TieredShards(self, dtype, offsets, {bucket: numels[bucket] for bucket in offsets})

    def leave(self) -> None:
        """One flat group is done with the tier; with the last one it ends."""
        self._users -= 1
        if self._users <= 0:
            self.close()

    def close(self) -> None:
        """Remove the file, and let go of the other ranks' buffers. Not collective; a second call does nothing."""
        self.stage.close()
        self.file.close()


class TieredShards:
    """What rests on the tier of one flat group. Starts open for writing, all zeros; see `comm.flat.FlatGatherer`."""

    def __init__(
        self, tier: ParameterTier, dtype: torch.dtype, offsets: Mapping[int, int], numels: Mapping[int, int]
    ) -> None:
        """Use `ParameterTier.shards`."""
        self.buckets = frozenset(offsets)
        """Numbers of the buckets."""
        self.version = 0
        """Counts writes."""
        self._tier = tier
        self._dtype = dtype
        self._offsets = offsets
        self._numels = numels
        self._publication = Publication()
        self._is_closed = False

    @property
    def is_broken(self) -> bool:
        """Whether an error has left values that nobody knows."""
        return self._tier.is_broken

    def fail(self) -> None:
        """A rank could not write what rests here: values are not known any more."""
        self._tier.fail()

    def check_usable(self) -> None:
        """Raise UsageError, the same on all ranks, after an error that all ranks were told of."""
        self._tier.check_usable()

    @property
    def stage(self) -> Stage:
        """What gathers go through."""
        return self._tier.stage

    def gather(self, bucket: int, into_F: Tensor) -> Work:
        """Start to read this rank's shard of `bucket` and to bring all ranks' together in `into_F`. Collective.

        Its `wait` raises FileIoError, on all ranks (`comm.staged`), when one of them could not read.
        """
        self._tier.check_usable()
        self._publication.check_published()
        offset, nbytes = self._offsets[bucket], self._numels[bucket] * self._dtype.itemsize

        def fill(slot: Tensor) -> IoRequest:
            return self._tier.file.io.read(self._tier.file.file, offset, slot[: aligned(nbytes)])

        return self.stage.gather(nbytes, fill, into_F, (offset, offset + nbytes))

    def read(self, bucket: int, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of this rank's shard of `bucket`, in new memory of the host. Blocks.

        Raises:
            FileIoError: they could not be read; the text names file and place.
        """
        self._tier.file.writes.settle()
        offset, size = self._offsets[bucket] + start * self._dtype.itemsize, self._dtype.itemsize
        shift = offset % PAGE_NBYTES
        memory = aligned_empty(aligned(shift + (stop - start) * size))  # whole pages: no part goes through the page cache
        self._tier.file.io.read(self._tier.file.file, offset - shift, memory).wait()
        return memory[shift : shift + (stop - start) * size].view(self._dtype)

    def write(self, bucket: int, start: int, source: Tensor) -> None:
        """Let the elements from `start` on of this rank's shard of `bucket` be those of `source`, rounded.

        Between `begin_update` and `publish`, at whose end they are in the file. `source` may change at once.

        Raises:
            FileIoError: an earlier write failed.
        """
        self._publication.check_writing()
        self.version += 1
        self._tier.file.writes.write(self._offsets[bucket] + start * self._dtype.itemsize, source, self._dtype)

    def begin_update(self) -> None:
        """Complete every gather that was started: what rests here may be written then. Every rank calls it."""
        self._tier.check_usable()
        if self._publication.is_published:
            self.stage.settle()
            self._publication.begin_update()

    def publish(self) -> None:
        """Block until all that was written is in the file: it is final until the next `begin_update`.

        Raises:
            FileIoError: some of it is not.
        """
        self._tier.file.writes.settle()
        self._publication.publish()

    def close(self) -> None:
        """Leave the tier; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._tier.leave()
