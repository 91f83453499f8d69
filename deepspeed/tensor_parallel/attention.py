"""Attention blocks of a model: found by the names of their projections, and told how many heads are left.

    find     q, k, v (or one fused projection) and the projection of what comes out    -> `Attention`
    parts    which rows of each a rank holds                                           -> `heads`
    adapt    head counts, sizes and biases that the block's own code reads             -> this rank's

Lives here: what attention of published models looks like. Does not live here: the arithmetic (`heads`), converting layers
(`layers`). Called by `auto`. A block that is not understood is not guessed at: `UnclearError` says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from deepspeed.sharding.cut import Span
from deepspeed.tensor_parallel.heads import HeadShares, Parts, share_heads
from deepspeed.tensor_parallel.linears import in_features, is_linear, out_features

__all__ = ["Attention", "UnclearError", "adapt", "attention_of"]

_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"))
_FUSED = ("query_key_value", "c_attn", "qkv_proj", "Wqkv", "qkv", "W_pack")
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "o", "out_lin", "proj", "Wo")

_GROUPS = ("GPTNeoX", "Bloom", "Falcon")
_SECTIONS = ("GPT2", "Phi3", "DecisionTransformerGPT2", "ImageGPT")
"""How the class of a block begins whose one fused projection is in that order (see `heads`)."""

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_SIZES = ("split_size", "all_head_size", "inner_dim")
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_POSITION_BIAS = "relative_attention_bias"

Layout = Literal["separate", "sections", "groups", "query_and_pair"]


_SAY_HEADS = f"Let the block say it in an integer attribute, one of {', '.join(_HEADS)}"


class UnclearError(Exception):
    """Why a block that looks like attention cannot be cut.

    Attributes:
        cure: what would make it clear; None: nothing but another block would.
    """

    def __init__(self, reason: str, cure: str | None = None) -> None:
        super().__init__(reason)
        self.cure = cure


@dataclass(frozen=True)
class Attention:
    """One attention block.

    Attributes:
        name: of the block.
        block: the module itself; its forward has the parts between the projections.
        layout: how the projections hold queries, keys and values.
        columns: names of the projections from the block's input, queries first.
        row: name of the projection of what comes out.
        query_heads: of the whole.
        key_heads: of the whole; several query heads may share one.
        head_dim: width of a head.
        norms: names of norms over single heads: their parameters stay whole.
    """

    name: str
    block: nn.Module
    layout: Layout
    columns: tuple[str, ...]
    row: str
    query_heads: int
    key_heads: int
    head_dim: int
    norms: tuple[str, ...] = ()

    def shares(self, ranks: int) -> HeadShares:
        """The heads of each rank.

        Raises:
            UnclearError: a rank would get no head, and the block's code cannot do without.
        """
        if ranks > self.query_heads and _attribute(self.block, ("num_heads",)) is not None:
            raise UnclearError(f"has {self.query_heads} heads for {ranks} ranks, and its code needs one on each")
        return share_heads(self.query_heads, self.key_heads, ranks)

    def column_parts(self, shares: HeadShares) -> dict[str, Parts]:
        """Rows of each projection that each rank holds."""
        rows: dict[Layout, tuple[Callable[[int], Parts], ...]] = {
            "separate": (shares.query_rows, shares.key_rows, shares.key_rows),
            "sections": (shares.section_rows,),
            "groups": (shares.group_rows,),
            "query_and_pair": (shares.query_rows, shares.pair_rows),
        }
        return {name: rows_of(self.head_dim) for name, rows_of in zip(self.columns, rows[self.layout], strict=True)}

    def position_bias(self) -> str | None:
        """Name of an embedding of biases, one for each head."""
        bias = dict(self.block.named_children()).get(_POSITION_BIAS)
        if isinstance(bias, nn.Embedding) and bias.embedding_dim == self.query_heads:
            return _join(self.name, _POSITION_BIAS)
        return None


def attention_of(model: nn.Module, name: str, *, sections: bool = False) -> Attention | None:
    """The attention whose projections are children of module `name`; None where there is none.

    Args:
        model: that has the module.
        name: of the module.
        sections: the user has said of a fused projection that it is in sections.

    Raises:
        UnclearError: it looks like attention, and what it does with heads is not known.
    """
    block = model.get_submodule(name)
    children = dict(block.named_children())
    if isinstance(block, nn.MultiheadAttention):
        raise UnclearError("is torch.nn.MultiheadAttention, which reads its weights itself")
    layout, columns = _projections(type(block).__name__, children, sections)
    if layout is None:
        return None
    found = {_join(name, each): children[each] for each in columns}
    heads = _heads(block, layout, list(found.values()))
    row = _row(model, name, children, heads.query_heads * heads.head_dim, set(columns))
    known = {*columns, *([row.rpartition(".")[2]] if row.startswith(f"{name}." if name else "") else []), _POSITION_BIAS}
    norms = tuple(_norms(name, block, known, heads.head_dim))
    return Attention(name, block, layout, tuple(found), row, heads.query_heads, heads.key_heads, heads.head_dim, norms)


@dataclass(frozen=True)
class _Counts:
    query_heads: int
    key_heads: int
    head_dim: int


def _projections(kind: str, children: dict[str, nn.Module], sections: bool) -> tuple[Layout | None, tuple[str, ...]]:
    linears = {each for each, child in children.items() if is_linear(child)}
    for names in _SEPARATE:
        if linears.issuperset(names):
            return "separate", names
    if linears.issuperset(("q_attn", "c_attn")):
        return "query_and_pair", ("q_attn", "c_attn")
    for fused in _FUSED:
        if fused not in linears:
            continue
        if sections or kind.startswith(_SECTIONS):
            return "sections", (fused,)
        if kind.startswith(_GROUPS):
            return "groups", (fused,)
        raise UnclearError(
            f"has a fused projection {fused!r} in an order that is not known", "Give the fused parts of it by 'shape'"
        )
    return None, ()


def _heads(block: nn.Module, layout: Layout, columns: list[nn.Module]) -> _Counts:
    """Head counts, from widths where they say it, else from the block and its config."""
    config = getattr(block, "config", None)
    query_heads = _attribute(block, _HEADS) or _attribute(config, _HEADS)
    head_dim = _attribute(block, _HEAD_DIMS)
    widths = [out_features(column) for column in columns]
    if layout in ("separate", "query_and_pair"):
        key_width = widths[1] if layout == "separate" else widths[1] // 2
        if head_dim is None and query_heads:
            head_dim = widths[0] // query_heads
        if not head_dim or widths[0] % head_dim or key_width % head_dim:
            raise UnclearError(f"does not say its number of heads, with projections {widths} wide", _SAY_HEADS)
        counts = _Counts(widths[0] // head_dim, key_width // head_dim, head_dim)
    else:
        if not query_heads:
            raise UnclearError("does not say its number of heads", _SAY_HEADS)
        key_heads = _key_heads(block, config) or query_heads
        head_dim = head_dim or widths[0] // (query_heads + 2 * key_heads)
        counts = _Counts(query_heads, key_heads, head_dim)
        if widths[0] != (query_heads + 2 * key_heads) * head_dim:
            counts = _Counts(query_heads, query_heads, head_dim)
        if widths[0] != (counts.query_heads + 2 * counts.key_heads) * head_dim:
            raise UnclearError(f"has {query_heads} heads of {head_dim} and a projection {widths[0]} wide, which do not fit")
    if query_heads not in (None, counts.query_heads) or counts.query_heads % counts.key_heads:
        raise UnclearError(f"has {query_heads} heads, and projections for {counts.query_heads} and {counts.key_heads}")
    return counts


def _key_heads(block: nn.Module, config: object) -> int | None:
    return _attribute(block, _KEY_HEADS) or _attribute(config, _KEY_HEADS)


def _row(model: nn.Module, name: str, children: dict[str, nn.Module], width: int, columns: set[str]) -> str:
    for output in _OUTPUTS:
        child = children.get(output)
        if child is not None and output not in columns and is_linear(child) and in_features(child) == width:
            return _join(name, output)
    parent = name.rpartition(".")[0]
    beside = f"{_join(parent, 'output')}.dense"
    try:
        child = model.get_submodule(beside)
    except AttributeError:
        child = None
    if child is not None and is_linear(child) and in_features(child) == width:
        return beside
    names = ", ".join(_OUTPUTS)
    raise UnclearError(
        f"has no projection of its {width} outputs under one of the names {names}", "Name its output layer one of these"
    )


def _norms(name: str, block: nn.Module, known: set[str], head_dim: int) -> Iterator[str]:
    """Children over single heads. Whatever else has parameters would see only a part."""
    for own, _ in block.named_parameters(recurse=False):
        raise UnclearError(f"has a parameter {own!r} of its own")
    for child_name, child in block.named_children():
        shapes = [tuple(getattr(param, "ds_shape", param.shape)) for param in child.parameters()]
        if child_name in known or not shapes:
            continue
        if any(shape != (head_dim,) for shape in shapes):
            raise UnclearError(f"has {child_name!r} with parameters of shapes {shapes}, which is not for single heads")
        yield _join(name, child_name)


# -- telling a block what it has -------------------------------------------------------------------------------------------


class PartConfig:
    """A model's config as a block with some of its heads sees it: all but the counts are the config's own."""

    def __init__(self, whole: object, own: dict[str, int]) -> None:
        """Store both."""
        self.__dict__.update(_whole=whole, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_whole"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_whole"], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return PartConfig, (self.__dict__["_whole"], self.__dict__["_own"])


def adapt(attention: Attention, shares: HeadShares, rank: int) -> None:
    """Make the block's code work on this rank's heads."""
    block = attention.block
    queries, keys = shares.queries[rank], shares.keys[rank]
    group = max(1, queries.length // max(1, keys.length))
    whole = attention.query_heads
    _replace(block, _KEY_HEADS, attention.key_heads, keys.length)
    _replace(block, ("num_key_value_groups",), shares.group, group)
    _replace(block, _HEADS, whole, queries.length)
    _replace(block, _SIZES, whole * attention.head_dim, queries.length * attention.head_dim)
    if getattr(block, "pretraining_tp", 1) != 1:  # another order of sums, on slices of the whole weight
        block.pretraining_tp = 1  # type: ignore[assignment]
    code = inspect.unwrap(type(block).forward).__code__
    if "config" in code.co_names and set(code.co_names) & {*_HEADS, *_KEY_HEADS} - set(vars(block)):
        own = dict.fromkeys(_HEADS, queries.length) | dict.fromkeys(_KEY_HEADS, keys.length)
        block.config = PartConfig(block.config, own)  # type: ignore[assignment]
    names = inspect.signature(type(block).forward).parameters
    if "alibi" in names:
        block.register_forward_pre_hook(_PartBiases(tuple(names)[1:], whole, queries), with_kwargs=True)


class _PartBiases:
    """Before a block's forward: of biases of all heads, keep its own."""

    def __init__(self, names: tuple[str, ...], heads: int, own: Span) -> None:
        self._names, self._heads, self._own = names, heads, own

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        for name in ("alibi", "attention_mask"):
            value = given.get(name)
            if isinstance(value, Tensor):
                given[name] = self._part(name, value)
        return tuple(given[name] for name in self._names[: len(args)]), {name: given[name] for name in kwargs}

    def _part(self, name: str, value: Tensor) -> Tensor:
        heads = slice(self._own.start, self._own.stop)
        if value.dim() == 4 and value.shape[1] == self._heads:
            return value[:, heads]
        if name == "alibi" and value.dim() == 3:  # (batch x heads, 1, T)
            return value.view(-1, self._heads, *value.shape[1:])[:, heads].flatten(0, 1)
        return value


def _replace(block: nn.Module, names: tuple[str, ...], whole: int, own: int) -> None:
    for name in names:
        if vars(block).get(name) == whole:
            setattr(block, name, own)


def _attribute(holder: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
