"""Which parameters of a model are parts, that other tensor-parallel ranks hold the others of; and which elements are copies.

    modules that say so (`cut_axis`, `cuts()`: docs/adr/0017)  --.
    parameters that Megatron-style code marked                 --+--> ids of parts --> a kind of their own (`partition`)
                                                                 `--> copies ------> left out of the gradient norm

Does not live here: cutting (`tensor_parallel`), storing parts (`cuts`). Called by `partition` and `training`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import nn
from torch.optim import Optimizer

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, UnbuiltFeatureError
from deepspeed.optim.clip import is_model_parallel
from deepspeed.optim.elementwise import is_elementwise
from deepspeed.sharding import Cut, Span
from deepspeed.zero.flat import FlatGroup

__all__ = ["TensorParts", "refuse_for_parts"]


class TensorParts(NamedTuple):
    """Those of a module on one tensor-parallel rank; none where there is one such rank.

    Attributes:
        ids: of the parameters that are parts.
        cuts: by id, how they were cut, where their module says so.
        rank: this rank's place on the axis.
    """

    ids: frozenset[int]
    cuts: dict[int, Cut]
    rank: int

    @classmethod
    def of(cls, module: nn.Module, rank: int, size: int) -> TensorParts:
        """Find them."""
        if size == 1:
            return cls(frozenset(), {}, 0)
        cuts = dict(_cuts(module))
        marked = {id(param) for param in module.parameters() if is_model_parallel(param)}
        return cls(frozenset(cuts) | marked, cuts, rank)

    def copies(self, flat: FlatGroup) -> tuple[Span, ...]:
        """Where in this rank's shard of `flat` lie elements that another tensor-parallel rank counts."""
        return tuple(self._copies(flat))

    def _copies(self, flat: FlatGroup) -> Iterator[Span]:
        for f in flat.own_fragments() if flat.kind.is_part else ():
            cut = self.cuts.get(id(flat.members[f.index].param))
            for span in _joined(_flattened(cut, self.rank)) if cut is not None and cut.has_copies() else ():
                low, high = max(span.start, f.param_start), min(span.stop, f.param_start + f.numel)
                if low < high:
                    yield Span(f.buffer_start + low - f.param_start, high - low)


def refuse_for_parts(config: DeepSpeedConfig, optimizer: Optimizer | None, parts: TensorParts) -> None:
    """Refuse what would give other numbers on parts than on whole parameters. All ranks alike.

    Raises:
        ArgumentError, UnbuiltFeatureError: the text says what to do.
    """
    if not parts.ids or optimizer is None:
        return
    zero, name = config.zero_optimization, type(optimizer).__name__
    if zero.stage > 0 and zero.zenflow is not None:
        raise UnbuiltFeatureError(
            "zero_optimization.zenflow with layers cut over tensor-parallel ranks is not built yet: it would choose columns "
            "of each part for itself. Leave it out, or use one tensor-parallel rank."
        )
    uses_sums = getattr(optimizer, "needs_parameter_sums", False)
    if not uses_sums and not is_elementwise(optimizer):
        raise ArgumentError(
            f"optimizer {name} with layers cut over tensor-parallel ranks: it may need whole parameters, and a rank holds "
            "parts of them. Use an element-wise optimizer such as AdamW, or one tensor-parallel rank."
        )
    if uses_sums and any(cut.has_copies() for cut in parts.cuts.values()):
        raise UnbuiltFeatureError(
            f"optimizer {name} with key/value heads that several tensor-parallel ranks hold copies of is not built yet: its "
            "norms would count them twice. Use at most as many tensor-parallel ranks as there are key/value heads, or AdamW."
        )
    if uses_sums and any(group.get("max_grad_norm", 0.0) > 0 for group in optimizer.param_groups):
        raise UnbuiltFeatureError(
            f"max_grad_norm of {name} with layers cut over tensor-parallel ranks is not built yet. Use "
            '"gradient_clipping", which clips the gradient of the whole model.'
        )


def _cuts(module: nn.Module) -> Iterator[tuple[int, Cut]]:
    for each in module.modules():
        if getattr(each, "cut_axis", None) == "tensor":
            yield from ((id(getattr(each, name)), cut) for name, cut in cast("Any", each).cuts())


def _flattened(cut: Cut, rank: int) -> Iterator[Span]:
    """The copies among the elements of a rank's part, row-major."""
    width = cut.width(rank) * cut.inner
    for row in range(cut.rows):
        for span in cut.copies(rank):
            yield Span(row * width + span.start * cut.inner, span.length * cut.inner)


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Neighbours as one; `spans` are sorted."""
    last: Span | None = None
    for span in spans:
        if last is not None and span.start == last.stop:
            last = Span(last.start, last.length + span.length)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
