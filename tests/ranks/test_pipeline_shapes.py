"""What travels between stages: any container, shapes that change, described once; and how much stays behind."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import PipelineError
from tests.support.engines import config, masters
from tests.support.pipelines import WIDTH, Block, Whole, layers, make_pipeline, own, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def _same_as_one_process(engine: Any, described: Any, batches: Any, **options: Any) -> None:
    reference = train_reference(Whole(described, **options), SGD, batches)  # of copies
    losses = train_pipeline(engine, batches)
    got = masters(engine)
    assert losses == pytest.approx(reference.losses, abs=FP64_ROUNDING)
    assert relative_difference(got, {name: reference.weights[name] for name in got}) <= FP64_ROUNDING


def _changing_lengths(rank: int, _world_size: int) -> list[int]:
    described = layers(2)
    engine = make_pipeline(described, 2, config(3, 2), optimizer=SGD)
    batches = token_batches(4, 3, 1, lengths=(5, 9, 3, 7))
    batches += token_batches(1, 3, 1, rows=1)  # a ragged last batch
    _same_as_one_process(engine, described, batches)
    counts = [engine._transport.handshakes]
    train_pipeline(engine, batches)
    counts.append(engine._transport.handshakes)
    for _ in range(2):
        engine.eval_batch(iter(next(own(batches, 0))))
        counts.append(engine._transport.handshakes)
    engine.reset_activation_shape()
    train_pipeline(engine, batches[:1])
    return [*counts, engine._transport.handshakes]


def test_lengths_may_change_and_each_is_described_once() -> None:
    first, last = run_ranks(_changing_lengths, 2)
    assert first == [5, 5, 8, 8, 11], "4 lengths and the ragged one; none again; 3 in evaluation, once; 3 after a reset"
    assert last == [0] * 5


def _no_handshake(rank: int, _world_size: int) -> list[int]:
    engine = make_pipeline(layers(2), 3, config(4, 2), optimizer=SGD)
    counts = []
    for _ in range(3):
        train_pipeline(engine, token_batches(1, 4, 1))
        counts.append(engine._transport.handshakes)
    return counts


def test_shapes_that_stay_are_described_once_per_run() -> None:
    assert run_ranks(_no_handshake, 3) == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


class Spread(nn.Module):
    """One tensor becomes a nesting of several, of other dtypes, and of plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 3, dtype=torch.float64)
        nn.init.constant_(self.widen.weight, 0.1)
        nn.init.constant_(self.widen.bias, 0.2)

    def forward(self, x: Tensor) -> Any:
        mask = x[..., 0] > 0
        return x * 2, {"narrow": self.widen(x), "mask": mask, "length": x.shape[1]}, [None, mask.sum(1), x.detach().float()]


class Pass(nn.Module):
    """Uses some of it and hands all of it on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5, dtype=torch.float64))

    def forward(self, given: Any) -> Any:
        x, named, (nothing, counts, plain) = given
        assert nothing is None
        assert named["mask"].dtype == torch.bool
        assert named["length"] == x.shape[1]
        assert counts.dtype == torch.int64
        assert plain.dtype == torch.float32
        assert not plain.requires_grad
        return x, {**named, "narrow": named["narrow"] * self.scale}, [nothing, counts, plain]


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 0.5, dtype=torch.float64))

    def forward(self, given: Any) -> Tensor:
        x, named, (_, counts, plain) = given
        kept: Tensor = torch.where(named["mask"], x.sum(-1), named["narrow"].sum(-1)) * self.scale
        return kept + plain.sum(-1).double() + counts.unsqueeze(1)


def _square(out: Tensor, labels: Tensor) -> Tensor:
    return (out - labels).square().mean()


def _float_batches(steps: int, micro_batches: int) -> Any:
    generator = torch.Generator().manual_seed(3)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        length = 3 + number % 2
        x = torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)
        return x, torch.randn(2, length, generator=generator, dtype=torch.float64)

    return [[[batch(micro)] for micro in range(micro_batches)] for _ in range(steps)]


def _nested(rank: int, _world_size: int) -> None:
    described = [Block(0, torch.float64), Spread(), Pass(), Pass(), Join()]
    engine = make_pipeline(described, 3, config(3, 2), optimizer=SGD, loss_fn=_square, partition_method=[3, 1, 2, 2, 3])
    _same_as_one_process(engine, described, _float_batches(3, 3), loss_fn=_square)


def test_nested_containers_masks_and_plain_values_travel() -> None:
    run_ranks(_nested, 3)


class InPlace(nn.Module):
    """Puts what it computes into the container that it was given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed, torch.float64)

    def forward(self, given: Any) -> Any:
        given[0]["h"] = self.block(given[0]["h"])
        return given


def _wrapped(x: Tensor) -> Any:
    return [{"h": x}]


def _unwrapped(given: Any) -> Tensor:
    h: Tensor = given[0]["h"]
    return h


def _changed_in_place(rank: int, _world_size: int, interval: int) -> None:
    described = [Block(9, torch.float64), _wrapped, *(InPlace(seed) for seed in range(4)), _unwrapped]
    options = {"partition_method": [3, 0, 1, 1, 1, 1, 0], "activation_checkpoint_interval": interval}
    loss_fn = _mean_square
    engine = make_pipeline(described, 2, config(3, 2), optimizer=SGD, loss_fn=loss_fn, **options)
    _same_as_one_process(engine, described, _float_batches(3, 3), loss_fn=loss_fn)


def _mean_square(out: Tensor, labels: Tensor) -> Tensor:
    return (out.mean(-1) - labels).square().mean()


@pytest.mark.parametrize("interval", [0, 2])
def test_layers_may_change_the_container_that_they_get(interval: int) -> None:
    run_ranks(_changed_in_place, 2, interval)


def _conjugated(x: Tensor) -> Tensor:
    return torch.complex(x, 2 * x).conj()


def _both_parts(z: Tensor) -> Tensor:
    z = z.conj() * (1 + 3j)  # its gradient is conjugated, too
    return z.real + z.imag


def _complex(rank: int, _world_size: int) -> None:
    described = layers(2, tied=False)
    described[3:3] = [_conjugated, _both_parts]
    engine = make_pipeline(described, 2, config(2, 2), optimizer=SGD, partition_method="uniform")
    assert engine.module.parts == [0, 4, 7]
    _same_as_one_process(engine, described, token_batches(2, 2, 1))


def test_conjugates_travel_with_their_values() -> None:
    run_ranks(_complex, 2)


class Picked(nn.Module):
    """As many rows as the values say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 1 + int(x[0, 0, 0] > x[0, 0, 1])]


def _by_values(rank: int, _world_size: int, is_dynamic: bool) -> str:
    described = [Block(0, torch.float64), Picked(), Block(1, torch.float64)]
    engine = make_pipeline(
        described,
        2,
        config(8, 2),
        optimizer=SGD,
        loss_fn=lambda out, _: out.square().mean(),
        dynamic_shape=is_dynamic,
        partition_method=[1, 1, 2],
    )
    batches = [[[(batch[0][0][:, :3], None)] for batch in step] for step in _float_batches(2, 8)]
    try:
        if is_dynamic:
            _same_as_one_process(engine, described, batches, loss_fn=lambda out, _: out.square().mean())
        else:
            train_pipeline(engine, batches)
    except PipelineError as error:
        return str(error)
    return ""


def test_shapes_that_depend_on_values_need_dynamic_shape_and_say_so() -> None:
    assert run_ranks(_by_values, 2, True) == ["", ""]
    for text in run_ranks(_by_values, 2, False):
        assert "stage 0 (rank 0) failed in the forward of micro-batch" in text
        assert "Build the PipelineModule with dynamic_shape=True" in text


def _live(rank: int, _world_size: int, schedule: str) -> tuple[int, int]:
    """The most activations of a batch, by the executor's count and by autograd's."""
    engine = make_pipeline(layers(4), 3, config(6, 2, pipeline={"schedule": schedule}), optimizer=SGD)
    batch = next(own(token_batches(1, 6, 1), 0))
    engine.train_batch(iter(batch))
    runs = []
    made = engine._batch_run
    engine._batch_run = lambda *args, **kwargs: runs.append(made(*args, **kwargs)) or runs[-1]  # type: ignore[method-assign]
    alive: set[int] = set()
    most = 0

    def pack(tensor: Tensor) -> Any:
        nonlocal most
        token = Token()
        alive.add(id(token))
        most = max(most, len(alive))
        return token, tensor

    class Token:
        def __del__(self) -> None:
            alive.discard(id(self))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
        engine.train_batch(iter(batch[:1] * 6))
    tensors_of_one = _saved_by_one(engine, batch)
    return runs[0].most_live, -(-most // tensors_of_one)


def _saved_by_one(engine: Any, batch: Any) -> int:
    """How many tensors autograd keeps for one micro-batch in this stage."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda packed: packed):
        engine.micro_batches = 1
        engine.train_batch(iter(batch))
    return len(saved)


def test_1f1b_keeps_no_more_activations_than_stages_follow_and_gpipe_keeps_all() -> None:
    assert run_ranks(_live, 3, "1f1b") == [(3, 3), (2, 2), (1, 1)]
    assert run_ranks(_live, 3, "gpipe") == [(6, 6)] * 3
