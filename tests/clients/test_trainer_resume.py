"""A Trainer's run that stops at a checkpoint goes on as if it had not, at another ZeRO stage and on fewer ranks as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.clients import tiny_llama
from tests.support.ranks import run_ranks
from tests.support.trainer import Update, assert_same_run, auto_config, trainer, updates

_SAVED = (1, 2, 3)
_RESUMED = ((1, 1), (1, 3), (2, 2), (3, 3), (3, 2))  # saved at the first stage, gone on with at the second
_STEPS, _HALF = 8, 4
_SAVING = {"max_steps": _STEPS, "save_strategy": "steps", "save_steps": _HALF}


def _checkpoint(folder: str, stage: int) -> str:
    return f"{folder}/{stage}/checkpoint-{_HALF}"


def _weights(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{folder}/model.safetensors")


def _resumed(folder: str, saved: int, stage: int, **settings: Any) -> list[Update]:
    run = trainer(f"{folder}/again", auto_config(stage), max_steps=_STEPS, **settings)
    run.train(resume_from_checkpoint=_checkpoint(folder, saved))
    return updates(run)  # with those of before, which the client kept beside the checkpoint


def _saves_and_resumes(rank: int, world_size: int, folder: str) -> dict[str, list[Update]]:
    curves = {}
    for stage in (None, *_SAVED):
        run = trainer(f"{folder}/{stage}", None if stage is None else auto_config(stage), **_SAVING)
        run.train()
        curves["reference" if stage is None else f"whole, stage {stage}"] = updates(run)
    for saved, stage in _RESUMED:
        curves[f"saved at {saved}, resumed at {stage}"] = _resumed(folder, saved, stage)
    return curves


def _resumes_alone(rank: int, world_size: int, folder: str) -> dict[str, list[Update]]:
    # One rank takes the rows that two took: twice the micro-batch.
    return {f"saved at {n}, one rank": _resumed(folder, n, n, per_device_train_batch_size=4) for n in (2, 3)}


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for curves in run_ranks(_saves_and_resumes, 2, folder, init=False, timeout_seconds=150):
        expected = curves.pop("reference")
        for name, got in curves.items():
            print(name)  # shown where the comparison fails
            assert_same_run(got, expected)
    expected_weights = _weights(_checkpoint(folder, None))
    for stage in _SAVED:
        for name, weight in _weights(_checkpoint(folder, stage)).items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-5)
    [curves] = run_ranks(_resumes_alone, 1, folder, init=False)
    for name, got in curves.items():
        print(name)
        assert_same_run(got, expected)


def _saves_weights_only(rank: int, world_size: int, folder: str) -> None:
    for stage in (2, 3):
        run = trainer(f"{folder}/{stage}", auto_config(stage), **_SAVING, save_only_model=True)
        run.train()
        run.save_model(f"{folder}/{stage}/end")
        run.accelerator.wait_for_everyone()
    ungathered = auto_config(3, stage3_gather_16bit_weights_on_model_save=False)
    run = trainer(f"{folder}/ungathered", ungathered, max_steps=2)
    run.train()
    run.save_model(f"{folder}/ungathered/end")


def test_weights_alone_are_saved_for_from_pretrained(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    run_ranks(_saves_weights_only, 2, str(tmp_path), init=False)
    for stage in (2, 3):
        half, end = tmp_path / f"{stage}/checkpoint-{_HALF}", tmp_path / f"{stage}/end"
        assert not list(half.glob("global_step*"))
        model = LlamaForCausalLM.from_pretrained(end)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, _weights(f"{tmp_path}/{stage}/checkpoint-{_STEPS}")[name], rtol=0, atol=0)
            assert not torch.equal(weight, _weights(str(half))[name])
    # Without the key the client saves a checkpoint of ours in place of the weights, for `zero_to_fp32`.
    saved = tmp_path / "ungathered/end"
    assert not (saved / "model.safetensors").exists()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(saved))
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: weight.shape for name, weight in tiny_llama().state_dict().items()
    }
