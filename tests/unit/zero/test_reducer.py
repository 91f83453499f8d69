"""Buckets travel in one order, as early as is safe, and never twice without need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.zero import reducer as reducer_module
from deepspeed.zero.gradients import ViewGradients
from deepspeed.zero.reducer import GradientReducer
from tests.support.fake_reducers import FailingReducer, RecordingReducer, pretend_axis
from tests.support.flat_groups import flat_group


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
