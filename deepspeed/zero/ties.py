r"""Parameters that several pipeline stages hold copies of stay equal: each copy takes the same step.

    stage 0   gradient of the embedding's rows   --mean over data--> shard d --\
    stage 3   gradient of the output's rows      --mean over data--> shard d --+-- sum over the tie --> both shards d

Tied parameters are flat groups of their own, laid out alike on every stage of the tie, so that the shards of data-parallel
rank d correspond. Equal masters, equal state and equal gradients then give equal steps. The norm counts the first stage's.

Does not live here: which parameters are tied (`pipe.module`), when (`zero.optimizer`, which calls this).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from deepspeed import comm
from deepspeed.comm.watch import naming
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup

__all__ = ["Ties"]


class Ties:
    """The ties of one stage.

    Args:
        axes: key of the tie -> the ranks that hold the copies that correspond to this rank's, one of each stage.
    """

    def __init__(self, axes: Mapping[str, AxisGroup] | None = None) -> None:
        self._axes = dict(axes or {})

    def reduce(self, flats: Iterable[FlatGroup]) -> None:
        """Add up the mean gradients of the copies, in place. Collective over each tie, in the order of their keys."""
        for flat in sorted((flat for flat in flats if flat.kind.tie in self._axes), key=lambda flat: flat.kind.tie):
            axis = self._axes[flat.kind.tie]
            with naming(f"gradients of the tied module {flat.kind.tie!r}"):
                for shard in flat.gradients.shards():
                    on_device = shard.to(flat.device)  # offloaded gradients may be where no collective of a device's reaches
                    comm.all_reduce(on_device, group=axis.group)
                    if on_device is not shard:
                        shard.copy_(on_device)

    def counted(self, flats: Iterable[FlatGroup]) -> Iterator[FlatGroup]:
        """The groups of `flats` that count here: all but copies of what an earlier stage has."""
        for flat in flats:
            axis = self._axes.get(flat.kind.tie)
            if axis is None or axis.rank == 0:
                yield flat
