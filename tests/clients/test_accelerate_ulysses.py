"""Accelerate prepares model, optimizer and loader over sequence-parallel ranks: losses are those of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from deepspeed.sequence.registry import restore_transformers
from tests.support.ranks import run_ranks
from tests.support.ulysses import batch, llama

_SAMPLES, _ROWS = 16, 2
_BATCHES = _SAMPLES // _ROWS


def _sample(number: int) -> dict[str, torch.Tensor]:
    return {name: value[0] for name, value in batch(12, 1, number).items()}


class _Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _sample(index)


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


class _Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (_sample(number) for number in range(_SAMPLES))


def _accelerator(world_size: int) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs, data_loader
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig

    data_loader.is_datasets_available = lambda: False  # none of ours is one; to import and see takes a rank 2 s
    settings = {"train_micro_batch_size_per_gpu": _ROWS, "gradient_accumulation_steps": 1, "train_batch_size": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config={**settings, "zero_optimization": {"stage": 2}})
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=12, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=world_size, sp_handler=handler)
    return Accelerator(
        deepspeed_plugin=plugin, parallelism_config=parallel, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )


def _prepared(rank: int, world_size: int, data: Dataset[Any], skipped: int, passes: int) -> list[float]:
    """Losses of the parts of one pass after the first `skipped`, or of whole passes."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = _accelerator(world_size)
    model = llama()
    engine, optimizer, loader = accelerator.prepare(model, _sgd(model), DataLoader(data, batch_size=_ROWS))
    if skipped:
        loader = accelerator.skip_first_batches(loader, skipped)
    losses = []
    for _ in range(passes):
        for part in loader:
            loss = deepspeed_sp_compute_loss(accelerator, engine, dict(part), False, accelerator.parallelism_config)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    restore_transformers()
    return losses


def _one_process(batches: list[int]) -> list[float]:
    """Losses of a plain loop over the batches of these numbers."""
    model = llama()
    optimizer = _sgd(model)
    expected = []
    for number in batches:
        samples = [_sample(_ROWS * number + row) for row in range(_ROWS)]
        loss = model(**{name: torch.stack([each[name] for each in samples]) for name in samples[0]}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return expected


def test_accelerates_own_path_trains_as_one_process_does() -> None:
    expected = _one_process([*range(_BATCHES), *range(_BATCHES)])
    for losses in run_ranks(_prepared, 2, _Samples(), 0, 2, init=False):
        assert losses == pytest.approx(expected, abs=1e-5)  # transformers takes the loss in fp32


@pytest.mark.parametrize("skipped", [2, 3])
@pytest.mark.parametrize("data", [_Samples(), _Stream()], ids=["rows", "stream"])
def test_in_the_middle_of_an_epoch_ranks_go_on_with_their_parts(data: Dataset[Any], skipped: int) -> None:
    expected = _one_process(list(range(skipped, _BATCHES)))
    for losses in run_ranks(_prepared, 2, data, skipped, 1, init=False):
        assert losses == pytest.approx(expected, abs=1e-5)
