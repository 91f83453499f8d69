"""What models have beside plain layers: vocabularies in parts, dropout, recomputation, few heads, frozen weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed import comm
from deepspeed.comm.recorder import RECORDER
from deepspeed.comm.vocabulary_loss import vocab_parallel_cross_entropy
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sequence.cross_entropy import VocabParallelCrossEntropyLoss, configure_vocab_parallel_loss
from deepspeed.tensor_parallel.auto import apply_auto_tp
from deepspeed.tensor_parallel.layers import VocabularyEmbedding
from deepspeed.topology.mesh import AxisGroup
from tests.ranks.test_tensor_parallel import ROUNDING, compare, tensor_axis, train_alike
from tests.support.cut_net import cuts_of
from tests.support.families import VOCABULARY, build, double_throughout, logits_of, tokens
from tests.support.ranks import run_ranks


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


# -- the vocabulary --------------------------------------------------------------------------------------------------------


def _losses(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    generator = torch.Generator().manual_seed(3)
    for vocabulary, ignored in ((10, ()), (3, (2, 5))):
        whole = (5 * torch.randn(8, vocabulary, generator=generator, dtype=torch.float64)).requires_grad_()
        target = torch.randint(vocabulary, (8,), generator=generator)
        target[list(ignored)] = -100
        widths = [vocabulary // world_size + (each < vocabulary % world_size) for each in range(world_size)]
        part = whole.detach().split(widths, 1)[rank].clone().requires_grad_()
        for reduction in ("none", "sum", "mean"):
            whole.grad = part.grad = None
            expected = F.cross_entropy(whole, target, reduction=reduction)
            loss = VocabParallelCrossEntropyLoss(axis.group, reduction=reduction, vocab_size=vocabulary)(part, target)
            close(loss, expected)
            weights = torch.arange(1.0, 9) if reduction == "none" else torch.tensor(2.0)
            (expected * weights).sum().backward()
            (loss * weights).sum().backward()
            close(part.grad, whole.grad.split(widths, 1)[rank])
    with pytest.raises(ArgumentError, match=r"logits of shape \(8, 2\).*shared out as \(3, 3, 3, 3\).*this rank's columns"):
        vocab_parallel_cross_entropy(torch.zeros(8, 2), target, axis.group, vocab_size=12)
    with pytest.raises(ArgumentError, match=r"reduction='total'"):
        vocab_parallel_cross_entropy(torch.zeros(8, 2), target, axis.group, reduction="total")  # type: ignore[arg-type]


def test_the_loss_over_a_vocabulary_in_parts_is_that_of_the_whole() -> None:
    run_ranks(_losses, 4, init=False)


def _vocabulary(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    for name in ("llama", "llama_tied", "gpt2", "gemma2"):
        with double_throughout(name):
            whole = build(name)
            cut = copy.deepcopy(whole)
            apply_auto_tp(cut, TensorParallelConfig(autotp_size=world_size, vocab_parallel_lm_head=True), axis)
            ids = tokens()
            outputs = [model(input_ids=ids, labels=ids) for model in (whole, cut)]
            widths = [VOCABULARY // world_size + (each < VOCABULARY % world_size) for each in range(world_size)]
            close(outputs[1].logits, outputs[0].logits.split(widths, -1)[rank])
            # transformers' own loss computes in float32, ours in that of the logits
            torch.testing.assert_close(outputs[1].loss.float(), outputs[0].loss.float(), rtol=1e-5, atol=1e-6)
            shifted = F.cross_entropy(outputs[0].logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            close(outputs[1].loss, shifted)
            shifted.backward()
            outputs[1].loss.backward()
            compare(whole, cut, rank, "gradient")
            is_tied = whole.lm_head.weight is whole.get_input_embeddings().weight
            assert (cut.lm_head.weight is cut.get_input_embeddings().weight) == is_tied, name
            assert isinstance(cut.get_input_embeddings(), VocabularyEmbedding) or not is_tied
            configure_vocab_parallel_loss(cut)
    whole = build("llama_tied")
    apply_auto_tp(whole, TensorParallelConfig(autotp_size=world_size, vocab_parallel_lm_head=False), axis)
    assert not [name for name in cuts_of(whole) if "lm_head" in name or "embed" in name]
    with pytest.raises(ArgumentError, match=r"no output layer that gives each rank a part"):
        configure_vocab_parallel_loss(whole)
    with pytest.raises(ArgumentError, match=r"Liger's kernel needs whole rows.*\"torch\""):
        configure_vocab_parallel_loss(whole, "liger")
    with pytest.raises(ArgumentError, match=r"T5ForConditionalGeneration computes its loss from whole logits"):
        apply_auto_tp(build("t5"), TensorParallelConfig(autotp_size=world_size, vocab_parallel_lm_head=True), axis)


def test_an_output_layer_in_parts_gives_the_whole_ones_loss_and_gradients() -> None:
    run_ranks(_vocabulary, 2, init=False, timeout_seconds=120)


# -- heads -----------------------------------------------------------------------------------------------------------------


def _few_heads(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    two = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    assert train_alike("llama", axis, {}, two) > 20  # two ranks have no head
    assert train_alike("qwen3", axis, {"tp_overlap_comm": True}, {"num_attention_heads": 3, "num_key_value_heads": 1}) > 10
    gpt2 = build("gpt2", n_head=2)
    apply_auto_tp(gpt2, TensorParallelConfig(autotp_size=world_size), axis)
    assert not [name for name in cuts_of(gpt2) if "attn" in name], "its code needs a head on each rank: it stays whole"
    assert train_alike("gpt2", axis, {}, {"n_head": 2}) == 6  # the MLPs of two blocks


def test_ranks_beyond_the_heads_have_none_or_attention_stays_whole() -> None:
    run_ranks(_few_heads, 4, init=False, timeout_seconds=120)


# -- random numbers --------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Drops what is whole, then parts, then what is whole; returns all three."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = self.drop(torch.ones_like(x))
        parts = self.drop(torch.ones_like(self.fc1(before * x)))
        after = self.drop(torch.ones_like(self.fc2(parts)))
        return before, parts, after


def _masks(rank: int, world_size: int) -> tuple[Tensor, ...]:
    axis = tensor_axis(world_size)
    torch.manual_seed(0)
    model = nn.Sequential(Dropping())
    apply_auto_tp(model, TensorParallelConfig(autotp_size=world_size), axis)
    torch.manual_seed(11)
    x = torch.ones(4, 8, requires_grad=True)
    first, second = model(x), model(x)
    assert not torch.equal(first[1], second[1])
    seen: list[Tensor] = []

    def run(given: Tensor) -> Tensor:
        before, parts, after = model(given)
        seen.append(torch.cat([before.flatten(), parts.flatten(), after.flatten()]).detach())
        return (model[0].fc2(model[0].fc1(given) * parts) * before * after).sum()

    checkpoint(run, x, use_reentrant=False).backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1]), "recomputation drops the same"
    model.eval()
    state = torch.get_rng_state()
    model(x)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn in evaluation"
    return first


def test_dropout_is_alike_on_what_is_whole_and_differs_on_parts() -> None:
    first, second = run_ranks(_masks, 2, init=False)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert not torch.equal(first[1], second[1])


# -- gradients -------------------------------------------------------------------------------------------------------------


def _frozen(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    with double_throughout("llama"):
        whole = build("llama")
        for name, param in whole.named_parameters():
            param.requires_grad_("norm" in name or "layers.1.mlp" in name)
        cut = copy.deepcopy(whole)
        apply_auto_tp(cut, TensorParallelConfig(autotp_size=world_size, tp_overlap_comm=True), axis)
        ids = tokens()
        for model in (whole, cut):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
            logits_of(model, ids).square().mean().backward()
        compare(whole, cut, rank, "gradient")


def test_frozen_weights_and_recomputation_change_no_gradient() -> None:
    run_ranks(_frozen, 2, init=False, timeout_seconds=120)


def _second(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def run(model: nn.Module, keys: dict[str, Any] | None = None) -> None:
        (gradient,) = torch.autograd.grad(model(inputs_embeds=x, **(keys or {}))[0].square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    with double_throughout("llama"):
        for key_heads in (4, 1):
            whole = build("llama", num_attention_heads=4, num_key_value_heads=key_heads)
            whole.set_attn_implementation("eager")
            cut = copy.deepcopy(whole)
            apply_auto_tp(cut, TensorParallelConfig(autotp_size=world_size), axis)
            run(whole)
            run(cut)
            compare(whole, cut, rank, "gradient")
        for keys, error, said in (
            ({"tp_overlap_comm": True}, RuntimeError, r"differentiate twice"),
            ({"vocab_parallel_lm_head": True}, UsageError, r"no second derivative.*vocab_parallel_lm_head out"),
        ):
            cut = build("llama")
            cut.set_attn_implementation("eager")
            apply_auto_tp(cut, _settings(world_size, keys), axis)
            with pytest.raises(error, match=said):
                run(cut, {"labels": tokens()[:2, :5]})


def test_second_derivatives_are_those_of_one_process_or_refused() -> None:
    run_ranks(_second, 2, init=False, timeout_seconds=120)


class Adapted(nn.Module):
    """A frozen layer with a correction of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.first = nn.Linear(base.in_features, 2, bias=False)
        self.second = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.second(self.first(x))
        return out


class AdaptedLinear(nn.Linear):
    """The same as one layer of another kind."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.first = nn.Linear(base.in_features, 2, bias=False)
        self.second = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.second(self.first(x))
        return out


_ADAPTED: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("self_attn", ("q_proj", "v_proj"), 6),  # what is left of two blocks: two MLPs
    ("self_attn", ("o_proj",), 6),
    ("mlp", ("gate_proj",), 8),
    ("mlp", ("up_proj", "down_proj"), 8),
)


def _adapted(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    inside = [
        {"patterns": [r"(gate|up)_proj\.(base_layer|second)\.weight$"], "partition_type": "column"},
        {"patterns": [r"down_proj\.(base_layer|first)\.weight$"], "partition_type": "row"},
    ]
    all_of_mlp = ("mlp", ("gate_proj", "up_proj", "down_proj"), 8 + 12)
    with double_throughout("llama"):
        for kind in (Adapted, AdaptedLinear):
            for block, names, expected in _ADAPTED:
                _compare_adapted(kind, block, names, {}, expected, axis)
        _compare_adapted(Adapted, *all_of_mlp[:2], {"partition_config": {"layer_specs": inside}}, all_of_mlp[2], axis)
        whole = _with(AdaptedLinear, "mlp", ("up_proj",))
        rules = {"layer_specs": [{"patterns": [r"up_proj\.weight$"], "partition_type": "column"}]}
        with pytest.raises(ArgumentError, match=r"up_proj' is of class AdaptedLinear, whose forward or weight.*'skip'"):
            apply_auto_tp(whole, _settings(world_size, {"partition_config": rules}), axis)


def _compare_adapted(
    kind: Any, block: str, names: tuple[str, ...], keys: dict[str, Any], expected: int, axis: AxisGroup
) -> None:
    whole = _with(kind, block, names)
    cut = copy.deepcopy(whole)
    apply_auto_tp(cut, _settings(axis.size, keys), axis)
    weights = [name for name in cuts_of(cut) if "layers" in name and name.endswith("weight")]
    assert len(weights) == expected, (kind, block, names)
    for model in (whole, cut):
        logits_of(model, tokens()).square().mean().backward()
    compare(whole, cut, axis.rank, "gradient")


def _with(kind: Any, block: str, names: tuple[str, ...]) -> nn.Module:
    model = build("llama")
    with torch.random.fork_rng():
        torch.manual_seed(2)
        for layer in model.model.layers:
            for name in names:
                holder = layer.get_submodule(block)
                setattr(holder, name, kind(holder.get_submodule(name)).double())
    return model


def _settings(size: int, keys: dict[str, Any]) -> TensorParallelConfig:
    return TensorParallelConfig.model_validate({"autotp_size": size, **keys})


def test_a_block_with_adapters_stays_whole_unless_rules_cut_what_is_in_them() -> None:
    run_ranks(_adapted, 2, init=False, timeout_seconds=120)


def _counted(rank: int, world_size: int) -> list[int]:
    axis: AxisGroup = tensor_axis(world_size)
    comm.configure(enabled=True, prof_all=True, verbose=False)
    counts = []
    for overlap in (False, True):
        model = build("llama")
        apply_auto_tp(model, TensorParallelConfig(autotp_size=world_size, tp_overlap_comm=overlap), axis)
        before = _calls()
        model.model.layers[1].mlp(torch.ones(2, 3, 24, dtype=torch.float64, requires_grad=True)).sum().backward()
        counts.append(_calls() - before)
    return counts


def _calls() -> int:
    return sum(entry[0] for entry in RECORDER.comms_dict.get("all_reduce", {}).values())


def test_columns_of_one_input_share_one_reduction() -> None:
    for counts in run_ranks(_counted, 2, init=False):
        assert counts == [2, 2], "one forward, one backward"
