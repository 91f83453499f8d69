"""Buckets travel in one order, as early as is safe, and never twice without need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm.algorithms import LocalReducer, LocalReduceScatterer
from deepspeed.errors import UsageError
from deepspeed.zero import reducer as reducer_module
from deepspeed.zero.gradients import ShardedGradients, ViewGradients, WholeGradients, largest_bucket_numel
from deepspeed.zero.reducer import GradientReducer
from tests.support.fake_reducers import FailingReducer, RecordingReducer, pretend_axis
from tests.support.flat_groups import CPU, flat_group


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for layer in self.layers:
            for _ in range(times):
                x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one small collective that the reducer itself makes is answered as if all ranks agreed."""
    monkeypatch.setattr(comm, "all_reduce", lambda tensor, **_: tensor)
    assert reducer_module.comm is comm


def build(
    kind: Any = RecordingReducer, is_boundary: Any = lambda: True, **options: Any
) -> tuple[Chain, Any, GradientReducer]:
    module = Chain()
    flat = flat_group(module, bucket_numel=256)
    recorder = kind(flat.layout.numel)
    flat.attach_gradients(ViewGradients(flat, recorder))
    return module, recorder, GradientReducer([flat], pretend_axis(2), is_boundary=is_boundary, **options)


LAUNCHES = ["launch 0:256", "launch 256:512", "launch 512:768"]
WAITS = ["wait 0:256", "wait 256:512", "wait 512:768"]


def test_the_first_backward_reduces_at_its_end_and_later_ones_while_they_run(no_peers: None) -> None:
    module, recorder, reducer = build()
    seen: list[int] = []
    module.layers[0].weight.register_hook(lambda _: seen.append(len(recorder.journal)))  # the last gradient to come
    for _ in range(2):
        recorder.journal.clear()
        reducer.drive(lambda: module(torch.ones(1, 16)).backward())
        assert recorder.journal == LAUNCHES + WAITS
    assert seen == [0, 2]


def test_without_overlap_everything_waits_for_the_end(no_peers: None) -> None:
    module, recorder, reducer = build(is_overlapped=False)
    seen: list[int] = []
    module.layers[0].weight.register_hook(lambda _: seen.append(len(recorder.journal)))
    for _ in range(2):
        recorder.journal.clear()
        reducer.drive(lambda: module(torch.ones(1, 16)).backward())
    assert seen == [0, 0]


def test_plain_backward_finishes_by_itself(no_peers: None) -> None:
    module, recorder, reducer = build()
    module(torch.ones(1, 16)).backward()
    assert recorder.journal == LAUNCHES + WAITS
    assert reducer.is_reduced
    assert not reducer.is_running


def test_between_boundaries_nothing_travels(no_peers: None) -> None:
    module, recorder, reducer = build(is_boundary=lambda: False)
    reducer.drive(lambda: module(torch.ones(1, 16)).backward())
    module(torch.ones(1, 16)).backward()
    assert recorder.journal == []
    assert not reducer.is_reduced


def test_a_bucket_whose_turn_has_not_come_waits_for_its_turn(no_peers: None) -> None:
    module, recorder, reducer = build()
    reducer.drive(lambda: module(torch.ones(1, 16)).backward())
    recorder.journal.clear()
    first_only = module.layers[0]  # its bucket is the last in order
    reducer.drive(lambda: first_only(torch.ones(1, 16)).sum().backward())
    assert recorder.journal == LAUNCHES + WAITS


def test_layers_that_arrive_twice_switch_overlap_off_for_good(no_peers: None) -> None:
    from torch.utils.checkpoint import checkpoint

    module, recorder, reducer = build()
    seen: list[int] = []
    x = torch.ones(1, 16, requires_grad=True)

    def backward() -> None:
        hidden = x
        for _ in range(2):
            hidden = checkpoint(module.layers[2], hidden, use_reentrant=True)
        hidden.sum().backward()
        seen.append(len(recorder.journal))

    for _ in range(2):
        recorder.journal.clear()
        reducer.drive(backward)
        assert sorted(recorder.journal[:3]) == LAUNCHES
        assert sorted(recorder.journal[3:]) == WAITS
    assert recorder.journal[2] == "launch 0:256"  # its turn is the last now, so that the others need not wait for it
    assert seen == [0, 0]


def test_a_second_arrival_after_the_bucket_left_is_refused_with_the_cure(no_peers: None) -> None:
    from torch.utils.checkpoint import checkpoint

    module, _, reducer = build()
    reducer.drive(lambda: module(torch.ones(1, 16)).backward())

    def twice() -> None:
        x = torch.ones(1, 16, requires_grad=True)
        for _ in range(2):
            x = checkpoint(module.layers[2], x, use_reentrant=True)
        x.sum().backward()

    with pytest.raises(UsageError, match=r"(?s)layers\.2\.weight.*overlap_comm"):
        reducer.drive(twice)
    assert not reducer.is_running


def test_a_reduction_that_fails_raises_and_leaves_the_hooks_usable(no_peers: None) -> None:
    module, _, reducer = build(FailingReducer)
    with pytest.raises(RuntimeError, match="peer closed"):
        reducer.drive(lambda: module(torch.ones(1, 16)).backward())
    assert not reducer.is_reduced


def test_removing_leaves_no_hook_behind(no_peers: None) -> None:
    module, recorder, reducer = build()
    reducer.remove()
    module(torch.ones(1, 16)).backward()
    assert recorder.journal == []
    assert recorder.is_closed


# -- stores that keep no param.grad -----------------------------------------------------------------------------------


def alone(module: nn.Module, store: str, **options: Any) -> tuple[Any, GradientReducer]:
    """One rank: gradients of bf16 parameters add up in fp32."""
    flat = flat_group(module, dtype=torch.bfloat16, bucket_numel=256)
    if store == "whole":
        kept: Any = WholeGradients(flat, LocalReducer(flat.layout.numel, torch.float32, CPU), is_scattered=False)
    else:
        pool = LocalReduceScatterer(largest_bucket_numel(flat), torch.bfloat16, CPU)
        kept = ShardedGradients(flat, pool, torch.float32)
    flat.attach_gradients(kept)
    return kept, GradientReducer([flat], pretend_axis(1), **{"is_boundary": lambda: True, **options})


@pytest.mark.parametrize("store", ["whole", "sharded"])
@pytest.mark.parametrize("is_driven", [True, False])
def test_micro_batches_add_up_in_the_store_and_not_in_param_grad(store: str, is_driven: bool) -> None:
    module: Any = Chain()
    values = [1.0, 2.0**-10, 2.0**-10]  # 1 + 2**-10 is 1 in bf16
    kept, reducer = alone(module, store, is_boundary=lambda: not values)
    while values:
        value = values.pop(0)
        loss = torch.stack([layer.weight.sum() for layer in module.layers[:2]]).sum() * value
        if is_driven:
            reducer.drive(lambda loss=loss: loss.backward())
        else:
            loss.backward()
        assert all(p.grad is None for p in module.parameters())
    reducer.ensure_reduced()
    assert kept.shards()[0].unique().tolist() == [0.0, 1.0 + 2 * 2.0**-10]


@pytest.mark.parametrize("store", ["whole", "sharded"])
def test_gradients_leave_autograd_while_backward_still_runs(store: str) -> None:
    module = Chain().bfloat16()
    _, reducer = alone(module, store, is_boundary=lambda: False)
    seen: list[int] = []
    first: Any = module.layers[0]
    first.weight.register_hook(lambda _: seen.append(sum(p.grad is not None for p in module.parameters())))
    for _ in range(2):
        reducer.drive(lambda: module(torch.ones(1, 16, dtype=torch.bfloat16)).backward())
    assert seen == [0, 0]


@pytest.mark.parametrize("store", ["whole", "sharded"])
def test_a_gradient_that_arrives_twice_in_one_backward_counts_twice(store: str) -> None:
    from torch.utils.checkpoint import checkpoint

    module: Any = Chain()
    kept, reducer = alone(module, store)
    x = torch.ones(1, 16, requires_grad=True, dtype=torch.bfloat16)

    def layer(x: Tensor) -> Tensor:
        return x + module.layers[2].weight.sum() * 0.5

    for _ in range(2):  # the second window goes like the first
        reducer.drive(
            lambda: checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True).sum().backward()
        )
        assert kept.shards()[0][:256].unique().tolist() == [2 * 16 * 0.5]
        kept.close_window()
        reducer.close_window()


# -- parameters that must be used -------------------------------------------------------------------------------------


def test_a_parameter_without_a_gradient_since_the_last_update_is_named(no_peers: None) -> None:
    module, _, reducer = build(allows_unused=False)
    whole: Any = lambda: module(torch.ones(1, 16)).backward()  # noqa: E731
    first_only: Any = lambda: module.layers[0](torch.ones(1, 16)).sum().backward()  # noqa: E731
    reducer.drive(whole)
    reducer.drive(first_only)  # the others had theirs
    reducer.close_window()
    with pytest.raises(UsageError, match=r"2 of 3 parameters .* 'layers\.1\.weight', 'layers\.2\.weight'; .*ignore_unused"):
        reducer.drive(first_only)


def test_parameters_may_have_their_gradients_in_different_backwards_of_one_update(no_peers: None) -> None:
    module, _, reducer = build(is_boundary=lambda: False, allows_unused=False)
    for layer in module.layers:
        reducer.drive(lambda layer=layer: layer(torch.ones(1, 16)).sum().backward())
    reducer.ensure_reduced()
    reducer.close_window()
    with pytest.raises(UsageError, match="3 of 3 parameters"):
        reducer.ensure_reduced()


def test_reducing_later_or_once_more_finds_no_parameter_unused(no_peers: None) -> None:
    module, recorder, reducer = build(is_boundary=lambda: False, allows_unused=False)
    reducer.drive(lambda: module(torch.ones(1, 16)).backward())
    reducer.ensure_reduced()  # what `no_sync` and unmanaged accumulation leave to the update
    reducer.reduce()
    assert recorder.journal == (LAUNCHES + WAITS) * 2
