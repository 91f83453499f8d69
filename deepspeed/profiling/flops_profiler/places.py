"""The model as a tree of places, and which of them is at work: in forward, in backward, in recomputation.

    ""                  the model itself                place 0
    "layers"            a container, never called       1        its numbers are those below it
    "layers.0"          called                          2

[Note: shared modules] A module that hangs in several places is counted where it is called from: among its places, the one
that shares the longest way with the caller's; if several do, the first.

[Note: sequence numbers] Autograd numbers the nodes of its graph as forward makes them. So it is enough to note the number
at which the place changes: in backward the number of the node at work says which place made it. No hook on a tensor is
needed. Numbers are counted by thread; on a GPU a recomputation makes nodes in the thread that runs backward, so each thread
has its own notes.

Lives here: the tree, the stack of calls, the notes. Does not live here: counting (`counter`).
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["IGNORED", "OUTSIDE", "ROOT", "Call", "Places"]

ROOT = 0
OUTSIDE = -1
"""In no module of the model."""
IGNORED = -2
"""In a module that is not to be counted."""


@dataclass(frozen=True)
class Call:
    """A module at work."""

    place: int
    task: int
    """Of the backward pass inside which it was called; -1: in none."""


@dataclass
class _Notes:
    """Of one thread: from sequence number `starts[i]` on, nodes are made by `places[i]`."""

    starts: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def add(self, start: int, place: int) -> None:
        if self.starts and self.starts[-1] == start:
            self.places[-1] = place
            return
        self.starts.append(max(start, self.starts[-1]) if self.starts else start)
        self.places.append(place)

    def find(self, number: int) -> int:
        at = bisect.bisect_right(self.starts, number) - 1
        return self.places[at] if at >= 0 else OUTSIDE


class Places:
    """Follows the calls of a model's modules.

    Args:
        model: its modules get hooks between `attach` and `detach`.
        ignored: types of modules; nothing in them is counted.
        switched: called before the place at work changes.
    """

    def __init__(self, model: nn.Module, ignored: Iterable[type], switched: Callable[[], None]) -> None:
        self.paths: list[str] = []
        self.modules: list[nn.Module] = []
        self.parents: list[int] = []
        self.calls: list[int] = []
        self.stack: list[Call] = []
        self._ignored = tuple(ignored)
        self._switched = switched
        self._of_module: dict[int, list[int]] = {}
        self._notes: dict[int, _Notes] = {}
        self._forward_thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []
        known: dict[str, int] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            known[path] = len(self.paths)
            self._of_module.setdefault(id(module), []).append(len(self.paths))
            self.parents.append(known[path.rpartition(".")[0]] if path else OUTSIDE)
            self.paths.append(path)
            self.modules.append(module)
            self.calls.append(0)

    @property
    def current(self) -> int:
        """The place at work."""
        return self.stack[-1].place if self.stack else OUTSIDE

    def is_repeat(self, place: int) -> bool:
        """Whether the module of a place has an earlier place, which then stands for it where parameters are counted."""
        return self._of_module[id(self.modules[place])][0] != place

    # -- calls --------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on. They are the outermost: what other hooks do before and after a call belongs to the module."""
        for module in {id(each): each for each in self.modules}.values():
            self._handles.append(module.register_forward_pre_hook(self._before, prepend=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stack.clear()

    def enter(self, place: int) -> None:
        """`place` begins to work."""
        self._switched()
        task = torch._C._current_graph_task_id()
        self.stack.append(Call(IGNORED if self.current == IGNORED else place, task))
        if place >= 0 and task == -1:
            self.calls[place] += 1
        self._note()

    def leave(self) -> None:
        """What began last has ended."""
        self._switched()
        if self.stack:
            self.stack.pop()
        self._note()

    def _before(self, module: nn.Module, inputs: object) -> None:
        self.enter(self._place_of(module))

    def _after(self, module: nn.Module, inputs: object, outputs: object) -> None:
        self.leave()

    def _place_of(self, module: nn.Module) -> int:
        """[Note: shared modules]."""
        if isinstance(module, self._ignored):
            return IGNORED
        places = self._of_module[id(module)]
        if len(places) == 1 or self.current < 0:
            return places[0]
        way = self.paths[self.current].split(".")
        return max(places, key=lambda place: (_common(way, self.paths[place].split(".")), -place))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _note(self) -> None:
        thread = threading.get_ident()
        if torch._C._current_graph_task_id() == -1:
            self._forward_thread = thread
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._notes.setdefault(thread, _Notes()).add(number, self.current)

    def note_rebuilt(self, place: int) -> None:
        """The operator at work is run again by a function, in no module; its node of the graph, just made, is `place`'s."""
        notes = self._notes.setdefault(threading.get_ident(), _Notes())
        notes.add(torch.autograd._get_sequence_nr() - 1, place)  # type: ignore[attr-defined]

    def place_of_node(self, number: int, *, is_nested: bool) -> int:
        """The place that made the node of the graph with this sequence number. [Note: sequence numbers]

        Args:
            number: of the node.
            is_nested: it is at work in a backward pass inside another: this thread made it, in a recomputation.
        """
        thread = threading.get_ident() if is_nested else self._forward_thread
        notes = self._notes.get(thread)
        return OUTSIDE if notes is None else notes.find(number)


def _common(one: list[str], other: list[str]) -> int:
    """How many names two ways share at their beginning."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
