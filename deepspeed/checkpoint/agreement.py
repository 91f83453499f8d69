"""All ranks go on, or all ranks raise the same error: the one pattern behind every step of a save or load.

    every rank   own() ----- gather ---> rank 0   any failure? raise for all : lead(all results)
    every rank   <---------- broadcast ------------- the one verdict

Lives here: the messages between ranks (JSON bytes; no pickle) and the pattern. Does not live here: what is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.disk import strict_json
from deepspeed.comm.aside import AsideGroup
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, DeepSpeedError

__all__ = ["Alone", "AsideRanks", "GroupRanks", "Ranks", "ranks_of", "together"]

_KINDS: dict[str, type[DeepSpeedError]] = {
    kind.__name__: kind for kind in (CheckpointError, CheckpointDamagedError, CheckpointNotFoundError, ArgumentError)
}


class Ranks(Protocol):
    """The ranks that save or load together; both methods are collective."""

    rank: int
    world_size: int

    def gather(self, payload: bytes) -> list[bytes]:
        """Bring every rank's bytes to rank 0, in rank order; the other ranks get an empty list."""

    def broadcast(self, payload: bytes) -> bytes:
        """Bring rank 0's bytes to every rank; what the others pass is not looked at."""


class Alone:
    """One process without a process group."""

    rank = 0
    world_size = 1

    def gather(self, payload: bytes) -> list[bytes]:
        """The own bytes."""
        return [payload]

    def broadcast(self, payload: bytes) -> bytes:
        """The own bytes."""
        return payload


class _TensorRanks:
    """Bytes as tensors: what the two kinds of group below share. Blocks until every rank of the group has called."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device

    def gather(self, payload: bytes) -> list[bytes]:
        """Bring every rank's bytes to rank 0: sizes first, then everything padded to the longest."""
        nbytes = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        sizes = self._all_gather(nbytes)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        mine[: len(payload)] = _to_tensor(payload).to(self._device)
        parts = self._gather(mine)
        return [_to_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=False)]

    def broadcast(self, payload: bytes) -> bytes:
        """Bring rank 0's bytes to every rank: size first, then the bytes."""
        nbytes = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        self._broadcast(nbytes)
        buffer = _to_tensor(payload) if self.rank == 0 else torch.empty(int(nbytes), dtype=torch.uint8)
        buffer = buffer.to(self._device)
        self._broadcast(buffer)
        return _to_bytes(buffer)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def _broadcast(self, tensor: Tensor) -> None:
        raise NotImplementedError


class GroupRanks(_TensorRanks):
    """The ranks of a process group (None: all ranks)."""

    def __init__(self, rank: int, world_size: int, group: Any = None) -> None:
        kinds = {device.type for device in (group or comm.get_world_group())._device_types}
        super().__init__(rank, world_size, "cpu" if "cpu" in kinds else get_accelerator().current_device_name())
        self._group = group
        self._first = comm.get_global_rank(group, 0)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        comm.all_gather(gathered, tensor, group=self._group)
        return gathered

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else None
        comm.gather(tensor, gather_list=parts, dst=self._first, group=self._group)
        return parts or []

    def _broadcast(self, tensor: Tensor) -> None:
        comm.broadcast(tensor, src=self._first, group=self._group)


class AsideRanks(_TensorRanks):
    """All ranks, each with the one thread that the group was made for."""

    def __init__(self, rank: int, group: AsideGroup) -> None:
        super().__init__(rank, group.world_size, "cpu")
        self._group = group

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._group.all_gather(tensor)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = self._group.all_gather(tensor)  # a few hundred bytes per rank: not worth a collective of its own
        return gathered if self.rank == 0 else []

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor)


def ranks_of(rank: int, world_size: int, group: Any = None) -> Ranks:
    """The ranks that act together: one process, or a process group in which this is `rank` of `world_size`."""
    return Alone() if world_size == 1 else GroupRanks(rank, world_size, group)


def together(
    ranks: Ranks, own: Callable[[], JsonValue], lead: Callable[[list[JsonValue]], JsonValue] = lambda results: None
) -> JsonValue:
    """Run `own` on every rank, then `lead` on rank 0 with the results in rank order; return lead's value on every rank.

    Collective. When `own` fails anywhere, `lead` is not called. Every rank then raises the same error, which names the ranks
    that failed; on those ranks it is raised from the first cause.

    Raises:
        CheckpointError, CheckpointDamagedError, CheckpointNotFoundError, ArgumentError: whichever the first failing rank
            met; any other exception becomes a CheckpointError.
    """
    report, cause = _attempt(own)
    reports = [strict_json.loads(part) for part in ranks.gather(strict_json.dumps(report).encode())]
    verdict: JsonValue = None
    if ranks.rank == 0:
        verdict = _merge_failures(reports, ranks.world_size)
        if verdict is None:
            results = [cast("dict[str, JsonValue]", part)["value"] for part in reports]
            verdict, cause = _attempt(lambda: lead(results))
    agreed = cast("dict[str, JsonValue]", strict_json.loads(ranks.broadcast(strict_json.dumps(verdict).encode())))
    if "error" in agreed:
        raise _KINDS[str(agreed["error"])](str(agreed["text"])) from cause
    return agreed["value"]


def _attempt(action: Callable[[], JsonValue]) -> tuple[JsonValue, Exception | None]:
    """What `action` gives, or what went wrong, as a message for the other ranks.

    Broad on purpose: an exception that did not become a message would leave the other ranks waiting. It is raised again, on
    every rank, by `together`.
    """
    try:
        return {"value": action()}, None
    except Exception as error:
        kind = next((name for name, known in reversed(_KINDS.items()) if isinstance(error, known)), "CheckpointError")
        text = str(error) if isinstance(error, DeepSpeedError) else f"{type(error).__name__}: {error}"
        return {"error": kind, "text": text}, error


def _merge_failures(reports: Sequence[JsonValue], world_size: int) -> JsonValue:
    """One message for all failed ranks: each different text once, with the ranks that met it; None when none failed."""
    where: dict[str, list[int]] = {}
    kind = ""
    for rank, report in enumerate(cast("Sequence[dict[str, JsonValue]]", reports)):
        if "error" in report:
            kind = kind or str(report["error"])
            where.setdefault(str(report["text"]), []).append(rank)
    if not where:
        return None
    if world_size == 1:
        return {"error": kind, "text": next(iter(where))}
    texts = [f"{'rank' if len(met) == 1 else 'ranks'} {', '.join(map(str, met))}: {text}" for text, met in where.items()]
    return {"error": kind, "text": "\n".join(texts)}


def _to_tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
