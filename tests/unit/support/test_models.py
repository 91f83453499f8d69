from __future__ import annotations

import pytest
import torch

from tests.support import models

ALL = [
    models.Mlp,
    models.TiedLm,
    models.TiedGpt,
    models.Lora,
    models.Branching,
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


def test_the_adapters_of_a_lora_model_train_and_its_larger_weights_do_not() -> None:
    lora = models.build(models.Lora, 32, 2)
    trained = {name: p.numel() for name, p in lora.named_parameters() if p.requires_grad}
    frozen = {name: p.numel() for name, p in lora.named_parameters() if not p.requires_grad}
    assert set(trained) == {"first.down", "first.up", "second.down", "second.up"}
    assert frozen["first.base.weight"] == frozen["second.base.weight"] == 7 * 32
    assert max(trained.values()) == 64
    lora(*lora.batch(2, 0)).backward()
    assert all((p.grad is not None and bool(p.grad.any())) == p.requires_grad for p in lora.parameters())


@pytest.mark.parametrize("world_size", [2, 3])
def test_twenty_steps_use_the_branch_on_no_on_some_and_on_all_ranks(world_size: int) -> None:
    branching = models.build(models.Branching)
    batches = models.make_batches(branching, steps=20, world_size=world_size)
    used_by = {sum(bool(batch[2]) for batch in step[0]) for step in batches}
    assert used_by == set(range(world_size + 1))
    for with_branch in (False, True):
        branching.zero_grad(set_to_none=True)
        branching(*branching.batch(2, 0)[:2], torch.tensor(with_branch)).backward()
        assert (branching.branch.weight.grad is not None) == with_branch


def test_a_token_does_not_see_later_ones() -> None:
    gpt = models.build(models.TiedGpt, dtype=torch.float64)
    hidden = torch.randn(1, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    changed = hidden.clone()
    changed[:, 2, 0] += 1
    before, after = gpt.blocks[0](hidden), gpt.blocks[0](changed)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 3], after[:, 3])


def test_casting_batches_leaves_tokens_and_switches_alone() -> None:
    branching = models.build(models.Branching)
    cast = models.cast_batches(models.make_batches(branching, 1), torch.bfloat16)
    assert [t.dtype for t in cast[0][0][0]] == [torch.bfloat16, torch.bfloat16, torch.bool]
    gpt = models.build(models.TiedGpt)
    assert models.cast_batches(models.make_batches(gpt, 1), torch.bfloat16)[0][0][0][0].dtype == torch.int64
