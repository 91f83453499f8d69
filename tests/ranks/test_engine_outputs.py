"""What an engine hands out beside training: its loader, and the model as one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import deepspeed
from tests.support.engines import config, make_engine
from tests.support.models import Mlp, build
from tests.support.ranks import run_ranks


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.0)


def _own_loader(rank: int, world_size: int) -> list[int]:
    model = build(Mlp)
    numbers = torch.arange(10.0)
    data = TensorDataset(numbers.view(10, 1).expand(10, Mlp.VALUES), numbers)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=_adam(model), config=config(rows=2, dataloader_drop_last=True), training_data=data
    )
    assert loader is engine.training_dataloader
    assert len(loader) == 2  # five samples of this rank, the last one left over
    return [int(value) for _, targets in loader for value in targets]


def test_training_data_becomes_a_loader_that_deals_samples_to_ranks() -> None:
    first, second = run_ranks(_own_loader, 2)
    assert len({*first, *second}) == len(first) + len(second) == 8


def _one_file(rank: int, world_size: int, folder: str) -> bool:
    model = build(Mlp)
    engine = make_engine(model, config(bf16={"enabled": True}), optimizer=_adam(model))
    assert engine.save_16bit_model(folder)
    torch.distributed.barrier()
    stored = torch.load(Path(folder, "pytorch_model.bin"), weights_only=True)
    own = model.state_dict()
    assert Path(folder, "pytorch_model.bin").stat().st_size < 4 * sum(value.nbytes for value in own.values()) + 4096
    return stored.keys() == own.keys() and all(torch.equal(stored[name], own[name]) for name in own)


def test_the_model_as_one_file_is_what_the_ranks_hold(tmp_path: Path) -> None:
    assert run_ranks(_one_file, 2, str(tmp_path)) == [True, True]
