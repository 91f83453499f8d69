"""Which parameters are gathered together: the module tree cut into units.

    Gpt                          unit 0   Gpt's own parameters (pos), in use while Gpt runs
    |- wte   Embedding           unit 1   no children: one unit
    |- h     ModuleList          (nothing of its own)
    |  |- 0  Block               unit 2   an element of a list that is small enough: one unit, whatever it is made of
    |  `- 1  Block               unit 3   (tiny neighbours in a list, below 2**17 elements together, are one unit)
    |- ln    LayerNorm           unit 4
    `- head  Linear, tied to wte guest    owns nothing, but needs unit 1 while it runs

A unit is *whole* when all parameters below its module are in it (or belong to an earlier unit), and *direct* when it holds
what lies in the module itself and its children are units of their own. Units are numbered in order of registration, the
best guess at the order of use before the first step.

Lives here: the walk. Does not live here: what happens to a unit (`zero.coordinator`). Called by `engine.partition`
before parameters are laid out, because the parameters of one unit and kind share a bucket.

Source: units as in FSDP (arXiv:2304.11277), section 3.3.1; the rules are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["UnitPlan", "is_leaf", "plan_units"]

_LEAST_NUMEL = 1 << 17
"""Smaller collectives are ruled by their latency, and so many units by Python."""

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_HOLDERS = (nn.ParameterList, nn.ParameterDict)  # never called: what they hold is used by the module around them


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """Parameters that are gathered together while its modules run."""

    number: int
    """Position among the units, in order of registration; the same on all ranks."""

    name: str
    """Name of the module; empty for the root. Of neighbours: the first and the last."""

    modules: tuple[nn.Module, ...]
    """One module, or neighbours in a list, which run one after another."""

    params: tuple[nn.Parameter, ...]
    """Sharded parameters of the unit, in order of registration. Empty for a guest."""

    borrowed: tuple[nn.Parameter, ...]
    """Sharded parameters of earlier units that the module has as well (tied weights, shared modules)."""

    is_whole: bool
    """Everything below the modules is in `params` or `borrowed`: no other unit runs inside them on its own account."""


def is_leaf(module: nn.Module) -> bool:
    """Whether `set_z3_leaf_modules` has marked `module`: everything below it is one unit."""
    return bool(getattr(module, "_z3_leaf", False))


def plan_units(
    root: nn.Module,
    sharded: Mapping[nn.Parameter, int],
    *,
    limit_numel: int,
    granularity_threshold: int = 0,
) -> list[UnitPlan]:
    """Cut `root` into units.

    A module marked as leaf is one unit with everything below it; so is an element of a ModuleList, ModuleDict or Sequential
    with at most `limit_numel` sharded elements, a module without children, and a module of few elements per module. Of any
    other module, what lies in it directly is a unit, and its children are looked at. Neighbours in a list are joined while
    they stay below 2**17 elements (and the limit) together. A parameter or module that occurs twice belongs to the first
    unit that has it.

    Args:
        root: the model.
        sharded: the parameters to be sharded, with the elements of each (a parameter that is sharded already has none to
            count). Others are in no unit.
        limit_numel: most elements of an element of a list, or of several, that are gathered as one.
        granularity_threshold: a module whose elements divided by its number of modules (itself included) stay below is one
            unit (`module_granularity_threshold`); 0: none for that reason.

    Returns:
        The units with parameters, their own or borrowed.
    """
    walk = _Walk(sharded, limit_numel, granularity_threshold)
    walk.visit(root, "", is_element=False)
    return walk.units


class _Walk:
    def __init__(self, sharded: Mapping[nn.Parameter, int], limit_numel: int, granularity_threshold: int) -> None:
        self.units: list[UnitPlan] = []
        self._sharded = sharded
        self._limit_numel = limit_numel
        self._joined_numel = min(_LEAST_NUMEL, limit_numel)
        self._granularity_threshold = granularity_threshold
        self._claimed: set[nn.Parameter] = set()
        self._seen: set[nn.Module] = set()

    def visit(self, module: nn.Module, name: str, *, is_element: bool) -> None:
        """Make the units of `module` and of what is below it, unless that happened before."""
        if module in self._seen:
            return
        if self._is_one(module, is_element=is_element):
            self._seen.update(module.modules())
            self._add(module, name, _unique(module.parameters()), is_whole=True)
            return
        self._seen.add(module)
        held = [child for child in module.children() if isinstance(child, _HOLDERS)]
        self._seen.update(held)
        direct = [*module.parameters(recurse=False), *(p for holder in held for p in holder.parameters())]
        self._add(module, name, _unique(direct), is_whole=False)
        is_list, neighbour = isinstance(module, _LISTS), None
        for child_name, child in module.named_children():
            before = len(self.units)
            self.visit(child, f"{name}.{child_name}" if name else child_name, is_element=is_list)
            if is_list and len(self.units) > before:
                neighbour = self._join(neighbour) if len(self.units) == before + 1 else None

    def _is_one(self, module: nn.Module, *, is_element: bool) -> bool:
        if is_leaf(module) or next(module.children(), None) is None:
            return True
        if is_element:
            mine = [p for p in _unique(module.parameters()) if p in self._sharded]
            if sum(self._sharded[p] for p in mine if p not in self._claimed) <= self._limit_numel:
                return True
        if not self._granularity_threshold:
            return False
        numel = sum(self._sharded.get(p, p.numel()) for p in _unique(module.parameters()))
        return numel < self._granularity_threshold * sum(1 for _ in module.modules())

    def _add(self, module: nn.Module, name: str, params: list[nn.Parameter], *, is_whole: bool) -> None:
        sharded = [p for p in params if p in self._sharded]
        own = tuple(p for p in sharded if p not in self._claimed)
        borrowed = tuple(p for p in sharded if p in self._claimed)
        self._claimed.update(own)
        if sharded:
            self.units.append(UnitPlan(len(self.units), name, (module,), own, borrowed, is_whole))

    def _join(self, neighbour: UnitPlan | None) -> UnitPlan | None:
        """Join the latest unit to `neighbour`, the one before it in a list, if both are plain and small.

        Returns:
            The unit that the next one may be joined to.
        """
        latest = self.units[-1]
        if not latest.is_whole or latest.borrowed or is_leaf(latest.modules[0]):
            return None
        params = (*neighbour.params, *latest.params) if neighbour is not None else ()
        if neighbour is None or sum(self._sharded[p] for p in params) > self._joined_numel:
            return latest
        name = f"{neighbour.name.split(' to ')[0]} to {latest.name}"
        modules = (*neighbour.modules, *latest.modules)
        self.units[-2:] = [UnitPlan(neighbour.number, name, modules, params, (), is_whole=True)]
        return self.units[-1]


def _unique(params: Iterator[nn.Parameter] | list[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(params))
