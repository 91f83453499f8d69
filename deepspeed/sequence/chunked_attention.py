"""Causal attention chunk by chunk, over chunks of keys and values that may rest in host memory between uses.

    chunk 0   q0 k0 v0   attend to      k0                    put k0 v0 (and q0, out, lse for backward) to rest
    chunk 1   q1 k1 v1                  k1, k0                bring k0 v0
    chunk 2   q2 k2 v2                  k2, k0, k1            bring k0 v0, then k1 v1 while k0's block is computed
    backward  chunk 2: grad q2 done, k2 v2 done; parts of k0 v0 k1 v1 rest
              chunk 1: ...              each chunk's gradients are complete when its turn is over

A device so holds two chunks of keys and values, whatever the length, and the scores of no more than a block.
(FPDT, arXiv:2408.16978, section 4: a pipeline over chunks with offload. There keys are the outer loop in backward, and
gradients of queries rest; here queries are, and those of keys and values rest, which are fewer where heads are shared.)

[Note: where chunks rest] On the device they are ordinary saved tensors: hooks and activation checkpoints see them. In
host memory they are this module's own: a checkpointed part need not compute them again, and they are given back chunk by
chunk during backward.

Lives here: `CausalChunks`, `chunked_attention`. Does not live here: kernels (`attention_blocks`), layers (`fpdt_layer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.activations.buffers import ReusedBuffers
from deepspeed.activations.host import HostPlace
from deepspeed.activations.lane import Lane
from deepspeed.activations.places import Rest
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.offload import placement
from deepspeed.ops.aio.engine import aligned_empty
from deepspeed.sequence.attention_blocks import block_kernel, merge, wide_dtype
from deepspeed.sequence.tiles import without_autocast
from deepspeed.sharding import even_range

__all__ = [
    "CausalChunks",
    "ChunkPlace",
    "Held",
    "HostChunks",
    "Range",
    "StayingChunks",
    "chunk_ranges",
    "chunked_attention",
    "keeps_graph",
]

Range = tuple[int, int]


def chunk_ranges(length: int, chunk: int) -> list[Range]:
    """Bounds of chunks of at most `chunk` tokens, as even as can be.

    Raises:
        ArgumentError: a chunk of less than one token.
    """
    if chunk < 1:
        raise ArgumentError(f"a chunk of {chunk} tokens: needed at least 1. Some thousands are usual.")
    count = max(1, -(-length // chunk))
    return [even_range(length, count, number) for number in range(count)]


def keeps_graph() -> bool:
    """Whether the backward that runs now keeps the graph for another one."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


# -- where chunks rest ------------------------------------------------------------------------------------------------


class Held(Protocol):
    """One tensor at rest."""

    def bring(self) -> None:
        """Start the way back; does not wait for it."""

    def value(self) -> Tensor:
        """The tensor on the device. Not to be written to."""


class ChunkPlace(Protocol):
    """Takes tensors."""

    def put(self, tensor: Tensor) -> Held:
        """Let `tensor` rest; the caller need not hold it."""


class _Here:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def bring(self) -> None:
        """It is there."""

    def value(self) -> Tensor:
        return self._tensor


class StayingChunks:
    """Chunks stay where they are."""

    def put(self, tensor: Tensor) -> Held:
        """See `ChunkPlace`."""
        return _Here(tensor)


class _OnHost:
    def __init__(self, rest: Rest, shape: torch.Size) -> None:
        self._rest = rest
        self._shape = shape

    def bring(self) -> None:
        self._rest.bring()

    def value(self) -> Tensor:
        return self._rest.value().view(self._shape)


class HostChunks:
    """Chunks rest in host memory: page-locked where there is a device, and copied by a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        is_apart = placement.is_host_apart(device)
        self._place = HostPlace(ReusedBuffers(lambda nbytes: aligned_empty(nbytes, is_pinned=is_apart)), Lane())

    def put(self, tensor: Tensor) -> Held:
        """See `ChunkPlace`."""
        return _OnHost(self._place.put(tensor.contiguous().view(-1)), tensor.shape)


# -- the walk over chunks ---------------------------------------------------------------------------------------------


class CausalChunks:
    """Chunks of one sequence: their attention in order, their gradients in reverse order.

    Shapes: as `attention_blocks`; chunks may differ in length.

    Args:
        place: where chunks rest.
        scale: of the scores.
        is_kept: whether backward will come.
    """

    def __init__(self, place: ChunkPlace, scale: float, *, is_kept: bool) -> None:
        self._place = place
        self._scale = scale
        self._is_kept = is_kept
        self._keys_values: list[tuple[Held, Held]] = []
        self._rows: list[tuple[Held, Held, Held]] = []  # queries, outputs, log-sum-exps
        self._partial: dict[int, tuple[Held, Held]] = {}  # gradients of keys and values so far

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The next chunk: its attention over itself and all before it, and the log-sum-exp."""
        with without_autocast(q.device):  # it would round the scores of plain operators
            block_out, lse = self._attended(q, k, v)
        self._keys_values.append((self._place.put(k), self._place.put(v)))
        if self._is_kept:
            self._rows.append((self._place.put(q), self._place.put(block_out), self._place.put(lse)))
        return block_out, lse

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kernel = block_kernel(q)
        block_out, lse = kernel.forward(q, k, v, is_causal=True, scale=self._scale)
        if self._keys_values:
            out = block_out.to(wide_dtype(q.dtype), copy=True)
            for keys, values in _coming(self._keys_values):
                block_out, block_lse = kernel.forward(q, keys.value(), values.value(), is_causal=False, scale=self._scale)
                lse = merge(out, lse, block_out, block_lse)
            block_out = out.to(q.dtype)
        return block_out, lse

    def adopt(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """The next chunk, whose attention is known."""
        self._keys_values.append((self._place.put(k), self._place.put(v)))
        self._rows.append((self._place.put(q), self._place.put(out), self._place.put(lse)))

    def backward(self, number: int, grad: Tensor, *, is_last_use: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of a chunk's queries, keys and values from that of its output. Call it from the last chunk to the first.

        Args:
            number: the chunk.
            grad: as its queries.
            is_last_use: no other backward will come: the chunk is given back.

        Raises:
            UsageError: it was given back.
        """
        if number >= len(self._rows):
            raise UsageError(
                "backward a second time through attention whose chunks rest in host memory; they were given back in the "
                "first. Call the first with retain_graph=True."
            )
        grad = grad.to(self._rows[number][0].value().dtype)
        with without_autocast(grad.device):
            return self._gradients(number, grad, is_last_use)

    def _gradients(self, number: int, grad: Tensor, is_last_use: bool) -> tuple[Tensor, Tensor, Tensor]:
        q, out, lse = (held.value() for held in self._rows[number])
        kernel = block_kernel(q)
        wide = wide_dtype(q.dtype)
        k, v = (held.value() for held in self._keys_values[number])
        grad_q, grad_k, grad_v = kernel.backward(grad, q, k, v, out, lse, is_causal=True, scale=self._scale)
        of_queries = grad_q.to(wide, copy=True)
        for earlier, (keys, values) in enumerate(_coming(self._keys_values[:number])):
            parts = kernel.backward(grad, q, keys.value(), values.value(), out, lse, is_causal=False, scale=self._scale)
            of_queries += parts[0]
            self._add(earlier, parts[1], parts[2])
        before = self._partial.pop(number, None)
        if before is not None:
            grad_k, grad_v = grad_k + before[0].value(), grad_v + before[1].value()
        if is_last_use:
            del self._rows[number:], self._keys_values[number:]
        return of_queries.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _add(self, number: int, grad_k: Tensor, grad_v: Tensor) -> None:
        wide = wide_dtype(grad_k.dtype)
        before = self._partial.get(number)
        sums = [
            part.to(wide) if before is None else part + before[place].value() for place, part in enumerate((grad_k, grad_v))
        ]
        self._partial[number] = self._place.put(sums[0]), self._place.put(sums[1])

    def tensors(self) -> list[Tensor]:
        """All that `adopt` takes, chunk by chunk. For chunks that stay."""
        return [
            held.value()
            for (keys, values), (queries, out, lse) in zip(self._keys_values, self._rows, strict=True)
            for held in (queries, keys, values, out, lse)
        ]

    def output(self, number: int) -> Tensor:
        """The attention of a chunk."""
        return self._rows[number][1].value()


def _coming(pairs: Sequence[tuple[Held, Held]]) -> Iterator[tuple[Held, Held]]:
    """Pairs in order; while one is used the next is on its way."""
    for number, pair in enumerate(pairs):
        for held in (*pair, *(pairs[number + 1] if number + 1 < len(pairs) else ())):
            held.bring()
        yield pair


# -- a function -------------------------------------------------------------------------------------------------------


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, chunk: int = 4096, *, scale: float | None = None, is_offloaded: bool = False
) -> Tensor:
    """Causal attention, chunk by chunk: `scaled_dot_product_attention(q, k, v, is_causal=True)`.

    Args:
        q: (batch, heads, tokens, head size).
        k: (batch, key heads, tokens, head size); heads a multiple of key heads.
        v: as `k`.
        chunk: tokens per chunk at most; chunks are as even as can be.
        scale: of the scores; by default 1 / sqrt(head size).
        is_offloaded: what backward needs rests in host memory.

    Returns:
        As `q`; in the dtype of autocast where that is on.

    Raises:
        ArgumentError: shapes or dtypes that do not go together.
    """
    q, k, v = _cast_as_torch_does(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(
            f"chunked_attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; needed one dtype. Convert them "
            "(k.to(q.dtype)), or use torch.autocast."
        )
    if q.dim() != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.size(3) != k.size(3) or q.size(1) % k.size(1):
        raise ArgumentError(
            f"chunked_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; needed (batch, heads, tokens, "
            "head size) of the same batch, tokens and head size, heads of q a multiple of those of k and v."
        )
    scale = q.size(-1) ** -0.5 if scale is None else scale
    ranges = chunk_ranges(q.size(2), chunk)
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))):
        chunks = CausalChunks(StayingChunks(), scale, is_kept=False)
        return torch.cat([chunks.attend(*_cut((q, k, v), bounds))[0] for bounds in ranges], 2)
    output: Tensor = _ChunkedAttention.apply(q, k, v, ranges, scale, is_offloaded)  # type: ignore[no-untyped-call]
    return output


def _cast_as_torch_does(*tensors: Tensor) -> Sequence[Tensor]:
    """What autocast does with the arguments of torch's attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [each if each.dtype is torch.float64 else each.to(dtype) for each in tensors]


def _cut(tensors: Sequence[Tensor], bounds: Range) -> list[Tensor]:
    return [each[:, :, bounds[0] : bounds[1]] for each in tensors]


class _ChunkedAttention(torch.autograd.Function):
    """[Note: where chunks rest]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: list[Range], scale: float, is_offloaded: bool) -> Tensor:
        place = HostChunks(q.device) if is_offloaded else StayingChunks()
        chunks = CausalChunks(place, scale, is_kept=is_offloaded)
        out = torch.empty_like(q)
        lses = []
        for bounds in ranges:
            part, lse = chunks.attend(*_cut((q, k, v), bounds))
            out[:, :, bounds[0] : bounds[1]] = part
            lses.append(lse)
        ctx.ranges, ctx.scale = ranges, scale
        ctx.chunks = chunks if is_offloaded else None
        if not is_offloaded:
            ctx.save_for_backward(q, k, v, out, *lses)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chunks = ctx.chunks
        if chunks is None:
            chunks = CausalChunks(StayingChunks(), ctx.scale, is_kept=True)
            q, k, v, out, *lses = ctx.saved_tensors
            for bounds, lse in zip(ctx.ranges, lses, strict=True):
                chunks.adopt(*_cut((q, k, v, out), bounds), *[lse])
        is_last_use = ctx.chunks is None or not keeps_graph()
        grads: list[Tensor] = []
        for number in reversed(range(len(ctx.ranges))):
            bounds = ctx.ranges[number]
            parts = chunks.backward(number, grad[:, :, bounds[0] : bounds[1]], is_last_use=is_last_use)
            if not grads:
                grads = [part.new_empty((*part.shape[:2], ctx.ranges[-1][1], part.shape[3])) for part in parts]
            for whole, part in zip(grads, parts, strict=True):
                whole[:, :, bounds[0] : bounds[1]] = part
        return *grads, None, None, None
