"""Which weights go into which output file: the rules of the Hugging Face hub, over sizes alone. Nothing is read for a plan.

    weights  a 3  b 3  c 9  d 2      max 6:   file 1 {a, b}   file 2 {c}, larger than any file may be   file 3 {d}

Source: huggingface_hub, `serialization`: "Split a model state dictionary in shards", for the rules and the index file.

Does not live here: values (`weights_source`) and files (`files`). Called by `files`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.errors import ArgumentError

__all__ = ["Item", "ShardPlan", "parse_nbytes", "plan_shards"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Item(NamedTuple):
    """One weight to place."""

    name: str
    nbytes: int
    shares_with: str | None = None
    """Name of an earlier item whose bytes this one shares in the file; it costs nothing and goes where that one is."""


@dataclass(frozen=True)
class ShardPlan:
    """File name -> names of the weights in it, in the order of writing."""

    files: dict[str, list[str]]
    index_file: str | None
    """Name of the index; None where there is one file, which needs none."""

    total_nbytes: int

    def index(self) -> str:
        """Text of the index file."""
        where = {name: file for file, names in self.files.items() for name in names}
        described = {"metadata": {"total_size": self.total_nbytes}, "weight_map": where}
        return json.dumps(described, indent=2, sort_keys=True) + "\n"


def parse_nbytes(text: str | int, what: str = "max_shard_size") -> int:
    """Bytes of a size such as `"5GB"` (10^9), `"500MB"`, `"2GiB"` (2^30) or a number.

    Raises:
        ArgumentError: not such a size, or below one byte; `what` names it.
    """
    match = _SIZE.fullmatch(str(text))
    nbytes = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0.0
    is_part_of_a_byte = match is not None and not match[2] and not nbytes.is_integer()
    if nbytes < 1 or is_part_of_a_byte:
        raise ArgumentError(
            f"{what}={text!r} is no size of a file. Give a number of bytes, or a number and a unit: "
            "KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024); for example '5GB'."
        )
    return int(nbytes)


def plan_shards(items: Iterable[Item], max_nbytes: int, file_name: str) -> ShardPlan:
    """Place the items, in their order: a file is closed before the item that would make it larger than `max_nbytes`.

    Args:
        items: the weights. One that is larger than `max_nbytes` gets a file of its own.
        max_nbytes: limit of each file's tensors.
        file_name: name of the file where one is enough, e.g. `pytorch_model.bin`; several are numbered from it.
    """
    shards: list[list[str]] = []
    shard_of: dict[str, list[str]] = {}
    open_shard: list[str] = []
    open_nbytes = total_nbytes = 0
    for item in items:
        if item.shares_with is not None:
            shard = shard_of[item.shares_with]
        elif item.nbytes > max_nbytes:
            shard = []
            shards.append(shard)
        else:
            if open_shard and open_nbytes + item.nbytes > max_nbytes:
                shards.append(open_shard)
                open_shard, open_nbytes = [], 0
            shard = open_shard
            open_nbytes += item.nbytes
        total_nbytes += item.nbytes if item.shares_with is None else 0
        shard.append(item.name)
        shard_of[item.name] = shard
    if open_shard or not shards:
        shards.append(open_shard)
    return _name(shards, total_nbytes, file_name)


def _name(shards: Sequence[list[str]], total_nbytes: int, file_name: str) -> ShardPlan:
    if len(shards) == 1:
        return ShardPlan({file_name: shards[0]}, None, total_nbytes)
    stem, dot, suffix = file_name.rpartition(".")
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}{dot}{suffix}" for number in range(1, len(shards) + 1)]
    return ShardPlan(dict(zip(names, shards, strict=True)), f"{file_name}.index.json", total_nbytes)
