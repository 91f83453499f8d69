"""The machinery of tiles: run a function tile by tile along a sequence, and again in backward.

    forward    keep(x, ...) --token--> t0 -> y0 | t1 -> y1 | t2 -> y2     a tile's intermediates are gone before the next
                               |          what each tile used: its leaves (parameters)
    backward   attached node <-+- y.grad     t0 again: grads | t1 again: grads | t2 again: grads
               one gradient for x (filled in place), one for each leaf (summed)

Autograd sees one node, whose inputs are x and the leaves. A parameter so gets its gradient once, after the last tile,
whoever reduces it; hooks on it run once; `torch.autograd.grad` works. No list of parameters is needed: leaves are found
in the graph of each tile, which is built in forward without keeping any saved tensor.

[Note: kept first] The tensors that backward needs are saved before the first tile runs. In a checkpointed part that ends
with tiles, recomputation stops at the last saved tensor, and so before the tiles: these run twice in all, not three times.

[Note: sums] Gradients of 16-bit leaves are added up in fp32 and rounded once; those of other dtypes in their own.

[Note: hooks run once] `torch.autograd.grad` runs the hooks of the leaves that it is asked about. They are out of force
meanwhile, and run when autograd stores the sum.

Lives here: `run_tiles`, `Sums`, `leaves_of`. Does not live here: what is tiled (`tiled`, the caller).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from deepspeed.activations.random_states import tracker
from deepspeed.errors import ArgumentError
from deepspeed.sharding import even_range

__all__ = [
    "FilledGradient",
    "Join",
    "JoinTiles",
    "Leaves",
    "ReduceTiles",
    "Replay",
    "Sums",
    "TileRun",
    "hooks_out_of_force",
    "leaves_of",
    "run_tiles",
    "scaled",
    "tile_of",
    "tile_ranges",
    "without_autocast",
]

TileRun = Callable[[Sequence[Tensor]], Tensor]
"""Computes one tile from that tile of every sharded tensor, followed by the tensors that are passed whole."""

Range = tuple[int, int]

_BLOCK_NUMEL = 1 << 22

_functions: Any = torch._C._functions
_Accumulate = _functions.AccumulateGrad  # the node that stores a leaf's gradient


def tile_ranges(length: int, tiles: int) -> list[Range]:
    """Bounds of the tiles of a sequence: as even as can be, none of them empty (fewer tiles where `length` is less).

    Raises:
        ArgumentError: less than one tile.
    """
    if tiles < 1:
        raise ArgumentError(f"shards={tiles}: needed at least 1. Give the number of tiles that the sequence is cut into.")
    count = max(1, min(tiles, length))
    return [even_range(length, count, number) for number in range(count)]


def tile_of(tensor: Tensor, dim: int, bounds: Range) -> Tensor:
    """The part of `tensor` within `bounds` along `dim`, a view."""
    return tensor.narrow(dim, bounds[0], bounds[1] - bounds[0])


# -- what a tile used -------------------------------------------------------------------------------------------------


class Leaves:
    """Leaf tensors that graphs ended in, each once, in the order in which they were found.

    Their accumulating nodes are held too: a node knows the leaf's shape from when it was made, and at ZeRO stage 3 the
    leaf may be empty by the time that the gradient is stored.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, Any] = {}

    def add(self, found: Iterable[Any], without: Sequence[Tensor]) -> None:
        """Remember nodes, but for those of the tensors `without`."""
        passed_over = {id(tensor) for tensor in without}
        for node in found:
            if id(node.variable) not in passed_over:
                self._nodes.setdefault(id(node.variable), node)

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves."""
        return [node.variable for node in self._nodes.values()]


def leaves_of(output: Tensor) -> list[Any]:
    """The nodes at the ends of the graph of `output` that store gradients; their `variable` is the leaf."""
    if output.grad_fn is None:
        return []
    seen: set[Any] = {output.grad_fn}
    waiting, found = [output.grad_fn], []
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Accumulate):
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found[::-1]


@contextlib.contextmanager
def _forgetting_saved() -> Iterator[None]:
    """Build graphs that keep no saved tensor: they tell what was used, and backward through them is impossible."""
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _was_forgotten):
        yield


def _was_forgotten(_: object) -> Tensor:
    raise AssertionError("backward through a tile's first run")  # its output is detached, so nobody can ask


@contextlib.contextmanager
def hooks_out_of_force(leaves: Sequence[Tensor]) -> Iterator[None]:
    """[Note: hooks run once]."""
    put_by = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in put_by:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in put_by:
            hooks.update(entries)


# -- gradients of tiles -----------------------------------------------------------------------------------------------


class Sums:
    """Gradients of leaves, added up over tiles ([Note: sums])."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = list(leaves)
        self._sums: list[Tensor | None] = [None] * len(leaves)
        self._is_own = [False] * len(leaves)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """One tile's, in the order of the leaves; None where the tile did not use one."""
        for number, grad in enumerate(grads):
            before = self._sums[number]
            if grad is None:
                continue
            if before is None:
                self._sums[number] = grad  # may be another's memory: autograd gives what it has
            elif self._is_own[number]:
                before.add_(grad)
            else:
                wide = _sum_dtype(grad.dtype)
                self._sums[number] = before.to(wide) + grad.to(wide)
                self._is_own[number] = True

    def unrounded(self) -> list[Tensor | None]:
        """The sums, as wide as they were added up."""
        return list(self._sums)

    def rounded(self) -> list[Tensor | None]:
        """The sums in the dtypes of the leaves."""
        return [
            None if total is None else total.to(leaf.dtype) for leaf, total in zip(self._leaves, self._sums, strict=True)
        ]


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad * factor` in `dtype`, rounded once; `factor` is one number.

    A number of more precision than a 16-bit tensor would be rounded to 16 bits first, so those are multiplied in fp32,
    block by block: no copy of that size is made.
    """
    if grad.is_sparse or _sum_dtype(grad.dtype) == grad.dtype:
        return (grad * factor).to(dtype)
    product = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)
    flat, source = product.view(-1), grad.reshape(-1)
    for start in range(0, flat.numel(), _BLOCK_NUMEL):
        block = slice(start, start + _BLOCK_NUMEL)
        flat[block] = source[block].float() * factor
    return product


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Backward inside a forward: its operators take the dtypes of what forward saved, as they do after it."""
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys((device.type, "cpu")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class FilledGradient:
    """The gradient of a sharded tensor, filled tile by tile."""

    def __init__(self, like: Tensor, dim: int) -> None:
        self._like = like
        self._dim = dim
        self._whole: Tensor | None = None

    def put(self, grad: Tensor | None, bounds: Range) -> None:
        """That of one tile; None is zero."""
        if self._whole is None:
            if grad is None:
                return
            self._whole = torch.empty_like(self._like, memory_format=torch.contiguous_format)
            if bounds[0] > 0:
                tile_of(self._whole, self._dim, (0, bounds[0])).zero_()
        place = tile_of(self._whole, self._dim, bounds)
        if grad is None:
            place.zero_()
        else:
            place.copy_(grad)

    @property
    def whole(self) -> Tensor | None:
        """All of it; None when no tile had one."""
        return self._whole


# -- running again as in forward --------------------------------------------------------------------------------------


class Replay:
    """The random generators and autocast as they are when it is made, to run something again in `restored`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu_state = torch.get_rng_state()
        self._devices, self._device_states = get_device_states(*tensors)
        self._device_type = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        self._streams = tracker.get_states()
        self._autocast: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in dict.fromkeys((self._device_type, "cpu"))
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the same numbers in the same dtypes inside the block; after it all is as it was before."""
        with contextlib.ExitStack() as stack:
            if self._device_type == "cpu":
                stack.enter_context(torch.random.fork_rng(devices=[]))
            else:
                stack.enter_context(torch.random.fork_rng(devices=self._devices, device_type=self._device_type))
                set_device_states(self._devices, self._device_states, device_type=self._device_type)
            torch.set_rng_state(self._cpu_state)
            stack.enter_context(tracker.restored(self._streams))
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            yield


# -- outputs ----------------------------------------------------------------------------------------------------------


class Join(Protocol):
    """What becomes of the outputs of tiles."""

    def put(self, output: Tensor, number: int, bounds: Range) -> None:
        """The output of one tile, in order."""

    def whole(self) -> Tensor:
        """Of all tiles, in memory of its own."""

    def grad_of(self, grad: Tensor, output: Tensor, number: int) -> Tensor:
        """The part of the whole's gradient that belongs to the output of a tile."""


class JoinTiles:
    """Outputs lie one after another along a dimension of the whole, of which each tile has its share.

    Args:
        dim: the dimension.
        length: of the sequence that was cut.
    """

    def __init__(self, dim: int, length: int) -> None:
        self._dim = dim
        self._length = length
        self._whole: Tensor | None = None
        self._places: list[Range] = []

    def put(self, output: Tensor, number: int, bounds: Range) -> None:
        """See `Join`.

        Raises:
            ArgumentError: the output has another length than its tile has tokens.
        """
        tokens = bounds[1] - bounds[0]
        if output.dim() <= self._dim or output.size(self._dim) != tokens:
            raise ArgumentError(
                f"a tile of {tokens} tokens gave an output of shape {tuple(output.shape)}; needed {tokens} along dimension "
                f"{self._dim}. Set output_unshard_dimension to the sequence's dimension, or output_reduction for a loss."
            )
        if self._whole is None:
            shape = list(output.shape)
            shape[self._dim] = self._length
            self._whole = output.new_empty(shape)
        tile_of(self._whole, self._dim, bounds).copy_(output)
        self._places.append(bounds)

    def whole(self) -> Tensor:
        """See `Join`."""
        assert self._whole is not None  # there is at least one tile
        whole, self._whole = self._whole, None
        return whole

    def grad_of(self, grad: Tensor, output: Tensor, number: int) -> Tensor:
        """See `Join`."""
        return tile_of(grad, self._dim, self._places[number])


class ReduceTiles:
    """Scalars of tiles are added up with weights.

    Args:
        weights: one for each tile.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._total: Tensor | None = None

    def put(self, output: Tensor, number: int, bounds: Range) -> None:
        """See `Join`.

        Raises:
            ArgumentError: the output is no scalar.
        """
        if output.numel() != 1:
            raise ArgumentError(
                f"a tile gave an output of shape {tuple(output.shape)}; output_reduction needs one number per tile. "
                "Set output_reduction=None to join outputs along output_unshard_dimension."
            )
        part = output * self._weights[number]
        self._total = part if self._total is None else self._total + part

    def whole(self) -> Tensor:
        """See `Join`."""
        assert self._total is not None  # there is at least one tile
        return self._total

    def grad_of(self, grad: Tensor, output: Tensor, number: int) -> Tensor:
        """See `Join`."""
        return (grad * self._weights[number]).to(output.dtype)


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class _Tiling:
    """One call of `run_tiles`, as far as its backward needs it."""

    run: TileRun
    ranges: list[Range]
    dim: int
    sharded_count: int
    join: Join
    replay: Replay
    leaves: Leaves = field(default_factory=Leaves)

    def tile(self, tensors: Sequence[Tensor], wants: Sequence[bool], bounds: Range) -> list[Tensor]:
        """Inputs of one tile: leaves of a graph of its own."""
        cut = (
            tile_of(tensor, self.dim, bounds) if number < self.sharded_count else tensor
            for number, tensor in enumerate(tensors)
        )
        return [part.detach().requires_grad_(want) for part, want in zip(cut, wants, strict=True)]


def run_tiles(
    run: TileRun, sharded: Sequence[Tensor], passed: Sequence[Tensor], *, dim: int, tiles: int, join: Join
) -> Tensor:
    """`join` of `run(tile of each of sharded, passed)` over all tiles; see the module's docstring.

    Args:
        run: a function of tensors; it is called again in backward and must compute the same. What it uses besides and
            takes a gradient must be a leaf.
        sharded: tensors that are cut along `dim`, all of one length there.
        passed: tensors that each tile gets whole.
        dim: the dimension of the sequence.
        tiles: how many; at most the length.
        join: what becomes of the outputs.
    """
    ranges = tile_ranges(sharded[0].size(dim), tiles)
    tensors = [*sharded, *passed]
    tiling = _Tiling(run, ranges, dim, len(sharded), join, Replay(tensors))
    if not torch.is_grad_enabled():
        for number, bounds in enumerate(ranges):
            join.put(run(tiling.tile(tensors, [False] * len(tensors), bounds)), number, bounds)
        return join.whole()
    wants = [tensor.requires_grad for tensor in tensors]
    box: list[Sequence[Tensor | None]] = []
    start = torch.empty(0, dtype=torch.float32, device=tensors[0].device, requires_grad=True)
    token = _Keep.apply(box, start, *tensors)  # type: ignore[no-untyped-call]
    for number, bounds in enumerate(ranges):
        inputs = tiling.tile(tensors, wants, bounds)
        with _forgetting_saved():
            output = run(inputs)
        tiling.leaves.add(leaves_of(output), without=inputs)
        with torch.no_grad():
            join.put(output, number, bounds)
        del output
    whole = join.whole()
    if not any(wants) and not tiling.leaves.tensors:
        return whole
    attached: Tensor = _Attach.apply(tiling, box, [whole], wants, token, *tiling.leaves.tensors)  # type: ignore[no-untyped-call]
    return attached


class _Keep(torch.autograd.Function):
    """Saves tensors for `_Attach` ([Note: kept first]) and hands their gradients on. Gives an empty token."""

    @staticmethod
    def forward(ctx: Any, box: list[Sequence[Tensor | None]], start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.box = box
        ctx.save_for_backward(*tensors)
        return torch.empty_like(start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.box.pop()


class _Attach(torch.autograd.Function):
    """The node that stands for all tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        tiling: _Tiling,
        box: list[Sequence[Tensor | None]],
        output: list[Tensor],
        wants: list[bool],
        token: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.tiling, ctx.box, ctx.wants = tiling, box, wants
        return output.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        keep = ctx.next_functions[0][0]
        of_tensors, of_leaves = _gradients(ctx.tiling, keep.saved_tensors, ctx.wants, grad)
        ctx.box[:] = [of_tensors]
        return None, None, None, None, grad.new_zeros(0, dtype=torch.float32), *of_leaves


def _gradients(
    tiling: _Tiling, tensors: Sequence[Tensor], wants: Sequence[bool], grad: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of the tensors and of the leaves, from that of the whole."""
    leaves = tiling.leaves.tensors
    count = tiling.sharded_count
    filled = [FilledGradient(tensor, tiling.dim) for tensor in tensors[:count]]
    passed, sums = Sums(tensors[count:]), Sums(leaves)
    asked = [number for number, want in enumerate(wants) if want]
    with tiling.replay.restored(), hooks_out_of_force(leaves):
        for number, bounds in enumerate(tiling.ranges):
            with torch.enable_grad():
                inputs = tiling.tile(tensors, wants, bounds)
                output = tiling.run(inputs)
            of_tile: list[Tensor | None] = [None] * (len(inputs) + len(leaves))
            if output.requires_grad:
                places = [*asked, *range(len(inputs), len(of_tile))]
                wanted = [*(inputs[place] for place in asked), *leaves]
                part = tiling.join.grad_of(grad, output, number)
                with without_autocast(output.device):
                    grads = torch.autograd.grad(output, wanted, part, allow_unused=True)
                for place, found in zip(places, grads, strict=True):
                    of_tile[place] = found
            for each, found_grad in zip(filled, of_tile[:count], strict=True):
                each.put(found_grad, bounds)
            passed.add(of_tile[count : len(inputs)])
            sums.add(of_tile[len(inputs) :])
    return [*(each.whole for each in filled), *passed.rounded()], sums.rounded()
