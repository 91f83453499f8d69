"""Tensors that a rank holds a part of: of tensor-parallel layers, of experts stacked in one parameter.

    checkpoint, exports   qkv (12, M)   q0..3 k0..3 v0..3    gate_up_proj (8, 2I, M)   |  0  1  |  2  3  |  4  5  |  6  7  |
    rank 0 of the axis    qkv (6, M)    q0 q1 k0 k1 v0 v1    gate_up_proj (2, 2I, M)   |  0  1  |

All ranks have such a tensor under one name, the model's own. Whatever goes by name stores and reads the whole one, so that
files do not depend on the ranks. Who holds which part is asked of the modules, of all in one way:

    module.cut_axis    "tensor" or "expert"; None, or no such attribute: nothing is cut
    module.cuts()      (name of a parameter or buffer in the module, `sharding.Cut`), ...

and of parameters that Megatron-style code marked (`tensor_model_parallel` or `model_parallel`, with `partition_dim`, and
`partition_stride` where several are fused): equal widths over the tensor axis.

Does not live here: who cuts (`tensor_parallel`, `moe.auto_ep`), the arithmetic (`sharding`), reading (`checkpoint.parts`).
Used by `saving`, `loading`, `whole_model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn

from deepspeed.checkpoint import CheckpointSource, Piece
from deepspeed.checkpoint.parts import read_part
from deepspeed.common.deferred import DeferredTensor
from deepspeed.errors import UsageError
from deepspeed.optim.clip import is_model_parallel
from deepspeed.sharding import Cut
from deepspeed.tensor_parallel.layers import part_of
from deepspeed.topology.mesh import AxisGroup, ParallelMesh

__all__ = ["Cuts", "Held"]

Axis = Literal["tensor", "expert"]


class Held(NamedTuple):
    """Part `rank` of a cut is what this rank holds; the other ranks of `axis` hold the others."""

    cut: Cut
    rank: int
    axis: Axis

    @property
    def start(self) -> int:
        """Its first element in stored order."""
        return self.cut.stored_starts()[self.rank]

    @property
    def counts(self) -> bool:
        """Whether no rank before this one holds something of the tensor."""
        return not any(self.cut.width(rank) for rank in range(self.rank))


class Cuts:
    """Those of a model on one rank, by every name; any other tensor is its own whole.

    Args:
        module: the model.
        axes: the ranks of each axis that may be cut over.

    Raises:
        UsageError: what a module or a mark says does not fit the ranks or the tensor.
    """

    def __init__(self, module: nn.Module, axes: Mapping[Axis, AxisGroup]) -> None:
        held = dict(_found(module, axes))
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        self._held = {name: held[id(tensor)] for name, tensor in tensors if id(tensor) in held}
        for name, tensor in tensors:
            if name in self._held:
                _check(name, _shape(tensor), self._held[name], axes[self._held[name].axis])

    @classmethod
    def of_mesh(cls, module: nn.Module, mesh: ParallelMesh) -> Cuts:
        """Those of a model whose ranks lie so."""
        return cls(module, {"tensor": mesh.axis("tensor"), "expert": mesh.axis("expert")})

    def __contains__(self, name: str) -> bool:
        """Whether other ranks hold other parts of it."""
        return name in self._held

    def is_along(self, axis: Axis, name: str) -> bool:
        """Whether the ranks of `axis` do."""
        return name in self._held and self._held[name].axis == axis

    def counts(self, name: str) -> bool:
        """Whether this rank is the first on the axis to hold something of it; of whole ones every rank is."""
        return name not in self._held or self._held[name].counts

    def shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor; `own` is that of this rank's."""
        return self._held[name].cut.shape if name in self._held else tuple(own)

    def part(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of the whole tensor of that name. What has another shape stays as it is."""
        held = self._held.get(name)
        is_whole = held is not None and tuple(value.shape) == held.cut.shape
        return part_of(value, held.cut, held.rank) if is_whole and held is not None else value

    def piece(
        self,
        stored: str,
        name: str,
        own: Sequence[int],
        start: int,
        data: Tensor | DeferredTensor,
        *,
        is_private: bool = False,
    ) -> Piece:
        """What this rank writes: elements of its tensor from `start` on, or of an optimizer's state of it.

        Args:
            stored: name in the checkpoint.
            name: of the parameter or buffer.
            own: shape of this rank's tensor.
            start: first element, of this rank's flattened tensor.
            data: the elements.
            is_private: as `Piece` has it.
        """
        held = self._held.get(name)
        if held is None:
            return Piece(stored, tuple(own), start, data, is_private=is_private)
        return Piece(stored, held.cut.shape, held.start + start, data, held.cut, is_private)

    def read(self, source: CheckpointSource, stored: str, name: str, start: int, out: Tensor) -> Tensor:
        """Inverse of `piece`: fill the flat `out`, and give it."""
        held = self._held.get(name)
        if held is None:
            return source.read(stored, start, out=out)
        return read_part(source, stored, held.cut, held.rank, start, out)

    def parts_of(self, name: str) -> Cut:
        """How ranks hold a tensor that is cut."""
        return self._held[name].cut


def _found(module: nn.Module, axes: Mapping[Axis, AxisGroup]) -> Iterator[tuple[int, Held]]:
    """By id of the tensor; what modules say comes last, and counts where there is a mark too."""
    tensor = axes["tensor"]
    for name, param in module.named_parameters() if tensor.size > 1 else ():
        if is_model_parallel(param):
            yield id(param), Held(_marked(name, param, tensor.size), tensor.rank, "tensor")
    for each in module.modules():
        for axis, ranks in axes.items():
            for name, cut in cast("Any", each).cuts() if getattr(each, "cut_axis", None) == axis else ():
                yield id(_tensor(each, name)), Held(cut, ranks.rank, axis)


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), attribute)
    return tensor


def _marked(name: str, param: Tensor, ranks: int) -> Cut:
    """The cut of a parameter that is marked as one of equal parts."""
    shape, dim = _shape(param), int(getattr(param, "partition_dim", -1))
    fused = max(1, int(getattr(param, "partition_stride", 1) or 1))
    if not 0 <= dim < len(shape) or shape[dim] % fused:
        raise UsageError(
            f"parameter {name!r} of shape {shape} is marked as one of {ranks} parts (tensor_model_parallel or "
            f"model_parallel), with partition_dim={dim} and partition_stride={fused}: a checkpoint must know along which "
            "dimension it was cut. Set partition_dim to that dimension (and partition_stride to the number of matrices "
            "fused in it), or take the marks away from what every rank holds whole."
        )
    sections = [[shape[dim] // fused] * ranks] * fused
    return Cut.of_widths((*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :]), dim, *sections)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Of this rank's tensor, also where ZeRO shards it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _check(name: str, shape: tuple[int, ...], held: Held, axis: AxisGroup) -> None:
    cut = held.cut
    if cut.ranks != axis.size:
        raise UsageError(
            f"cuts() says that {name!r} was cut for {cut.ranks} ranks; the {held.axis} axis has {axis.size}. Cut the model "
            "anew for the ranks that it trains on."
        )
    if cut.part_shape(held.rank) != shape:
        raise UsageError(
            f"cuts() says that rank {held.rank} of the {held.axis} axis holds {cut.part_shape(held.rank)} of {name!r} "
            f"{cut.shape}; the tensor has shape {shape}. Let cuts() describe the parts that ranks hold."
        )
