"""Numbers of a module with all that is below it.

Lives here: sums over the tree. Does not live here: counting (`counter`), text (`report`). A call belongs to the place of its
module in the tree (`places`), so the numbers of children and of the module itself add up to its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.profiling.flops_profiler.counter import Counter, Phase
from deepspeed.profiling.flops_profiler.places import OUTSIDE
from deepspeed.zero.shard import whole_shape

__all__ = ["Row", "StepFacts", "rows"]


@dataclass
class Row:
    """One place of the tree, what is below it included."""

    path: str
    kind: str
    """Class of the module."""
    extra: str
    """What the module says of itself: `in_features=8, out_features=16, bias=True`."""
    depth: int
    parent: int
    is_repeat: bool
    """The module hangs in an earlier place too, which has its parameters."""
    calls: int = 0
    params: int = 0
    macs: int = 0
    flops: int = 0
    backward_flops: int = 0
    again_flops: int = 0
    seconds: float = 0.0

    def add(self, other: Row) -> None:
        """Take over what a child has."""
        self.params += other.params
        self.macs += other.macs
        self.flops += other.flops
        self.backward_flops += other.backward_flops
        self.again_flops += other.again_flops
        self.seconds += other.seconds


@dataclass(frozen=True)
class StepFacts:
    """What the engine knows of a profiled step, of this rank, and of all ranks together."""

    micro_batches: int
    samples: int
    """Of the global batch."""
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    ranks: int
    all_flops: int
    """Forward, backward and recomputation on all ranks."""
    all_again_flops: int
    model_params: int
    """Of the whole model, each once."""
    by_stage: tuple[tuple[int, int], ...] = ()
    """(forward, backward) FLOPs of all ranks of each pipeline stage; empty without stages."""


def rows(counter: Counter) -> list[Row]:
    """Every place of the tree, parents before children. Parameters are whole, sharded or not, and each is counted once."""
    places, seen, found = counter.places, set[int](), []
    for place, (path, module, tally) in enumerate(zip(places.paths, places.modules, counter.tallies, strict=True)):
        own = {id(param): whole_shape(param).numel() for param in module.parameters(recurse=False)}
        found.append(
            Row(
                path=path,
                kind=type(module).__name__,
                extra=module.extra_repr(),
                depth=path.count(".") + 1 if path else 0,
                parent=places.parents[place],
                is_repeat=places.is_repeat(place),
                calls=places.calls[place],
                params=sum(numel for key, numel in own.items() if key not in seen),
                macs=tally.macs[Phase.FORWARD],
                flops=tally.flops[Phase.FORWARD],
                backward_flops=tally.flops[Phase.BACKWARD],
                again_flops=tally.flops[Phase.AGAIN],
                seconds=tally.seconds,
            )
        )
        seen |= own.keys()
    for row in reversed(found):
        if row.parent != OUTSIDE:
            found[row.parent].add(row)
    return found
