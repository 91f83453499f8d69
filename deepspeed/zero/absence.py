"""Training state that leaves the device for a while, so that something else (generation, another model) has room.

    tensor views --> | storage on the device | ---- offload ----> host copy; the storage shrinks to nothing
                     | storage on the device | <--- reload ------ host copy; every view is right again

Working on storages keeps all views valid (slices of the optimizer, parameters in flat buffers), without a list of them.
While something is away nothing may touch it: the engine asks `require_present` before each forward, backward and step.
Tensors that lie in the target memory already stay where they are.

Lives here: what the five kinds of state are, and moving them. `engine.members` and the engine's optimizer call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.config.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.errors import ArgumentError, UsageError

if TYPE_CHECKING:
    from deepspeed.zero.flat import FlatGroup
    from deepspeed.zero.master import MasterWeights

__all__ = ["Absence", "is_on_host", "state_tensors"]

_Kind = OffloadStateTypeEnum


class Absence:
    """What of one engine's training state is away from the device."""

    def __init__(self) -> None:
        self._copies: dict[OffloadStateTypeEnum, list[tuple[Tensor, Tensor]]] = {}

    @property
    def kinds(self) -> frozenset[OffloadStateTypeEnum]:
        """Kinds of state that are away."""
        return frozenset(self._copies)

    def offload(
        self,
        tensors: dict[OffloadStateTypeEnum, list[Tensor]],
        include: Iterable[OffloadStateTypeEnum | str] | None,
        device: OffloadDeviceEnum | str,
        *,
        pin_memory: bool,
        non_blocking: bool,
    ) -> None:
        """Move the kinds named by `include` (None: all) to the host.

        Raises:
            ArgumentError: a device other than the host, or an unknown kind; nothing was moved.
        """
        if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
            raise ArgumentError(f'offload_states(device="{device}"): only "cpu" is possible. Leave device out.')
        known = [kind.value for kind in _Kind]
        unknown = [str(kind) for kind in include or () if str(getattr(kind, "value", kind)) not in known]
        if unknown:
            raise ArgumentError(f"offload_states(include={unknown}): unknown kinds. There are: {', '.join(known)}.")
        wanted = list(_Kind) if include is None else [_Kind(kind) for kind in include]
        for kind in wanted:
            if kind not in self._copies:
                moved = _unique_storages(tensor for tensor in tensors.get(kind, ()) if not is_on_host(tensor))
                self._copies[kind] = [(t, _to_host(t, pin_memory=pin_memory, non_blocking=non_blocking)) for t in moved]
        if non_blocking:
            get_accelerator().synchronize()  # the storages shrink below: the copies must be complete
        for kind in wanted:
            for tensor, _ in self._copies[kind]:
                tensor.untyped_storage().resize_(0)

    def reload(self, *, non_blocking: bool) -> None:
        """Bring everything back."""
        for copies in self._copies.values():
            for tensor, host in copies:
                storage = tensor.untyped_storage()
                storage.resize_(host.numel())
                _bytes_of(tensor).copy_(host, non_blocking=non_blocking)
        self._copies.clear()

    def require_present(self, what: str) -> None:
        """Raise UsageError while anything is away that `what` would touch."""
        if self._copies:
            names = ", ".join(sorted(kind.value for kind in self._copies))
            raise UsageError(f"{what} while offload_states() keeps {names} away. Call engine.reload_states() first.")


def state_tensors(master: MasterWeights | None, flats: Iterable[FlatGroup]) -> dict[OffloadStateTypeEnum, list[Tensor]]:
    """The tensors of each kind of training state, views included."""
    flats = list(flats)
    trained = [flat for flat in flats if flat.kind.is_trained]
    buffers = [buffer for flat in trained for buffer in flat.gradients.buffers()]
    return {
        _Kind.optim_states: list(_optimizer_tensors(master)) if master is not None else [],
        _Kind.hp_params: [buffer for flat in trained if flat.masters is not None for buffer in flat.masters.buffers()],
        _Kind.lp_params: [flat.values for flat in flats],
        _Kind.lp_grads: [shard for flat in trained for shard in flat.gradients.shards()],
        _Kind.contiguous_grad_buffer: buffers,
    }


def is_on_host(tensor: Tensor) -> bool:
    """Whether `tensor` lies in host memory already."""
    return tensor.device.type == "cpu"


def _optimizer_tensors(master: MasterWeights) -> Iterator[Tensor]:
    for state in master.optimizer.state.values():
        tensors = (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
        yield from (tensor for tensor in tensors if tensor.device.type != "meta")  # those rest on a tier


def _unique_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    found: dict[Any, Tensor] = {}
    for tensor in tensors:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(found.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _to_host(tensor: Tensor, *, pin_memory: bool, non_blocking: bool) -> Tensor:
    source = _bytes_of(tensor)
    host = torch.empty(source.shape, dtype=torch.uint8)
    if pin_memory:
        host = get_accelerator().pin_memory(host, make_copy=False)
    return host.copy_(source, non_blocking=non_blocking)
