"""What a Trainer's user turns on to save memory changes no numbers: offload, recomputation, smaller batches, bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clients import assert_same_curve, tiny_llama
from tests.support.ranks import run_ranks
from tests.support.trainer import Update, assert_same_run, auto_config, trainer, updates

_OURS = ("our optimizer offloaded", "all offloaded")  # where the client hands its schedule to the engine
_CPU = {"device": "cpu", "pin_memory": True}


def _configs() -> dict[str, dict[str, Any]]:
    configs = {f"optimizer offloaded, stage {n}": auto_config(n, offload_optimizer=_CPU) for n in (1, 2, 3)}
    configs[_OURS[0]] = auto_config(2, optimizer=True, offload_optimizer=_CPU)
    configs[_OURS[1]] = auto_config(3, optimizer=True, offload_optimizer=_CPU, offload_param=_CPU)
    return configs


def _offloads(rank: int, world_size: int, folder: str) -> dict[str, list[Update]]:
    curves = {}
    for name, config in {"reference": None, **_configs()}.items():
        run = trainer(folder, config, max_steps=6)
        run.train()
        curves[name] = updates(run)
    for reentrant in (True, False):
        for stage in (2, 3):
            kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
            run = trainer(folder, auto_config(stage), max_steps=6, gradient_checkpointing=True, **kwargs)
            run.train()
            curves[f"recomputed, reentrant {reentrant}, stage {stage}"] = updates(run)
    return curves


def test_offload_and_recomputation_change_no_numbers(tmp_path: Path) -> None:
    for curves in run_ranks(_offloads, 2, str(tmp_path), init=False, timeout_seconds=150):
        expected = curves.pop("reference")
        for name, got in curves.items():
            print(name)  # shown where the comparison fails
            assert_same_run(got, expected, rates_ahead=name in _OURS)


class _Tight(torch.nn.Module):
    """A decoder layer where more than `rows` rows do not fit: torch's own error, in the middle of a forward."""

    def __init__(self, layer: Any, rows: int) -> None:
        super().__init__()
        self.layer, self.rows = layer, rows

    def forward(self, hidden_BTD: torch.Tensor, **kwargs: Any) -> Any:
        if len(hidden_BTD) > self.rows:
            torch.empty(1 << 60, dtype=torch.uint8)
        return self.layer(hidden_BTD, **kwargs)


def _finds_batch_size(rank: int, world_size: int, folder: str) -> dict[str, list[Update]]:
    curves = {}
    for name, config, micro in (
        ("reference", None, 2),
        ("stage 1", auto_config(1), 4),
        ("stage 2", auto_config(2), 4),  # at stage 3 the client refuses to search
    ):
        model = tiny_llama()
        model.model.layers[1] = _Tight(model.model.layers[1], rows=2)
        searched = {"per_device_train_batch_size": micro, "auto_find_batch_size": config is not None}
        run = trainer(folder, config, model=model, max_steps=4, **searched)
        run.train()
        curves[name] = updates(run)
    return curves


def test_a_batch_that_does_not_fit_is_made_smaller(tmp_path: Path) -> None:
    for curves in run_ranks(_finds_batch_size, 2, str(tmp_path), init=False, timeout_seconds=150):
        for name, got in curves.items():
            print(name)
            assert_same_run(got, curves["reference"])


def _trains_in_bf16(rank: int, world_size: int, folder: str) -> dict[str, list[Update]]:
    from transformers import training_args

    # The client refuses bf16 without a device that has it, but on `use_cpu`, where it knows no DeepSpeed.
    training_args.is_torch_bf16_gpu_available = lambda: True
    curves = {}
    for name, config in {"reference": None, **{f"stage {n}": auto_config(n) for n in (0, 1, 2, 3)}}.items():
        run = trainer(folder, config, bf16=True, max_steps=6)
        run.train()
        assert {param.dtype for param in run.model.parameters()} == {torch.bfloat16 if config else torch.float32}
        curves[name] = updates(run)
    return curves


def test_bf16_is_the_same_at_every_stage_and_near_the_clients(tmp_path: Path) -> None:
    for curves in run_ranks(_trains_in_bf16, 2, str(tmp_path), init=False):
        expected = [update.loss for update in curves.pop("reference")]
        for got in curves.values():
            assert_same_run(got, curves["stage 1"])
            # The client multiplies in bf16 over fp32 weights, we round weights (2^-9) and what lies between layers, too.
            # Logits of this model are below 4, and so err by less than 4 x 2^-9 a rounding; the mean over tokens by less.
            assert_same_curve([update.loss for update in got], expected, tolerance=4 * 2**-9)


def test_the_settings_of_this_file_are_read() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        _Tight(torch.nn.Identity(), rows=1)(torch.zeros(2, 1, 1))
