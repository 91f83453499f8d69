"""What an order makes travel: the message that each work needs, the one that it makes, and in which order they arrive.

    virtual stage   v = chunk x stages + stage        the model's parts in the order of use; the last one makes the loss

    F of v     needs the activation from v-1          makes the activation for v+1
    B of v     needs the gradient from v+1            makes the gradient for v-1
    W          needs and makes nothing

A stage receives in the order in which its neighbour sends, which the neighbour's own order tells, whatever it needs first.

Pure: no torch, no processes. Does not live here: orders (`pipe.orders`), carrying (`pipe.transport`). Called by
`engine.pipeline_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from deepspeed.pipe.orders import Work

__all__ = ["Kind", "Line", "Message", "Place", "arrivals", "lines"]

Kind = Literal["activation", "gradient"]


class Line(NamedTuple):
    """One kind of message on its way from one stage to another, in order."""

    kind: Kind
    source: int
    destination: int


class Message(NamedTuple):
    """What one work makes and another needs."""

    line: Line
    micro_batch: int
    chunk: int
    """Of the stage that needs it."""

    def __str__(self) -> str:
        kind, source, destination = self.line
        return f"{kind} of micro-batch {self.micro_batch} from stage {source} to stage {destination}"


class Place(NamedTuple):
    """A stage of a pipeline whose stages have some chunks each."""

    stage: int
    stages: int
    chunks: int = 1

    def is_first(self, chunk: int) -> bool:
        """Whether the chunk takes the batch's inputs."""
        return self._virtual(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Whether the chunk makes the loss."""
        return self._virtual(chunk) == self.stages * self.chunks - 1

    def needs(self, work: Work) -> Message | None:
        """The message without which `work` cannot start; None where it needs none."""
        if work.kind == "F" and not self.is_first(work.chunk):
            return self._message("activation", self._virtual(work.chunk) - 1, self._virtual(work.chunk), work.micro_batch)
        if work.kind == "B" and not self.is_last(work.chunk):
            return self._message("gradient", self._virtual(work.chunk) + 1, self._virtual(work.chunk), work.micro_batch)
        return None

    def makes(self, work: Work) -> Message | None:
        """The message that `work` makes for another; None where nobody waits for it."""
        if work.kind == "F" and not self.is_last(work.chunk):
            return self._message("activation", self._virtual(work.chunk), self._virtual(work.chunk) + 1, work.micro_batch)
        if work.kind == "B" and not self.is_first(work.chunk):
            return self._message("gradient", self._virtual(work.chunk), self._virtual(work.chunk) - 1, work.micro_batch)
        return None

    def _virtual(self, chunk: int) -> int:
        return chunk * self.stages + self.stage

    def _message(self, kind: Kind, source: int, destination: int, micro_batch: int) -> Message:
        line = Line(kind, source % self.stages, destination % self.stages)
        return Message(line, micro_batch, destination // self.stages)


def arrivals(place: Place, order_of_stage: Callable[[int], Sequence[Work]]) -> dict[Line, tuple[Message, ...]]:
    """What comes to `place` in one batch, line by line in the order of sending.

    Args:
        place: of the stage that receives.
        order_of_stage: the order of each stage.
    """
    found: dict[Line, list[Message]] = {}
    for source in sorted({(place.stage - 1) % place.stages, (place.stage + 1) % place.stages}):
        sender = place._replace(stage=source)
        for work in order_of_stage(source):
            message = sender.makes(work)
            if message is not None and message.line.destination == place.stage:
                found.setdefault(message.line, []).append(message)
    return {line: tuple(messages) for line, messages in found.items()}


def lines(stages: int, chunks: int = 1) -> tuple[Line, ...]:
    """All lines of a pipeline, whatever its schedule, in an order in which all ranks may open them one after the other.

    Each rank that goes through its own lines in this order, blocking in each until the other end is there too, comes to the
    end: of all lines that are not open, the first finds both its ends waiting for it. Lines between different stages stand
    side by side, so that they open together: a line of p stages does not take p times as long.
    """
    found: set[Line] = set()
    for stage in range(stages):
        place = Place(stage, stages, chunks)
        works = [Work(kind, 0, chunk) for kind in ("F", "B") for chunk in range(chunks)]
        made = [place.makes(work) for work in works]
        found.update(message.line for message in made if message is not None and message.line.destination != stage)
    return tuple(sorted(found, key=lambda line: (line.kind, line.source > line.destination, line.source % 2, line.source)))
