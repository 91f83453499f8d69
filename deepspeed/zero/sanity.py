"""Do ranks that must hold the same values hold them? Asked with `enable_sanity_checks`, by one small all-gather.

    bucket 0 of this rank --hash_bits--> 64 bits --.
    bucket 1              --hash_bits--> 64 bits ---+--> all-gather --> a table, ranks x buckets --> every column one value?
    ...                                            /

Lives here: the hash, the comparison, and which values are held alike. Does not live here: when to ask; the engine does
so after the update, when whole parameters have been gathered.

[Note: the hash] The bits are taken as 64-bit words; each word is mixed with its own upper half and multiplied by an odd
number that depends on its position, and the products are added modulo 2^64. Mixing and multiplication by an odd number
lose nothing, so a change within one word, a single bit for instance, always changes the sum. Exchanged words change it
but for one case in about 2^32. It is no defence against somebody who wants two buckets to agree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.common.wording import some
from deepspeed.errors import DeepSpeedError
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup

__all__ = ["HASH_NBYTES", "ValuesDifferError", "agree", "hash_bits", "held_alike"]

_WORD_NBYTES = 8
_BLOCK_WORDS = 1 << 18
_NEXT_BLOCK = 0x2545F4914F6CDD1D  # odd
_SHOWN = 3

HASH_NBYTES = _BLOCK_WORDS * _WORD_NBYTES
"""What `hash_bits` keeps on a device from its first call on."""


class ValuesDifferError(DeepSpeedError, RuntimeError):
    """Ranks hold different values where they must hold the same."""


def hash_bits(tensor: Tensor) -> Tensor:
    """64 bits that depend on every bit of `tensor`, on their order and number, not on shape and dtype. [Note: the hash]

    Args:
        tensor: of any dtype and shape; one that is not contiguous is copied.

    Returns:
        int64 scalar on the tensor's device; the host does not wait for it.
    """
    flat = tensor.detach().reshape(-1)
    whole_numel = flat.numel() // max(1, _WORD_NBYTES // flat.element_size())
    whole_numel *= max(1, _WORD_NBYTES // flat.element_size())
    result = torch.full((), flat.numel() * flat.element_size(), dtype=torch.int64, device=flat.device)
    for words in (_words(flat[:whole_numel]), _padded_word(flat[whole_numel:])):
        for start in range(0, words.numel(), _BLOCK_WORDS):
            block = words[start : start + _BLOCK_WORDS]
            mixed = (block >> 32).bitwise_xor_(block)
            result = result * _NEXT_BLOCK + mixed.mul_(_weights(flat.device)[: block.numel()]).sum()
    return result


def _words(flat: Tensor) -> Tensor:
    """The elements as 64-bit words: a view where they begin at a multiple of 8 bytes of their storage."""
    is_aligned = flat.storage_offset() * flat.element_size() % _WORD_NBYTES == 0
    return (flat if is_aligned else flat.clone()).view(torch.int64)


def _padded_word(rest: Tensor) -> Tensor:
    """The last few elements as one word, empty without them."""
    if not rest.numel():
        return rest.new_empty(0, dtype=torch.int64)
    word = torch.zeros(_WORD_NBYTES, dtype=torch.uint8, device=rest.device)
    nbytes = rest.numel() * rest.element_size()
    word[:nbytes] = rest.clone().view(torch.uint8)
    return word.view(torch.int64)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers, equal on all ranks."""
    generator = torch.Generator().manual_seed(0x5EED)
    numbers = torch.randint(-(2**62), 2**62, (_BLOCK_WORDS,), generator=generator, dtype=torch.int64)
    return (numbers * 2 + 1).to(device)


def agree(tensors: Sequence[tuple[str, Tensor]], axis: AxisGroup, told: AxisGroup | None = None) -> None:
    """Check that all ranks of `axis` hold the same bits. Collective over both axes; waits for the device once or twice.

    Args:
        tensors: names for the error and values; as many, in the same order, on all ranks.
        axis: the ranks to compare.
        told: the ranks that raise together; None: those of `axis`.

    Raises:
        ValuesDifferError: on every rank, when a value differs; names it and the ranks that differ from most others.
    """
    text = _difference(tensors, axis)
    if told is not None and told.size > 1:
        device = tensors[0][1].device if tensors else torch.device("cpu")
        differs = torch.tensor(float(bool(text)), device=device)
        comm.all_reduce(differs, comm.ReduceOp.MAX, group=told.group)
        if differs.item():
            texts: list[Any] = [None] * told.size
            comm.all_gather_object(texts, text, group=told.group)
            text = next(each for each in texts if each)
    if text:
        raise ValuesDifferError(text)


def _difference(tensors: Sequence[tuple[str, Tensor]], axis: AxisGroup) -> str:
    if axis.size == 1 or not tensors:
        return ""
    mine = torch.stack([hash_bits(tensor) for _, tensor in tensors])
    everyones = mine.new_empty(axis.size * mine.numel())
    comm.all_gather_into_tensor(everyones, mine, group=axis.group)
    table = everyones.view(axis.size, -1).cpu()
    usual = table.mode(dim=0).values
    differing = (table != usual).nonzero().tolist()
    if not differing:
        return ""
    ranks_of: dict[str, list[int]] = {}
    for position, column in differing:
        ranks_of.setdefault(tensors[column][0], []).append(axis.ranks[position])
    parts = [f"{name} on rank(s) {ranks}" for name, ranks in ranks_of.items()]
    return (
        f"values that ranks {list(axis.ranks)} must hold alike differ from those of most ranks: "
        f"{some(parts, _SHOWN, between='; ')}. Look for code that changes parameters on some ranks only (change them on all "
        "ranks, or through deepspeed.zero.GatheredParameters with modifier_rank, or safe_set_full_fp32_param); if there is "
        "none, suspect the memory of those ranks' hosts or devices."
    )


def held_alike(
    flats: Iterable[FlatGroup], *, of_experts: bool = False, of_parts: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters, bucket by bucket: what the data-parallel ranks hold alike between an update and the next.

    Nothing of groups whose parameters are sharded. Experts that are spread over ranks are alike among fewer: they are asked
    for with `of_experts`, and nothing else is given then. Without `of_parts`, what tensor-parallel ranks hold alike too.
    """
    for flat in flats:
        if flat.is_sharded or flat.kind.is_expert != of_experts or (flat.kind.is_part and not of_parts):
            continue
        for number, bucket in enumerate(flat.layout.buckets):
            slots = flat.layout.slots[bucket.first_slot : bucket.last_slot]
            names = [flat.members[slot.index].name for slot in slots]
            yield f"bucket {number} ({some(names, _SHOWN)})", flat.values[bucket.start : bucket.stop]
