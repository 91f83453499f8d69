"""The formats of a run, and modules put into them in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.config.precision import BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig
from deepspeed.errors import ConfigError
from deepspeed.precision import DtypePolicy, autocast_dtype, cast_module

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def config(communication: str | None = None, types: dict[str, Any] | None = None, **blocks: dict[str, Any]) -> Any:
    given = {name: {"enabled": True, **keys} for name, keys in blocks.items()}
    return SimpleNamespace(
        fp16=FP16Config(**given.get("fp16", {})),
        bf16=BF16Config(**given.get("bf16", {})),
        torch_autocast=TorchAutocastConfig(**given.get("torch_autocast", {})),
        data_types=DataTypesConfig(**(types or {})),
        communication_data_type=communication,
    )


def parameter(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(("block", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_16_bit_modes_keep_a_float32_master_and_travel_in_their_own_format(block: str, dtype: torch.dtype) -> None:
    policy = DtypePolicy.from_config(config(**{block: {}}))
    p = parameter(torch.float32)
    assert policy.param_for(p) == dtype
    assert policy.master_for(p) == torch.float32
    assert policy.grad_accumulation_for(dtype) == dtype
    assert policy.communication_for(dtype) == dtype


@pytest.mark.parametrize("dtype", FLOATS)
def test_without_a_16_bit_mode_everything_keeps_its_format(dtype: torch.dtype) -> None:
    policy = DtypePolicy.from_config(config())
    assert policy.param_for(parameter(dtype)) == policy.master_for(parameter(dtype)) == dtype
    assert policy.grad_accumulation_for(dtype) == dtype
    assert policy.communication_for(dtype) == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(("block", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_masters_may_be_16_bit_too(block: str, dtype: torch.dtype) -> None:
    policy = DtypePolicy.from_config(config(**{block: {f"{block}_master_weights_and_grads": True}}))
    assert policy.master_for(parameter(torch.float32)) == dtype
    assert policy.state == torch.float32


def test_state_may_be_16_bit_where_masters_are() -> None:
    blocks = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert DtypePolicy.from_config(config(bf16=blocks)).state == torch.bfloat16
    assert DtypePolicy.from_config(config(bf16={})).state is None
    assert DtypePolicy.from_config(config()).state is None


def test_named_formats_are_taken() -> None:
    policy = DtypePolicy.from_config(
        config("fp32", {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16", "keep_in_fp32_modules": ["rope"]}, bf16={})
    )
    assert policy.communication_for(torch.bfloat16) == torch.float32
    assert policy.grad_accumulation_for(torch.bfloat16) == torch.float32
    assert (policy.buffer, policy.keep_in_fp32) == (torch.bfloat16, ("rope",))


@pytest.mark.parametrize(
    ("blocks", "stated", "agrees"),
    [({}, "fp32", True), ({"bf16": {}}, "bf16", True), ({"bf16": {}}, "fp16", False), ({}, "bf16", False)],
)
def test_a_stated_parameter_format_must_agree_with_the_mode(blocks: dict[str, Any], stated: str, agrees: bool) -> None:
    made = config(types={"param_dtype": stated}, **blocks)
    if agrees:
        DtypePolicy.from_config(made)
    else:
        with pytest.raises(
            ConfigError, match=f'param_dtype = "{stated}", but fp16.enabled and bf16.enabled make parameters'
        ):
            DtypePolicy.from_config(made)


@given(param=st.sampled_from(FLOATS), mode=st.sampled_from([{}, {"fp16": {}}, {"bf16": {}}]), tagged=st.booleans())
def test_a_master_is_never_narrower_than_its_parameter(param: torch.dtype, mode: dict[str, Any], tagged: bool) -> None:
    policy, p = DtypePolicy.from_config(config(**mode)), parameter(param)
    if tagged:
        p._deepspeed_no_cast = True  # type: ignore[attr-defined]
        assert policy.param_for(p) == param
    after = policy.param_for(p)
    assert torch.promote_types(policy.master_for(p), after) == policy.master_for(p)


def test_autocast_takes_the_named_format_or_the_devices_own() -> None:
    assert autocast_dtype(config()) is None
    assert autocast_dtype(config(torch_autocast={"dtype": "half"})) == torch.float16
    assert autocast_dtype(config(torch_autocast={}), "cuda") == torch.float16
    assert DtypePolicy.from_config(config(torch_autocast={}), "cpu").autocast == torch.bfloat16


class Network(nn.Module):
    """Tied weights, a tagged parameter, an integer parameter and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Parameter(torch.ones(3))
        self.gate._deepspeed_no_cast = True  # type: ignore[attr-defined]
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.rope = nn.Module()
        self.rope.register_buffer("inv_freq", torch.rand(2))


BF16 = DtypePolicy(param=torch.bfloat16, master=torch.float32)


def test_casting_keeps_every_object_and_every_tie() -> None:
    network = Network()
    objects = {name: id(tensor) for name, tensor in [*network.named_parameters(), *network.named_buffers()]}
    values = network.embed.weight.detach().clone()
    cast_module(network, BF16)
    assert {name: id(tensor) for name, tensor in [*network.named_parameters(), *network.named_buffers()]} == objects
    assert network.head.weight is network.embed.weight
    assert torch.equal(network.embed.weight, values.bfloat16())
    assert network.embed.weight.requires_grad


def test_casting_leaves_tagged_and_integer_parameters_and_all_buffers() -> None:
    network = Network()
    cast_module(network, BF16)
    assert network.gate.dtype == torch.float32
    assert network.table.dtype == torch.int64
    assert network.norm.weight.dtype == torch.bfloat16
    assert network.norm.running_mean.dtype == torch.float32
    assert network.norm.num_batches_tracked.dtype == torch.int64


def test_an_optimizer_built_before_the_cast_still_holds_the_parameters() -> None:
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    network.weight.grad = torch.ones(2, 3)
    cast_module(network, BF16)
    before = network.weight.detach().clone()
    assert network.weight.grad.dtype == torch.bfloat16
    optimizer.step()
    # Values below 2: the bf16 update and the bf16 difference here round by at most half of 2**-7 each.
    torch.testing.assert_close(network.weight.detach(), before - 1, rtol=0, atol=2**-7)


def test_a_float64_model_stays_float64_without_a_16_bit_mode() -> None:
    network = Network().double()
    cast_module(network, DtypePolicy())
    assert {p.dtype for p in network.parameters()} == {torch.float64, torch.int64}


def test_buffers_are_cast_on_request_except_those_kept() -> None:
    network = Network()
    cast_module(network, DtypePolicy(torch.bfloat16, torch.float32, buffer=torch.bfloat16, keep_in_fp32=("rope",)))
    assert network.norm.running_mean.dtype == torch.bfloat16
    assert network.norm.num_batches_tracked.dtype == torch.int64
    assert network.rope.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("pattern", ["rope", "rope.inv_freq", "inv_freq", "ro*", "*.inv_*"])
def test_patterns_name_modules_buffers_or_parts(pattern: str) -> None:
    network = Network()
    network.rope.inv_freq = network.rope.inv_freq.bfloat16()
    cast_module(network, DtypePolicy(torch.bfloat16, torch.float32, keep_in_fp32=(pattern,)))
    assert network.rope.inv_freq.dtype == torch.float32
    assert network.norm.running_mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("param", "attribute", "kept"),
    [
        (torch.bfloat16, "_keep_in_fp32_modules_strict", True),
        (torch.float16, "_keep_in_fp32_modules_strict", True),
        (torch.float16, "_keep_in_fp32_modules", True),
        (torch.bfloat16, "_keep_in_fp32_modules", False),
        (None, "_keep_in_fp32_modules_strict", False),
    ],
)
def test_auto_asks_the_model(param: torch.dtype | None, attribute: str, kept: bool) -> None:
    network = Network()
    network._keep_in_fp32_modules = network._keep_in_fp32_modules_strict = None  # type: ignore[assignment]
    setattr(network, attribute, ["rope"])
    cast_module(network, DtypePolicy(param, buffer=torch.bfloat16))
    assert (network.rope.inv_freq.dtype == torch.float32) == kept


def test_an_empty_list_keeps_none() -> None:
    network = Network()
    network._keep_in_fp32_modules_strict = ["rope"]  # type: ignore[assignment]
    cast_module(network, DtypePolicy(torch.float16, buffer=torch.float16, keep_in_fp32=()))
    assert network.rope.inv_freq.dtype == torch.float16
