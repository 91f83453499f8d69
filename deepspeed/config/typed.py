"""Blocks that name a class and its arguments: what `optimizer` and `scheduler` have in common.

Lives here: the base of both and of the models of their parameters. Does not live here: any type (`config.optimizer`,
`config.scheduler`), nor the parameters of torch's own classes: this room knows no torch, so the builder checks those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeAlias, cast

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from deepspeed.config.base import AUTO, WHO_FILLS_AUTO, ConfigModel, fault_line
from deepspeed.config.blocks import load_model
from deepspeed.config.faults import refuse
from deepspeed.config.values import Freeform

__all__ = ["ParamsModel", "TypedBlock"]


class ParamsModel(ConfigModel):
    """Parameters of one type: "auto" stands for a value that a client fills in."""

    left_out_when_none: ClassVar[frozenset[str]] = frozenset()
    """Keys that the builder sees only when they were given."""

    @classmethod
    def must_fill(cls, field: str) -> bool:
        """No parameter of an optimizer or schedule may stay "auto"."""
        return True

    def as_params(self) -> Freeform:
        """Return the keyword arguments: everything given, and the documented defaults."""
        params = self.model_dump()
        return {key: value for key, value in params.items() if value is not None or key not in self.left_out_when_none}


ParamsClass: TypeAlias = type[ParamsModel]


class TypedBlock(ConfigModel):
    """A block with a `type` and the `params` that go with it."""

    known: ClassVar[Mapping[str, str]] = {}
    """Canonical type -> model of its parameters, as `module:Class` inside this room; loaded when it is used."""

    type: str = Field(min_length=1)
    """Name of the class."""

    params: Freeform = Field(default_factory=dict, validate_default=True)
    """Its keyword arguments."""

    @classmethod
    def params_model(cls, kind: str) -> ParamsClass:
        """Return the model of a known type's parameters."""
        return cast(ParamsClass, load_model(cls.known[kind]))

    @field_validator("type", mode="after")
    @classmethod
    def _canonical(cls, name: str) -> str:
        by_lower = {known.lower(): known for known in cls.known}
        canonical = by_lower.get(name.lower(), name)
        if not canonical.isidentifier():
            raise refuse("needed the name of a class", f"Known here: {', '.join(cls.known)}.")
        return canonical

    @field_validator("params", mode="before")
    @classmethod
    def _typed(cls, params: object, info: ValidationInfo) -> object:
        """Check the parameters of a known type; refuse "auto" for every type."""
        if params is None:
            params = {}
        kind = info.data.get("type")
        if not isinstance(params, Mapping) or kind is None:
            return params
        if kind in cls.known:
            return cls.params_model(kind).model_validate(params).as_params()
        unfilled = [key for key, value in params.items() if isinstance(value, str) and value == AUTO]
        if unfilled:
            lines = [fault_line((key,), AUTO, 'needed a value in place of "auto"', WHO_FILLS_AUTO) for key in unfilled]
            raise ValidationError.from_exception_data(kind, lines)
        return dict(params)
