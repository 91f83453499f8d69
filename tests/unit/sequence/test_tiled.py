"""Tiles give the numbers of the plain call: outputs, gradients, dropout, autocast, checkpoints, hooks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.harness.live_bytes import LiveBytes
from deepspeed import checkpointing
from deepspeed.errors import ArgumentError
from deepspeed.sequence.tiled import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from deepspeed.sequence.tiles import leaves_of, tile_ranges

TILES = (1, 2, 3, 7)
LENGTHS = (21, 20, 5)
ROUNDING = 1e-12
"""fp64 rounds at 1.1e-16; sums of at most 42 x 16 terms of size one in another order differ by less."""

WIDTH, INNER, VOCABULARY = 6, 16, 11


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def _build(kind: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(3)
    return kind(*args).double()


def _hidden(length: int, batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)


def _labels(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCABULARY, (batch, length), generator=generator)
    return labels.masked_fill(torch.rand(batch, length, generator=generator) < 0.4, -100)


def _outcome(output: Tensor, x: Tensor, module: nn.Module) -> list[Tensor]:
    """Output and gradients; forgets the gradients."""
    output.square().sum().backward()
    tensors = [x, *module.parameters()]
    found = [output.detach(), *(torch.zeros_like(each) if each.grad is None else each.grad for each in tensors)]
    for each in tensors:
        each.grad = None
    return found


def _assert_equal(found: list[Tensor], expected: list[Tensor], atol: float = ROUNDING) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


# -- MLP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_tiled_mlp_equals_the_plain_one(tiles: int, length: int) -> None:
    mlp, x = _build(Mlp), _hidden(length)
    expected = _outcome(mlp(x), x, mlp)
    _assert_equal(_outcome(TiledMLP.apply(Mlp.forward, mlp, x, tiles, list(mlp.parameters())), x, mlp), expected)


def test_no_list_of_parameters_is_needed_and_x_need_not_take_a_gradient() -> None:
    mlp, x = _build(Mlp), _hidden(9).detach()
    expected = _outcome(mlp(x), x, mlp)
    _assert_equal(_outcome(TiledMLP.apply(lambda _, tile: mlp(tile), None, x, 4), x, mlp), expected)


def test_frozen_parameters_get_no_gradient() -> None:
    mlp, x = _build(Mlp), _hidden(9)
    mlp.up.requires_grad_(False)
    TiledMLP.apply(Mlp.forward, mlp, x, 4).sum().backward()
    assert mlp.up.weight.grad is None
    assert mlp.gate.weight.grad is not None
    mlp.requires_grad_(False)
    assert not TiledMLP.apply(Mlp.forward, mlp, x.detach(), 4).requires_grad


def test_experts_that_only_some_tiles_use_get_their_gradient() -> None:
    experts = nn.ModuleList(_build(Mlp) for _ in range(3))
    x = _hidden(12)

    def routed(_: None, tile: Tensor) -> Tensor:
        choice = (tile.detach()[0, :, 0] > 0).long()
        return torch.stack([experts[int(each)](tile[:, place]) for place, each in enumerate(choice)], 1)

    expected = _outcome(routed(None, x), x, experts)
    _assert_equal(_outcome(TiledMLP.apply(routed, None, x, 5), x, experts), expected)
    TiledMLP.apply(routed, None, x, 5).sum().backward()
    assert experts[2].up.weight.grad is None  # nobody chose it, as in the plain run


def test_dropout_draws_the_same_numbers_in_backward_and_leaves_the_generator_alone() -> None:
    mlp, x = _build(Mlp, 0.5), _hidden(9)
    torch.manual_seed(5)
    output = TiledMLP.apply(Mlp.forward, mlp, x, 3)
    torch.manual_seed(5)
    plain = torch.cat([mlp(part) for part in x.split(3, 1)], 1)
    after = torch.get_rng_state()
    expected = _outcome(plain, x, mlp)
    torch.manual_seed(5)
    torch.rand(0)
    output_of_tiles = _outcome(output, x, mlp)
    _assert_equal(output_of_tiles, expected)
    torch.set_rng_state(after)
    TiledMLP.apply(Mlp.forward, mlp, x, 3).sum().backward()
    drawn = torch.rand(3)
    torch.set_rng_state(after)
    for part in x.split(3, 1):
        mlp(part)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("tiles", [1, 4])
def test_autocast_is_that_of_forward(tiles: int) -> None:
    mlp, x = _build(Mlp).float(), _hidden(16).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = mlp(x)
    expected = _outcome(output.float(), x, mlp)
    with torch.autocast("cpu", torch.bfloat16):
        tiled = TiledMLP.apply(Mlp.forward, mlp, x, tiles)
        again = mlp(x)  # the cache of casts still leads to the weights
    assert tiled.dtype is torch.bfloat16
    # the gradient of a weight is rounded to bf16 (2**-9) once, or once per tile: parts of up to 8 differ by 2**-6
    _assert_equal(_outcome(tiled.float(), x, mlp), expected, atol=0.0 if tiles == 1 else 4 * 2**-6)
    _assert_equal(_outcome(again.float(), x, mlp), expected, atol=0.0)


def test_sixteen_bit_gradients_are_added_up_in_fp32() -> None:
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    x = torch.ones(1, 512, 1, dtype=torch.bfloat16)
    TiledMLP.apply(lambda module, tile: module(tile), layer, x, 512).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.bfloat16
    assert layer.weight.grad.item() == 512  # bf16 sums of ones stop at 256


def test_a_checkpointed_part_that_ends_with_tiles_runs_them_twice() -> None:
    mlp, x = _build(Mlp, 0.5), _hidden(9)
    torch.manual_seed(5)
    expected = _outcome(x + TiledMLP.apply(Mlp.forward, mlp, x, 3), x, mlp)
    mlp.calls = 0
    torch.manual_seed(5)
    output = checkpointing.checkpoint(lambda given: given + TiledMLP.apply(Mlp.forward, mlp, given * 1.0, 3), x)
    _assert_equal(_outcome(output, x, mlp), expected)
    assert mlp.calls == 2 * 3


@pytest.mark.parametrize("form", ["checkpoint", "reentrant_checkpoint"])
def test_tiles_work_under_every_form_of_checkpointing(form: str) -> None:
    mlp, norm, x = _build(Mlp, 0.3), nn.LayerNorm(WIDTH).double(), _hidden(10)
    both = nn.ModuleList([mlp, norm])
    torch.manual_seed(5)
    expected = _outcome(norm(x + TiledMLP.apply(Mlp.forward, mlp, x, 3)), x, both)
    torch.manual_seed(5)
    run = getattr(checkpointing, form)
    output = run(lambda given: norm(given + TiledMLP.apply(Mlp.forward, mlp, given, 3)), x)
    _assert_equal(_outcome(output, x, both), expected)


def test_hooks_of_parameters_run_once_per_backward() -> None:
    mlp, x = _build(Mlp), _hidden(9)
    plain = _outcome(mlp(x), x, mlp)
    seen: list[str] = []
    mlp.up.weight.register_hook(lambda grad: seen.append("hook") or 2 * grad)
    mlp.up.weight.register_post_accumulate_grad_hook(lambda _: seen.append("stored"))
    tiled = _outcome(TiledMLP.apply(Mlp.forward, mlp, x, 4), x, mlp)
    assert seen == ["hook", "stored"]
    torch.testing.assert_close(tiled[2], 2 * plain[2], rtol=0, atol=ROUNDING)


def test_autograd_grad_and_several_backward_passes_work() -> None:
    mlp, x = _build(Mlp), _hidden(9)
    wanted = [x, mlp.down.weight]
    expected = torch.autograd.grad(mlp(x).square().sum(), wanted)
    loss = TiledMLP.apply(Mlp.forward, mlp, x, 4).square().sum()
    for _ in range(2):
        _assert_equal(list(torch.autograd.grad(loss, wanted, retain_graph=True)), list(expected))
    _assert_equal(list(torch.autograd.grad(loss, wanted[1:], retain_graph=True)), list(expected[1:]))
    _assert_equal(list(torch.autograd.grad(loss, wanted[:1])), list(expected[:1]))


def test_without_gradients_nothing_is_kept() -> None:
    mlp, x = _build(Mlp), _hidden(9)
    with torch.no_grad():
        output = TiledMLP.apply(Mlp.forward, mlp, x, 4)
    assert not output.requires_grad
    torch.testing.assert_close(output, mlp(x).detach(), rtol=0, atol=ROUNDING)


def test_an_mlp_keeps_its_input_alone_and_a_tile_at_a_time() -> None:
    tokens, tiles = 1024, 8
    mlp, x = Mlp(), torch.randn(1, tokens, WIDTH, requires_grad=True)
    for each in (x, *mlp.parameters()):
        each.grad = torch.zeros_like(each)
    with LiveBytes() as live:
        output = TiledMLP.apply(Mlp.forward, mlp, x, tiles)
        assert live.now_nbytes <= output.nbytes + 64  # the generator's state is no operator's result
        forward_peak = live.peak_nbytes
        output.sum().backward()
    tile_nbytes = 4 * INNER * tokens // tiles
    assert forward_peak <= output.nbytes + 8 * tile_nbytes
    # backward: the output, its gradient, that of x, and one tile's
    assert live.peak_nbytes <= 3 * output.nbytes + 10 * tile_nbytes


def test_a_finished_tiling_is_freed_without_the_collector() -> None:
    mlp, x = _build(Mlp), _hidden(9)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            TiledMLP.apply(Mlp.forward, mlp, x * 1.0, 4).sum().backward()
            held = sum(param.grad.nbytes for param in (x, *mlp.parameters()) if param.grad is not None)
            assert live.now_nbytes <= held
    finally:
        gc.enable()


# -- any function -----------------------------------------------------------------------------------------------------


def _scaled_mlp(x: Tensor, scale: Tensor | None, shift: Tensor, mlp: Mlp) -> Tensor:
    return mlp(x if scale is None else x * scale) + shift


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("length", LENGTHS)
def test_keyword_arguments_are_cut_or_passed_with_their_gradients(tiles: int, length: int) -> None:
    mlp, x = _build(Mlp), _hidden(length)
    scale = _hidden(length, seed=7)[..., :1].detach().requires_grad_()
    start = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    holder = nn.ParameterList([nn.Parameter(scale), nn.Parameter(start)])
    both = nn.ModuleList([mlp, nn.Module()])
    both[1].held = holder

    def run(apply: Callable[..., Tensor]) -> list[Tensor]:
        return _outcome(apply(x=x, scale=holder[0] * 2.0, shift=holder[1] * 3.0), x, both)

    expected = run(lambda **tensors: _scaled_mlp(**tensors, mlp=mlp))
    found = run(
        lambda x, scale, shift: sequence_tiled_compute(
            _scaled_mlp, length, tiles, {"x": x, "scale": scale}, {"shift": shift, "mlp": mlp}, "x", None, 1, None
        )
    )
    _assert_equal(found, expected)


def test_losses_of_tiles_are_averaged_by_tokens_or_added() -> None:
    head, x = _build(Head), _hidden(10)
    labels = torch.randint(VOCABULARY, (2, 10))

    def loss(x: Tensor, y: Tensor, head: Head) -> Tensor:
        return head.loss(x, y)

    arguments: tuple[Any, ...] = ({"x": x, "y": labels}, {"head": head}, "x", None, 0)
    mean = sequence_tiled_compute(loss, 10, 4, *arguments, "mean")
    _assert_equal(_outcome(mean, x, head), _outcome(head.loss(x, labels), x, head))
    total = sequence_tiled_compute(lambda x, y, head: head.loss(x, y) * y.numel(), 10, 4, *arguments, "sum")
    _assert_equal(_outcome(total, x, head), _outcome(head.loss(x, labels) * 20, x, head), atol=1e-10)  # values of 1,000


def test_what_is_none_stays_none_and_values_may_come_apart_from_keys() -> None:
    mlp, x = _build(Mlp), _hidden(6)
    shift = torch.zeros(WIDTH, dtype=torch.float64)
    output = SequenceTiledCompute.apply(
        _scaled_mlp, 6, 2, ["x", "scale"], ["shift", "mlp"], "x", None, 1, None, x, None, shift, mlp
    )
    torch.testing.assert_close(output, mlp(x), rtol=0, atol=ROUNDING)


def test_what_does_not_fit_is_told_with_the_cure() -> None:
    mlp, x = _build(Mlp), _hidden(6)
    with pytest.raises(ArgumentError, match=r"shape \(2, 6, 6\); needed seqlen=7"):
        sequence_tiled_compute(_scaled_mlp, 7, 2, {"x": x}, {}, "x", None, 1, None)
    with pytest.raises(
        ArgumentError, match=r"'hidden' is no tensor of kwargs_to_shard, which has \['hidden_states'\]. Give"
    ):
        sequence_tiled_compute(_scaled_mlp, 6, 2, {"hidden_states": x}, {}, "hidden", None, 1, None)
    with pytest.raises(ArgumentError, match="output_reduction=None"):
        sequence_tiled_compute(mlp, 6, 2, {"x": x}, {}, "x")
    with pytest.raises(ArgumentError, match="needed 3 along dimension 1"):
        sequence_tiled_compute(lambda x: mlp(x).sum(), 6, 2, {"x": x}, {}, "x", None, 1, None)
    with pytest.raises(ArgumentError, match="output_reduction='max'"):
        sequence_tiled_compute(mlp, 6, 2, {"x": x}, {}, "x", None, 1, "max")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at least 1"):
        TiledMLP.apply(Mlp.forward, mlp, x, 0)
    with pytest.raises(ArgumentError, match="needed one tensor"):
        TiledMLP.apply(lambda module, tile: (module(tile), None), mlp, x, 2)  # type: ignore[arg-type, return-value]
    with pytest.raises(ArgumentError, match="3 values for 1 keys to shard and 1 to pass"):
        SequenceTiledCompute.apply(_scaled_mlp, 6, 2, ["x"], ["mlp"], "x", None, 1, None, x, mlp, mlp)


@given(length=st.integers(0, 60), tiles=st.integers(1, 70))
def test_tiles_cover_the_sequence_evenly(length: int, tiles: int) -> None:
    ranges = tile_ranges(length, tiles)
    assert [each for start, stop in ranges for each in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert len(ranges) == max(1, min(tiles, length))


def test_leaves_are_found_once_each() -> None:
    mlp, x = _build(Mlp), _hidden(3)
    found = [node.variable for node in leaves_of(mlp(x) + mlp(x * 2))]
    assert {id(each) for each in found} == {id(each) for each in (x, *mlp.parameters())}
    assert len(found) == 6
    assert leaves_of(x.detach()) == []


# -- logits and loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_tiled_loss_equals_the_plain_one_with_labels_that_do_not_count(tiles: int, length: int) -> None:
    head, x, labels = _build(Head), _hidden(length), _labels(length)
    labels[:, : length // 2] = -100  # with more tiles, in some of them none counts
    expected = _outcome(head.loss(x, labels), x, head)
    loss = TiledFusedLogitsLoss.apply(Head.loss, head, x, labels, None, tiles, [head.head.weight], "mean")
    _assert_equal(_outcome(loss, x, head), expected)


def test_a_tiled_sum_is_what_clients_divide_themselves() -> None:
    head, x, labels = _build(Head), _hidden(10), _labels(10)

    def summed(model: Head, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden).flatten(0, 1), targets.flatten(), reduction="sum")

    loss = TiledFusedLogitsLoss.apply(summed, head, x, labels, None, 3, head.parameters(), "sum") / (labels != -100).sum()
    _assert_equal(_outcome(loss, x, head), _outcome(head.loss(x, labels), x, head))


def test_a_loss_against_other_hidden_states_weighs_every_position_and_gets_the_mask() -> None:
    head, x, teacher = _build(Head), _hidden(10), _hidden(10, seed=4)
    mask = torch.arange(10).expand(2, 10) < 7

    def distil(model: Head, hidden: Tensor, other: Tensor, counts: Tensor) -> Tensor:
        return ((model.head(hidden) - model.head(other)).square().sum(-1) * counts).mean()

    both = nn.ParameterList([teacher])
    everything = nn.ModuleList([head, both])
    expected = _outcome(distil(head, x, teacher, mask), x, everything)
    loss = TiledFusedLogitsLoss.apply(distil, head, x, teacher, mask, 3, None, "mean")
    _assert_equal(_outcome(loss, x, everything), expected)


def test_a_sequence_where_nothing_counts_has_loss_zero_and_gradients_of_zero() -> None:
    head, x = _build(Head), _hidden(10)
    labels = torch.full((2, 10), -100)
    found = _outcome(TiledFusedLogitsLoss.apply(Head.loss, head, x, labels, None, 3), x, head)
    assert all(each.abs().max() == 0 for each in found)
    assert head.head.weight.grad is None  # `_outcome` took it; it was there


def test_a_tiled_loss_keeps_no_logits_and_cuts_their_memory_by_the_tiles() -> None:
    tokens, tiles = 512, 16
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 1000, bias=False), torch.randn(1, tokens, 8)
    labels = torch.randint(1000, (1, tokens))

    def loss(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def peak(count: int) -> int:
        x = hidden.clone().requires_grad_()
        with LiveBytes() as live:
            TiledFusedLogitsLoss.apply(loss, head, x, labels, None, count).backward()
        head.weight.grad = None
        return live.peak_nbytes

    def plain() -> int:
        x = hidden.clone().requires_grad_()
        with LiveBytes() as live:
            loss(head, x, labels).backward()
        head.weight.grad = None
        return live.peak_nbytes

    other = 3 * (head.weight.nbytes + 2 * hidden.nbytes)  # gradients on their way, and those that stay
    assert peak(tiles) - other <= (plain() + other) / tiles


def test_a_loss_without_gradients_and_two_backward_passes() -> None:
    head, x, labels = _build(Head), _hidden(10), _labels(10)
    with torch.no_grad():
        loss = TiledFusedLogitsLoss.apply(Head.loss, head, x, labels, None, 4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, head.loss(x, labels).detach(), rtol=0, atol=ROUNDING)
    tiled = TiledFusedLogitsLoss.apply(Head.loss, head, x, labels, None, 4)
    first = torch.autograd.grad(tiled, x, retain_graph=True)[0]
    second = torch.autograd.grad(3.0 * tiled, x)[0]
    torch.testing.assert_close(3 * first, second, rtol=0, atol=ROUNDING)


def test_fp16_gradients_neither_vanish_nor_wait_for_the_loss_scale() -> None:
    torch.manual_seed(0)
    tokens = 2048
    head, x = nn.Linear(8, 64, bias=False), torch.randn(1, tokens, 8)
    labels = torch.randint(64, (1, tokens))

    def loss(model: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(hidden).float().flatten(0, 1), targets.flatten())

    wide = x.clone().requires_grad_()
    loss(head, wide, labels).backward()
    assert wide.grad is not None
    assert head.weight.grad is not None
    expected, of_head = wide.grad.clone(), head.weight.grad.clone()
    half, narrow = nn.Linear(8, 64, bias=False).half(), x.half().requires_grad_()
    half.load_state_dict(head.state_dict())
    (TiledFusedLogitsLoss.apply(loss, half, narrow, labels, None, 8) * 1024.0).backward()
    assert narrow.grad is not None
    assert half.weight.grad is not None
    # a gradient of 1e-4 is 0.1 after scaling: fp16 holds 11 bits of it, of which products and sums lose some
    torch.testing.assert_close(narrow.grad.double() / 1024, expected.double(), rtol=0.02, atol=1e-6)
    torch.testing.assert_close(half.weight.grad.double() / 1024, of_head.double(), rtol=0.02, atol=2e-5)


def test_a_tiled_loss_under_autocast_and_under_a_checkpoint() -> None:
    head, x, labels = _build(Head).float(), _hidden(12).detach().float().requires_grad_(), _labels(12)
    with torch.autocast("cpu", torch.bfloat16):
        plain = head.loss(x, labels)
    expected = _outcome(plain, x, head)
    with torch.autocast("cpu", torch.bfloat16):
        tiled = TiledFusedLogitsLoss.apply(Head.loss, head, x, labels, None, 3)
    rounding = 3 * 2**-8  # gradients of up to 2 are rounded to bf16 (2**-9) in each of three tiles, and once
    _assert_equal(_outcome(tiled, x, head), expected, atol=rounding)
    with torch.autocast("cpu", torch.bfloat16):
        again = checkpointing.checkpoint(
            lambda given: TiledFusedLogitsLoss.apply(Head.loss, head, given, labels, None, 3), x
        )
    _assert_equal(_outcome(again, x, head), expected, atol=rounding)


def test_losses_that_do_not_fit_are_told_with_the_cure() -> None:
    head, x, labels = _build(Head), _hidden(6), _labels(6)
    with pytest.raises(ArgumentError, match='needed "mean" or "sum"'):
        TiledFusedLogitsLoss.apply(Head.loss, head, x, labels, None, 2, None, "none")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"x has shape \(2, 6, 6\) and y has \(2, 5\)"):
        TiledFusedLogitsLoss.apply(Head.loss, head, x, labels[:, :5], None, 2)
    with pytest.raises(ArgumentError, match="needed one number"):
        TiledFusedLogitsLoss.apply(lambda model, hidden, _: model.head(hidden), head, x, labels, None, 2)
