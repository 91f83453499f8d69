"""What lives on one stage of a pipeline during a batch: the engine's own batch, over fake tensors.

    output_form    what a part of the model hands on                         one forward
    trace_stage    `engine.pipeline_batch.BatchRun`, by the order of the schedule, with the engine's transport
                   |  carriers that carry nothing: rooms of messages, messages that are kept, graphs are as they are
                   v  a `Timeline`, with a mark where each backward begins and ends

[Note: the first rounds] An order repeats itself once as many micro-batches are alive as ever will be. So it is carried out
up to there, and for as many rounds more as the transport keeps messages; then nothing comes that was not there before. The
schedule `interleaved` is carried out whole: its parts differ, and so do its rounds.

Called by `pipelines`. Does not live here: building stages (`pipelines`), orders and messages (`pipe`), what is kept
elsewhere than in a batch (`states`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed.engine.pipeline_batch import BatchRun, MicroBatch
from deepspeed.errors import ArgumentError
from deepspeed.pipe.forms import Form, TensorForm, room, take_apart
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.orders import OrderName, Work, order_of
from deepspeed.pipe.traffic import Place, arrivals
from deepspeed.pipe.transport import Transport
from deepspeed.planning.timeline import BACKWARD, OVER, Mark, Timeline
from deepspeed.planning.tracing import trace_carried_out
from deepspeed.precision.policy import DtypePolicy

__all__ = ["Pipeline", "batch_nbytes", "first_rounds", "output_form", "place_of", "sent_by_stage", "trace_stage"]

_MORE_ROUNDS = 5  # beyond the first moment at which most is alive: the transport keeps three messages of a line, posts two
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Pipeline:
    """What all stages have in common."""

    schedule: OrderName
    micro_batches: int
    policy: DtypePolicy
    inputs: Any
    """Of one micro-batch; of its tensors shapes and dtypes count."""

    labels: Any
    forms: Sequence[Form | None]
    """Of what each part of the model gets from the one before, in the order of use; None for the first, or where unknown."""

    def orders(self, place: Place) -> list[tuple[Work, ...]]:
        """Of each stage."""
        _, stages, chunks = place
        return [order_of(self.schedule, stage, stages, self.micro_batches, chunks) for stage in range(stages)]


def place_of(module: PipelineModule) -> Place:
    """Of a stage."""
    return Place(module.stage_id, module.num_stages, module.num_chunks)


def first_rounds(order: Sequence[Work]) -> list[Work]:
    """The works after which nothing new comes: [Note: the first rounds]. All works of an order that has chunks."""
    if any(work.chunk for work in order):
        return list(order)
    last = "W" if any(work.kind == "W" for work in order) else "B"
    alive, most_at, most = 0, 0, 0
    for at, work in enumerate(order):
        alive += (work.kind == "F") - (work.kind == last)
        if alive > most:
            most, most_at = alive, at
    ends = [at for at, work in enumerate(order) if at > most_at and work.kind == last]
    return list(order[: ends[_MORE_ROUNDS - 1] + 1]) if len(ends) > _MORE_ROUNDS else list(order)


# -- messages -------------------------------------------------------------------------------------------------------------


def output_form(module: PipelineModule, chunk: int, given: Any, policy: DtypePolicy) -> Form:
    """What one part of the model hands on.

    Args:
        module: the stage that has it.
        chunk: the part, counted on the stage.
        given: its input: the form of an activation, or inputs of a micro-batch.
        policy: formats of the run.

    Raises:
        ArgumentError: forward needs values, not only shapes; the text has what failed.
    """
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")  # takes half as long to load as torch
    try:
        with fake.FakeTensorMode(allow_non_fake_inputs=True):
            params = {f"stage.{name}": _faked(param, policy.param_for(param)) for name, param in module.named_parameters()}
            buffers = {f"stage.{name}": _faked(buffer, buffer.dtype) for name, buffer in module.named_buffers()}
            inputs = _received(given) if isinstance(given, Form) else tree_map_only(Tensor, partial(_input, policy), given)
            part = _Part(module, chunk, policy)
            return take_apart(torch.func.functional_call(part, {**params, **buffers}, (inputs,)))[0]
    except Exception as cause:  # whatever a layer raises
        raise ArgumentError(
            f"stage {module.stage_id} of the pipeline cannot be traced without values: {cause} Leave the batch out: the "
            "plan then has all terms but the activations."
        ) from cause


class _Part(nn.Module):
    def __init__(self, stage: PipelineModule, chunk: int, policy: DtypePolicy) -> None:
        super().__init__()
        self.stage, self._chunk, self._policy = stage, chunk, policy

    def forward(self, inputs: Any) -> Any:
        with _autocast(self._policy):
            return self.stage.forward_chunk(self._chunk, inputs, 0)


def _faked(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(value.shape, dtype=dtype, device=_HOST).requires_grad_(value.requires_grad and value.is_leaf)


def _input(policy: DtypePolicy, value: Tensor) -> Tensor:
    return _faked(value, policy.param if policy.param is not None and value.is_floating_point() else value.dtype)


def _received(form: Form) -> Any:
    """An activation as the transport hands it over."""
    tensors = room(form.tensors, _HOST)
    return form.put_together(
        tensor.requires_grad_(each.requires_grad) for tensor, each in zip(tensors, form.tensors, strict=True)
    )


def _autocast(policy: DtypePolicy) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", policy.autocast, enabled=policy.autocast is not None)


def sent_by_stage(pipeline: Pipeline, place: Place) -> int:
    """Bytes of activations and of their gradients that a stage sends per batch; 0 where forms are unknown."""
    sent = 0
    for work in pipeline.orders(place)[place.stage]:
        message = place.makes(work)
        if message is None or message.line.source == message.line.destination:
            continue
        virtual = work.chunk * place.stages + place.stage
        form = pipeline.forms[virtual + (work.kind == "F")]
        if form is not None:
            sent += sum(_nbytes(each) for each in form.tensors if work.kind == "F" or each.requires_grad)
    return sent


def _nbytes(form: TensorForm) -> int:
    return form.dtype.itemsize * torch.Size(form.shape).numel()


# -- a batch --------------------------------------------------------------------------------------------------------------


def trace_stage(module: PipelineModule, pipeline: Pipeline) -> Timeline:
    """What lives on a stage during one batch, without parameters, whole gradients and the batch itself.

    Args:
        module: the stage, on the meta device.
        pipeline: all that it must know of the others; no form is unknown.

    Raises:
        ArgumentError: forward or backward needs values, not only shapes.
    """
    place = place_of(module)
    orders = pipeline.orders(place)
    order = first_rounds(orders[place.stage])
    is_first, is_last = place.stage == 0, place.stage == place.stages - 1
    one = MicroBatch(pipeline.inputs if is_first else None, pipeline.labels if is_last else None)
    count = 1 + max(work.micro_batch for work in order)

    def carry_out(mark: Callable[[Mark], None], *micro_batches: MicroBatch) -> None:
        transport = Transport(lambda line: _Nowhere(), _HOST)
        for chunk in range(place.chunks):
            _tell_forms(transport, place, chunk, pipeline.forms)
        run = BatchRun(
            place,
            _Compute(module, pipeline.policy, mark),
            transport,
            micro_batches,
            [0] * pipeline.micro_batches,
            range(pipeline.micro_batches),
            defers_weights=pipeline.schedule == "zero_bubble",
        )
        run.carry_out(order, arrivals(place, orders.__getitem__))

    return trace_carried_out(module, (tuple([one] * count), {}), pipeline.policy, carry_out)


def _tell_forms(transport: Transport, place: Place, chunk: int, forms: Sequence[Form | None]) -> None:
    virtual = chunk * place.stages + place.stage
    forward = Work("F", 0, chunk)
    for message, form in ((place.needs(forward), forms[virtual]), (place.makes(forward), [*forms, None][virtual + 1])):
        if message is not None and form is not None:
            transport.know(message.line, 0, message.chunk, form)


class _Nowhere:
    """A carrier that carries nothing, at once."""

    def send(self, data_B: Tensor) -> _Nowhere:
        return self

    def receive(self, data_B: Tensor) -> _Nowhere:
        return self

    def wait(self) -> None:
        pass


class _Compute:
    """`pipeline_batch.StageCompute` of a stage without an engine."""

    def __init__(self, module: PipelineModule, policy: DtypePolicy, mark: Callable[[Mark], None]) -> None:
        self._module, self._policy, self._mark = module, policy, mark

    def forward(self, chunk: int, inputs: Any, number: int) -> Any:
        with _autocast(self._policy):
            return self._module.forward_chunk(chunk, inputs, number)

    def loss(self, outputs: Any, labels: Any) -> Tensor:
        loss_fn = self._module.loss_fn
        with _autocast(self._policy):
            loss: Tensor = outputs if loss_fn is None else loss_fn(outputs, labels)
        return loss.reshape(())

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def backward(self, autograd: Callable[[], None]) -> None:
        self._mark(BACKWARD)
        autograd()
        self._mark(OVER)


def batch_nbytes(pipeline: Pipeline, place: Place) -> int:
    """Bytes of the micro-batches of a batch that a stage holds: inputs on the first, labels on the last."""
    held = [pipeline.inputs] * (place.stage == 0) + [pipeline.labels] * (place.stage == place.stages - 1)
    tensors = [each for each in tree_leaves(held) if isinstance(each, Tensor)]
    return pipeline.micro_batches * sum(each.numel() * each.element_size() for each in tensors)
