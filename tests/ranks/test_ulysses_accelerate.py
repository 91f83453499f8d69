"""Accelerate prepares model, optimizer and loader over sequence-parallel ranks: losses are those of one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from deepspeed.sequence.registry import restore_transformers
from tests.support.ranks import run_ranks
from tests.support.ulysses import batch, llama

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
pytest.importorskip("transformers")

_SAMPLES, _ROWS = 16, 2


def _sample(number: int) -> dict[str, torch.Tensor]:
    return {name: value[0] for name, value in batch(12, 1, number).items()}


class _Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _sample(index)


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _prepared(rank: int, world_size: int) -> list[float]:
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    settings = {"train_micro_batch_size_per_gpu": _ROWS, "gradient_accumulation_steps": 1, "train_batch_size": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config={**settings, "zero_optimization": {"stage": 2}})
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=12, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=world_size, sp_handler=handler)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, parallelism_config=parallel, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    model = llama()
    engine, optimizer, loader = accelerator.prepare(model, _sgd(model), DataLoader(_Samples(), batch_size=_ROWS))
    losses = []
    for part in loader:
        loss = deepspeed_sp_compute_loss(accelerator, engine, dict(part), False, parallel)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    restore_transformers()
    return losses


def test_accelerates_own_path_trains_as_one_process_does() -> None:
    model = llama()
    optimizer = _sgd(model)
    expected = []
    for first in range(0, _SAMPLES, _ROWS):
        samples = [_sample(number) for number in range(first, first + _ROWS)]
        loss = model(**{name: torch.stack([each[name] for each in samples]) for name in samples[0]}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in run_ranks(_prepared, 2, init=False):
        assert losses == pytest.approx(expected, abs=1e-5)  # transformers takes the loss in fp32
