"""LoRA with PEFT under the Trainer: adapters train, are saved, loaded and gone on with as without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.clients import tiny_llama
from tests.support.ranks import run_ranks
from tests.support.trainer import Update, arguments, assert_same_run, auto_config, updates

_STAGES = (2, 3)
_STEPS, _HALF = 6, 3


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
