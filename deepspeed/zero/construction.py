"""Watching modules being built, inside `zero.Init`.

    with Init:                                what is replaced in torch.nn.Module, and told to the innermost context
        Linear(...)
           Linear.__init__ begins             every __init__, also of classes declared inside   -> begin
              Module.__init__ ...             (of one object: the outermost counts)
           Linear.__init__ is over                                                              -> built
        model.lin.weight                      __getattr__; named_parameters() in a constructor  -> looked_up
        model.apply(fn)                       apply                                             -> apply

Lives here: replacing attributes of classes and putting them back, and knowing whose constructor runs. Does not live here:
what is done then (`zero.init_context`). Nothing outside `zero.init_context` calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

__all__ = ["Construction", "Replacements", "Watcher"]


class Watcher(Protocol):
    """Is told what happens while modules are built."""

    watches_apply: bool
    """Whether `apply` is to be told."""

    def built(self, module: nn.Module) -> None:
        """The constructor of `module` has returned."""

    def abandoned(self, module: nn.Module) -> None:
        """The constructor of `module` has raised."""

    def looked_up(self, param: nn.Parameter) -> None:
        """The program has read `module.<name>`, or iterates over parameters inside a constructor."""

    def apply(self, module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
        """Call `fn(module)` for `module.apply(fn)`; the children had their turn."""


class Replacements:
    """Attributes of classes and modules that stand in for others until `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, value: object, *, keeps_later: bool = False) -> None:
        """Set `owner.name`; one that `owner` inherits is deleted again by `undo`.

        Args:
            owner: a class or module.
            name: of its attribute.
            value: what stands in.
            keeps_later: leave what somebody else has put there since, as a decorator of a class does.
        """
        if name in vars(owner):
            put_back = functools.partial(setattr, owner, name, vars(owner)[name])
        else:
            put_back = functools.partial(delattr, owner, name)

        def undo() -> None:
            if not keeps_later or vars(owner).get(name) is value:
                put_back()

        self._undo.append(undo)
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put back everything, the latest first."""
        while self._undo:
            self._undo.pop()()


class Construction:
    """The modules whose constructors are running, outermost first, and who is told; one instance serves all contexts."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self._running: list[nn.Module] = []
        self._replaced = Replacements()

    @property
    def innermost(self) -> nn.Module | None:
        """The module whose constructor runs; None outside any."""
        return self._running[-1] if self._running else None

    @property
    def watcher(self) -> Watcher:
        """The innermost watcher."""
        return self.watchers[-1]

    def enter(self, watcher: Watcher) -> None:
        """Tell `watcher` what happens from now on, instead of the one before it."""
        self.watchers.append(watcher)
        if len(self.watchers) == 1:
            self._install()

    def leave(self, watcher: Watcher) -> None:
        """Undo `enter` of this watcher."""
        self.watchers.remove(watcher)
        if not self.watchers:
            self._replaced.undo()

    # -- what is replaced ---------------------------------------------------------------------------------------------

    def _install(self) -> None:
        for cls in _with_subclasses(nn.Module):
            self._watch_constructor(cls)
        self._watch_declarations()
        self._watch_lookups()
        self._watch_iteration()
        self._watch_apply()

    def _watch_constructor(self, cls: type[nn.Module]) -> None:
        """Make the constructor of `cls` report; classes without one of their own inherit a reporting one."""
        original = vars(cls).get("__init__")
        if original is None:
            return

        @functools.wraps(original)
        def reporting_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            construct = original.__get__(module)
            # The constructor of a base class; or no context is open, and somebody kept this function.
            if module is self.innermost or not self.watchers:
                construct(*args, **kwargs)
                return
            watcher = self.watcher
            self._running.append(module)
            try:
                construct(*args, **kwargs)
            except BaseException:
                self._running.pop()
                watcher.abandoned(module)
                raise
            self._running.pop()
            if watcher in self.watchers:  # else its context was left inside the constructor
                watcher.built(module)

        self._replaced.put(cls, "__init__", reporting_init, keeps_later=True)

    def _watch_declarations(self) -> None:
        def init_subclass(cls: type[nn.Module], /, **options: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**options)  # nn.Module itself has none
            self._watch_constructor(cls)

        self._replaced.put(nn.Module, "__init_subclass__", classmethod(init_subclass))

    def _watch_lookups(self) -> None:
        original = nn.Module.__getattr__

        def reporting_getattr(module: nn.Module, name: str) -> Any:
            value = original(module, name)
            if isinstance(value, nn.Parameter):
                self.watcher.looked_up(value)
            return value

        self._replaced.put(nn.Module, "__getattr__", reporting_getattr)

    def _watch_iteration(self) -> None:
        original = nn.Module.named_parameters

        @functools.wraps(original)
        def named_parameters(module: nn.Module, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
            for name, param in original(module, *args, **options):
                if self._running and self.watchers:
                    self.watcher.looked_up(param)
                yield name, param

        self._replaced.put(nn.Module, "named_parameters", named_parameters)

    def _watch_apply(self) -> None:
        original = nn.Module.apply

        @functools.wraps(original)
        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            if not self.watcher.watches_apply:
                return original(module, fn)
            for child in module.children():
                child.apply(fn)
            self.watcher.apply(module, fn)
            return module

        self._replaced.put(nn.Module, "apply", apply)


def _with_subclasses(cls: type[nn.Module]) -> list[type[nn.Module]]:
    """`cls` and every class below it, each once."""
    found, waiting = {cls: None}, [cls]
    while waiting:
        for subclass in waiting.pop().__subclasses__():
            if subclass not in found:
                found[subclass] = None
                waiting.append(subclass)
    return list(found)
