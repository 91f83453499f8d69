"""Blocks of two products, found by the names that models use, or by the order of a `Sequential`.

    x --> columns (up, gate) --> element by element --> row (down) --> y

Lives here: which names, and that widths fit. Does not live here: attention (`attention`). Called by `auto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from deepspeed.tensor_parallel.linears import in_features, is_linear, out_features

__all__ = ["Mlp", "mlps_of"]

_NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
    (("lin1",), "lin2"),
    (("fc_in",), "fc_out"),
)

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Dropout, nn.Identity),
)


@dataclass(frozen=True)
class Mlp:
    """One such block.

    Attributes:
        name: of the module that runs it.
        columns: names of the layers that take the input.
        row: name of the layer that gives the output.
        sections: fused parts of each column: 2 where gate and up are one weight.
    """

    name: str
    columns: tuple[str, ...]
    row: str
    sections: int = 1

    @property
    def members(self) -> tuple[str, ...]:
        """All of its layers."""
        return (*self.columns, self.row)


def mlps_of(model: nn.Module, name: str) -> Iterator[Mlp]:
    """Those that module `name` runs."""
    block = model.get_submodule(name)
    if isinstance(block, nn.Sequential):
        yield from _chain(name, block)
    elif not isinstance(block, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        mlp = _named(name, block)
        if mlp is not None:
            yield mlp


def _named(name: str, block: nn.Module) -> Mlp | None:
    prefix = f"{name}." if name else ""
    for columns, row in _NAMES:
        found = [_at(block, each) for each in (*columns, row)]
        if any(each is None for each in found):
            continue
        linears = [each for each in found if each is not None and is_linear(each)]
        if len(linears) < len(found):
            return None  # one of them is something else (an adapter): the others go with it
        *firsts, last = linears
        sections = {out_features(first) / in_features(last) for first in firsts}
        if {in_features(first) for first in firsts} == {out_features(last)} and sections in ({1}, {2}):
            return Mlp(name, tuple(prefix + each for each in columns), prefix + row, int(sections.pop()))
    return None


def _chain(name: str, block: nn.Sequential) -> Iterator[Mlp]:
    prefix = f"{name}." if name else ""
    first: tuple[str, nn.Module] | None = None
    for child_name, child in block.named_children():
        if is_linear(child):
            if first is not None and out_features(first[1]) == in_features(child):
                yield Mlp(name, (prefix + first[0],), prefix + child_name)
                first = None
            else:
                first = (child_name, child)
        elif not isinstance(child, _ELEMENTWISE):
            first = None


def _at(block: nn.Module, name: str) -> nn.Module | None:
    try:
        return block.get_submodule(name)
    except AttributeError:
        return None
