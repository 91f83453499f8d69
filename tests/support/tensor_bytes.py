"""Bytes that the tensors of a process use, each storage once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["bytes_of_tensors", "mapped_bytes_of_tensors", "place_of"]


def bytes_of_tensors() -> dict[str, int]:
    """Bytes by the place of every storage that a tensor of this process uses.

    Memory that ranks share is placed by the number of its file, so that a rank's view of its peers' is not counted twice.
    """
    return {place: storage.nbytes() for place, storage in _storages()}


def mapped_bytes_of_tensors() -> dict[str, int]:
    """The same of memory that is neither torch's allocator's nor shared: what `ops.aio.memory.aligned_empty` has mapped."""
    return {p: s.nbytes() for p, s in _storages() if not (p.startswith("file") or s.resizable()) and s.nbytes()}


def place_of(tensor: Tensor) -> str:
    """Where a tensor that no other rank maps has its storage."""
    return f"address {tensor.untyped_storage().data_ptr()}"


def _storages() -> Iterator[tuple[str, torch.UntypedStorage]]:
    shared = [(low, high, node) for low, high, node in _mappings() if node]
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.layout == torch.strided and each.device.type != "meta":
            storage = each.untyped_storage()
            address = storage.data_ptr()
            nodes = [f"file {node} + {address - low}" for low, high, node in shared if low <= address < high]
            yield (nodes[0] if nodes else f"address {address}"), storage


def _mappings() -> list[tuple[int, int, str]]:
    """(first address, last address, number of the file or "") of every mapping of memory without a name on disk."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, node, *name = line.split(maxsplit=5)
        low, high = (int(each, 16) for each in addresses.split("-"))
        found.append((low, high, node if name and name[0].startswith("/memfd:") else ""))
    return found
