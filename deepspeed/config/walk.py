"""Every key of a configuration, one after another.

Lives here: walking over the models. Does not live here: any key. Called by the reference page, the JSON Schema, and by
`config.root` to say where a misplaced key belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from deepspeed.config.base import ConfigModel, block_of
from deepspeed.config.blocks import blocks_of
from deepspeed.config.faults import Fault
from deepspeed.config.typed import TypedBlock

__all__ = ["Section", "sections", "with_home"]


class Section(NamedTuple):
    """One block of a configuration."""

    path: str
    """Dotted path; empty for the top level. `<name>` stands for names the user chooses, `[...]` for places in a list."""
    model: type[ConfigModel]


def sections(root: type[ConfigModel]) -> Iterator[Section]:
    """Yield the top level, and each block before the blocks inside it; the parameter models of a typed block follow it."""
    yield Section("", root)
    for name, block in blocks_of(root).items():
        yield from _inside(name, block.model)


def _inside(path: str, model: type[ConfigModel]) -> Iterator[Section]:
    yield Section(path, model)
    if issubclass(model, TypedBlock):
        for kind in model.known:
            yield Section(f"{path}.params ({kind})", model.params_model(kind))
    for name, field in model.model_fields.items():
        inner = block_of(field.annotation)
        if inner is not None:
            many = {"dict": ".<name>", "list": "[...]"}
            suffix = next((mark for kind, mark in many.items() if str(field.annotation).startswith(kind)), "")
            yield from _inside(f"{path}.{name}{suffix}", inner)


def with_home(fault: Fault, root: type[ConfigModel]) -> Fault:
    """Add to the fault of an unknown key in which other block the key exists."""
    if not fault.needed.startswith("unknown key") or fault.cure.startswith("Did you mean"):
        return fault
    key = fault.path.rpartition(".")[2]
    homes = [section.path for section in sections(root) if key in section.model.known_keys()]
    homes += [name for name in blocks_of(root) if name == key]
    if not homes:
        return fault
    places = ["the top level" if home in ("", key) else home for home in dict.fromkeys(homes)]
    return fault._replace(cure=f'"{key}" is a key of {" and of ".join(places[:3])}: move it there.')
