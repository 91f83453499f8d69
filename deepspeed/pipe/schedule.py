"""The published view of a pipeline's schedules: what a stage does, tick by tick.

    TrainSchedule, 2 micro-batches, 2 stages

    tick       0     1     2     3     4     5
    stage 0    F0    .     F1    B0    .     B1   reduce, step       what one tick made travels in the next
    stage 1    .     F0    B0    F1    B1    .    reduce, step

For readers, and for clients that walk through it. Does not live here: what the engine executes (`orders`), which has no
ticks: a stage there waits only for what its next work needs. The order of forwards and backwards is the same as that of
`1f1b`.

In tick t, stage s does the forward of micro-batch (t - s) / 2 or the backward of (t + s + 1) / 2 - stages: the one that is
a whole number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """One thing that a stage does; its arguments are attributes."""

    def __init__(self, **kwargs: int) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, PipeInstruction) and other.kwargs == self.kwargs

    def __hash__(self) -> int:
        return hash((self.name, *self.kwargs.items()))


class OptimizerStep(PipeInstruction):
    """Update the weights, and set gradients to zero."""


class ReduceGrads(PipeInstruction):
    """Average gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied modules over the stages that hold them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction about one of the stage's buffers, `buffer_id`."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: int) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take a micro-batch from the data: its inputs on the first stage, its labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Compute the stage's layers."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the stage's layers and of their inputs."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of inputs to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of outputs from the next stage."""


class PipeSchedule(ABC):
    """The schedule of one stage for one batch; iterating over it gives the instructions of each tick.

    Args:
        micro_batches: of the batch.
        stages: of the pipeline.
        stage_id: which one this is.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield what the stage does in each tick, in order."""

    def num_pipe_buffers(self) -> int:
        """Return how many buffers the instructions number."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The stage that this is for."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage has the first layers."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage has the last layers."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _exists(self, micro_batch: int) -> bool:
        return 0 <= micro_batch < self.micro_batches

    def _buffer(self, micro_batch: int) -> int:
        return micro_batch % self.num_pipe_buffers()

    def _load(self, buffer_id: int) -> list[PipeInstruction]:
        return [LoadMicroBatch(buffer_id)] if self.is_first_stage or self.is_last_stage else []


class InferenceSchedule(PipeSchedule):
    """Forwards alone: micro-batch k passes stage s in tick k + s, and what it gave is sent one tick later."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield what the stage does in each tick, in order."""
        for tick in range(self.micro_batches + self.stages - 1):
            now, before = tick - self.stage_id, tick - self.stage_id - 1
            sent = [SendActivation(self._buffer(before))] if self._exists(before) and not self.is_last_stage else []
            if not self._exists(now):
                yield [*sent]
                continue
            buffer_id = self._buffer(now)
            received = [] if self.is_first_stage else [RecvActivation(buffer_id)]
            # neighbours do it the other way round, so that neither waits for the other to receive
            travel = [*sent, *received] if self.stage_id % 2 == 0 else [*received, *sent]
            yield [*self._load(buffer_id), *travel, ForwardPass(buffer_id)]

    def num_pipe_buffers(self) -> int:
        """Return two: one is computed while the other is sent."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B. (PipeDream-Flush, arXiv:2006.09503, section 2.2.)"""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield what the stage does in each tick, in order; the last one ends the batch."""
        ticks = 2 * (self.micro_batches + self.stages - 1)
        for tick in range(ticks):
            done = [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if tick == ticks - 1 else []
            yield [*(self._forward(tick) if self._is_forward(tick) else self._backward(tick)), *done]

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches are alive on the stage at most, and no less than two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _is_forward(self, tick: int) -> bool:
        return (tick - self.stage_id) % 2 == 0

    def _micro_batch(self, tick: int) -> int:
        """Return the micro-batch of a tick, which may be one that does not exist."""
        if self._is_forward(tick):
            return (tick - self.stage_id) // 2
        return (tick + self.stage_id + 1) // 2 - self.stages

    def _forward(self, tick: int) -> list[PipeInstruction]:
        """Send the gradient that was made a tick ago; receive and compute a forward."""
        before, now = self._micro_batch(tick - 1), self._micro_batch(tick)
        sends = self._exists(before) and not self.is_first_stage
        instructions: list[PipeInstruction] = [SendGrad(self._buffer(before))] if sends else []
        if self._exists(now):
            buffer_id = self._buffer(now)
            received = [] if self.is_first_stage else [RecvActivation(buffer_id)]
            instructions += [*received, *self._load(buffer_id), ForwardPass(buffer_id)]
        return instructions

    def _backward(self, tick: int) -> list[PipeInstruction]:
        """Receive a gradient, send the outputs that were made a tick ago; compute a backward."""
        before, now = self._micro_batch(tick - 1), self._micro_batch(tick)
        instructions: list[PipeInstruction] = []
        if self._exists(now) and not self.is_last_stage:
            instructions.append(RecvGrad(self._buffer(now)))
        if self._exists(before) and not self.is_last_stage:
            instructions.append(SendActivation(self._buffer(before)))
        if self._exists(now):
            instructions.append(BackwardPass(self._buffer(now)))
        return instructions


class DataParallelSchedule(PipeSchedule):
    """Accumulation without a pipeline: one stage, one micro-batch after the other, in one buffer."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield what the stage does for each micro-batch; the last one ends the batch."""
        for micro_batch in range(self.micro_batches):
            done = [ReduceGrads(), OptimizerStep()] if micro_batch == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *done]

    def num_pipe_buffers(self) -> int:
        """Return one."""
        return 1
