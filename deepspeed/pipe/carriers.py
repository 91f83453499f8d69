"""How the bytes of one line get from one rank to another: in order, and started before anybody waits for them.

    send(bytes)     starts and returns; the bytes may change again after `wait` of what it returns
    receive(bytes)  starts to fill them and returns; they are there after `wait` of what it returns

Lives here: messages of the back end. Called by `pipe.transport`.

[Note: lines that block each other] Back ends of devices carry what two ranks send each other in the order of the calls. If
both first send and then receive on one communicator, neither send begins. So there each line between two ranks has a
communicator of its own; gloo tells lines apart by tags.

[Note: opening lines] Such back ends make a communicator at its first message, and the call blocks the host until the other
end calls too, even a send that would not wait. Stages that each send first, in a circle as `interleaved` has it, would wait
for each other for ever. So one byte goes over each line at the start, in one order of all lines.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.watch import naming
from deepspeed.pipe.traffic import Line, lines
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["Carrier", "MessageCarrier", "MessageCarriers", "Pending"]

_KINDS = ("activation", "gradient")


class Pending(Protocol):
    """Something that was started."""

    def wait(self) -> Any:
        """Block (the caller, or its stream) until it is done.

        Raises:
            CommError: it never will be.
        """


class Carrier(Protocol):
    """One line, seen from one of its ends."""

    def send(self, data_B: Tensor) -> Pending:
        """Start to send contiguous bytes."""

    def receive(self, data_B: Tensor) -> Pending:
        """Start to receive into contiguous bytes."""


class MessageCarrier:
    """A line over `comm.isend` and `comm.irecv`.

    Args:
        peer: global rank of the other end.
        group: process group of both.
        tag: of the line within it.
    """

    def __init__(self, peer: int, group: Any, tag: int) -> None:
        self._peer = peer
        self._group = group
        self._tag = tag

    def send(self, data_B: Tensor) -> Pending:
        """See `Carrier`."""
        work: Pending = comm.isend(data_B, self._peer, group=self._group, tag=self._tag)
        return work

    def receive(self, data_B: Tensor) -> Pending:
        """See `Carrier`."""
        work: Pending = comm.irecv(data_B, self._peer, group=self._group, tag=self._tag)
        return work


class MessageCarriers:
    """Makes the carriers of a rank. Constructing it is collective over the world.

    Args:
        mesh: of the ranks.
        device: where tensors are.
        chunks: parts of the model per stage.
        is_tagged: the back end tells lines of one group apart by tags (gloo).
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, *, chunks: int, is_tagged: bool) -> None:
        self._axis = mesh.axis("pipe")
        self._groups: dict[tuple[str, bool], Any] = {}
        if not is_tagged and self._axis.size > 1:  # [Note: lines that block each other]
            for kind in _KINDS:
                for goes_up in (False, True):
                    self._groups[kind, goes_up] = mesh.group_along("pipe", f"{kind} {'up' if goes_up else 'down'}")
            for line in lines(self._axis.size, chunks):
                self._open(line, device)

    def _open(self, line: Line, device: torch.device) -> None:
        """[Note: opening lines]. Blocks until the other end is there."""
        if self._axis.rank not in (line.source, line.destination):
            return
        carrier, byte = self(line), torch.zeros(1, dtype=torch.uint8, device=device)
        with naming(f"opening of the line from stage {line.source} to stage {line.destination}"):
            (carrier.send(byte) if self._axis.rank == line.source else carrier.receive(byte)).wait()

    def __call__(self, line: Line) -> MessageCarrier:
        """The carrier of a line that this rank is one end of."""
        stage = self._axis.rank
        peer = self._axis.ranks[line.destination if line.source == stage else line.source]
        goes_up = line.destination > line.source
        group = self._groups.get((line.kind, goes_up), self._axis.group)
        return MessageCarrier(peer, group, 2 * _KINDS.index(line.kind) + goes_up)
