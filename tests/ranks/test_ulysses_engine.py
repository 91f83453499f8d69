"""Engines over sequence-parallel ranks train a transformers model as one process does, as clients drive them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence import auto_wrap_model_for_sp, detect_model_sp_info
from deepspeed.sequence.data import own_part
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.sequence.registry import SharedAttention, restore_transformers
from deepspeed.utils import groups
from tests.support.engines import model_weights, zero
from tests.support.ranks import run_ranks
from tests.support.ulysses import batch, llama, shifted, token_loss

pytest.importorskip("transformers")

TOLERANCE = 1e-10  # double precision; sums over ranks and heads come in another order
STEPS, SAMPLES, LENGTH = 10, 2, 13


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _batches(data_ranks: int, accumulation: int, length: int = LENGTH) -> list[list[list[dict[str, torch.Tensor]]]]:
    """By step, micro-batch and data rank."""
    seeds = iter(range(10_000))
    return [
        [[batch(length, SAMPLES, next(seeds)) for _ in range(data_ranks)] for _ in range(accumulation)] for _ in range(STEPS)
    ]


def _plain(batches: list[list[list[dict[str, torch.Tensor]]]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = llama(kv_heads=1)
    optimizer = _sgd(model.parameters())
    losses = []
    for step in batches:
        parts = [each for micro in step for each in micro]
        optimizer.zero_grad()
        for each in parts:
            logits = model(input_ids=each["input_ids"], position_ids=each["position_ids"]).logits
            loss = token_loss(logits, shifted(each))
            (loss / len(parts)).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def _training(rank: int, world_size: int, sequence: int, stages: tuple[int, ...]) -> None:
    data_ranks = world_size // sequence
    batches = _batches(data_ranks, 2)
    losses, weights = _plain(batches)
    for stage in stages:
        model = llama(kv_heads=1)
        if stage % 2:
            model.gradient_checkpointing_enable({"use_reentrant": stage == 3})
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, None, sequence, SAMPLES)
        try:
            settings = {
                "train_batch_size": SAMPLES * 2 * data_ranks,
                "train_micro_batch_size_per_gpu": SAMPLES,
                "gradient_accumulation_steps": 2,
                **zero(stage),
            }
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=_sgd(model.parameters()), config_params=settings, mpu=mpu
            )
            assert groups._get_sequence_parallel_world_size() == sequence
            seen = [_step(engine, each[rank // sequence]) for step in batches for each in step]
            mine = losses[rank // sequence :: data_ranks]
            assert seen == pytest.approx(mine, rel=0, abs=TOLERANCE), f"stage {stage}"
            for name, weight in model_weights(engine).items():
                assert (weight - weights[name]).abs().max() < TOLERANCE, f"stage {stage}, {name}"
        finally:
            restore_transformers()


def _step(engine: Any, whole: dict[str, torch.Tensor]) -> float:
    part = own_part(whole, groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size())
    labels = part.pop("shift_labels")
    logits = engine(**part).logits
    loss = mean_over_sequence(token_loss(logits, labels), (labels != -100).sum())
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize(
    ("world_size", "sequence", "stages"), [(2, 2, (0, 1, 2, 3)), (4, 2, (0, 3)), (4, 4, (2,)), (2, 1, (1,))]
)
def test_an_engine_over_parts_trains_as_one_process_does(world_size: int, sequence: int, stages: tuple[int, ...]) -> None:
    run_ranks(_training, world_size, sequence, stages)


def _trainers_loss(rank: int, world_size: int) -> None:
    """The loss aggregation of transformers' Trainer, over what the adapter yields."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    whole = [batch(12, SAMPLES, seed) for seed in range(4)]
    plain = llama()
    expected = []
    optimizer = _sgd(plain.parameters())
    for each in whole:
        loss = plain(**each).loss
        optimizer.zero_grad()
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    model = llama()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        sequence_parallel_size=2,
        seq_length=12,
        seq_length_is_variable=False,
        core_attn_implementation="sdpa",
        micro_batch_size=SAMPLES,
        disable_in_eval=True,
    )
    settings = {"train_micro_batch_size_per_gpu": SAMPLES, "train_batch_size": SAMPLES, **zero(2)}
    engine, *_ = deepspeed.initialize(model=model, optimizer=_sgd(model.parameters()), config_params=settings, mpu=mpu)
    mine = whole[rank::2]
    loader = UlyssesSPDataLoaderAdapter(
        mine,
        sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=mpu.get_sequence_parallel_group(),
        sp_world_size=mpu.get_sequence_parallel_world_size(),
        device=engine.device,
    )
    pc = SimpleNamespace(sp_backend="deepspeed", sp_size=2)
    seen = []
    for part in loader:
        loss = deepspeed_sp_compute_loss(SimpleNamespace(torch_device_mesh=None), engine, part, False, pc)
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    assert seen == pytest.approx(expected, abs=1e-6)  # transformers takes the loss in fp32
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model_weights(engine)[name], param.detach(), rtol=0, atol=1e-7)
    engine.eval()
    plain.eval()
    with torch.no_grad():  # not cut in evaluation
        logits = engine(input_ids=whole[rank]["input_ids"]).logits
        torch.testing.assert_close(logits, plain(input_ids=whole[rank]["input_ids"]).logits, rtol=0, atol=1e-6)
        prompt = whole[0]["input_ids"][:1, :5]
        assert torch.equal(
            model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True),
            plain.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True),
        )
    engine.train()
    with pytest.raises(ArgumentError, match=r"5 tokens on this rank.*12 tokens over 2 ranks"):
        engine(input_ids=whole[0]["input_ids"][:, :5], position_ids=whole[0]["position_ids"][:, :5])


def test_the_trainers_loop_computes_the_loss_of_the_whole() -> None:
    run_ranks(_trainers_loss, 2)


def _refusals(rank: int, world_size: int) -> None:
    model = llama()
    register = UlyssesSPAttentionHF.register_with_transformers
    with pytest.raises(ArgumentError, match=r"core_attn_implementation='spda'.*nearest: 'sdpa'"):
        register(model, "spda", 2, 1)
    with pytest.raises(ArgumentError, match="needed seq_length, a multiple of the ranks"):
        register(model, "sdpa", 2, 1, seq_length=7, seq_length_is_variable=False)
    with pytest.raises(ArgumentError, match="1 query heads over 2 sequence-parallel ranks"):
        register(llama(1, 1), "sdpa", 2, 1)
    with pytest.raises(ArgumentError, match="sequence=3"):
        register(model, "sdpa", 3, 1)
    register(model, "eager", 2, 1)
    assert model.config._attn_implementation == "eager", "switched"
    part = own_part(batch(8), rank, 2)
    ids, positions = part["input_ids"], part["position_ids"]
    with pytest.raises(ArgumentError, match="without position_ids, while its sequences lie on 2 ranks"):
        model(input_ids=ids)
    with pytest.raises(ArgumentError, match=r"attention mask of \(2, 1, 4, 4\)"):
        model(input_ids=ids, position_ids=positions, attention_mask=torch.zeros(2, 1, 4, 4, dtype=torch.float64))
    cache = model(input_ids=ids, position_ids=positions, use_cache=True).past_key_values
    with pytest.raises(ArgumentError, match="use_cache=False"):
        model(input_ids=ids, position_ids=positions + 4, past_key_values=cache, use_cache=True)
    with pytest.raises(UsageError, match="output_attentions=True over sequence-parallel ranks"):
        model(input_ids=ids, position_ids=positions, output_attentions=True)
    restore_transformers()
    model(input_ids=ids)


def test_what_cannot_be_is_refused() -> None:
    run_ranks(_refusals, 2)


def _other_models(rank: int, world_size: int) -> None:
    """Models of other types in the same process keep their attention, before and after."""
    from transformers import MistralConfig, MistralForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=3,
    )
    other = MistralForCausalLM(config).double()
    whole = batch(12)
    inputs = {"input_ids": whole["input_ids"], "position_ids": whole["position_ids"]}
    expected = other(**inputs).logits
    model = llama()
    info = detect_model_sp_info(model)
    assert (info.model_type, info.query_heads, info.kv_heads, info.layers) == ("llama", 4, 2, 2)
    assert (info.attention, info.max_sequence_parallel_size, info.vit_attn_modules) == ("sdpa", 4, [])
    assert [name for name, _ in info.llm_attn_modules] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert info.vision_projection_module is None
    groups.set_current(_mesh())
    assert auto_wrap_model_for_sp(model, groups._get_sequence_parallel_group()) is model
    torch.testing.assert_close(other(**inputs).logits, expected, rtol=0, atol=0)
    auto_wrap_model_for_sp(other, groups._get_sequence_parallel_group())  # now it takes part, with its window
    part = own_part({**whole, "logits": expected}, rank, 2)
    ours = other(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    torch.testing.assert_close(ours, part["logits"], rtol=0, atol=TOLERANCE)
    assert isinstance(ALL_ATTENTION_FUNCTIONS["sdpa"], SharedAttention)
    restore_transformers()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    with pytest.raises(ArgumentError, match="has no transformers config"):
        detect_model_sp_info(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=r"has attention in .*vision.* beside llama"):
        auto_wrap_model_for_sp(_llava(), groups._get_sequence_parallel_group())


def _llava() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **sizes}
    text = {"model_type": "llama", "vocab_size": 23, **sizes}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=1))


def _mesh() -> Any:
    from deepspeed.topology.mesh import ParallelMesh

    return ParallelMesh.build(sequence=2)


def test_other_models_are_left_alone() -> None:
    run_ranks(_other_models, 2)


def _engine_of(sequence: int, stage: int) -> Any:
    model = llama(kv_heads=1)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, None, sequence, SAMPLES)
    settings = {"train_micro_batch_size_per_gpu": SAMPLES, **zero(stage)}
    return deepspeed.initialize(model=model, optimizer=_sgd(model.parameters()), config=settings, mpu=mpu)[0]


def _go_on(rank: int, world_size: int, sequence: int, stage: int, folder: str, first: int) -> list[float]:
    """Three steps from where the checkpoint stands, all data ranks with the same samples, and the next checkpoint."""
    engine = _engine_of(sequence, stage)
    if first:
        engine.load_checkpoint(folder)
    losses = [_step(engine, batch(LENGTH, SAMPLES, seed)) for seed in range(first, first + 3)]
    engine.save_checkpoint(folder)
    restore_transformers()
    return losses


def test_training_goes_on_at_other_numbers_of_sequence_ranks(tmp_path: Path) -> None:
    expected, _ = _plain([[[batch(LENGTH, SAMPLES, seed)]] for seed in range(9)])
    folder = str(tmp_path)
    losses = run_ranks(_go_on, 2, 2, 3, folder, 0)[0]
    losses += run_ranks(_go_on, 4, 2, 2, folder, 3)[0]
    losses += run_ranks(_go_on, 1, 1, 1, folder, 6)[0]
    assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
