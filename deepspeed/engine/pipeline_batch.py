"""One batch through one stage: the order is carried out, work by work.

    F   take the activation, or the batch's own inputs -> this stage's layers -> send, or the loss
    B   take the gradient, or the loss -> autograd -> send the gradient of the activation
    W   the gradients of weights that B left
        between two works: make room for what comes next

Between F and B a micro-batch leaves behind: the tensors that it came in, if a gradient of them is wanted, and the ends of
its graph. The outputs themselves are freed as soon as they have left: autograd keeps what it needs of them.

Lives here: graphs. Does not live here: orders (`pipe.orders`), messages (`pipe.transport`), what surrounds a batch
(`engine.pipeline`, which calls this).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from deepspeed.common.pytree import tensors
from deepspeed.pipe.late_weights import LateWeights
from deepspeed.pipe.orders import Work
from deepspeed.pipe.traffic import Line, Message, Place
from deepspeed.pipe.transport import Transport

__all__ = ["BatchRun", "MicroBatch", "StageCompute"]

_DOING = {"F": "forward", "B": "backward", "W": "weight gradients"}


class MicroBatch(NamedTuple):
    """What the iterator gave; stages that need neither have None for both."""

    inputs: Any = None
    labels: Any = None


class StageCompute(Protocol):
    """What a stage computes, apart from the order."""

    def forward(self, chunk: int, inputs: Any, number: int) -> Any:
        """The layers of one chunk, for the micro-batch that has this number in the whole run."""

    def loss(self, outputs: Any, labels: Any) -> Tensor:
        """The loss of one micro-batch, a scalar."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as it goes into backward."""

    def backward(self, autograd: Callable[[], None]) -> None:
        """Run `autograd`, and see to the gradients that it leaves."""


@dataclass
class _Live:
    """What a micro-batch leaves behind in a chunk between its forward and its backward."""

    leaves: list[Tensor]
    """Received tensors that want gradients."""

    ends: list[GradientEdge] | list[Tensor]
    """Where its backward begins."""

    sent: Message | None
    late: LateWeights | None


@dataclass
class BatchRun:
    """Carries out orders for one batch.

    Args:
        place: of the stage.
        compute: its layers.
        transport: its messages.
        micro_batches: of the batch.
        signatures: of the micro-batches; see `Transport.begin`.
        numbers: of the micro-batches, in the whole run; those of evaluations are negative.
        defers_weights: leave gradients of weights to `W`.
        keeps_outputs: keep what the last chunk gives.
        has_loss: compute the loss of each micro-batch.
    """

    place: Place
    compute: StageCompute
    transport: Transport
    micro_batches: Sequence[MicroBatch]
    signatures: Sequence[int]
    numbers: Sequence[int]
    defers_weights: bool = False
    keeps_outputs: bool = False
    has_loss: bool = True
    losses: list[Tensor] = field(default_factory=list)
    """Of each micro-batch, in order, on the stage that makes them; without graphs."""

    outputs: list[Any] = field(default_factory=list)
    doing: str = "beginning of the batch"
    """The work in progress, for error texts."""

    work: Work | None = None
    """The same; the last one when all are done."""

    most_live: int = 0
    """The most micro-batches (times chunks) between forward and backward at one time."""

    _live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    _owed: dict[tuple[int, int], LateWeights] = field(default_factory=dict)

    def carry_out(self, order: Iterable[Work], arrivals: Mapping[Line, Sequence[Message]]) -> None:
        """Do all works of `order`, and block until what was sent has left.

        Args:
            order: of this stage.
            arrivals: what the other stages' orders send here (`pipe.traffic.arrivals`).
        """
        self.transport.begin(self.signatures, arrivals)
        steps = {"F": self._forward, "B": self._backward, "W": self._weights}
        for work in order:
            self.work = work
            self.doing = f"{_DOING[work.kind]} of micro-batch {work.micro_batch}"
            self.transport.post()
            steps[work.kind](work)
        self.doing = "end of the batch"
        self.transport.finish()

    # -- works --------------------------------------------------------------------------------------------------------

    def _forward(self, work: Work) -> None:
        needed, made = self.place.needs(work), self.place.makes(work)
        inputs = self.micro_batches[work.micro_batch].inputs if needed is None else self.transport.take(needed)
        # Listed before the layers see them: a layer may put other tensors into the container that it was given.
        leaves = [] if needed is None else [tensor for tensor in tensors(inputs) if tensor.requires_grad]
        late = LateWeights() if self.defers_weights else None
        with _entered(late):
            outputs = self.compute.forward(work.chunk, inputs, self.numbers[work.micro_batch])
            ends: list[GradientEdge] | list[Tensor]
            ends = self._finish(work, outputs) if made is None else self._hand_over(work, made, outputs)
        if torch.is_grad_enabled():
            self._live[work.micro_batch, work.chunk] = _Live(leaves, ends, made, late)
            self.most_live = max(self.most_live, len(self._live))

    def _hand_over(self, work: Work, made: Message, outputs: Any) -> list[GradientEdge]:
        self.transport.send(made, outputs)
        wanted = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
        reply = self.place.needs(work._replace(kind="B"))
        if torch.is_grad_enabled() and reply is not None:
            self.transport.expect_gradient(reply, wanted)
        elif self.place.chunks == 1:
            self.transport.bound(made.line)
        return [get_gradient_edge(tensor) for tensor in wanted]

    def _finish(self, work: Work, outputs: Any) -> list[Tensor]:
        """The last chunk of the model: outputs become a loss."""
        if self.keeps_outputs:
            self.outputs.append(outputs)
        if not self.has_loss:
            return []
        loss = self.compute.loss(outputs, self.micro_batches[work.micro_batch].labels)
        self.losses.append(loss.detach())
        return [self.compute.scaled(loss)] if loss.requires_grad else []

    def _backward(self, work: Work) -> None:
        needed, made = self.place.needs(work), self.place.makes(work)
        live = self._live.pop((work.micro_batch, work.chunk))
        gradients = None
        if needed is not None:
            assert live.sent is not None  # a gradient comes only of what was sent
            gradients = self.transport.take_gradient(needed)
            self.transport.was_received(live.sent)
        if live.ends:
            self.compute.backward(lambda: torch.autograd.backward(live.ends, gradients))
        if live.late is not None:
            self._owed[work.micro_batch, work.chunk] = live.late
        if made is not None:
            self.transport.send_gradient(made, [_gradient_of(leaf) for leaf in live.leaves])
            if self.place.chunks == 1:
                self.transport.bound(made.line)

    def _weights(self, work: Work) -> None:
        self.compute.backward(self._owed.pop((work.micro_batch, work.chunk)).pay)


def _gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _entered(late: LateWeights | None) -> AbstractContextManager[Any]:
    return nullcontext() if late is None else late
