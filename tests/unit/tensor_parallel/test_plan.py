"""Rules from the user, presets and a model's own plan."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deepspeed.config.parallel import PartitionConfig
from deepspeed.errors import ArgumentError
from deepspeed.tensor_parallel.plan import PRESETS, first_match, rules_of_model, rules_of_specs, sections_of


def _rules(*specs: dict[str, object], model_type: str | None = None) -> list[object]:
    return list(rules_of_specs(PartitionConfig.model_validate({"layer_specs": list(specs)}), model_type))


def test_the_first_rule_that_matches_a_parameters_name_counts() -> None:
    rules = rules_of_specs(
        PartitionConfig.model_validate(
            {
                "layer_specs": [
                    {"patterns": [r".*\.0\.fc1\.weight$"], "partition_type": "skip", "grad_allreduce": True},
                    {
                        "patterns": [r".*\.fc1\.weight$", r".*\.fc3\.weight$"],
                        "partition_type": "column",
                        "gather_output": True,
                    },
                    {"patterns": [r".*\.fc2\.weight$"], "partition_type": "row"},
                ]
            }
        ),
        None,
    )
    kinds = {name: rule.kind for name in ("a.0.fc1", "a.1.fc1", "a.1.fc3", "a.0.fc2") if (rule := first_match(rules, name))}
    assert kinds == {"a.0.fc1": "whole", "a.1.fc1": "column", "a.1.fc3": "column", "a.0.fc2": "row"}
    assert first_match(rules, "a.1.fc10") is None
    assert rules[0].sum_gradient
    assert rules[1].gather_output


def test_a_rule_may_be_for_some_model_types() -> None:
    spec = {"patterns": ["fc1"], "partition_type": "column", "model_types": ["Llama"]}
    assert len(_rules(spec, model_type="llama")) == 1
    assert _rules(spec, model_type="opt") == []
    assert _rules(spec) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"partition_type": "row", "gather_output": True},
            r"layer_specs\[0\].gather_output=True.*'row'.*Leave it out.*'column'",
        ),
        ({"partition_type": "column", "grad_allreduce": True}, r"grad_allreduce=True.*'column'.*'skip'"),
        ({"partition_type": "skip", "shape": [3, -1]}, r"shape=\[3, -1\].*'skip'.*'column or row'"),
        ({"partition_type": "skip", "partition_dim": 0}, r"partition_dim=0.*'skip'"),
        ({"partition_type": "column", "patterns": ["(fc"]}, r"'\(fc' is no regular expression"),
    ],
)
def test_keys_without_a_meaning_are_refused(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        _rules({"patterns": ["fc1"], **spec})


@pytest.mark.parametrize(
    ("shape", "dim", "sections"),
    [
        ([3, -1], 0, (4, 4, 4)),
        ([[6, 3, 3], -1], 0, (6, 3, 3)),
        ([[6, -1, 3], -1], 0, (6, 3, 3)),
        ([-1, 2], 1, (6, 6)),
        ([-1, 5], 0, None),
        ([12, 5], 0, None),
    ],
)
def test_a_shape_says_which_parts_are_fused(shape: list[object], dim: int, sections: tuple[int, ...] | None) -> None:
    (rule,) = rules_of_specs(
        PartitionConfig.model_validate(
            {"layer_specs": [{"patterns": ["qkv"], "partition_type": "column", "shape": shape, "partition_dim": dim}]}
        ),
        None,
    )
    assert sections_of(rule, "qkv", 12) == sections


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        ([5, -1], 0, r"5 does not divide the 12"),
        ([[6, 5], -1], 0, r"parts \[6, 5\] add up to 11.*has 12"),
        ([[16, -1], -1], 0, r"parts \[16, -4\] add up to 12.*sizes above 0"),
        ([3, -1], 2, r"partition_dim=2.*has 2 entries"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: list[object], dim: int, message: str) -> None:
    (rule,) = rules_of_specs(
        PartitionConfig.model_validate(
            {"layer_specs": [{"patterns": ["qkv"], "partition_type": "column", "shape": shape, "partition_dim": dim}]}
        ),
        None,
    )
    with pytest.raises(ArgumentError, match=message):
        sections_of(rule, "qkv", 12)


@pytest.mark.parametrize("shape", [["three", -1], [0, -1], [[4, -1, -1], -1], [[], -1], [True, -1]])
def test_a_shape_of_anything_but_sizes_is_a_fault_of_the_config(shape: list[object]) -> None:
    with pytest.raises(ValidationError, match=r"needed numbers above 0, -1.*\[3, -1\]"):
        _rules({"patterns": ["qkv"], "partition_type": "column", "shape": shape})


def test_an_embedding_has_two_dimensions() -> None:
    with pytest.raises(ValidationError, match=r"embedding_partition_dim"):
        PartitionConfig.model_validate({"embedding_partition_dim": 2})


def test_a_models_plan_becomes_rules_and_styles_of_experts_are_left_out() -> None:
    rules, unknown = rules_of_model(
        {
            "model.layers.*.self_attn.q_proj": "colwise",
            "model.layers.*.self_attn.o_proj": "rowwise",
            "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
            "model.layers.*.mlp.experts": "moe_tp_experts",
            "model.layers.*.self_attn.kv_a": "mla_kv_a_proj",
            "embed_in": "embedding_rowwise",
            "lm_head": "colwise_gather_output",
        }
    )
    assert unknown == ["mla_kv_a_proj"]
    kinds = {
        name: rule.kind
        for name in ("model.layers.11.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "gpt_neox.embed_in", "lm_head")
        if (rule := first_match(rules, name))
    }
    assert list(kinds.values()) == ["column", "row", "vocabulary", "column"]
    head, norm = first_match(rules, "lm_head"), first_match(rules, "model.layers.0.self_attn.q_norm")
    assert head is not None
    assert head.gather_output
    assert norm is not None
    assert norm.sum_gradient


def test_presets_name_the_layers_of_their_families() -> None:
    assert {"llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"} == set(PRESETS)
    up = first_match(PRESETS["llama"], "model.layers.3.mlp.up_proj")
    down = first_match(PRESETS["llama"], "model.layers.3.mlp.down_proj")
    assert up is not None
    assert down is not None
    assert (up.kind, down.kind) == ("column", "row")
    experts = [
        first_match(PRESETS["mixtral"], f"layers.0.mlp.experts.{key}") for key in ("gate_up_proj", "down_proj", "2.w3")
    ]
    assert [rule and rule.kind for rule in experts] == ["column", "row", "column"]
