"""Weights are made where and as they are wanted; values that count stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.common.on_device import OnDevice
from deepspeed.errors import ArgumentError


class _Rotary(nn.Module):
    """With a buffer whose values no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("angles", 1.0 / 10 ** torch.arange(0, 4, 2).float(), persistent=False)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


def _kind(tensor: Tensor) -> tuple[str, torch.dtype]:
    return tensor.device.type, tensor.dtype


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_are_made_there_and_values_that_count_are_kept(device: str) -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device=device):
        made = _Rotary()
    assert {_kind(param) for param in made.parameters()} == {(device, torch.bfloat16)}
    assert all(param.requires_grad and param.is_leaf for param in made.parameters())
    assert _kind(made.counts) == (device, torch.int64)
    assert torch.equal(made.angles, _Rotary().angles)
    assert _kind(made.angles) == ("cpu", torch.float32)
    assert _kind(torch.ones(2)) == ("cpu", torch.float32)


def test_meta_is_where_weights_go_unless_told_and_weights_loaded_later_are_used() -> None:
    plain = _Rotary()
    with deepspeed.utils.OnDevice(dtype=torch.float32):
        made = _Rotary()
    assert made.proj.weight.is_meta
    made.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(made.proj(torch.ones(3)), plain.proj(torch.ones(3)), rtol=0, atol=0)


def test_what_a_constructor_names_counts_but_for_the_floating_dtype() -> None:
    with OnDevice(torch.float16):
        assert _kind(torch.ones(2, dtype=torch.float32)) == ("meta", torch.float16)
        assert _kind(torch.ones(2, device="cpu")) == ("cpu", torch.float16)
        assert _kind(torch.full((2,), 3)) == ("meta", torch.int64)
        assert _kind(torch.full((2,), 3.0)) == ("meta", torch.float16)
        assert _kind(torch.zeros(2, dtype=torch.complex64)) == ("meta", torch.complex64)
        assert torch.zeros(2, requires_grad=True).is_leaf
        assert torch.zeros(2, requires_grad=True).requires_grad
        assert _kind(torch.zeros(2, out=torch.empty(2, device="cpu", dtype=torch.float64))) == ("cpu", torch.float16)


def test_contexts_nest_and_end_with_an_exception() -> None:
    with OnDevice(torch.float16), OnDevice(torch.bfloat16, device="cpu"):
        assert _kind(torch.ones(1)) == ("cpu", torch.bfloat16)
    with pytest.raises(KeyError), OnDevice(torch.float16):
        raise KeyError
    assert _kind(torch.ones(1)) == ("cpu", torch.float32)


def test_switched_off_it_changes_nothing() -> None:
    with OnDevice(torch.float16, enabled=False):
        assert _kind(torch.ones(1)) == ("cpu", torch.float32)


def test_a_dtype_without_fractions_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.int64.*floating"):
        OnDevice(torch.int64)
