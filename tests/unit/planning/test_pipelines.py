"""Plans of pipelines: every stage by the engine's own batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import ArgumentError, PipelineError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.orders import order_of
from deepspeed.planning import Comparison, plan, stages
from deepspeed.planning.stages import first_rounds

_WIDTH, _VOCABULARY = 16, 40
_TOKENS = torch.zeros(2, 8, dtype=torch.long)


def _logits(embedding: nn.Embedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(num_stages: int = 2, blocks: int = 6, **options: Any) -> Any:
    embedding = partial(TiedLayerSpec, "embedding", nn.Embedding, _VOCABULARY, _WIDTH)
    body = [LayerSpec(kind, *args) for _ in range(blocks) for kind, args in ((nn.Linear, (_WIDTH, _WIDTH)), (nn.Tanh, ()))]
    layers = [embedding(), *body, embedding(forward_fn=_logits)]
    return PipelineModule(layers, num_stages=num_stages, loss_fn=_loss, **options), (_TOKENS, _TOKENS), {}


def _plan(schedule: str = "1f1b", micro_batches: int = 8, stage: int = 0, ranks: int = 4, **options: Any) -> Comparison:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": schedule},
        "zero_optimization": {"stage": stage},
    }
    return plan(partial(build, **options), config, ranks, 1e9)


def _term(found: Comparison, stage: int, name: str) -> int:
    return sum(term.nbytes for term in found.stages[stage].terms if term.name == name)


def test_stages_hold_their_own_layers_and_the_fullest_is_the_plan() -> None:
    found = _plan(num_stages=2)
    table, body = _VOCABULARY * _WIDTH, 6 * (_WIDTH + 1) * _WIDTH
    assert found.numel == table + body  # the tied table once
    assert sum(_term(found, stage, "weights") for stage in range(2)) == 4 * (2 * table + body)
    assert found.asked.peak_nbytes() == max(stage.peak_nbytes() for stage in found.stages)
    assert [stage.label for stage in found.stages] == ["stage 0 of 2", "stage 1 of 2"]
    assert not torch.distributed.is_initialized()


def test_earlier_stages_keep_more_micro_batches_and_gpipe_keeps_all() -> None:
    """1F1B keeps at most `stages - stage` of them, GPipe as many as there are."""
    alike: dict[str, Any] = {"num_stages": 3, "blocks": 9, "partition_method": "uniform", "ranks": 3}

    def kept(schedule: str, micro_batches: int) -> int:
        return _term(_plan(schedule, micro_batches, **alike), 0, "activations and messages")

    assert kept("1f1b", 6) == kept("1f1b", 12) < kept("gpipe", 6) < kept("gpipe", 12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_first_rounds_are_as_full_as_the_whole_batch(
    schedule: str, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _plan(schedule, 14, num_stages=num_stages)
    monkeypatch.setattr(stages, "first_rounds", list)
    whole = _plan(schedule, 14, num_stages=num_stages)
    losses = 4 * 14  # at most, on the last stage: a scalar of each micro-batch
    for of_first, of_whole in zip(first.stages, whole.stages, strict=True):
        assert 0 <= of_whole.peak_nbytes() - of_first.peak_nbytes() < losses
    assert [stage.peak_nbytes() for stage in first.stages[:-1]] == [stage.peak_nbytes() for stage in whole.stages[:-1]]


def test_an_order_is_cut_after_its_fullest_rounds() -> None:
    order = order_of("1f1b", 0, 2, 20)
    assert len(first_rounds(order)) < len(order) // 2
    chunks = order_of("interleaved", 0, 2, 20, 2)
    assert first_rounds(chunks) == list(chunks)


def test_activations_and_their_gradients_are_sent_to_neighbours() -> None:
    found = _plan(num_stages=2, ranks=2, micro_batches=5)
    hidden = 2 * 8 * _WIDTH * 4
    assert [stage.sent_nbytes for stage in found.stages] == [5 * hidden, 5 * hidden]


def test_data_parallel_ranks_share_states_and_sum_gradients() -> None:
    alone, shared = _plan(num_stages=2, ranks=2, stage=1), _plan(num_stages=2, ranks=8, stage=1)
    ours, theirs = _term(shared, 0, "optimizer state"), _term(alone, 0, "optimizer state")
    assert theirs <= 4 * ours < 1.02 * theirs  # padding
    assert shared.stages[0].sent_nbytes > alone.stages[0].sent_nbytes


def test_settings_that_a_pipeline_does_not_have_are_not_offered() -> None:
    found = _plan()
    assert [each.label for each in found.others] == ["stage 0", "stage 1", "stage 1, optimizer on host"]
    assert any("stages 2 and 3 are left out" in note for note in found.notes)
    assert not any('"stage": 2' in term.lower or '"stage": 3' in term.lower for term in found.asked.terms)


def test_without_a_batch_activations_are_left_out_and_told() -> None:
    found = plan(lambda: build()[0], {"train_micro_batch_size_per_gpu": 2}, 2)
    assert all("activations" not in term.name for stage in found.stages for term in stage.terms)
    assert any("((inputs, labels), {})" in note for note in found.notes)


def test_a_batch_that_is_none_of_a_pipeline_and_a_stage_alone_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"\(\(inputs, labels\), \{\}\)"):
        plan(lambda: (build()[0], (_TOKENS,), {"labels": _TOKENS}), {"train_micro_batch_size_per_gpu": 2}, 2)
    with pytest.raises(PipelineError, match="3 ranks were started"):
        plan(build, {"train_micro_batch_size_per_gpu": 2}, 3)


def test_the_name_of_a_function_and_json_have_the_stages() -> None:
    found = deepspeed.plan("tests.unit.planning.test_pipelines:build", {"train_micro_batch_size_per_gpu": 2}, 2)
    assert [each["label"] for each in found.as_dict()["stages"]] == ["stage 0 of 2", "stage 1 of 2"]
