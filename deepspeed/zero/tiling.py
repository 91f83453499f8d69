"""`TiledLinear`: one linear layer as a grid of small ones, so that stage 3 gathers a tile at a time.

    input   |x0    |x1    |            in_splits = 2
               |      |
    out 0   [t00] + [t01] + bias 0     out_splits = 3: outputs are concatenated, partial sums of a row are added
    out 1   [t10] + [t11] + bias 1
    out 2   [t20] + [t21] + bias 2

The numbers are those of one `nn.Linear`, but for the order of the sum over a row's tiles. Parts differ by one element where
sizes do not divide.

Lives here: the two layers. Called by clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import ArgumentError
from deepspeed.sharding import even_range
from deepspeed.zero.gather import GatheredParameters

__all__ = ["TiledLinear", "TiledLinearReturnBias"]


class TiledLinear(nn.Module):
    """A linear layer of `out_splits` x `in_splits` tiles.

    Shapes: input (..., in_features), output (..., out_features).

    Args:
        in_features: size of an input.
        out_features: size of an output.
        bias: whether there is a bias; it lies in the last tile of each row.
        in_splits: parts of the input, 1 to `in_features`.
        out_splits: parts of the output, 1 to `out_features`.
        input_is_already_split: `forward` gets the list of the input's parts.
        combine_out_splits: `forward` returns the whole output; False: the list of its parts.
        linear_cls: class of the tiles, called as `linear_cls(in_features, out_features, bias=..., **kwargs)`.
        init_linear: a layer of the whole size whose values the tiles take.
        kwargs: for `linear_cls`.

    Raises:
        ArgumentError: splits out of range; also a RuntimeError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ArgumentError(
                    f"TiledLinear({name}_splits={splits}, {name}_features={features}): needed 1 to {features} splits. "
                    f"Choose a smaller {name}_splits."
                )
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = [even_range(in_features, in_splits, part) for part in range(in_splits)]
        self.out_parts = [even_range(out_features, out_splits, part) for part in range(out_splits)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(in_stop - in_start, out_stop - out_start, bias=bias and in_stop == in_features, **kwargs)
                for in_start, in_stop in self.in_parts
            )
            for out_start, out_stop in self.out_parts
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """Apply the layer; see the class for `input_is_already_split` and `combine_out_splits`."""
        parts = self._parts_of(input_)
        rows = [self._row(row, parts) for row in self._rows()]
        return self._combine(rows)

    def _rows(self) -> list[list[nn.Module]]:
        return [list(row) for row in self.linears if isinstance(row, nn.ModuleList)]

    def _parts_of(self, given: Tensor | Sequence[Tensor]) -> list[Tensor]:
        if isinstance(given, Tensor) and self.in_splits > 1 and not self.input_is_already_split:
            return list(torch.split(given, [stop - start for start, stop in self.in_parts], dim=-1))
        parts = [given] if isinstance(given, Tensor) else list(given)
        if len(parts) != self.in_splits:
            raise ArgumentError(
                f"TiledLinear got {len(parts)} parts of the input; needed {self.in_splits}, as in_splits says. Split the "
                f"last dimension into {[stop - start for start, stop in self.in_parts]}."
            )
        return parts

    def _row(self, row: list[nn.Module], parts: list[Tensor]) -> Any:
        total = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:], strict=True):
            total = total + tile(part)
        return total

    def _combine(self, rows: list[Any]) -> Any:
        return torch.cat(rows, dim=-1) if self.combine_out_splits else rows

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take the values of a layer of the whole size (`weight`, `bias`), tile by tile. Collective where one is sharded.

        Raises:
            ArgumentError: one has a bias and the other has none, or the sizes differ.
        """
        bias = getattr(other, "bias", None)
        if (bias is not None) != self.use_bias:
            raise ArgumentError(
                f"copy_params_from(): the layer has {'a' if bias is not None else 'no'} bias, this one has "
                f"{'one' if self.use_bias else 'none'}. Build both alike."
            )
        weight: Any = other.weight
        with GatheredParameters([weight, bias]):
            if weight.shape != (self.out_features, self.in_features):
                raise ArgumentError(
                    f"copy_params_from(): the weight has shape {tuple(weight.shape)}; needed "
                    f"{(self.out_features, self.in_features)}. Pass a layer of the same sizes."
                )
            for row, (out_start, out_stop) in zip(self._rows(), self.out_parts, strict=True):
                for tile, (in_start, in_stop) in zip(row, self.in_parts, strict=True):
                    _fill(tile.weight, weight[out_start:out_stop, in_start:in_stop])
                if bias is not None:
                    _fill(row[-1].bias, bias[out_start:out_stop])


class TiledLinearReturnBias(TiledLinear):
    """The same for tiles that return `(output, bias or None)`, as Megatron's linear layers do; so does this layer."""

    def _row(self, row: list[nn.Module], parts: list[Tensor]) -> Any:
        total, bias = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:], strict=True):
            output, tile_bias = tile(part)
            total = total + output
            bias = tile_bias if bias is None else bias
        return total, bias

    def _combine(self, rows: list[Any]) -> Any:
        outputs, biases = [row[0] for row in rows], [row[1] for row in rows]
        if not self.combine_out_splits:
            return outputs, biases
        return torch.cat(outputs, dim=-1), torch.cat(biases, dim=-1) if biases[0] is not None else None


def _fill(target: Any, values: Tensor) -> None:
    """Write into a parameter, sharded or not; all ranks have the same values."""
    group = getattr(target, "ds_process_group", None)
    with GatheredParameters([target], modifier_rank=comm.get_global_rank(group, 0)):
        target.copy_(values)
