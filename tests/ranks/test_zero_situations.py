"""What models and loops do that is hard to shard: in each situation every ZeRO stage trains as one process does.

Everything is fp64 and stepped by SGD, which, unlike Adam, shows a gradient that is off by a factor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.engines import config, make_engine, masters, model_weights, zero
from tests.support.models import Batches, Branching, Lora, Mlp, TiedGpt, TinyModel, WithEmptyParameter, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, Reference, relative_difference, train_reference

LAYOUTS: tuple[dict[str, Any], ...] = (
    zero(0, reduce_bucket_size=20),
    zero(1, reduce_bucket_size=20),
    zero(2, reduce_bucket_size=20),
    zero(2, overlap_comm=False),
    zero(3, stage3_param_persistence_threshold=0),
    zero(
        3,
        stage3_param_persistence_threshold=0,
        stage3_max_reuse_distance=0,
        stage3_prefetch_bucket_size=60,
        reduce_bucket_size=20,
    ),
)
WORLD_SIZES = (2, 3)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Drive = Callable[[Any, Batches, int], None]


def drive_plainly(engine: Any, batches: Batches, rank: int) -> None:
    """The ordinary loop."""
    for step in batches:
        for micro in step:
            engine.backward(engine(*micro[rank]))
            engine.step()


def compare(
    rank: int,
    layout: dict[str, Any],
    make: Callable[[], nn.Module],
    batches: Batches,
    *,
    drive: Drive = drive_plainly,
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD,
    accumulation: int | None = None,
    tolerance: float = FP64_ROUNDING,
) -> None:
    """Train `make()` by `drive` and `make()` in one plain process; weights and masters must agree."""
    wanted = train_reference(make(), optimizer, batches, unused_counts_as_zero=True)
    model = make()
    trained = optimizer([p for p in model.parameters() if p.requires_grad])
    steps = len(batches[0]) if accumulation is None else accumulation
    engine = make_engine(model, config(steps, **layout), optimizer=trained)
    drive(engine, batches, rank)
    assert_same(engine, wanted, tolerance)
    engine.destroy()


def assert_same(engine: Any, wanted: Reference, tolerance: float = FP64_ROUNDING) -> None:
    assert relative_difference(masters(engine), wanted.weights) <= tolerance
    assert relative_difference(model_weights(engine), wanted.model_weights) <= tolerance


def doubles(model_class: Callable[..., Any], *args: object) -> Callable[[], Any]:
    return functools.partial(build, model_class, *args, dtype=torch.float64)


def fed(model_class: Callable[..., Any], world_size: int, *args: object, steps: int = 3, micro_batches: int = 1) -> Batches:
    return make_batches(doubles(model_class, *args)(), steps, micro_batches, world_size)


def with_extra(batches: Batches, extra: Callable[[int, int], Sequence[Any]]) -> Any:
    """`batches` with `extra(step, rank)` appended to each."""
    return [
        [[(*batch, *extra(number, rank)) for rank, batch in enumerate(micro)] for micro in step]
        for number, step in enumerate(batches)
    ]


# -- models -----------------------------------------------------------------------------------------------------------


class Blocks(TinyModel):
    """Three blocks in a list, called in the order that the batch brings; number 9 stands for an error."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(self.VALUES, self.VALUES) for _ in range(3))
        self.head = nn.Linear(self.VALUES, self.VALUES)

    def forward(self, inputs: Tensor, targets: Tensor, order: Sequence[int] = (0, 1, 2)) -> Tensor:
        for number in order:
            if number == FAILS:
                raise MemoryError("as if out of memory in forward")
            inputs = torch.tanh(self.blocks[number](inputs))
        return F.mse_loss(self.head(inputs), targets)


FAILS = 9


class Recomputed(TinyModel):
    """Blocks under recomputation, the first of them twice."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(self.VALUES) for _ in range(2))
        self.head = nn.Linear(self.VALUES, self.VALUES)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()  # a reentrant recomputation without such an input gives no gradient
        for block in (*self.blocks, self.blocks[0]):
            inputs = checkpoint(block, inputs, use_reentrant=self.use_reentrant)
        return F.mse_loss(self.head(inputs), targets)


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


class Compiled(TinyModel):
    """Blocks of which one is compiled."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.before, self.block, self.head = Pair(self.VALUES), Pair(self.VALUES), nn.Linear(self.VALUES, self.VALUES)
        self.block.compile(backend=backend)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.block(self.before(inputs))), targets)


class Mixed(TinyModel):
    """Parameters of three dtypes, which the forward casts between; the loss is fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.middle, self.narrow = (nn.Linear(self.VALUES, self.VALUES) for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(inputs.double()))
        hidden = torch.tanh(self.middle(hidden.float()))
        return F.mse_loss(self.narrow(hidden.bfloat16()).float(), targets.float())


def mixed() -> Mixed:
    model = build(Mixed)
    model.wide.double()
    model.narrow.bfloat16()
    return model


class Shapes(TinyModel):
    """Parameters of no, one, two and three dimensions, of the root module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(self.VALUES))
        self.matrix = nn.Parameter(torch.randn(self.VALUES, 3))
        self.cube = nn.Parameter(torch.randn(3, 2, self.VALUES))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.scale * inputs + self.shift) @ self.matrix
        return F.mse_loss(torch.einsum("bi,ijv->bv", hidden, self.cube), targets)


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class EmptyModule(Mlp):
    """A module all of whose parameters have no elements, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.between = OnlyEmpty()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.between(torch.tanh(self.first(inputs)))), targets)


class One(TinyModel):
    """A single element: fewer than ranks."""

    VALUES = 1

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Linear(1, 1, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.slope(inputs), targets)


class Borrowing(Mlp):
    """Weights are used by other modules than the one that owns them, and by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(self.VALUES, self.VALUES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs @ self.lender.weight.t() + self.lender.bias
        weights = torch.cat([self.first.weight * 0.5, self.first.weight * 2.0])
        bias = torch.cat([self.first.bias, self.first.bias])
        left, right = torch.tanh(F.linear(hidden, weights, bias)).chunk(2, dim=1)
        return F.mse_loss(self.second(left * right), targets) + self.lender.weight.square().mean()


# -- situations: (rank, world size, layout) ----------------------------------------------------------------------------


def tied_weights(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    compare(rank, layout, doubles(TiedGpt), fed(TiedGpt, world_size, micro_batches=2))


def frozen_weights(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    compare(rank, layout, doubles(Lora), fed(Lora, world_size))


def a_module_called_several_times(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    batches = with_extra(fed(Blocks, world_size), lambda step, _: [(0, 1, 0, 2, 0)])
    compare(rank, layout, doubles(Blocks), batches)


def modules_skipped_by_data(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    orders = [(0, 1, 2), (0, 2), (1,), (), (0, 1, 2)]
    compare(rank, layout, doubles(Blocks), with_extra(fed(Blocks, world_size, steps=5), lambda step, _: [orders[step]]))


def a_module_used_on_one_rank_only(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    batches = [[[(*b[:2], r == n % world_size) for r, b in enumerate(m)] for m in s] for n, s in _numbered(world_size)]
    compare(rank, layout, doubles(Branching), batches)


def _numbered(world_size: int) -> Iterator[tuple[int, Any]]:
    return enumerate(fed(Branching, world_size, steps=4))


def a_branch_in_some_micro_batches_of_some_ranks(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    compare(rank, layout, doubles(Branching), fed(Branching, world_size, steps=4, micro_batches=3))


def forward_without_backward(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    def drive(engine: Any, batches: Batches, rank: int) -> None:
        for step in batches:
            kept = engine(*step[0][rank])  # its graph lives on while the other is used
            engine.backward(engine(*step[0][rank]))
            engine(*step[0][rank])
            engine.step()
            assert kept.requires_grad

    compare(rank, layout, doubles(TiedGpt), fed(TiedGpt, world_size), drive=drive)


def evaluation_between_steps(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    def drive(engine: Any, batches: Batches, rank: int) -> None:
        twin = doubles(TiedGpt)()
        for step in batches:
            for evaluating in (torch.inference_mode, torch.no_grad):
                engine.eval()
                with evaluating():
                    value = engine(*step[0][rank])
                engine.train()
                twin.load_state_dict({**masters(engine), "head.weight": masters(engine)["embedding.weight"]})
                assert abs(value.item() - twin(*step[0][rank]).item()) <= FP64_ROUNDING
            engine.backward(engine(*step[0][rank]))
            engine.step()

    compare(rank, layout, doubles(TiedGpt), fed(TiedGpt, world_size), drive=drive)


def recomputation(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    for use_reentrant in (False, True):
        make = doubles(Recomputed, use_reentrant)
        batches = fed(Recomputed, world_size, use_reentrant, micro_batches=2)
        compare(rank, layout, make, batches)
        compare(rank, layout, make, batches, drive=_plain_backward)


def _plain_backward(engine: Any, batches: Batches, rank: int) -> None:
    for step in batches:
        for micro in step:
            engine(*micro[rank]).backward()
            engine.step()


def plain_backward(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    compare(rank, layout, doubles(TiedGpt), fed(TiedGpt, world_size, micro_batches=2), drive=_plain_backward)


def mixed_dtypes(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    batches = make_batches(build(Mixed), 3, 1, world_size)
    # One bf16 weight that rounds to its neighbour moves by 2**-8 of its size; the wide layers follow its gradients.
    compare(rank, layout, mixed, batches, tolerance=2**-8)


def parameters_of_no_to_three_dimensions(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    compare(rank, layout, doubles(Shapes), fed(Shapes, world_size))


def parameters_without_elements(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    for model_class in (WithEmptyParameter, EmptyModule):
        compare(rank, layout, doubles(model_class), fed(model_class, world_size))


def a_compiled_block(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    backend = {2: "eager", 3: "aot_eager"}[world_size]
    compare(rank, layout, doubles(Compiled, backend), fed(Compiled, world_size, backend, steps=2))


def fewer_elements_than_ranks(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    compare(rank, layout, doubles(One), fed(One, world_size, micro_batches=2))


def weights_used_outside_their_module(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    compare(rank, layout, doubles(Borrowing), fed(Borrowing, world_size))


def several_backwards_per_step(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    def drive(engine: Any, batches: Batches, rank: int) -> None:
        for step in batches:
            for micro in step:
                engine.backward(engine(*micro[rank]) / len(step))
            engine.step()

    compare(rank, layout, doubles(TiedGpt), fed(TiedGpt, world_size, micro_batches=3), drive=drive, accumulation=1)


def two_losses_of_one_graph(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    def drive(engine: Any, batches: Batches, rank: int) -> None:
        for step in batches:
            loss = engine(*step[0][rank])
            engine.backward(loss * 0.25, retain_graph=True)
            (loss * 0.75).backward()
            engine.step()

    compare(rank, layout, doubles(TiedGpt), fed(TiedGpt, world_size), drive=drive)


def groups_with_rates_of_their_own(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        kept = list(params)
        groups = [
            {"params": kept[::3], "lr": 0.2},
            {"params": kept[1::3], "weight_decay": 0.1},
            {"params": kept[2::3], "lr": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    compare(rank, layout, doubles(TiedGpt), fed(TiedGpt, world_size), optimizer=optimizer)


def modules_in_another_order_each_step(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1), (0, 1, 2), (0, 1, 2)]
    compare(rank, layout, doubles(Blocks), with_extra(fed(Blocks, world_size, steps=6), lambda step, _: [orders[step]]))


class Bomb(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise MemoryError("as if out of memory in backward")


def _plant_bomb(_: nn.Module, __: Any, output: Tensor) -> Any:
    return Bomb.apply(output)  # type: ignore[no-untyped-call]


def exceptions_in_forward_and_backward(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    def drive(engine: Any, batches: Batches, rank: int) -> None:
        for step in batches:
            with pytest.raises(MemoryError, match="in forward"):
                engine(*step[0][rank][:2], (0, FAILS))
            for backward in (engine.backward, torch.autograd.backward):
                handle = engine.module.blocks[1].register_forward_hook(_plant_bomb)
                loss = engine(*step[0][rank])
                handle.remove()
                with pytest.raises(MemoryError, match="in backward"):
                    backward(loss)
                engine.zero_grad()
            engine.backward(engine(*step[0][rank]))
            engine.step()

    compare(rank, layout, doubles(Blocks), fed(Blocks, world_size), drive=drive)


def two_engines_in_one_loss(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    class Both(nn.Module):
        def __init__(self, first: Any, second: Any) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, inputs: Tensor, _: Tensor) -> Tensor:
            hidden: Tensor = self.second(torch.tanh(self.first(inputs)))
            return hidden.square().mean()

    def pairs() -> list[Any]:
        make: Any = build
        return [make(Pair, Mlp.VALUES, dtype=torch.float64, seed=seed) for seed in (1, 2)]

    batches = fed(Mlp, world_size, steps=4)
    wanted = train_reference(Both(*pairs()), SGD, batches)
    engines = [make_engine(pair, config(**layout), optimizer=SGD(pair.parameters())) for pair in pairs()]
    both = Both(*engines)
    for number, step in enumerate(batches):
        loss = both(*step[0][rank])
        if number % 2:
            loss.backward()
        else:
            engines[1].backward(loss)
        for engine in engines:
            engine.step()
    got = {
        f"{name}.{n}": w
        for name, engine in zip(("first", "second"), engines, strict=True)
        for n, w in masters(engine).items()
    }
    assert relative_difference(got, wanted.weights) <= FP64_ROUNDING
    for engine in engines:
        engine.destroy()


SITUATIONS = (
    tied_weights,
    frozen_weights,
    a_module_called_several_times,
    modules_skipped_by_data,
    a_module_used_on_one_rank_only,
    a_branch_in_some_micro_batches_of_some_ranks,
    forward_without_backward,
    evaluation_between_steps,
    recomputation,
    plain_backward,
    mixed_dtypes,
    parameters_of_no_to_three_dimensions,
    parameters_without_elements,
    a_compiled_block,
    fewer_elements_than_ranks,
    weights_used_outside_their_module,
    several_backwards_per_step,
    two_losses_of_one_graph,
    groups_with_rates_of_their_own,
    modules_in_another_order_each_step,
    exceptions_in_forward_and_backward,
    two_engines_in_one_loss,
)


def _in_every_layout(rank: int, world_size: int, situation: Callable[..., None], layouts: Sequence[dict[str, Any]]) -> None:
    for layout in layouts:
        try:
            situation(rank, world_size, layout)
        except BaseException as error:
            raise AssertionError(f"with {layout}") from error


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_every_stage_trains_as_one_process_does(situation: Callable[..., None], world_size: int) -> None:
    run_ranks(_in_every_layout, world_size, situation, LAYOUTS, timeout_seconds=120)
