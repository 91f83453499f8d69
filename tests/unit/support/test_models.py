from __future__ import annotations

import pytest
import torch

from tests.support import models

ALL = [
    models.Mlp,
    models.TiedLm,
    models.SparseEmbedding,
    models.PartlyFrozen,
    models.WithEmptyParameter,
    models.WithUnusedParameter,
    models.ManyTinyLayers,
]


@pytest.mark.parametrize("model_class", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_model_has_a_loss_and_gradients_in_its_dtype(model_class: type[models.TinyModel], dtype: torch.dtype) -> None:
    model = models.build(model_class, dtype=dtype)
    loss = model(*model.batch(rows=3, seed=5))
    loss.backward()
    assert loss.dtype == dtype
    assert loss.dim() == 0
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("model_class", ALL)
def test_equal_calls_build_equal_models_and_leave_the_random_state_alone(model_class: type[models.TinyModel]) -> None:
    before = torch.get_rng_state()
    first, second = models.build(model_class), models.build(model_class, seed=0)
    other = models.build(model_class, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_every_batch_of_a_run_is_different() -> None:
    model = models.build(models.Mlp)
    batches = models.make_batches(model, steps=2, micro_batches=3, world_size=2)
    flat = [batch[0] for step in batches for micro in step for batch in micro]
    assert len(flat) == 12
    assert not any(torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])
    again = models.make_batches(model, steps=2, micro_batches=3, world_size=2)
    assert torch.equal(again[1][2][1][0], batches[1][2][1][0])


def test_each_difficulty_is_really_there() -> None:
    tied = models.build(models.TiedLm)
    assert tied.head.weight is tied.embedding.weight
    sparse = models.build(models.SparseEmbedding)
    sparse(*sparse.batch(2, 0)).backward()
    assert sparse.embedding.weight.grad is not None
    assert sparse.embedding.weight.grad.is_sparse
    assert not models.build(models.PartlyFrozen).first.weight.requires_grad
    assert models.build(models.WithEmptyParameter).empty.numel() == 0
    assert len(list(models.build(models.ManyTinyLayers, 40).parameters())) == 80
    unused = models.build(models.WithUnusedParameter)
    unused(*unused.batch(2, 0)).backward()
    assert unused.unused.weight.grad is None
