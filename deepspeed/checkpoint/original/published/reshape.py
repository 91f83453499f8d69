"""Which files of the original's ranks make up those of fewer ranks: arithmetic of rank numbers.

    4 pipeline stages x 2 tensor ranks        2 x 1
      stage 0   0  1                          stage 0   0 1 2 3
      stage 1   2  3            ---->         stage 1   4 5 6 7
      stage 2   4  5
      stage 3   6  7

With data parallelism a rank is `data_rank * stages * tensor_ranks + stage * tensor_ranks + tensor_rank`: the data ranks of a
place are listed one after another, places are merged as above, and each list is dealt out evenly over the new data ranks.

Pure: no file is opened. Does not live here: files (`deepspeed_checkpoint`, `zero_checkpoint`). Called by both and by users.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from deepspeed.errors import ArgumentError
from deepspeed.sharding import even_range

__all__ = ["ModelDegrees", "RankMap", "model_3d_desc", "reshape_meg_2d_parallel"]


@dataclass(frozen=True)
class RankMap:
    """Pipeline stages times tensor ranks, and the old ranks that each place is made of."""

    pp_degree: int
    tp_degree: int
    ranks: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(stage, tensor rank) -> old ranks, in the order in which their parts are joined."""

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """Old ranks of a place; None takes all stages or all tensor ranks, stage by stage.

        Raises:
            ArgumentError: there is no such place.
        """
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        tensor_ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        places = [(stage, tensor_rank) for stage in stages for tensor_rank in tensor_ranks]
        for stage, tensor_rank in places:
            if (stage, tensor_rank) not in self.ranks:
                raise ArgumentError(
                    f"there is no place pp_index={stage}, tp_index={tensor_rank} in {self.pp_degree} pipeline stages times "
                    f"{self.tp_degree} tensor ranks. Count both from 0."
                )
        return [rank for place in places for rank in self.ranks[place]]


@dataclass(frozen=True)
class ModelDegrees:
    """How many ranks share a model: pipeline stages, tensor ranks, data ranks."""

    pp_degree: int = 1
    tp_degree: int = 1
    dp_degree: int = 1

    def get_desc(self) -> str:
        """The three numbers as text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """All ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is such a place, and if not, why."""
        asked = (("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree))
        wrong = [(axis, index, degree) for axis, index, degree in asked if not 0 <= index < degree]
        faults = [f"{axis} index {index} is not within its degree {degree}" for axis, index, degree in wrong]
        return not faults, faults

    def can_reshape(self, target_3d_desc: ModelDegrees) -> tuple[bool, list[str]]:
        """Whether these ranks can be merged into those of the target, and if not, why."""
        degrees = (
            ("PP", self.pp_degree, target_3d_desc.pp_degree),
            ("TP", self.tp_degree, target_3d_desc.tp_degree),
            ("DP", self.dp_degree, target_3d_desc.dp_degree),
        )
        faults = [f"{axis}: {old} ranks cannot become more, {new}" for axis, old, new in degrees if new > old]
        if not faults:
            uneven = [(axis, old, new) for axis, old, new in degrees[:2] if old % new]
            faults = [f"{axis}: {old} ranks cannot be shared evenly among {new}" for axis, old, new in uneven]
            per_place = self.world_size() // (target_3d_desc.pp_degree * target_3d_desc.tp_degree)
            if not uneven and per_place % target_3d_desc.dp_degree:
                faults = [f"DP: {per_place} shards cannot be shared evenly among {target_3d_desc.dp_degree} ranks"]
        return not faults, faults

    def reshape(self, target_3d_desc: ModelDegrees) -> list[RankMap]:
        """For each data rank of the target the old ranks of its places.

        Raises:
            ArgumentError: `can_reshape` says no.
        """
        can, faults = self.can_reshape(target_3d_desc)
        if not can:
            raise ArgumentError(
                f"{self.get_desc()} cannot be reshaped to {target_3d_desc.get_desc()}: {'; '.join(faults)}. Use a universal "
                "checkpoint (ds_to_universal), or load it directly, for any other number of ranks."
            )
        places = self.pp_degree * self.tp_degree
        merged = reshape_meg_2d_parallel(self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree)
        every = {
            place: [data * places + number for number in numbers for data in range(self.dp_degree)]
            for place, numbers in merged.ranks.items()
        }
        parts = target_3d_desc.dp_degree
        return [
            RankMap(
                merged.pp_degree,
                merged.tp_degree,
                {place: ranks[slice(*even_range(len(ranks), parts, part))] for place, ranks in every.items()},
            )
            for part in range(parts)
        ]


model_3d_desc = ModelDegrees
"""The published name."""


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> RankMap:
    """Merge pipeline stages and tensor ranks: neighbours become one.

    Args:
        old_pp_degree: pipeline stages there are.
        old_tp_degree: tensor ranks there are.
        new_pp_degree: stages wanted, a divisor of those.
        new_tp_degree: tensor ranks wanted, a divisor of those.
        verbose: accepted; the result can be printed.

    Raises:
        ArgumentError: a degree does not divide the old one.
    """
    del verbose
    for axis, old, new in (("pp", old_pp_degree, new_pp_degree), ("tp", old_tp_degree, new_tp_degree)):
        if new < 1 or old < 1 or old % new:
            raise ArgumentError(
                f"old_{axis}_degree={old}, new_{axis}_degree={new}: ranks can only be merged evenly. Give a divisor of "
                f"{old}."
            )
    return RankMap(new_pp_degree, new_tp_degree, dict(_merged(old_pp_degree, old_tp_degree, new_pp_degree, new_tp_degree)))


def _merged(old_pp: int, old_tp: int, new_pp: int, new_tp: int) -> Iterator[tuple[tuple[int, int], list[int]]]:
    for stage in range(new_pp):
        for tensor_rank in range(new_tp):
            stages = range(*even_range(old_pp, new_pp, stage))
            tensor_ranks = range(*even_range(old_tp, new_tp, tensor_rank))
            yield (stage, tensor_rank), [s * old_tp + t for s in stages for t in tensor_ranks]
