"""LoRA with PEFT under the Trainer: adapters train, are saved, loaded and gone on with as without us."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clients import tiny_llama
from tests.support.ranks import run_ranks
from tests.support.trainer import Update, arguments, assert_same_run, auto_config, updates

_STAGES = (2, 3)
_STEPS, _HALF = 6, 3
_THRESHOLDS: dict[str, dict[str, int]] = {"small": {}, "sharded": {"stage3_param_persistence_threshold": 0}}


def _with_adapters(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, settings)


def _run(folder: str, config: dict[str, Any] | None, base: str | None = None) -> Any:
    from transformers import LlamaForCausalLM, Trainer

    from tests.support.clients import Sentences

    made = arguments(folder, config, max_steps=_STEPS, save_strategy="steps", save_steps=_HALF, learning_rate=0.05)
    model = tiny_llama() if base is None else LlamaForCausalLM.from_pretrained(base)
    return Trainer(_with_adapters(model), made, train_dataset=Sentences())


def _trains_adapters(rank: int, world_size: int, folder: str) -> dict[str, list[Update]]:
    curves = {}
    for stage in (None, *_STAGES):
        config = None if stage is None else auto_config(stage)
        run = _run(f"{folder}/{stage}", config, None if stage is None else f"{folder}/base")
        run.train()
        run.save_model(f"{folder}/{stage}/end")
        curves["reference" if stage is None else f"stage {stage}"] = updates(run)
    for stage in _STAGES:
        again = _run(f"{folder}/again", auto_config(stage), f"{folder}/base")
        again.train(resume_from_checkpoint=f"{folder}/{stage}/checkpoint-{_HALF}")
        curves[f"resumed, stage {stage}"] = updates(again)
    return curves


def test_adapters_learn_as_without_us(tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    tiny_llama().save_pretrained(tmp_path / "base")
    for curves in run_ranks(_trains_adapters, 2, str(tmp_path), init=False):
        expected = curves.pop("reference")
        for name, got in curves.items():
            print(name)  # shown where the comparison fails
            assert_same_run(got, expected)
    adapters = load_file(tmp_path / "None/end/adapter_model.safetensors")
    for stage in _STAGES:
        saved = load_file(tmp_path / f"{stage}/end/adapter_model.safetensors")
        assert saved.keys() == adapters.keys()
        for name, weight in saved.items():
            torch.testing.assert_close(weight, adapters[name], rtol=0, atol=1e-5)
        model = PeftModel.from_pretrained(tiny_llama(), tmp_path / f"{stage}/end")
        loaded = [param for name, param in model.named_parameters() if "lora_B" in name]
        assert loaded
        assert all(param.abs().sum() > 0 for param in loaded)


def _saves_adapters(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """Save with and without a gather, each rank to its folder; was PEFT's warning of incomplete adapters given?"""
    from peft import LoraConfig, PeftWarning, get_peft_model

    import deepspeed

    warned = {}
    for name, zero in _THRESHOLDS.items():
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
        torch.manual_seed(3)
        base = torch.nn.Sequential(torch.nn.Linear(8, 6))
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
        torch.save(model.state_dict(), f"{folder}/{name}-{rank}.pt")
        engine = deepspeed.initialize(model=model, config=config)[0]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine.module.save_pretrained(f"{folder}/{name}-{rank}")
        warned[name] = any(issubclass(each.category, PeftWarning) for each in told)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            engine.module.save_pretrained(f"{folder}/{name}-{rank}-gathered")
        engine.destroy()
    return warned


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_adapter_saved_without_a_gather_is_complete_or_told_to_be_not(tmp_path: Path, world_size: int) -> None:
    """PEFT warns of an empty `lora_A`. Small parameters stay whole, and what is whole needs neither gather nor warning."""
    from safetensors.torch import load_file

    told = run_ranks(_saves_adapters, world_size, str(tmp_path))
    assert told == [{"small": False, "sharded": True}] * world_size
    for rank in range(world_size):
        for name in _THRESHOLDS:
            before = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            adapter = {key.replace(".default", ""): value for key, value in before.items() if "lora_" in key}
            complete = [f"{name}-{rank}-gathered", *([f"{name}-{rank}"] if name == "small" else [])]
            for folder in complete:
                saved = load_file(tmp_path / folder / "adapter_model.safetensors")
                torch.testing.assert_close(saved, adapter, rtol=0, atol=0)
