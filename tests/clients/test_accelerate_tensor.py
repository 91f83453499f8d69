"""Accelerate's `ParallelismConfig(tp_size=2)` with us: with parts of layers, without, and with layers it has cut itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.accelerate_runs import RATE, Recipe, assert_same_weights, build_accelerator, fits, prepared, weights
from tests.support.clients import Sentences, assert_same_curve, tiny_llama
from tests.support.ranks import run_ranks

ROWS, PARTS = 4, 2


def _config(stage: int, parts: int) -> dict[str, Any]:
    # with parts Accelerate wraps the loader before it looks at its rows, so that it cannot fill in the micro-batch
    batch = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1}
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    cut = {"tensor_parallel": {"autotp_size": parts}} if parts > 1 else {}
    return {**batch, "gradient_clipping": 1.0, "zero_optimization": zero, **cut}


def _parallelism(world_size: int) -> Any:
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(tp_size=PARTS, dp_shard_size=world_size // PARTS)


def _trains(rank: int, world_size: int, config: dict[str, Any] | None) -> dict[str, Any]:
    """With a configuration of ours, and Accelerate told of the parts as well; without, the reference under DDP."""
    recipe = Recipe(plugin=None if config is None else {"hf_ds_config": config})
    settings = {} if config is None else {"parallelism_config": _parallelism(world_size)}
    accelerator = build_accelerator(recipe, **settings)
    model, optimizer, batches, _ = prepared(accelerator, recipe)
    own = sum(value.numel() for value in model.parameters())
    return {**fits(accelerator, model, optimizer, batches), "numel": own, "weights": weights(accelerator, model)}


@pytest.mark.parametrize(
    ("world_size", "stage", "parts"), [(2, 0, PARTS), (2, 2, PARTS), (2, 3, 1), (4, 1, PARTS), (4, 2, 1)]
)
def test_two_ranks_with_the_same_rows_train_as_one_does(world_size: int, stage: int, parts: int) -> None:
    """Accelerate gives both the same rows, and us its wrapper of the optimizer. Only `autotp_size` cuts layers."""
    whole = run_ranks(_trains, world_size // PARTS, None, init=False)
    got = run_ranks(_trains, world_size, _config(stage, parts), init=False)
    for rank, ours in enumerate(got):
        theirs = whole[rank // PARTS]
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
        assert stage == 3 or (ours["numel"] < theirs["numel"]) is (parts > 1)
        assert (ours["weights"] is None) is (parts > 1 and rank > 0)  # of parts, Accelerate hands rank 0 the whole
        if ours["weights"] is not None:
            assert_same_weights(ours["weights"], theirs["weights"], 1e-4)


def _cut_by_torch(rank: int, world_size: int, stage: int) -> str:
    """A model whose linear layers torch has cut into DTensors, as Transformers does for `tp_size`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    accelerator = build_accelerator(
        Recipe(plugin={"hf_ds_config": _config(stage, 1)}), parallelism_config=_parallelism(world_size)
    )
    model = tiny_llama()
    for layer in model.model.layers:
        parallelize_module(layer.mlp, accelerator.torch_device_mesh["tp"], {"up_proj": ColwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with pytest.raises(ValueError, match="DTensor") as error:
        accelerator.prepare(model, optimizer, DataLoader(Sentences(), batch_size=ROWS))
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_layers_that_torch_has_cut_are_refused_with_the_cure(stage: int) -> None:
    for said in run_ranks(_cut_by_torch, 2, stage, init=False):
        assert "model.layers.0.mlp.up_proj.weight" in said
        assert '"tensor_parallel": {"autotp_size": 2}' in said
