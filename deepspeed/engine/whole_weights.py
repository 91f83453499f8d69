"""The entries of a model's state dict, and their whole values one after the other, wherever their shards are.

Does not live here: what becomes of the values (`whole_model`, which calls this).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from deepspeed.checkpoint.export.model_file import ModelEntry

if TYPE_CHECKING:
    from deepspeed.zero.flat import FlatGroup

__all__ = ["WholeWeights"]


class WholeWeights:
    """What a state dict holds, tied names together."""

    def __init__(
        self,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        flats: Sequence[FlatGroup],
        metadata: Mapping[str, Any] | None,
    ) -> None:
        """Describe a state dict.

        Args:
            module: the model.
            state_dict: of `module`; parameters of `flats` may be empty in it.
            flats: the groups of sharded parameters.
            metadata: `_metadata` of the whole state dict.
        """
        self._flats = flats
        self._shapes = {
            id(member.param): (flat.values.dtype, tuple(shape))
            for flat in flats
            for member, shape in zip(flat.members, flat.shapes, strict=True)
        }
        self._params = {name: id(param) for name, param in module.named_parameters(remove_duplicate=False)}
        self._whole: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}
        """Entries that are no tensors."""

        self.metadata = metadata
        """Versions of modules, as `load_state_dict` looks for them."""

        found: dict[Hashable, ModelEntry] = {}
        for name, value in state_dict.items():
            if not isinstance(value, Tensor):
                self.others[name] = value
                continue
            key = self._key(name, value)
            if key not in found:
                dtype, shape = (
                    self._shapes[self._params[name]] if self._is_sharded(name) else (value.dtype, tuple(value.shape))
                )
                found[key] = ModelEntry([], dtype, shape)
                if not self._is_sharded(name):
                    self._whole[name] = value.detach()
            found[key].names.append(name)
        self._first_names = {
            self._params[entry.names[0]]: entry.names[0] for entry in found.values() if self._is_sharded(entry.names[0])
        }
        by_first_name = {entry.names[0]: entry for entry in found.values()}
        self.entries = [by_first_name[name] for nbytes in self.item_sizes() for name in self._order(nbytes)]
        """Every tensor, in the order of `values`."""

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """(First name, whole value) of each entry, by falling element size. A value is valid until the next is asked for.

        All ranks that share parameters go through it to its end: sharded parameters are gathered bucket by bucket.
        """
        for nbytes in self.item_sizes():
            yield from self.values_of(nbytes)

    def values_of(self, item_nbytes: int) -> Iterator[tuple[str, Tensor]]:
        """Those of `values` with elements of this size."""
        yield from ((name, value) for name, value in self._whole.items() if value.element_size() == item_nbytes)
        for flat in self._wanted_flats(item_nbytes):
            for member, value in flat.gathered():
                if id(member.param) in self._first_names:
                    yield self._first_names[id(member.param)], value

    def _order(self, item_nbytes: int) -> Iterator[str]:
        """First names in the order of `values_of`."""
        yield from (name for name, value in self._whole.items() if value.element_size() == item_nbytes)
        for flat in self._wanted_flats(item_nbytes):
            for slot in flat.layout.slots:
                key = id(flat.members[slot.index].param)
                if key in self._first_names:
                    yield self._first_names[key]

    def item_sizes(self) -> list[int]:
        """Sizes of elements that there may be, falling."""
        sizes = {value.element_size() for value in self._whole.values()} | {f.values.element_size() for f in self._flats}
        return sorted(sizes, reverse=True)

    def _wanted_flats(self, item_nbytes: int) -> Iterator[FlatGroup]:
        for flat in self._flats:
            is_wanted = any(id(member.param) in self._first_names for member in flat.members)
            if is_wanted and flat.values.element_size() == item_nbytes:
                yield flat

    def _is_sharded(self, name: str) -> bool:
        return self._params.get(name) in self._shapes

    def _key(self, name: str, value: Tensor) -> Hashable:
        """Equal for names of one tensor."""
        if self._is_sharded(name):
            return self._params[name]
        if value.numel() == 0:
            return name
        return (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
