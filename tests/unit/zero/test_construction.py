from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed.zero.construction import Construction, Replacements


class Recorder:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.watches_apply = True
        self.told: list[str] = []

    def built(self, module: nn.Module) -> None:
        self.told.append(f"built {type(module).__name__}")

    def abandoned(self, module: nn.Module) -> None:
        self.told.append(f"abandoned {type(module).__name__}")

    def looked_up(self, param: nn.Parameter) -> None:
        self.told.append(f"looked up {tuple(param.shape)}")

    def apply(self, module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
        self.told.append(f"apply {type(module).__name__}")
        fn(module)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Derived(Base):
    def __init__(self, is_faulty: bool = False) -> None:
        super().__init__()
        self.inner = Base()
        if is_faulty:
            raise ValueError("faulty")


class Inherits(Derived):
    """Has no constructor of its own."""


class Holder(nn.Module):
    """Looks at parameters in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()
        self.numel = sum(p.numel() for p in self.parameters()) + self.inner.weight.numel()


@pytest.fixture
def watched() -> Iterator[Recorder]:
    construction, recorder = Construction(), Recorder()
    construction.enter(recorder)
    yield recorder
    construction.leave(recorder)


def test_a_module_is_reported_once_when_its_outermost_constructor_is_over(watched: Recorder) -> None:
    Derived()
    Inherits()
    assert watched.told == ["built Base", "built Derived", "built Base", "built Inherits"]


def test_a_constructor_that_a_decorator_has_wrapped_meanwhile_stays_and_reports_again() -> None:
    construction, first, second = Construction(), Recorder(), Recorder()
    construction.enter(first)

    class Declared(Base):
        def __init__(self) -> None:
            super().__init__()

    own = Declared.__init__

    @functools.wraps(own)
    def wrapped(self: Declared) -> None:
        own(self)
        self.is_decorated = True

    Declared.__init__ = wrapped  # type: ignore[method-assign]
    assert Declared().is_decorated
    construction.leave(first)
    assert Declared().is_decorated
    construction.enter(second)
    assert Declared().is_decorated
    construction.leave(second)
    assert (first.told, second.told) == (["built Declared"], ["built Declared"])


def test_a_class_declared_meanwhile_is_reported_and_one_made_afterwards_is_not(watched: Recorder) -> None:
    class Declared(Base):
        def __init__(self) -> None:
            super().__init__()

    Declared()
    assert watched.told == ["built Declared"]


def test_a_constructor_that_raises_is_reported_as_abandoned(watched: Recorder) -> None:
    with pytest.raises(ValueError, match="faulty"):
        Derived(is_faulty=True)
    Base()
    assert watched.told == ["built Base", "abandoned Derived", "built Base"]


def test_look_ups_are_reported_and_iteration_only_inside_a_constructor(watched: Recorder) -> None:
    module = Base()
    assert module.weight.numel() == 2
    assert len(list(module.parameters())) == 1
    assert watched.told == ["built Base", "looked up (2,)"]
    assert Holder().numel == 4
    assert watched.told[2:] == ["built Base", "looked up (2,)", "looked up (2,)", "built Holder"]


def test_apply_is_handed_over_child_first_unless_the_watcher_does_not_want_it(watched: Recorder) -> None:
    module, seen = Derived(), []
    assert module.apply(seen.append) is module
    assert watched.told[2:] == ["apply Base", "apply Derived"]
    assert seen == [module.inner, module]
    watched.watches_apply = False
    module.apply(seen.append)
    assert watched.told[4:] == []
    assert len(seen) == 4


def test_the_innermost_watcher_is_settled_and_everything_is_put_back_at_the_end() -> None:
    names = ("__init__", "__init_subclass__", "__getattr__", "named_parameters", "apply")
    before = {(cls, name): vars(cls).get(name) for cls in (nn.Module, nn.Linear, Base) for name in names}
    construction, outer, inner = Construction(), Recorder(), Recorder()
    construction.enter(outer)
    construction.enter(inner)
    Base()
    construction.leave(outer)
    Base()
    construction.leave(inner)
    Base()
    assert outer.told == []
    assert inner.told == ["built Base", "built Base"]
    assert {(cls, name): vars(cls).get(name) for cls, name in before} == before


def test_a_module_whose_watcher_left_inside_its_constructor_is_not_reported() -> None:
    construction, recorder = Construction(), Recorder()

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            construction.leave(recorder)

    construction.enter(recorder)
    Leaving()
    assert recorder.told == []


def test_replacements_are_undone_in_reverse_and_inherited_attributes_are_inherited_again() -> None:
    class Parent:
        name = "parent"

    class Child(Parent):
        own = 1

    replaced, thing = Replacements(), SimpleNamespace(value=1)
    replaced.put(Child, "name", "child")
    replaced.put(Child, "own", 2)
    replaced.put(thing, "value", 2)
    replaced.put(thing, "value", 3)
    assert (Child.name, Child.own, thing.value) == ("child", 2, 3)
    replaced.undo()
    assert (Child.name, Child.own, thing.value) == ("parent", 1, 1)
    assert "name" not in vars(Child)
