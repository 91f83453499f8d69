"""Layers whose parts run chunk by chunk along a sequence that is spread over ranks: FPDT.

    hidden, a rank's tokens   | chunk 0 | chunk 1 | ...
        chunk i --> q k v --all-to-all--> this rank's heads of the whole chunk --> attention over chunks 0..i, which rest
                                                                                         in host memory between uses
        output  <-- dense <--all-to-all-- context

    tokens of chunk i     rank 0 | rank 1 | ...        so that together they are one stretch of the sequence: all ranks
                                                       have as much to do, and a chunk sees those before it

Queries, keys and values of the whole sequence so never are on the device at once. (FPDT, arXiv:2408.16978, section 4.)

Lives here: the published classes, as Megatron-DeepSpeed calls them. Does not live here: attention over chunks
(`chunked_attention`), tiles (`tiles`), the exchange (`layer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspeed import comm
from deepspeed.errors import ArgumentError
from deepspeed.sequence.attention_blocks import merge, wide_dtype
from deepspeed.sequence.chunked_attention import (
    CausalChunks,
    HostChunks,
    Range,
    StayingChunks,
    chunk_ranges,
    keeps_graph,
)
from deepspeed.sequence.layer import single_all_to_all
from deepspeed.sequence.loss import gathered_sequence
from deepspeed.sequence.tiles import JoinTiles, Sums, run_tiles

__all__ = ["FPDT_FFN", "FPDT_Attention", "FPDT_InputConstruct", "FPDT_LogitsLoss", "SequenceChunk", "update_out_and_lse"]


# -- which tokens a rank has ------------------------------------------------------------------------------------------


def _local_ranges(local_tokens: int, ranks: int, chunk_size: int) -> list[Range]:
    """Bounds of a rank's part of each chunk; a chunk has at most `chunk_size` tokens of all ranks together."""
    return chunk_ranges(local_tokens, max(1, chunk_size // ranks))


def _order(tokens: int, ranks: int, chunk_size: int) -> list[Tensor]:
    """For each rank the positions of its tokens in the sequence, in its order."""
    ranges = _local_ranges(tokens // ranks, ranks, chunk_size)
    return [
        torch.cat(
            [
                torch.arange(start * ranks + rank * (stop - start), start * ranks + (rank + 1) * (stop - start))
                for start, stop in ranges
            ]
        )
        for rank in range(ranks)
    ]


class FPDT_InputConstruct(nn.Module):
    """A rank's tokens of each chunk.

    Args:
        tokens: (batch, sequence, ...), whole.
        labels: (batch, sequence) or None.
        loss_mask: (batch, sequence) or None.
        attention_mask: passed on as it is.
        position_ids: (batch, sequence) or None.
        args: has `ds_sequence_parallel_fpdt_chunk_size`, tokens of a chunk.
        sp_size: ranks that share the sequence.
        sp_rank: this one.

    Raises:
        ArgumentError: tokens that the ranks do not divide.
    """

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        super().__init__()
        if tokens.size(1) % sp_size:
            raise ArgumentError(
                f"FPDT_InputConstruct: a sequence of {tokens.size(1)} tokens, which {sp_size} ranks do not divide. Pad it "
                f"to {-(-tokens.size(1) // sp_size) * sp_size} tokens, with labels that do not count."
            )
        self._whole = (tokens, labels, loss_mask, attention_mask, position_ids)
        self._orders = _order(tokens.size(1), sp_size, args.ds_sequence_parallel_fpdt_chunk_size)
        self._rank = sp_rank

    def generate(self) -> tuple[Tensor | None, ...]:
        """This rank's tokens, labels; the loss mask of all ranks, one after another; the attention mask; position ids.

        The loss mask goes with losses that are gathered from all ranks (`FPDT_LogitsLoss`).
        """
        tokens, labels, loss_mask, attention_mask, position_ids = self._whole
        mine = self._orders[self._rank]
        return (
            _select(tokens, mine),
            _select(labels, mine),
            _select(loss_mask, torch.cat(self._orders)),
            attention_mask,
            _select(position_ids, mine),
        )


def _select(tensor: Tensor | None, positions: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.index_select(1, positions.to(tensor.device))


# -- attention --------------------------------------------------------------------------------------------------------


class _Exchange:
    """Tokens for heads and back, over the ranks of a group. Shapes: (tokens, batch, heads, head size)."""

    def __init__(self, group: comm.ProcessGroup | None) -> None:
        self._group = group
        self.ranks = comm.get_world_size(group) if comm.is_initialized() else 1

    def to_heads(self, part: Tensor) -> Tensor:
        """All ranks' tokens of this rank's heads."""
        return part if self.ranks == 1 else single_all_to_all(part.contiguous(), 2, 0, 1, self._group)

    def to_tokens(self, heads: Tensor) -> Tensor:
        """This rank's tokens of all heads."""
        return heads if self.ranks == 1 else single_all_to_all(heads.contiguous(), 0, 2, 1, self._group)


@dataclass(frozen=True)
class _Shape:
    """Heads, and how keys and values are spread where there are fewer than ranks."""

    heads: int
    key_heads: int
    head_size: int
    key_copies: int

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values of (tokens, batch, all of them), with copies."""
        sizes = [self.heads * self.head_size, *[self.key_heads * self.head_size] * 2]
        q, k, v = (torch.unflatten(part, -1, (-1, self.head_size)) for part in torch.split(mixed, sizes, -1))
        return q, self._copied(k), self._copied(v)

    def _copied(self, heads: Tensor) -> Tensor:
        return heads if self.key_copies == 1 else heads.repeat_interleave(self.key_copies, 2)

    def joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Inverse of `split` for gradients: those of copies are added."""
        if self.key_copies > 1:
            k, v = (torch.unflatten(part, 2, (self.key_heads, -1)).sum(3) for part in (k, v))
        return torch.cat([part.flatten(2) for part in (q, k, v)], -1)


class FPDT_Attention(nn.Module):
    """Self-attention, projections included, chunk by chunk.

    Causal; no dropout. Shapes: hidden (tokens of this rank, batch, width). All ranks of the group call it together.

    Args:
        config: has `num_attention_heads`, `hidden_size`, and where they differ from what follows, `num_key_value_heads`
            and `kv_channels`.
        first_weight: (heads + 2 key heads) x head size, width: queries, then keys, then values.
        first_bias: its bias, or None.
        second_weight: width, heads x head size: the output projection.
        second_bias: its bias, or None.
        sequence_process_group: ranks that share a sequence; their tokens are as `FPDT_InputConstruct` gives them.
        gather_idx: taken for compatibility, like `scatter_idx`.
        scatter_idx: see `gather_idx`.
        return_bias: give `second_bias` beside the output instead of adding it.
        chunk_size: tokens of a chunk, of all ranks together.
        enable_offloading: queries, keys, values and outputs rest in host memory until they are used again.
    """

    def __init__(
        self,
        config: Any,
        first_weight: nn.Parameter,
        first_bias: nn.Parameter | None,
        second_weight: nn.Parameter,
        second_bias: nn.Parameter | None,
        sequence_process_group: comm.ProcessGroup | None = None,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        heads = int(config.num_attention_heads)
        self.num_heads = heads
        self.num_key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.head_size = int(getattr(config, "kv_channels", None) or config.hidden_size // heads)
        self.qkv_linear_weight = first_weight
        self.qkv_linear_bias = first_bias
        self.qkv_dense_weight = second_weight
        self.qkv_dense_bias = second_bias
        self.group = sequence_process_group
        self.return_bias = return_bias
        self.chunk_size = chunk_size
        self.enable_offloading = enable_offloading

    def forward(
        self,
        layernorm_output: Tensor,
        attention_mask: Tensor | None = None,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        cpu_offloading: bool = True,
    ) -> tuple[Tensor, nn.Parameter | None] | Tensor:
        """Attention of this rank's tokens.

        Args:
            layernorm_output: (tokens of this rank, batch, width).
            attention_mask: None.
            inference_params: None.
            rotary_pos_emb: cosine and sine of the whole sequence in its own order, (tokens, 1, 1, size) each, or the
                angles; applied to the first of the head size, whose halves are the two coordinates.
            cpu_offloading: False keeps chunks on the device, whatever the constructor was told.

        Returns:
            The output, with the bias beside it where `return_bias` says so.

        Raises:
            ArgumentError: a mask, inference state, or heads that do not spread over the ranks.
        """
        if attention_mask is not None or inference_params is not None:
            raise ArgumentError(
                "FPDT_Attention got an attention_mask or inference_params; it is causal and for training. Pass None for "
                "both (Megatron builds no mask with --use-flash-attn-v2)."
            )
        exchange = _Exchange(self.group)
        run = _Layer(
            exchange,
            self._shape(exchange.ranks),
            _local_ranges(layernorm_output.size(0), exchange.ranks, self.chunk_size),
            _cosine_and_sine(rotary_pos_emb),
            is_offloaded=self.enable_offloading and cpu_offloading,
            is_kept=torch.is_grad_enabled(),
        )
        bias = None if self.return_bias else self.qkv_dense_bias
        output: Tensor = _ChunkedLayer.apply(  # type: ignore[no-untyped-call]
            run, layernorm_output, self.qkv_linear_weight, self.qkv_linear_bias, self.qkv_dense_weight, bias
        )
        return (output, self.qkv_dense_bias) if self.return_bias else output

    def _shape(self, ranks: int) -> _Shape:
        copies = 1 if self.num_key_heads % ranks == 0 else ranks // self.num_key_heads
        if self.num_heads % ranks or self.num_key_heads * copies % ranks or self.num_heads % (self.num_key_heads * copies):
            raise ArgumentError(
                f"FPDT_Attention: {self.num_heads} heads and {self.num_key_heads} key heads over {ranks} sequence ranks; "
                "needed both to divide, or the ranks to be a multiple of the key heads. Use fewer ranks, or "
                "DistributedAttention."
            )
        return _Shape(self.num_heads, self.num_key_heads, self.head_size, copies)


def _cosine_and_sine(rotary: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return (rotary.cos(), rotary.sin()) if isinstance(rotary, Tensor) else rotary


@dataclass
class _Layer:
    """One call of the layer."""

    exchange: _Exchange
    shape: _Shape
    ranges: list[Range]
    rotary: tuple[Tensor, Tensor] | None
    is_offloaded: bool
    is_kept: bool
    chunks: CausalChunks | None = None

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> list[Tensor]:
        """Queries, keys, values of a chunk: (batch, this rank's heads, tokens of all ranks, head size)."""
        parts = [self.exchange.to_heads(part) for part in self.shape.split(F.linear(hidden, weight, bias))]
        rotated = [self._rotate(part, number, back=False) for part in parts[:2]]
        return [part.permute(1, 2, 0, 3).contiguous() for part in (*rotated, parts[2])]

    def unproject(self, grads: Sequence[Tensor], number: int) -> Tensor:
        """The gradient of the projection's output from those of what `project` gave."""
        parts = [part.permute(2, 0, 1, 3) for part in grads]
        turned = [self._rotate(part, number, back=True) for part in parts[:2]]
        return self.shape.joined(*(self.exchange.to_tokens(part) for part in (*turned, parts[2])))

    def context(self, attended: Tensor) -> Tensor:
        """(this rank's tokens, batch, heads x head size) from (batch, this rank's heads, all ranks' tokens, head size)."""
        return self.exchange.to_tokens(attended.permute(2, 0, 1, 3)).flatten(2)

    def of_context(self, grad: Tensor) -> Tensor:
        """Inverse of `context`."""
        return self.exchange.to_heads(torch.unflatten(grad, -1, (self.shape.heads, -1))).permute(1, 2, 0, 3).contiguous()

    def _rotate(self, part: Tensor, number: int, *, back: bool) -> Tensor:
        if self.rotary is None:
            return part
        start, stop = (bound * self.exchange.ranks for bound in self.ranges[number])
        cosine, sine = (angle[start:stop].to(part) for angle in self.rotary)
        turned, rest = part[..., : cosine.size(-1)], part[..., cosine.size(-1) :]
        if back:
            first, second = (turned * sine).chunk(2, -1)
            return torch.cat([turned * cosine + torch.cat([second, -first], -1), rest], -1)
        first, second = turned.chunk(2, -1)
        return torch.cat([turned * cosine + torch.cat([-second, first], -1) * sine, rest], -1)


class _ChunkedLayer(torch.autograd.Function):
    """Projection, attention and output projection; chunks that stay on the device are saved tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        run: _Layer,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
    ) -> Tensor:
        place = HostChunks(hidden.device) if run.is_offloaded and run.is_kept else StayingChunks()
        chunks = CausalChunks(place, run.shape.head_size**-0.5, is_kept=run.is_kept)
        output: Tensor | None = None
        for number, (start, stop) in enumerate(run.ranges):
            attended, _ = chunks.attend(*run.project(hidden[start:stop], weight, bias, number))
            part = F.linear(run.context(attended), out_weight, out_bias)
            if output is None:
                output = part.new_empty((hidden.size(0), *part.shape[1:]))
            output[start:stop] = part
        assert output is not None  # there is at least one chunk
        kept = chunks.tensors() if run.is_kept and not run.is_offloaded else []
        run.chunks = chunks if run.is_offloaded else None
        ctx.run, ctx.has_bias = run, (bias is not None, out_bias is not None)
        ctx.save_for_backward(hidden, weight, out_weight, *kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: _Layer = ctx.run
        hidden, weight, out_weight, *kept = ctx.saved_tensors
        chunks = run.chunks
        if chunks is None:
            chunks = CausalChunks(StayingChunks(), run.shape.head_size**-0.5, is_kept=True)
            for first in range(0, len(kept), 5):
                chunks.adopt(*kept[first : first + 5])
        is_last_use = run.chunks is None or not keeps_graph()
        of_hidden, sums = torch.empty_like(hidden), Sums([weight, weight[:, 0], out_weight, out_weight[:, 0]])
        for number in reversed(range(len(run.ranges))):
            start, stop = run.ranges[number]
            part = grad[start:stop]
            attended = chunks.output(number)
            part = part.to(attended.dtype)
            context = run.context(attended)
            of_attended = run.of_context(part @ out_weight.to(part.dtype))
            mixed = run.unproject(chunks.backward(number, of_attended, is_last_use=is_last_use), number)
            of_hidden[start:stop] = mixed @ weight.to(mixed.dtype)
            sums.add([*_of_linear(mixed, hidden[start:stop], ctx.has_bias[0]), *_of_linear(part, context, ctx.has_bias[1])])
        return None, of_hidden, *sums.rounded()


def _of_linear(grad: Tensor, given: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of a linear layer's weight and bias."""
    rows = grad.flatten(0, -2)
    return rows.t() @ given.to(grad.dtype).flatten(0, -2), rows.sum(0) if has_bias else None


# -- position-wise parts ----------------------------------------------------------------------------------------------


class FPDT_FFN:
    """Two linear layers with GELU between, chunk by chunk."""

    @staticmethod
    def apply(
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        add_bias: bool,
        chunk_size: int,
    ) -> tuple[Tensor, None]:
        """The output, biases in it, and None in place of a bias that is still to be added.

        Args:
            x: (tokens, batch, width).
            w1: (inner, width).
            b1: (inner,) or None.
            w2: (width, inner).
            b2: (width,) or None.
            add_bias: False leaves both biases out.
            chunk_size: tokens of a chunk.
        """
        biases = [bias for bias in (b1, b2) if bias is not None] if add_bias else []
        has_first = add_bias and b1 is not None

        def run(tensors: Sequence[Tensor]) -> Tensor:
            tile, up, down, *rest = tensors
            first = rest.pop(0) if has_first else None
            return F.linear(F.gelu(F.linear(tile, up, first), approximate="tanh"), down, rest[0] if rest else None)

        tiles = len(chunk_ranges(x.size(0), chunk_size))
        return run_tiles(run, [x], [w1, w2, *biases], dim=0, tiles=tiles, join=JoinTiles(0, x.size(0))), None


class FPDT_LogitsLoss:
    """The loss of every token, whose logits live for a chunk at a time."""

    @staticmethod
    def apply(
        lm_output: Tensor,
        labels: Tensor,
        logit_weights: Tensor,
        rank: int,
        spg_size: int,
        spg: comm.ProcessGroup | None,
        num_chunk: int,
    ) -> Tensor:
        """Losses of all ranks' tokens, one rank after another, on every rank: (tokens of all ranks, batch).

        Every rank of the group must call it, and call backward. Gradients are those of `sequence.loss`, [Note: one
        objective on every rank].

        Args:
            lm_output: (tokens of this rank, batch, width).
            labels: (batch, tokens of this rank).
            logit_weights: (vocabulary, width).
            rank: taken for compatibility.
            spg_size: ranks that share the sequence.
            spg: their group.
            num_chunk: chunks.
        """

        def run(tensors: Sequence[Tensor]) -> Tensor:
            hidden, target, weight = tensors
            logits = F.linear(hidden, weight).flatten(0, 1)
            return F.cross_entropy(logits.to(wide_dtype(logits.dtype)), target.flatten(), reduction="none").view(
                target.shape
            )

        join = JoinTiles(0, lm_output.size(0))
        losses = run_tiles(run, [lm_output, labels.t()], [logit_weights], dim=0, tiles=num_chunk, join=join)
        return losses if spg_size == 1 else gathered_sequence(losses, spg)


def update_out_and_lse(
    out: Tensor | None, lse: Tensor | None, block_out: Tensor, block_lse: Tensor, slice_: Any = None
) -> tuple[Tensor, Tensor]:
    """Put attention over one more block of keys together with what there is.

    Args:
        out: (batch, tokens, heads, head size), wide; None at the first block. It may be written to.
        lse: (batch, tokens, heads, 1), its log-sum-exp; None at the first block.
        block_out: as `out`, of any dtype.
        block_lse: (batch, heads, tokens).
        slice_: the part of `out` and `lse` that the block belongs to.

    Raises:
        ArgumentError: a slice at the first block.
    """
    block_lse = block_lse.transpose(1, 2).unsqueeze(-1)
    if out is None or lse is None:
        if slice_ is not None:
            raise ArgumentError("update_out_and_lse: slice_ with out=None. Begin with a block of all queries.")
        return block_out.to(wide_dtype(block_out.dtype), copy=True), block_lse.contiguous()
    if slice_ is None:
        total = merge(out, lse.squeeze(-1), block_out, block_lse.squeeze(-1))
        return out, total.unsqueeze(-1)
    part, total = update_out_and_lse(out[slice_], lse[slice_], block_out, block_lse.squeeze(-1).transpose(1, 2))
    out[slice_], lse[slice_] = part, total
    return out, lse


class SequenceChunk:
    """A chunk that rests in host memory, and of which there may be a copy on the device.

    Args:
        chunk: its values; not needed after.
        device: where copies are made; by default where `chunk` is.
        is_in_use: keep `chunk` as the copy on the device.
    """

    def __init__(self, chunk: Tensor, device: torch.device | str | None = None, is_in_use: bool = False) -> None:
        self._place = HostChunks(chunk.device if device is None else torch.device(device))
        self._held = self._place.put(chunk)
        self._on_device: Tensor | None = chunk if is_in_use else None

    def load_to_gpu(self) -> None:
        """Start the copy to the device unless there is one."""
        if self._on_device is None:
            self._held.bring()

    def get_gpu_chunk(self) -> Tensor:
        """The copy on the device; made if there is none."""
        if self._on_device is None:
            self._on_device = self._held.value()
        return self._on_device

    def check_gpu_chunk(self) -> bool:
        """Whether there is a copy on the device."""
        return self._on_device is not None

    def offload(self) -> None:
        """Give up the copy on the device."""
        self._on_device = None

    def overwrite_to_cpu(self) -> None:
        """Let what the copy on the device holds now be what rests."""
        if self._on_device is not None:
            self._held = self._place.put(self._on_device)
