"""Experts of models that know nothing of ranks are found, and compute what they did, or are refused with the cure."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.config.parallel import ExpertParallelConfig
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.moe.auto_ep import SpreadExperts, apply_auto_ep
from deepspeed.moe.param_groups import has_moe_layers, is_moe_param
from deepspeed.sharding import Cut, Span
from deepspeed.topology import groups
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.leaf import set_z3_leaf_modules
from tests.support.moe_decoders import KINDS, logits_of, moe_decoder
from tests.unit.moe.test_stacked import EXPERTS, INNER, WIDTH, Plain, Stack

FP32_ROUTERS = 1e-6
"""Some routers weigh in fp32, rounding at 6e-8; here the plain and the spread sum may round in another order."""


def enabled(**keys: Any) -> ExpertParallelConfig:
    return ExpertParallelConfig(enabled=True, **keys)


class Block(nn.Module):
    """A router and its experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)
        self.experts = experts

    def forward(self, hidden: Tensor) -> Tensor:
        weights, index = self.gate(hidden).softmax(-1).topk(2)
        out: Tensor = self.experts(hidden, index, weights)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_computes_what_it_did(kind: str) -> None:
    plain = moe_decoder(kind)
    spread = copy.deepcopy(plain)
    apply_auto_ep(spread, enabled())
    found = [module for module in spread.modules() if isinstance(module, SpreadExperts)]
    assert found
    assert has_moe_layers(spread) == (True, found[-1].num_experts)
    (tokens,) = plain.batch(3, 0)
    torch.testing.assert_close(logits_of(spread)(tokens), logits_of(plain)(tokens), rtol=0, atol=FP32_ROUTERS)
    plain(tokens).backward()
    spread(tokens).backward()
    plain_gradients = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in spread.named_parameters():
        want = plain_gradients[name]
        assert (param.grad is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(param.grad, want, rtol=0, atol=FP32_ROUTERS)


@pytest.mark.parametrize("preset", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_presets_find_what_structure_finds(preset: str) -> None:
    model = moe_decoder(preset)
    apply_auto_ep(model, enabled(preset_model=preset))
    found = [name for name, module in model.named_modules() if isinstance(module, SpreadExperts)]
    dense = 1 if preset.startswith("deepseek") else 0
    assert found == [f"decoder.model.layers.{number}.mlp.experts" for number in range(dense, 2)]


def test_bf16_weights_are_weighed_in_the_dtype_of_the_router() -> None:
    plain = moe_decoder("mixtral", torch.bfloat16)  # its router gives fp32
    plain.config._experts_implementation = "grouped_mm"
    spread = copy.deepcopy(plain)
    apply_auto_ep(spread, enabled())
    (tokens,) = plain.batch(3, 0)
    torch.testing.assert_close(logits_of(spread)(tokens), logits_of(plain)(tokens), rtol=0.02, atol=0.02)


def test_a_model_goes_by_the_same_names_afterwards() -> None:
    model = moe_decoder("mixtral")
    names, classes = list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    own = importlib.import_module("transformers.models.mixtral.modeling_mixtral").MixtralExperts
    parameters = [id(param) for param in model.parameters()]
    apply_auto_ep(model, enabled(autoep_size=2))
    assert list(model.state_dict()) == names
    assert [type(module).__name__ for module in model.modules()] == classes
    assert [id(param) for param in model.parameters()] == parameters
    assert len(set_z3_leaf_modules(model, [own])) == len(set_z3_leaf_modules(model, ["MixtralExperts"])) == 2
    assert {name for name, param in model.named_parameters() if is_moe_param(param)} == {
        name for name in names if ".experts." in name
    }
    apply_auto_ep(model, enabled(autoep_size=2))  # an engine that is built anew
    assert "experts 0 to 3 of 4" in repr(model)


def test_arguments_may_be_given_by_the_names_of_the_model() -> None:
    model = Block(Stack())
    apply_auto_ep(model, enabled())
    hidden, index = torch.randn(3, WIDTH, dtype=torch.float64), torch.tensor([[0], [3], [1]])
    weights = torch.ones(3, 1, dtype=torch.float64)
    by_name = model.experts(hidden_states=hidden, top_k_weights=weights, top_k_index=index)
    assert torch.equal(by_name, model.experts(hidden, index, weights))


def test_a_choice_beyond_the_experts_goes_nowhere() -> None:
    model = Block(Stack())
    apply_auto_ep(model, enabled())
    hidden, weights = torch.randn(2, WIDTH, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    out = model.experts(hidden, torch.tensor([[EXPERTS], [1]]), weights)
    assert out[0].abs().sum() == 0
    assert out[1].abs().sum() > 0


def test_no_tokens_give_no_rows_and_gradients_of_zeros() -> None:
    model = Block(Stack())
    apply_auto_ep(model, enabled())
    hidden = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    model(hidden).sum().backward()
    assert all(param.grad is not None and param.grad.abs().sum() == 0 for param in model.parameters())


def test_modules_of_ones_own_are_tried_before_they_are_trusted() -> None:
    class Doubled(Stack):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states, top_k_index, top_k_weights)

    model = Block(Doubled())
    with pytest.raises(UsageError, match=r"Doubled \('experts'\).*computes something else.*moe_layer_pattern"):
        apply_auto_ep(model, enabled())
    assert type(model.experts) is Doubled
    with pytest.raises(UsageError, match="not here to try it"):
        apply_auto_ep(Block(Stack()).to("meta"), enabled())


def test_patterns_choose_the_blocks() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"first": Block(Stack()), "second": Block(Stack())})

    def found(**keys: Any) -> list[str]:
        made = model()
        apply_auto_ep(made, enabled(**keys))
        return [name for name, module in made.named_modules() if isinstance(module, SpreadExperts)]

    assert found() == ["first.experts", "second.experts"]
    assert found(moe_layer_pattern="^sec") == ["second.experts"]
    assert found(expert_pattern="experts", router_pattern="gate") == ["first.experts", "second.experts"]
    for keys in (
        {"expert_pattern": "others"},
        {"router_pattern": "router"},
        {"expert_w2": "w2"},
        {"preset_model": "mixtral"},
    ):
        with pytest.raises(ArgumentError, match="has no module of stacked experts"):
            found(**keys)


def test_the_number_of_experts_is_compared_with_the_config() -> None:
    model = moe_decoder("mixtral")
    apply_auto_ep(copy.deepcopy(model), enabled(num_experts_attr="num_local_experts"))
    with pytest.raises(ArgumentError, match=r"model\.config\.n_experts is None"):
        apply_auto_ep(model, enabled(num_experts_attr="n_experts"))
    with pytest.raises(ArgumentError, match=r"has 4 experts, where the model's config says 2"):
        apply_auto_ep(model, enabled(num_experts_attr="num_attention_heads"))


def test_a_list_of_modules_is_refused_with_the_cure() -> None:
    model = Block(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)))
    with pytest.raises(ArgumentError, match=r"experts: holds one module per expert(.|\n)*deepspeed\.moe\.layer\.MoE"):
        apply_auto_ep(model, enabled())
    apply_auto_ep(model, ExpertParallelConfig())  # nothing was asked for


def test_a_size_that_does_not_divide_is_refused_before_anything_is_changed() -> None:
    model = nn.ModuleDict({"first": Block(Stack()), "second": Block(Stack(experts=6))})
    with pytest.raises(ArgumentError, match=r"autoep_size=4 with 6 experts in 'second\.experts'"):
        apply_auto_ep(model, enabled(autoep_size=4))
    assert type(model["first"].experts) is Stack


def _be(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    mesh = SimpleNamespace(axis=lambda name: AxisGroup(range(size), rank))
    monkeypatch.setattr(groups, "get_current", lambda: mesh)


def test_weights_that_two_layers_share_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Stack(), Stack()
    second.down_proj = first.down_proj
    wanted = {name: value[2:].clone() for name, value in second.state_dict().items()}
    model = nn.Sequential(Block(first), Block(second))
    apply_auto_ep(model, enabled(autoep_size=2))
    _be(monkeypatch, 1, 2)
    for module in (first, second):
        module.set_deepspeed_parallelism()  # type: ignore[operator]
    assert second.down_proj is first.down_proj
    for name, value in second.state_dict().items():
        assert torch.equal(value, wanted[name])


def test_each_rank_keeps_its_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block(Stack())
    whole = {name: value.clone() for name, value in model.experts.state_dict().items()}
    apply_auto_ep(model, enabled(autoep_size=4))  # not taken further
    apply_auto_ep(model, enabled(autoep_size=2))
    experts: Any = model.experts
    assert experts.cut_axis is None
    assert list(experts.cuts()) == []
    _be(monkeypatch, 1, 2)
    for _ in range(2):
        experts.set_deepspeed_parallelism()
        assert all(torch.equal(value, whole[name][2:]) for name, value in experts.state_dict().items())
    assert "experts 2 to 3 of 4" in repr(model)
    assert experts.cut_axis == "expert"
    assert dict(experts.cuts())["down_proj"] == Cut((EXPERTS, WIDTH, INNER), 0, ((Span(0, 2),), (Span(2, 2),)))
    experts.load_state_dict({name: 2 * value for name, value in whole.items()})
    assert torch.equal(experts.down_proj, 2 * whole["down_proj"][2:])
    experts.load_state_dict({name: 3 * value[2:] for name, value in whole.items()})
    assert torch.equal(experts.down_proj, 3 * whole["down_proj"][2:])
    with pytest.raises(ArgumentError, match="were spread over 2 ranks"):
        apply_auto_ep(model, enabled(autoep_size=1))
    _be(monkeypatch, 0, 2)
    with pytest.raises(UsageError, match="number 1; now it is number 0 of 2"):
        experts.set_deepspeed_parallelism()


def test_spread_experts_without_ranks_say_so() -> None:
    model = Block(Stack())
    apply_auto_ep(model, enabled(autoep_size=2))
    with pytest.raises(UsageError, match=r"Use deepspeed\.initialize"):
        model(torch.zeros(1, WIDTH, dtype=torch.float64))


def test_one_product_of_gate_and_value_is_refused_where_there_is_no_gate() -> None:
    model = Block(Plain())
    with pytest.raises(ArgumentError, match=r'gate_up_impl="fused", but experts such as .* no gate'):
        apply_auto_ep(model, enabled(gate_up_impl="fused"))
    assert not isinstance(model.experts, SpreadExperts)
