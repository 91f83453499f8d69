"""Stretches of layers: order, seeds, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.activations.checkpointing import checkpoint
from deepspeed.pipe.forward import Recomputation, Stretch, pass_seed


def _always(calls: Sequence[Callable[[Any], Any]]) -> bool:
    return True


KEEP = Recomputation(0, checkpoint, _always)


def test_a_layer_gets_what_the_one_before_gave_as_its_single_argument() -> None:
    stretch = Stretch([lambda x: (x, {"twice": 2 * x}), lambda pair: pair[1]["twice"] + pair[0]], 0, None, 0)
    assert stretch(torch.ones(1), KEEP).item() == 3


def test_each_layer_is_seeded_by_its_index_and_the_number_of_the_micro_batch() -> None:
    seeds: list[int] = []
    stretch = Stretch([torch.tanh, torch.tanh], first=5, seed=seeds.append, base_seed=100)
    for number in (7, None, -1, None):
        stretch(torch.ones(1), KEEP, number)
    assert seeds == [pass_seed(100, number, layer) for number in (7, 0, -1, 1) for layer in (5, 6)]


@pytest.mark.parametrize("base_seed", [0, 1, 1234, 2**40])
def test_no_two_passes_are_seeded_alike(base_seed: int) -> None:
    far = 10**9  # base seed x number would leave numpy's range
    numbers = [*range(-8, 64), *range(far, far + 64)]
    seeds = [pass_seed(base_seed, number, layer) for number in numbers for layer in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert 0 <= min(seeds) <= max(seeds) < 2**32


def test_a_recomputed_piece_sees_the_seeds_of_its_own_micro_batch() -> None:
    seeds: list[int] = []
    linear = nn.Linear(1, 1)
    stretch = Stretch([linear], first=0, seed=seeds.append, base_seed=10)
    recomputing = Recomputation(1, checkpoint, _always)
    first, second = (stretch(torch.ones(1), recomputing) for _ in range(2))
    wanted = [pass_seed(10, number, 0) for number in (0, 1)]
    assert seeds == wanted
    first.backward()
    second.backward()
    assert seeds == wanted * 2


def test_pieces_of_the_interval_are_recomputed_where_it_is_worthwhile() -> None:
    ran: list[tuple[int, type]] = []

    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        ran.append((len(inputs), type(inputs[0])))
        return function(*inputs)

    def worthwhile(calls: Sequence[Callable[[Any], Any]]) -> bool:
        asked.append(len(calls))
        return split in calls

    def split(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        return hidden, hidden + 1

    asked: list[int] = []
    stretch = Stretch([split, split, torch.stack, split, split], 0, None, 0)
    out = stretch(torch.zeros(1), Recomputation(2, run, worthwhile))
    assert asked == [2, 2, 1]
    assert ran == [(1, torch.Tensor), (2, torch.Tensor), (2, torch.Tensor)]  # a tuple is handed over one by one
    torch.testing.assert_close(out[1], torch.tensor([[1.0], [2.0]]))


def test_a_tuple_of_one_stays_a_tuple() -> None:
    stretch = Stretch([lambda x: (x,), lambda pair: pair[0].sum()], 0, None, 0)
    whole = torch.ones(2, requires_grad=True)
    assert stretch(whole, Recomputation(1, checkpoint, _always)).item() == 2


def test_nothing_is_recomputed_where_no_gradient_is_wanted() -> None:
    def refuse(function: Callable[..., Any], *inputs: Any) -> Any:
        raise AssertionError("recomputed")

    with torch.no_grad():
        assert Stretch([torch.square], 0, None, 0)(torch.ones(1), Recomputation(1, refuse, _always)).item() == 1
