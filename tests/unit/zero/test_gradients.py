"""The three stores give the mean over ranks of the sum over micro-batches, whatever happens before the update."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepspeed.comm.algorithms import LocalReducer, LocalReduceScatterer
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.gradient_store import GradientStore
from deepspeed.zero.gradients import ShardedGradients, ViewGradients, WholeGradients, largest_bucket_numel
from tests.support.fake_reducers import Lockstep
from tests.support.flat_groups import CPU, flat_group, lockstep_groups

SHAPES = {"a": (5, 3), "b": (4,), "empty": (0, 3), "scalar": (), "c": (40, 3), "d": (2, 7)}
"""With buckets of 64 elements and two places in the pool, buckets of different sizes share a place."""


class Ranks:
    """Twins on `world_size` ranks that take turns, each with its store."""

    def __init__(
        self, kind: str, world_size: int, *, dtype: torch.dtype = torch.float32, to: torch.dtype | None = None
    ) -> None:
        module = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})
        self.modules: list[nn.Module] = [copy.deepcopy(module) for _ in range(world_size)]
        self.flats = lockstep_groups(self.modules, dtype=dtype, bucket_numel=64)
        first = self.flats[0]
        places = min(2, len(first.layout.buckets)) if kind == "sharded" else 0
        numel = places * largest_bucket_numel(first) if places else first.layout.numel
        self.shared = Lockstep(world_size, numel, dtype if places else to or dtype)
        self.stores = [self._store(kind, flat, to or dtype) for flat in self.flats]
        for flat, store in zip(self.flats, self.stores, strict=True):
            flat.attach_gradients(store)
        self.buckets = range(len(first.layout.buckets))

    def _store(self, kind: str, flat: FlatGroup, to: torch.dtype) -> GradientStore:
        scatterer = self.shared.scatterer(flat.axis.rank)
        if kind == "sharded":
            return ShardedGradients(flat, scatterer, to)
        return WholeGradients(flat, scatterer, is_scattered=True)

    def give(self, gradients: list[dict[str, Tensor]]) -> None:
        """Add `gradients[rank]` to `param.grad`, as autograd does."""
        for module, of_rank in zip(self.modules, gradients, strict=True):
            for name, gradient in of_rank.items():
                param = module.get_parameter(name)
                given = gradient.to(param.dtype)
                param.grad = given.clone() if param.grad is None else param.grad + given

    def collect(self) -> None:
        for number in self.buckets:
            for store in self.stores:
                store.collect(number)

    def reduce(self) -> None:
        """All buckets, each launched by all ranks before the next; waited for at the end."""
        for number in self.buckets:
            for store in self.stores:
                store.collect(number)
                store.launch(number)
        for number in reversed(self.buckets):
            for store in self.stores:
                store.wait(number)

    def mean(self) -> dict[str, Tensor]:
        """What the ranks' shards say together, read as the optimizer reads it; padding must be zero."""
        found = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
        for flat, store in zip(self.flats, self.stores, strict=True):
            held = 0.0
            for position, slot in enumerate(flat.layout.slots):
                for f in flat.own_parts(position):
                    shard = store.shard(f.buffer_start, f.buffer_start + f.numel)
                    found[flat.members[slot.index].name].view(-1)[f.param_start : f.param_start + f.numel] = shard
                    held += shard.double().square().sum().item()
            everything = sum(shard.double().square().sum().item() for shard in store.shards())
            assert everything == pytest.approx(held, rel=1e-12), "padding counts in the norm"
        return found

    def close_window(self) -> None:
        for store in self.stores:
            store.close_window()


def gradients_of(
    seed: int, world_size: int, absent: Callable[[int, str], bool] = lambda *_: False
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(world_size)]
    return [{n: g for n, g in of.items() if not absent(rank, n)} for rank, of in enumerate(made)]


def mean_of(*micro_batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    world_size = len(micro_batches[0])
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for micro in micro_batches:
        for of_rank in micro:
            for name, gradient in of_rank.items():
                total[name] += gradient.double() / world_size
    return total


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-6) -> None:
    for name, wanted in want.items():  # fp32: some four roundings of 6e-8, relative to values that may cancel to about 0.1
        torch.testing.assert_close(got[name].double(), wanted, rtol=rtol, atol=rtol)


KINDS = ["whole", "sharded"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_window_after_window_gives_the_mean(kind: str, world_size: int) -> None:
    ranks = Ranks(kind, world_size)
    for window in range(3):
        micro = gradients_of(window, world_size)
        ranks.give(micro)
        ranks.reduce()
        assert_equal(ranks.mean(), mean_of(micro))
        assert all(p.grad is None for module in ranks.modules for p in module.parameters())
        ranks.close_window()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_reductions_within_a_window_add_up(kind: str, world_size: int) -> None:
    ranks = Ranks(kind, world_size)
    for window in range(2):
        micros = [gradients_of(10 * window + number, world_size) for number in range(3)]
        for micro in micros:
            ranks.give(micro)
            ranks.reduce()
        assert_equal(ranks.mean(), mean_of(*micros))
        ranks.reduce()  # once more without anything new: nothing changes
        assert_equal(ranks.mean(), mean_of(*micros))
        ranks.close_window()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_collected_several_times_before_a_reduction_adds_up(world_size: int) -> None:
    ranks = Ranks("whole", world_size)
    for window in range(2):
        micros = [gradients_of(10 * window + number, world_size) for number in range(4)]
        for micro in micros[:2]:
            ranks.give(micro)
            ranks.collect()
        ranks.reduce()
        ranks.give(micros[2])
        ranks.collect()
        ranks.give(micros[3])
        ranks.reduce()
        assert_equal(ranks.mean(), mean_of(*micros))
        ranks.close_window()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_a_gradient_count_as_zero_and_not_as_what_was_there(kind: str, world_size: int) -> None:
    ranks = Ranks(kind, world_size)
    absences: list[Callable[[int, str], bool]] = [
        lambda rank, name: False,
        lambda rank, name: rank == 0,
        lambda rank, name: name in ("a", "c"),
        lambda rank, name: True,
        lambda rank, name: (rank + len(name)) % 2 == 0,
    ]
    for window, absent in enumerate(absences):
        micro = gradients_of(window, world_size, absent)
        ranks.give(micro)
        ranks.reduce()
        assert_equal(ranks.mean(), mean_of(micro))
        ranks.close_window()


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_that_nothing_reached_is_zero(kind: str) -> None:
    ranks = Ranks(kind, 2)
    ranks.give(gradients_of(0, 2))
    ranks.reduce()
    ranks.close_window()
    if kind == "whole":
        ranks.reduce()
    for store in ranks.stores:
        assert all(bool((shard == 0).all()) for shard in store.shards())


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_gradients_leave_no_trace(kind: str) -> None:
    ranks = Ranks(kind, 2)
    ranks.give(gradients_of(0, 2))
    ranks.reduce()
    ranks.give(gradients_of(1, 2))
    for store in ranks.stores:
        store.drop()
    micro = gradients_of(2, 2)
    ranks.give(micro)
    ranks.reduce()
    assert_equal(ranks.mean(), mean_of(micro))


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_are_taken_over_whole(kind: str) -> None:
    ranks = Ranks(kind, 2)
    rows = torch.tensor([[0, 4, 4]])
    sparse = torch.sparse_coo_tensor(rows, torch.ones(3, 3), (5, 3))
    for module in ranks.modules:
        module.get_parameter("a").grad = sparse.clone()
    ranks.reduce()
    assert_equal(ranks.mean(), {"a": sparse.to_dense().double()})


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_a_graph_are_taken_over_without_it(kind: str) -> None:
    ranks = Ranks(kind, 2)
    for module in ranks.modules:
        param = module.get_parameter("a")
        (param**3).sum().backward(create_graph=True)  # type: ignore[no-untyped-call]
    wanted = {"a": 3 * ranks.modules[0].get_parameter("a").detach().double() ** 2}
    ranks.reduce()
    assert_equal(ranks.mean(), wanted)
    assert not any(shard.requires_grad for store in ranks.stores for shard in store.shards())


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bit_gradients_add_up_in_the_accumulation_dtype(kind: str) -> None:
    ranks = Ranks(kind, 2, dtype=torch.bfloat16, to=torch.float32)
    tiny, one = 2.0**-10, 1.0  # 1 + 2**-10 is 1 in bf16
    for value in (one, tiny, tiny):
        ranks.give([{"a": torch.full((5, 3), value)} for _ in range(2)])
        ranks.collect() if kind == "whole" else ranks.reduce()
    if kind == "whole":
        ranks.reduce()
    assert ranks.stores[0].dtype == torch.float32
    assert torch.equal(ranks.mean()["a"], torch.full((5, 3), one + 2 * tiny))


# -- views ------------------------------------------------------------------------------------------------------------


def view_store(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[FlatGroup, ViewGradients]:
    flat = flat_group(module, dtype=dtype)
    store = ViewGradients(flat, LocalReducer(flat.layout.numel, dtype, CPU))
    flat.attach_gradients(store)
    return flat, store


def test_autograd_accumulates_into_the_buffer_in_place() -> None:
    module = nn.Linear(3, 1, bias=False)
    _, store = view_store(module)
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
    assert store.buffer_F[:3].tolist() == [2.0, 2.0, 2.0]
    assert store.buffer_F[3:].abs().sum() == 0


def test_a_gradient_that_the_user_replaced_is_the_truth() -> None:
    module = nn.Linear(3, 1, bias=False)
    _, store = view_store(module)
    module(torch.ones(1, 3)).sum().backward()
    module.zero_grad()
    store.collect(0)
    assert store.buffer_F.abs().sum() == 0
    module.weight.grad = torch.full((1, 3), 4.0)
    store.collect(0)
    assert store.buffer_F[:3].tolist() == [4.0, 4.0, 4.0]
    module(torch.ones(1, 3)).sum().backward()
    assert store.buffer_F[:3].tolist() == [5.0, 5.0, 5.0]


def test_a_gradient_that_came_with_a_graph_moves_into_the_buffer() -> None:
    module = nn.Linear(3, 1, bias=False)
    _, store = view_store(module)
    for _ in range(2):
        (module.weight**2).sum().backward(create_graph=True)  # type: ignore[no-untyped-call]
        store.collect(0)
    assert torch.equal(store.buffer_F[:3], 4 * module.weight.detach().view(-1))
    assert module.weight.grad is not None
    assert not module.weight.grad.requires_grad


def test_a_sparse_gradient_moves_into_the_buffer_even_after_zero_grad() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    _, store = view_store(module)
    module(torch.tensor([1, 1])).sum().backward()
    store.collect(0)
    assert store.buffer_F[:8].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]
    module.zero_grad()  # set to none: autograd's next gradient is a sparse tensor of its own
    module(torch.tensor([3])).sum().backward()
    store.collect(0)
    assert store.buffer_F[:8].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


def test_parameters_without_elements_are_collected_like_all_others() -> None:
    module = nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 4)), "full": nn.Parameter(torch.ones(3))})
    _, store = view_store(module)
    (module["empty"].sum() + module["full"].sum()).backward()
    for number in range(1):
        store.collect(number)
    module.zero_grad()
    store.collect(0)
    assert [tuple(p.grad.shape) for p in module.parameters() if p.grad is not None] == [(0, 4), (3,)]


def test_spent_ranges_are_zero_and_dropping_points_every_parameter_back() -> None:
    module = nn.Linear(3, 1, bias=False)
    flat, store = view_store(module)
    module(torch.ones(1, 3)).sum().backward()
    store.spend(0, flat.layout.shard_numel)
    assert store.buffer_F.abs().sum() == 0
    module.zero_grad()
    module(torch.ones(1, 3)).sum().backward()
    store.drop()
    module(torch.ones(1, 3)).sum().backward()
    assert store.buffer_F[:3].tolist() == [1.0, 1.0, 1.0]


# -- one rank alone ---------------------------------------------------------------------------------------------------


def test_another_accumulation_dtype_takes_gradients_over_and_drops_them() -> None:
    module = nn.Linear(3, 1, bias=False)
    flat = flat_group(module, dtype=torch.bfloat16)
    store = WholeGradients(flat, LocalReducer(flat.layout.numel, torch.float32, CPU), is_scattered=False)
    for _ in range(2):
        module(torch.full((1, 3), 0.1, dtype=torch.bfloat16)).sum().backward()
        store.collect(0)
        assert module.weight.grad is None
    once = torch.tensor(0.1, dtype=torch.bfloat16).float().item()
    assert store.shard(0, 3).tolist() == pytest.approx([2 * once] * 3, rel=1e-7)


def test_the_pool_of_one_rank_is_the_same_as_that_of_several() -> None:
    module = nn.Linear(3, 1, bias=False)
    flat = flat_group(module)
    store = ShardedGradients(flat, LocalReduceScatterer(largest_bucket_numel(flat), torch.float32, CPU), torch.float32)
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
        store.collect(0)
        store.launch(0)
        store.wait(0)
    assert store.shard(0, 3).tolist() == [2.0, 2.0, 2.0]


def test_a_closed_store_lets_its_buffers_go() -> None:
    ranks = Ranks("sharded", 2)
    scatterers = [ranks.shared.scatterer(rank) for rank in range(2)]
    stores = [
        ShardedGradients(flat, scatterer, torch.float32) for flat, scatterer in zip(ranks.flats, scatterers, strict=True)
    ]
    for store in stores:
        store.close()
    assert all(scatterer.is_closed for scatterer in scatterers)
