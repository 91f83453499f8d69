"""Layers of which each rank of the tensor axis has a part: the model's own objects, with another class.

    x whole --Entry--> [ ColumnLinear ] --> part of the outputs --> ... --> [ RowLinear ] --all-reduce--> y whole (+ bias)
            backward: one all-reduce for all columns that took the same x

    ids --> [ VocabularyEmbedding ] --> rows of own tokens, zeros for others --all-reduce--> whole
    ids --> [ WidthEmbedding ]      --> own columns --gather--> whole

Lives here: the classes, how a layer becomes one of them and takes its part, how it reads a whole state dict. Does not live
here: which layers are cut where (`plan`, `attention`, `auto`). A layer keeps its object, name, hooks and `isinstance`; its
class becomes a subclass of its own under the same name. Parts may be uneven and empty.

[Note: copies] Where several ranks hold the same key/value heads, each has the gradient of its own query heads alone: in
backward the copied spans are summed over the ranks that share them, so copies stay equal.

Source: Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.checkpoint.utils import note_part
from deepspeed.comm import differentiable
from deepspeed.comm.sums import all_reduce_now
from deepspeed.errors import UsageError
from deepspeed.sharding.cut import Cut, Span
from deepspeed.tensor_parallel.entry import Entry
from deepspeed.tensor_parallel.linears import input_dim, is_transposed, output_dim
from deepspeed.topology.mesh import AxisGroup

__all__ = [
    "ColumnLinear",
    "CutLayer",
    "RowLinear",
    "SummedGradients",
    "VocabularyEmbedding",
    "WidthEmbedding",
    "become",
    "cut_class",
    "part_of",
    "sum_gradients",
    "sum_into",
]


class CutLayer(nn.Module):
    """What layers of parts have in common."""

    cut_axis: ClassVar[str] = "tensor"
    axis: AxisGroup
    _cuts: dict[str, Cut]
    _sharers: dict[str, tuple[tuple[Span, ...], AxisGroup]]
    """Parameters with copies: spans in the part's own numbering, and the ranks that hold them."""

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """Name of each parameter of which this rank has a part, and how it is cut."""
        yield from self._cuts.items()

    def _widths(self) -> list[int]:
        cut = self._cuts["weight"]
        return [cut.width(rank) for rank in range(cut.ranks)]

    def _used(self, name: str) -> Tensor | None:
        """A parameter as the product uses it: see [Note: copies]."""
        param: Tensor | None = self._parameters.get(name)
        if param is None or name not in self._sharers or not torch.is_grad_enabled():
            return param
        spans, sharers = self._sharers[name]
        summed: Tensor = _SumSpans.apply(param, spans, self._cuts[name].dim, sharers)  # type: ignore[no-untyped-call]
        return summed

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As torch's, with a word about what is not here."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._cuts and self.axis.size > 1:
            note_part(destination, prefix, f"part {self.axis.rank} of {self.axis.size} of {', '.join(self._cuts)}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take this rank's part out of whole tensors; parts are taken as they are."""
        for name, cut in self.cuts():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and tuple(value.shape) == cut.shape:
                state_dict[prefix + name] = part_of(value, cut, self.axis.rank)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Which part is here."""
        return f"{super().extra_repr()}, part {self.axis.rank} of {self.axis.size}"


class ColumnLinear(CutLayer):
    """A linear layer with this rank's outputs; `nn.Linear` or `Conv1D` is the other base.

    Attributes:
        gather_output: give all outputs, on every rank.
    """

    gather_output: bool
    entry: Entry
    _order: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., this rank's outputs), or all of them; x (..., in) is alike on all ranks."""
        part = self.entry.product(self, x)
        if not self.gather_output:
            return part
        whole = differentiable.gather(part, -1, self.axis.group, self._widths())
        return whole if self._order is None else whole.index_select(-1, self._order.to(whole.device))

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """See `entry.Column`."""
        weight = self._used("weight")
        assert weight is not None  # a linear layer has one
        return (weight.t() if is_transposed(self) else weight), self._used("bias")


class RowLinear(CutLayer):
    """A linear layer with this rank's inputs: the sum over ranks is the output. Its bias is whole and added once.

    Attributes:
        split_input: the input is whole, and this rank's part of it is taken first.
        scatters_tokens: the output is (rows, this rank's part of the tokens, out): see `token_parts`.
    """

    split_input: bool
    scatters_tokens: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out), alike on all ranks; x (..., this rank's inputs)."""
        if self.split_input:
            x = self._own_inputs(differentiable.copy(x, self.axis.group))
        weight = self._used("weight")
        assert weight is not None  # a linear layer has one
        terms = F.linear(x, weight.t() if is_transposed(self) else weight)
        bias = self._parameters.get("bias")
        if self.scatters_tokens:
            part = differentiable.reduce_scatter(terms, 1, self.axis.group)
            return part if bias is None else part + differentiable.copy(bias, self.axis.group)
        total = sum_into(terms, self.axis)
        return total if bias is None else total + bias

    def _own_inputs(self, x: Tensor) -> Tensor:
        spans = self._cuts["weight"].parts[self.axis.rank]
        return torch.cat([x.narrow(-1, span.start, span.length) for span in spans] or [x.narrow(-1, 0, 0)], -1)


class VocabularyEmbedding(CutLayer):
    """An embedding with this rank's rows: tokens of other ranks become zeros, and the sum over ranks is the output."""

    num_embeddings: int
    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        """Return (..., M), alike on all ranks; ids (...) are of the whole vocabulary."""
        cut = self._cuts["weight"]
        (own, *_), weight = cut.parts[self.axis.rank] or (Span(0, 0),), self._parameters["weight"]
        assert weight is not None  # an embedding has one
        if own.length:
            is_foreign = (ids < own.start) | (ids >= own.stop)
            rows = super().forward((ids - own.start).masked_fill(is_foreign, 0))
            rows = rows.masked_fill(is_foreign.unsqueeze(-1), 0)
        else:
            rows = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()  # a part of the graph, like the others
        return sum_into(rows, self.axis)


class WidthEmbedding(CutLayer):
    """An embedding with this rank's columns.

    Attributes:
        gather_output: give all columns, on every rank; else what follows works on the part (biases of heads).
    """

    gather_output: bool

    def forward(self, ids: Tensor) -> Tensor:
        """Return (..., M) or this rank's columns; ids (...)."""
        part: Tensor = super().forward(ids)
        if not self.gather_output:
            return part
        return differentiable.gather(part, -1, self.axis.group, self._widths())


class SummedGradients(nn.Module):
    """A module with whole parameters that sees only this rank's part of its input: gradients are summed over the axis."""

    axis: AxisGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the module does, with parameters whose gradients are summed. All ranks of the axis must call backward."""
        kept = dict(self._parameters)
        if torch.is_grad_enabled():
            for name, param in kept.items():
                if param is not None and param.requires_grad:
                    self._parameters[name] = differentiable.copy(param, self.axis.group)  # type: ignore[assignment]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(kept)


# -- sums ------------------------------------------------------------------------------------------------------------------


def sum_into(terms: Tensor, axis: AxisGroup) -> Tensor:
    """Return the sum of all ranks' `terms`, which nobody else has seen: it may be made in their memory."""
    total: Tensor = _SumInto.apply(terms, axis)  # type: ignore[no-untyped-call]
    return total


class _SumInto(torch.autograd.Function):
    """All-reduce in place: for a tensor that nobody else has seen. Autograd has no in-place change of a function's view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup) -> Tensor:
        if x._is_view() or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        else:
            ctx.mark_dirty(x)
        ctx.group = axis.group
        all_reduce_now(x, axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank uses it for its own term: of the gradient's own gradient theirs are summed.
        return differentiable.copy(gradient, ctx.group) if torch.is_grad_enabled() else gradient, None


class _SumSpans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, spans: Sequence[Span], dim: int, sharers: AxisGroup) -> Tensor:
        ctx.given = spans, dim, sharers
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        spans, dim, sharers = ctx.given
        if len(spans) == 1 and spans[0].length == gradient.shape[dim]:
            return differentiable.reduce(gradient, sharers.group), None, None, None
        shared = differentiable.reduce(torch.cat([gradient.narrow(dim, *span) for span in spans], dim), sharers.group)
        gradient = gradient.clone()
        for span, part in zip(spans, torch.split(shared, [span.length for span in spans], dim), strict=True):
            gradient.narrow(dim, *span).copy_(part)
        return gradient, None, None, None


# -- becoming --------------------------------------------------------------------------------------------------------------


def become(
    layer: nn.Module,
    kind: type[CutLayer],
    axis: AxisGroup,
    parts: tuple[tuple[Span, ...], ...],
    shapes: Mapping[int, tuple[int, ...]],
    sharers: AxisGroup | None = None,
    **attributes: Any,
) -> None:
    """Make `layer` one of the classes above, and let it keep its part of its parameters. Nothing is sent.

    Args:
        layer: with whole parameters, on any device; one that another layer shares and has cut is taken as it is.
        kind: the class.
        axis: whose ranks have the parts.
        parts: of each rank, spans of the dimension that is cut: outputs, inputs, tokens, or columns of an embedding.
        shapes: of whole parameters, by `id`; another layer may have cut one that is shared.
        sharers: the ranks that hold what this one has copies of.
        **attributes: of the class.

    Raises:
        UsageError: a parameter has neither its whole shape nor that of this part.
    """
    cuts = _cuts_of(layer, kind, parts, shapes)
    for name, cut in cuts.items():
        param = layer._parameters[name]
        assert param is not None  # has a cut
        if tuple(param.shape) == cut.shape:
            param.data = part_of(param.detach(), cut, axis.rank)
        elif tuple(param.shape) != cut.part_shape(axis.rank):
            raise UsageError(
                f"parameter {name!r} of {type(layer).__name__} has shape {tuple(param.shape)}, where {cut.shape} was "
                "expected. Another layer shares it and cuts it otherwise: give both the same partition_type."
            )
    layer.__class__ = cut_class(cast("Any", kind), cast("Any", type(layer)))
    made = cast("CutLayer", layer)
    made.axis, made._cuts = axis, cuts
    made._sharers = {name: (_copied(cut, axis.rank), sharers) for name, cut in cuts.items() if sharers is not None}
    for name, value in attributes.items():
        setattr(made, name, value)
    if isinstance(made, ColumnLinear):
        made.entry.columns.append(made)
        made._order = _whole_order(cuts["weight"]) if made.gather_output else None
    _tell_width(made, cuts["weight"])


def sum_gradients(module: nn.Module, axis: AxisGroup) -> None:
    """Make `module`, whose parameters stay whole, one whose gradients are summed over the axis."""
    if not isinstance(module, SummedGradients):
        module.__class__ = cut_class(cast("Any", SummedGradients), cast("Any", type(module)))
        cast("SummedGradients", module).axis = axis


def part_of(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """A copy of what `rank` holds of `whole`, on the same device."""
    spans = [whole.narrow(cut.dim, *span) for span in cut.parts[rank]] or [whole.narrow(cut.dim, 0, 0)]
    return torch.cat(spans, cut.dim) if len(spans) > 1 else spans[0].clone(memory_format=torch.contiguous_format)


def _cuts_of(
    layer: nn.Module, kind: type[CutLayer], parts: tuple[tuple[Span, ...], ...], shapes: Mapping[int, tuple[int, ...]]
) -> dict[str, Cut]:
    def cut(name: str, dim: int) -> Cut:
        param = layer._parameters[name]
        return Cut(shapes[id(param)], dim, parts)

    if issubclass(kind, RowLinear):
        return {"weight": cut("weight", input_dim(layer))}
    if not issubclass(kind, ColumnLinear):
        return {"weight": cut("weight", 0 if issubclass(kind, VocabularyEmbedding) else 1)}
    has_bias = layer._parameters.get("bias") is not None
    return {"weight": cut("weight", output_dim(layer)), **({"bias": cut("bias", 0)} if has_bias else {})}


def _copied(cut: Cut, rank: int) -> tuple[Span, ...]:
    """Of this rank's part, in its own numbering, what another rank has too."""
    others = [span for other, spans in enumerate(cut.parts) if other != rank for span in spans]
    copied: list[Span] = []
    at = 0
    for span in cut.parts[rank]:
        shared = {index for other in others for index in range(max(span.start, other.start), min(span.stop, other.stop))}
        for index in range(span.start, span.stop):
            if index not in shared:
                continue
            place = at + index - span.start
            if copied and copied[-1].stop == place:
                copied[-1] = Span(copied[-1].start, copied[-1].length + 1)
            else:
                copied.append(Span(place, 1))
        at += span.length
    return tuple(copied)


def _whole_order(cut: Cut) -> Tensor | None:
    """Where, in parts side by side, each index of the whole is; None: where it was."""
    stored = [index for spans in cut.parts for span in spans for index in range(span.start, span.stop)]
    if stored == list(range(cut.shape[cut.dim])):
        return None
    places = {index: place for place, index in enumerate(stored)}
    return torch.tensor([places[index] for index in range(cut.shape[cut.dim])])


_WIDTHS: tuple[tuple[type[CutLayer], tuple[str, ...]], ...] = (
    (ColumnLinear, ("out_features", "nf")),
    (RowLinear, ("in_features", "nx")),
    (VocabularyEmbedding, ("num_embeddings",)),
    (WidthEmbedding, ("embedding_dim",)),
)


def _tell_width(layer: CutLayer, cut: Cut) -> None:
    """Set what the layer's own class calls its width."""
    for kind, names in _WIDTHS:
        for name in names:
            if isinstance(layer, kind) and name in vars(layer):
                setattr(layer, name, cut.width(layer.axis.rank))
    if isinstance(layer, VocabularyEmbedding) and layer.padding_idx is not None:
        spans = cut.parts[layer.axis.rank]
        inside = [layer.padding_idx - span.start for span in spans if span.start <= layer.padding_idx < span.stop]
        layer.padding_idx = inside[0] if inside else None


@cache
def cut_class(kind: type[Any], own: type[Any]) -> type[Any]:
    """A subclass that goes by the same name, so that what looks for modules by class name finds them."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}

    def reduced(layer: Any, protocol: Any) -> tuple[Any, ...]:
        """By what the class was made of: under its name pickle finds another one."""
        reduces: Any = own.__reduce_ex__
        _, (_, *given), *state = reduces(layer, max(protocol, 2))
        return _unfilled, (kind, own, *given), *state

    return type(own.__name__, (kind, own), {**names, "__reduce_ex__": reduced})


def _unfilled(kind: type[Any], own: type[Any], *given: Any) -> Any:
    made = cut_class(cast("Any", kind), cast("Any", own))
    return made.__new__(made, *given)
