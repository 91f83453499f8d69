"""`deepspeed.zero.private`: whole values in the hands of the user, on one rank."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.zero.prefetch import GatherSettings
from tests.support.sharded import Sharded, assert_same, shard
from tests.support.sharded_models import Gpt, Uses, inputs, tokens

NOTHING_KEPT = GatherSettings(max_reuse_numel=0)
EMPTY = torch.Size([0])


def _linear(settings: GatherSettings = NOTHING_KEPT) -> Sharded:
    return shard(Uses(lambda m, x: m.first(x)), settings, limit_numel=1, is_late=True)


def test_a_fetched_parameter_is_whole_until_every_fetch_was_undone() -> None:
    sharded = _linear()
    weight, bias = sharded.model.first.weight, sharded.model.first.bias
    sharded.coordinator.fetch([weight])
    sharded.coordinator.fetch([weight, bias])
    assert weight.shape == (8, 8)
    sharded.coordinator.drop([weight])
    assert weight.shape == (8, 8)
    assert sharded.model.second.weight.shape == EMPTY
    sharded.coordinator.drop([bias, weight])
    assert weight.shape == bias.shape == EMPTY
    assert sharded.coordinator.live_numel == 0
    assert not sharded.coordinator.pool.storages


def test_a_parameter_named_twice_is_dropped_twice() -> None:
    sharded = _linear()
    weight = sharded.model.first.weight
    sharded.coordinator.fetch([weight, weight])
    sharded.coordinator.drop([weight, weight])
    assert weight.shape == EMPTY


def test_edits_that_are_not_stored_are_gone() -> None:
    sharded = _linear()
    weight, before = sharded.model.first.weight, sharded.whole()
    sharded.coordinator.fetch([weight])
    with torch.no_grad():
        weight.zero_()
    sharded.coordinator.drop([weight])
    assert_same(sharded.whole(), before)


def test_stored_edits_are_the_parameters_from_then_on() -> None:
    sharded = _linear()
    weight, before = sharded.model.first.weight, sharded.whole()
    sharded.coordinator.fetch([weight])
    with torch.no_grad():
        weight.fill_(2.0)
    sharded.coordinator.store([weight], 0)
    sharded.coordinator.drop([weight])
    assert_same(sharded.whole(), {**before, "first.weight": torch.full((8, 8), 2.0)})


def test_other_storage_may_be_assigned_before_storing() -> None:
    sharded = _linear()
    weight = sharded.model.first.weight
    sharded.coordinator.fetch([weight])
    weight.data = torch.ones(8, 8, dtype=torch.float64).t()
    sharded.coordinator.store([weight], 0)
    assert weight.dtype == torch.float32
    sharded.coordinator.drop([weight])
    assert torch.equal(sharded.whole()["first.weight"], torch.ones(8, 8))


@pytest.mark.parametrize("is_fetched", [True, False])
def test_what_is_not_the_whole_value_cannot_be_stored(is_fetched: bool) -> None:
    sharded = _linear()
    weight = sharded.model.first.weight
    if is_fetched:
        sharded.coordinator.fetch([weight])
        weight.data = torch.ones(3)
    with pytest.raises(UsageError, match=r"'first\.weight' of shape .* cannot be stored; needed .* \(8, 8\)"):
        sharded.coordinator.store([weight], 0)


@pytest.mark.parametrize("settings", [NOTHING_KEPT, GatherSettings()])
@pytest.mark.parametrize("is_late", [True, False])
def test_memory_assigned_inside_the_block_is_what_a_forward_in_it_computes_with(
    settings: GatherSettings, is_late: bool
) -> None:
    sharded = shard(Uses(lambda m, x: m.first(x)), settings, is_late=is_late)
    first = sharded.model.first
    sharded.coordinator.fetch([first.bias, first.weight])
    first.weight.data = torch.eye(8)
    for _ in range(2):
        with torch.no_grad(), sharded.coordinator.forward_scope():
            assert torch.equal(sharded.model(inputs()), inputs() + first.bias)
    sharded.coordinator.drop([first.bias])
    assert torch.equal(first.weight, torch.eye(8))
    sharded.coordinator.store([first.weight], 0)
    sharded.coordinator.drop([first.weight])
    assert torch.equal(sharded.whole()["first.weight"], torch.eye(8))
    assert None not in sharded.coordinator.pool.storages.values()


@pytest.mark.parametrize("settings", [NOTHING_KEPT, GatherSettings()])
def test_a_forward_inside_the_block_sees_edits_and_one_after_it_only_stored_ones(settings: GatherSettings) -> None:
    sharded = _linear(settings)
    weight = sharded.model.first.weight
    coordinator = sharded.coordinator

    def output() -> torch.Tensor:
        with torch.no_grad(), coordinator.forward_scope():
            return sharded.model(inputs()).clone()

    before = output()
    coordinator.fetch([weight])
    with torch.no_grad():
        weight.mul_(2)
    edited = output()
    assert not torch.equal(edited, before)
    coordinator.drop([weight])
    assert torch.equal(output(), before)
    coordinator.fetch([weight])
    with torch.no_grad():
        weight.mul_(2)
    coordinator.store([weight], 0)
    coordinator.drop([weight])
    assert torch.equal(output(), edited)


def test_backward_after_the_block_uses_the_values_of_the_forward_inside_it() -> None:
    sharded = shard(Uses(lambda m, x: torch.nn.functional.layer_norm(m.first(x), (8,), m.second.bias).sum()), NOTHING_KEPT)
    bias, coordinator = sharded.model.second.bias, sharded.coordinator
    coordinator.fetch([bias])
    with torch.no_grad():
        bias.fill_(3.0)
    x = inputs().requires_grad_()
    with coordinator.forward_scope():
        loss = sharded.model(x)
    coordinator.drop([bias])
    sharded.backward(loss)
    whole = sharded.whole()
    again = inputs().requires_grad_()
    hidden = torch.nn.functional.linear(again, whole["first.weight"], whole["first.bias"])
    torch.nn.functional.layer_norm(hidden, (8,), torch.full((8,), 3.0)).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, again.grad)  # type: ignore[arg-type]


def test_storing_between_forward_and_backward_waits_for_gathers_and_refuses_the_old_graph() -> None:
    sharded = shard(Gpt(), GatherSettings(max_reuse_numel=0), limit_numel=300, is_late=True)
    coordinator, weight = sharded.coordinator, sharded.model.h[0].up.weight
    for _ in range(2):
        with coordinator.forward_scope():
            loss = sharded.model(tokens())
        log = sharded.flats[0].gatherer.log  # type: ignore[attr-defined]
        coordinator.fetch([weight])
        coordinator.store([weight], 0)
        coordinator.drop([weight])
        begun = len(log) - 1 - log[::-1].index(("begin_update",))
        launched = [entry[1:] for entry in log[:begun] if entry[0] == "launched"]
        assert sorted(launched) == sorted(entry[1:] for entry in log[:begun] if entry[0] == "arrived")
        with pytest.raises(UsageError, match="modified by an inplace operation"):
            loss.backward()
        coordinator.backward_over()
        coordinator.before_update()


def test_storing_inside_a_forward_changes_what_the_rest_of_it_computes_with() -> None:
    sharded = shard(Uses(lambda m, x: edit(m.first(x)) + m.first(x)), NOTHING_KEPT)
    weight, bias = sharded.model.first.weight, sharded.model.first.bias

    def edit(hidden: torch.Tensor) -> torch.Tensor:
        sharded.coordinator.fetch([weight, bias])
        with torch.no_grad():
            weight.zero_()
            bias.zero_()
        sharded.coordinator.store([weight, bias], 0)
        sharded.coordinator.drop([weight, bias])
        return torch.zeros_like(hidden)

    with torch.no_grad(), sharded.coordinator.forward_scope():
        assert sharded.model(inputs()).abs().sum() == 0
    assert sharded.coordinator.live_numel == 0


def test_memory_fetched_in_inference_mode_may_be_trained_with() -> None:
    sharded = _linear()
    with torch.inference_mode():
        sharded.coordinator.fetch([sharded.model.first.weight])
    assert not sharded.model.first.weight.is_inference()
    with sharded.coordinator.forward_scope():
        loss = sharded.model(inputs()).sum()
    with torch.inference_mode():
        sharded.coordinator.drop([sharded.model.first.weight])
    sharded.backward(loss)
    assert not sharded.model.first.weight.is_inference()
