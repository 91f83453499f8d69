from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepspeed.errors import ArgumentError
from deepspeed.zero import TiledLinear, TiledLinearReturnBias


class ReturnsBias(nn.Linear):
    """A linear layer as Megatron's: the bias is for the caller to add."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return inputs @ self.weight.t(), self.bias


def _layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(7, 5, bias=bias, dtype=torch.float64)


@given(in_splits=st.integers(1, 7), out_splits=st.integers(1, 5), bias=st.booleans())
def test_the_numbers_and_gradients_are_those_of_one_linear_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    layer = _layer(bias)
    tiled = TiledLinear(7, 5, bias, in_splits, out_splits, init_linear=layer, dtype=torch.float64)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in layer.parameters())
    inputs = torch.randn(3, 2, 7, dtype=torch.float64)
    got, want = tiled(inputs), layer(inputs)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)  # sums of 7 terms of order 1, in another order
    got.square().sum().backward()
    want.square().sum().backward()
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(rows), layer.weight.grad, rtol=1e-13, atol=1e-13)


def test_input_and_output_may_stay_split() -> None:
    layer = _layer()
    tiled = TiledLinear(
        7,
        5,
        in_splits=2,
        out_splits=2,
        input_is_already_split=True,
        combine_out_splits=False,
        init_linear=layer,
        dtype=torch.float64,
    )
    inputs = torch.randn(4, 7, dtype=torch.float64)
    parts = tiled(inputs.split([3, 4], dim=-1))
    assert [part.shape for part in parts] == [(4, 2), (4, 3)]
    torch.testing.assert_close(torch.cat(parts, dim=-1), layer(inputs), rtol=1e-14, atol=1e-14)
    with pytest.raises(ArgumentError, match=r"got 1 parts of the input; needed 2.*\[3, 4\]"):
        tiled([inputs])


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_return_their_bias_are_tiled_too(bias: bool) -> None:
    layer = _layer(bias)
    options = {"in_splits": 2, "out_splits": 3, "linear_cls": ReturnsBias, "init_linear": layer, "dtype": torch.float64}
    inputs = torch.randn(4, 7, dtype=torch.float64)
    output, returned = TiledLinearReturnBias(7, 5, bias, **options)(inputs)
    torch.testing.assert_close(output, inputs @ layer.weight.t(), rtol=1e-14, atol=1e-14)
    assert (returned is None) == (not bias)
    if bias:
        torch.testing.assert_close(returned, layer.bias, rtol=0, atol=0)
    outputs, biases = TiledLinearReturnBias(7, 5, bias, combine_out_splits=False, **options)(inputs)
    assert (len(outputs), len(biases)) == (3, 3)


def test_splits_out_of_range_and_other_layers_are_refused() -> None:
    for options in ({"in_splits": 8}, {"in_splits": 0}, {"out_splits": 6}):
        with pytest.raises(RuntimeError, match="needed 1 to"):
            TiledLinear(7, 5, **options)
    with pytest.raises(ArgumentError, match="the layer has a bias, this one has none"):
        TiledLinear(7, 5, bias=False, init_linear=_layer())
    with pytest.raises(ArgumentError, match=r"the weight has shape \(5, 7\); needed \(7, 5\)"):
        TiledLinear(5, 7, init_linear=_layer(), dtype=torch.float64)
