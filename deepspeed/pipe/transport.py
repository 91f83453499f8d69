"""Nested containers of tensors travel between stages: sent without waiting, received before they are needed.

    F of micro-batch 3  --send-->   [ form? ] tensor tensor ...   --line, in order-->   posted early ... take

A receiver makes room before anything comes, so it must know what comes. That follows from what the batch's inputs look like:
their signatures are known to all stages before the batch begins. The first time that a micro-batch with a new signature
passes a line, its form (`pipe.forms`) goes ahead of it; both ends then keep it. `is_dynamic` sends it every time, for
outputs whose shape depends on values. Gradients need no form: they look like the activations that they are gradients of.

    line    sender:   forms[key]            key = signature of the micro-batch, chunk
            receiver: forms[key]            the same entries, for both saw the same micro-batches in the same order

Lives here: forms, buffers, what is in flight. Does not live here: which message when (`pipe.traffic`), bytes
(`pipe.carriers`), graphs (`engine.pipeline_batch`, which calls this).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.watch import naming
from deepspeed.errors import PipelineError
from deepspeed.pipe.carriers import Carrier, Pending
from deepspeed.pipe.forms import Form, TensorForm, room, take_apart
from deepspeed.pipe.traffic import Line, Message

__all__ = ["Transport"]

_POSTED_AT_MOST = 2
_UNSEEN_AT_MOST = 3  # sent messages of one line of which nothing says that they were received
_KNOWN_FORMS = 4096
_LENGTH_NBYTES = 8


class _Arrival:
    """A message on its way to this rank: its form, once that is known, and the tensors that are being filled."""

    def __init__(self, message: Message, carrier: Carrier, device: torch.device) -> None:
        self.message = message
        self._carrier = carrier
        self._device = device
        self._length = torch.zeros(_LENGTH_NBYTES, dtype=torch.uint8, device=device)
        self._length_work: Pending | None = None
        self._works: list[Pending] = []
        self.tensors: list[Tensor] | None = None

    def post_form(self) -> None:
        """Start to receive how long the description is."""
        self._length_work = self._carrier.receive(self._length)

    def read_form(self) -> Form:
        """Receive the description. Blocks."""
        assert self._length_work is not None  # posted without a form
        self._length_work.wait()
        text = torch.empty(int(self._length.view(torch.int64)), dtype=torch.uint8, device=self._device)
        self._carrier.receive(text).wait()
        return Form.from_bytes(text.cpu().numpy().tobytes())

    def post_tensors(self, forms: Sequence[TensorForm]) -> None:
        """Start to receive the tensors."""
        self.tensors = room(forms, self._device)
        self._works = [self._carrier.receive(_bytes_of(tensor)) for tensor in self.tensors if tensor.numel()]

    def wait(self) -> list[Tensor]:
        """The tensors. Blocks until they are there."""
        assert self.tensors is not None  # posted
        for work in self._works:
            work.wait()
        return self.tensors


class _Incoming:
    """One line to this rank."""

    def __init__(self, carrier: Carrier, device: torch.device) -> None:
        self._carrier = carrier
        self._device = device
        self._expected: deque[Message] = deque()
        self._posted: deque[_Arrival] = deque()
        self._arrived: dict[Message, tuple[Form | None, list[Tensor]]] = {}

    def expect(self, messages: Sequence[Message]) -> None:
        """What will come in the batch that begins."""
        self._expected.extend(messages)

    def post(self, form_of: Callable[[Message], Form | Sequence[TensorForm] | None], *, is_described: bool) -> None:
        """Make room for the next messages, as far as it is known what they look like.

        Args:
            form_of: the form of a message, None where it is not known.
            is_described: unknown forms come ahead of their messages; else they are known later.
        """
        while self._expected and len(self._posted) < _POSTED_AT_MOST:
            if self._posted and self._posted[-1].tensors is None:
                return  # its description comes first
            form = form_of(self._expected[0])
            if form is None and not is_described:
                return
            arrival = _Arrival(self._expected.popleft(), self._carrier, self._device)
            with naming(str(arrival.message)):
                if form is None:
                    arrival.post_form()
                else:
                    arrival.post_tensors(form.tensors if isinstance(form, Form) else form)
            self._posted.append(arrival)

    def next_arrival(self) -> _Arrival:
        """The message that comes next; it has been posted."""
        return self._posted[0]

    def done(self) -> None:
        """The next message was received."""
        self._posted.popleft()


class Transport:
    """The messages of one stage, batch after batch.

    Args:
        carrier_of: makes the carrier of a line.
        device: where tensors are.
        is_dynamic: describe every activation.

    Attributes:
        handshakes: activations that were sent with a description, so far.
    """

    def __init__(self, carrier_of: Callable[[Line], Carrier], device: torch.device, *, is_dynamic: bool = False) -> None:
        self._carrier_of = carrier_of
        self._device = device
        self._is_dynamic = is_dynamic
        self._carriers: dict[Line, Carrier] = {}
        self._incoming: dict[Line, _Incoming] = {}
        self._forms: dict[Line, dict[Hashable, Form]] = {}
        self._signatures: Sequence[int] = ()
        self._local: dict[Message, list[Tensor] | Any] = {}
        self._gradients: dict[Message, list[TensorForm]] = {}
        self._early: dict[Message, Any] = {}
        self._sent: dict[Line, deque[tuple[Message, list[tuple[Pending, Tensor]]]]] = {}
        self.handshakes = 0

    # -- a batch ------------------------------------------------------------------------------------------------------

    def begin(self, signatures: Sequence[int], arrivals: Mapping[Line, Sequence[Message]]) -> None:
        """A batch begins.

        Args:
            signatures: of each micro-batch's inputs, the same on all stages of the pipeline.
            arrivals: what comes to this rank, line by line in the order of sending.
        """
        self._signatures = signatures
        for forms in self._forms.values():
            if len(forms) > _KNOWN_FORMS:
                forms.clear()  # the other end of the line has as many, and forgets them too
        for line, messages in arrivals.items():
            if line.source != line.destination:
                if line not in self._incoming:
                    self._incoming[line] = _Incoming(self._carrier(line), self._device)
                self._incoming[line].expect(messages)
        self.post()

    def know(self, line: Line, signature: int, chunk: int, form: Form) -> None:
        """Take it as told, at either end of `line`, what activations look like: none is described then.

        Args:
            line: of the activations.
            signature: of the micro-batches that they come of.
            chunk: of the stage that receives them.
            form: of each.
        """
        self._forms.setdefault(line, {})[signature, chunk] = form

    def forget_forms(self) -> None:
        """Describe everything anew. All stages call it between the same two batches."""
        self._forms.clear()

    def post(self) -> None:
        """Make room for what comes next."""
        for line, incoming in self._incoming.items():
            if line.kind == "gradient":
                incoming.post(self._gradients.get, is_described=False)
            else:
                incoming.post(self._known_form, is_described=True)

    def finish(self) -> None:
        """The batch is over: block until all that was sent has left."""
        for sent in self._sent.values():
            while sent:
                self._reap(sent)

    # -- activations --------------------------------------------------------------------------------------------------

    def send(self, message: Message, tree: Any) -> None:
        """Start to send an activation: any container. What is in it may be freed, and must not be changed.

        Raises:
            PipelineError: it looks different from the one that came out of inputs of the same look before.
        """
        form, tensors = take_apart(tree)
        line = message.line
        if line.source == line.destination:
            self._local[message] = form.put_together(_detached(tensors))
            return
        carrier, works = self._carrier(line), []
        with naming(str(message)):
            known = self._known_form(message)
            if known is None:
                works += self._describe(carrier, message, form)
            elif known != form:
                raise PipelineError(
                    f"the {message} is ({form}), but inputs of the same shapes gave ({known}) before, and that is what the "
                    "next stage has made room for: shapes, dtypes or plain values depend on the values of tensors here. "
                    "Build the PipelineModule with dynamic_shape=True."
                )
            for tensor in tensors:
                if tensor.numel():
                    works.append(_sent(carrier, tensor))
        self._note(message, works)

    def _describe(self, carrier: Carrier, message: Message, form: Form) -> list[tuple[Pending, Tensor]]:
        content = form.to_bytes()
        length = torch.tensor([len(content)], dtype=torch.int64, device=self._device)
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        self._keep_form(message, form)
        self.handshakes += 1
        return [_sent(carrier, length), _sent(carrier, text)]

    def take(self, message: Message) -> Any:
        """An activation. Blocks until it is there. In training its tensors are leaves that want gradients."""
        if message in self._local:
            return self._local.pop(message)
        incoming = self._incoming[message.line]
        while message not in self._early:
            incoming.post(self._known_form, is_described=True)
            arrival = incoming.next_arrival()
            with naming(str(arrival.message)):
                form = self._known_form(arrival.message) if arrival.tensors is not None else arrival.read_form()
                assert form is not None  # its tensors were posted for it
                if arrival.tensors is None:
                    self._keep_form(arrival.message, form)
                    arrival.post_tensors(form.tensors)
                    incoming.post(self._known_form, is_described=True)
                tensors = arrival.wait()
            incoming.done()
            for tensor, of_tensor in zip(tensors, form.tensors, strict=True):
                tensor.requires_grad_(of_tensor.requires_grad)
            self._early[arrival.message] = form.put_together(tensors)
        return self._early.pop(message)

    def _known_form(self, message: Message) -> Form | None:
        if self._is_dynamic:
            return None
        return self._forms.get(message.line, {}).get(self._key(message))

    def _keep_form(self, message: Message, form: Form) -> None:
        if not self._is_dynamic:
            self._forms.setdefault(message.line, {})[self._key(message)] = form

    def _key(self, message: Message) -> Hashable:
        return self._signatures[message.micro_batch], message.chunk

    # -- gradients ----------------------------------------------------------------------------------------------------

    def expect_gradient(self, message: Message, of: Sequence[Tensor]) -> None:
        """Say what the gradient will look like: that of the tensors `of`, as sent with the activation."""
        self._gradients[message] = [TensorForm.of(tensor) for tensor in of]

    def send_gradient(self, message: Message, gradients: Sequence[Tensor]) -> None:
        """Start to send gradients; they must not be changed."""
        if message.line.source == message.line.destination:
            self._local[message] = list(gradients)
            return
        carrier = self._carrier(message.line)
        with naming(str(message)):
            self._note(message, [_sent(carrier, gradient) for gradient in gradients if gradient.numel()])

    def take_gradient(self, message: Message) -> list[Tensor]:
        """The gradients that `expect_gradient` told of. Blocks until they are there."""
        self._gradients.setdefault(message, [])
        incoming = self._incoming.get(message.line)
        while incoming is not None and message not in self._early and message not in self._local:
            incoming.post(self._gradients.get, is_described=False)
            arrival = incoming.next_arrival()
            with naming(str(arrival.message)):
                self._early[arrival.message] = arrival.wait()
            incoming.done()
        del self._gradients[message]
        found: list[Tensor] = self._local.pop(message) if message in self._local else self._early.pop(message)
        return found

    # -- what is in flight --------------------------------------------------------------------------------------------

    def _note(self, message: Message, works: list[tuple[Pending, Tensor]]) -> None:
        self._sent.setdefault(message.line, deque()).append((message, works))

    def was_received(self, message: Message) -> None:
        """Something has come that needed `message`, so its memory is free."""
        sent = self._sent.get(message.line)
        while sent and sent[0][0] != message:
            self._reap(sent)
        if sent:
            self._reap(sent)

    def bound(self, line: Line) -> None:
        """Block while more than a few messages of `line` are on their way. Not where lines run in a circle."""
        sent = self._sent.get(line)
        while sent and len(sent) > _UNSEEN_AT_MOST:
            self._reap(sent)

    def _reap(self, sent: deque[tuple[Message, list[tuple[Pending, Tensor]]]]) -> None:
        message, works = sent.popleft()
        with naming(str(message)):
            for work, _ in works:
                work.wait()

    def _carrier(self, line: Line) -> Carrier:
        if line not in self._carriers:
            self._carriers[line] = self._carrier_of(line)
        return self._carriers[line]


def _sent(carrier: Carrier, tensor: Tensor) -> tuple[Pending, Tensor]:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return carrier.send(_bytes_of(whole)), whole  # kept: its memory is being read


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Within one rank: the same values, cut from the graph as a message would be."""
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
