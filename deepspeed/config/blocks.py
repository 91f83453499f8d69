"""How `DeepSpeedConfig` holds its blocks: each by the name of a model that is imported when it is first needed.

Lives here: the two descriptors. Does not live here: the list of blocks (`config.root`). A configuration uses few of some
forty blocks, and a pydantic model costs milliseconds, so the others are never loaded.
"""

from __future__ import annotations

import importlib
from typing import Any, Generic, TypeVar, cast

from deepspeed.config.base import ConfigModel

__all__ = ["Block", "OptionalBlock", "blocks_of", "load_model"]

_M = TypeVar("_M", bound=ConfigModel)


def load_model(where: str) -> type[ConfigModel]:
    """Import a model named as `module:Class` inside this room."""
    module, _, attribute = where.partition(":")
    return cast("type[ConfigModel]", getattr(importlib.import_module(f"deepspeed.config.{module}"), attribute))


class _Named(Generic[_M]):
    """Name of a block, and of its model as `module:Class` inside this room."""

    is_optional = False

    def __init__(self, where: str) -> None:
        self.where = where
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def model(self) -> type[_M]:
        """The model's class."""
        return cast("type[_M]", load_model(self.where))

    def _held(self, config: Any) -> _M | None:
        return cast("_M | None", config._blocks.get(self.name))


class Block(_Named[_M]):
    """A block that holds its defaults when it was left out."""

    def __get__(self, config: Any, owner: type) -> _M:
        """Return the block's model; on the class itself, this descriptor."""
        if config is None:
            return cast(_M, self)
        held = self._held(config)
        if held is None:
            held = self.model.model_construct()  # defaults need no validation; a test compares the two
            config._blocks[self.name] = held
        return held


class OptionalBlock(_Named[_M]):
    """A block that is None when it was left out."""

    is_optional = True

    def __get__(self, config: Any, owner: type) -> _M | None:
        """Return the block's model or None; on the class itself, this descriptor."""
        return cast("_M | None", self) if config is None else self._held(config)


def blocks_of(owner: type) -> dict[str, Block[Any] | OptionalBlock[Any]]:
    """Return every block of a configuration class, in order of definition."""
    found = (item for base in reversed(owner.__mro__) for item in vars(base).items())
    return {name: value for name, value in found if isinstance(value, (Block, OptionalBlock))}
