"""Where inputs of checkpointed parts are between forward and backward, counted in bytes and held against the formula."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness.live_bytes import LiveBytes
from deepspeed import checkpointing
from deepspeed.activations.keeping import Keeper, Kept, KeptState
from deepspeed.activations.needs import ActivationNeeds, SegmentBytes, activation_needs
from deepspeed.activations.partition import TensorShards
from deepspeed.errors import UsageError
from deepspeed.offload import placement
from deepspeed.topology.mesh import AxisGroup

ROWS, WIDTH, LAYERS = 64, 16, 6
INPUT = ROWS * WIDTH * 4  # a page
BIAS = WIDTH * 4  # the gradient of a bias is added to the parameter's before the peak or after it
INSIDE = 2 * ROWS * 4 * WIDTH * 4  # of a layer: what GELU is given and what it gives, four times as wide


class Layer(nn.Sequential):
    """Autograd saves its input, and twice four times as much inside."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)  # so that none is made during a measurement


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: host memory is another place."""
    monkeypatch.setattr(placement, "is_host_apart", lambda device: True)


def _configure(tmp_path: Path, device: str, **keys: Any) -> None:
    offload = {"device": device, "nvme_path": str(tmp_path) if device == "nvme" else None, "min_numel": 1, **keys}
    checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": {"offload": offload}})


def _measured(layers: int = LAYERS, *, is_checkpointed: bool = True) -> tuple[int, int]:
    """Bytes kept between forward and backward, and the most during backward."""
    model, start = [Layer() for _ in range(layers)], torch.ones(ROWS, WIDTH, requires_grad=True)
    start.grad = torch.zeros_like(start)
    with LiveBytes() as live:
        x = start * 1  # no leaf
        for layer in model:
            x = checkpointing.checkpoint(layer, x) if is_checkpointed else layer(x)
        loss = (x * 1).sum()  # whose gradient is a whole tensor, as between layers
        del x
        kept_nbytes = live.now_nbytes - loss.nbytes
        live.reset_peak()
        loss.backward()
    return kept_nbytes, live.peak_nbytes


def _transient() -> int:
    """The most that backward of one layer takes beside what is saved: gradients on their way."""
    kept_nbytes, peak_nbytes = _measured(1, is_checkpointed=False)
    return peak_nbytes - kept_nbytes


def _needs(**keys: Any) -> ActivationNeeds:
    return activation_needs([SegmentBytes(INPUT, INSIDE)] * LAYERS, **keys)


def test_without_checkpointing_everything_is_kept() -> None:
    assert _measured(is_checkpointed=False)[0] == _needs().without_nbytes


def test_checkpointed_inputs_alone_are_kept() -> None:
    kept_nbytes, peak_nbytes = _measured()
    assert kept_nbytes == _needs().kept_nbytes
    assert abs(peak_nbytes - _transient() - _needs().peak_nbytes) <= BIAS


@pytest.mark.usefixtures("apart")
def test_cpu_checkpointing_frees_all_but_the_latest_input(tmp_path: Path) -> None:
    _configure(tmp_path, "cpu", pin_memory=False)
    needs = _needs(is_moved=True, segments_ahead=2)
    kept_nbytes, peak_nbytes = _measured()
    assert kept_nbytes == needs.kept_nbytes == INPUT
    assert abs(peak_nbytes - _transient() - needs.peak_nbytes) <= BIAS


def test_where_host_and_device_are_one_place_cpu_checkpointing_moves_nothing(tmp_path: Path) -> None:
    _configure(tmp_path, "cpu")
    assert _measured()[0] == _needs().kept_nbytes


def test_nvme_frees_all_but_the_latest_input(tmp_path: Path) -> None:
    _configure(tmp_path, "nvme")
    needs = _needs(is_moved=True)
    kept_nbytes, peak_nbytes = _measured()
    assert kept_nbytes == needs.kept_nbytes == INPUT
    assert peak_nbytes - _transient() <= needs.peak_nbytes  # what was read lies in memory that no operator made
    (file,) = tmp_path.glob("*/activations")
    assert file.stat().st_size == needs.away_nbytes


def test_what_two_parts_in_a_row_are_given_is_kept_once_where_it_is(tmp_path: Path) -> None:
    _configure(tmp_path, "nvme")
    layers, start = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], torch.ones(ROWS, WIDTH, requires_grad=True)
    with LiveBytes() as live:
        x, mask = start * 1, torch.rand(ROWS, WIDTH)
        for layer in layers:
            x = checkpointing.checkpoint(lambda x, mask, layer=layer: layer(x).exp() * mask, x, mask=mask)
        loss = x.sum()
        del x, mask
        assert live.now_nbytes == 2 * INPUT + loss.nbytes  # the latest input, and the mask
        loss.backward()
    (file,) = tmp_path.glob("*/activations")
    assert file.stat().st_size == (LAYERS - 1) * INPUT


def test_a_graph_that_is_dropped_gives_everything_back(tmp_path: Path) -> None:
    _configure(tmp_path, "nvme")
    start = torch.ones(ROWS, WIDTH, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with LiveBytes() as live:
                x = start * 1
                for _ in range(4):
                    x = checkpointing.checkpoint(torch.exp, x)
                assert live.now_nbytes > INPUT
                del x
                assert live.now_nbytes == 0
    finally:
        gc.enable()
    (file,) = tmp_path.glob("*/activations")
    assert file.stat().st_size <= 2 * 3 * INPUT  # a dropped graph's writes may still be on their way when the next begins


def test_a_second_backward_finds_its_inputs_again(tmp_path: Path) -> None:
    _configure(tmp_path, "nvme")
    x = torch.rand(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    y = x * 1
    for _ in range(4):
        y = checkpointing.checkpoint(lambda x: x.sin().cos(), y)
    y.sum().backward(retain_graph=True)
    assert x.grad is not None
    first, x.grad = x.grad, None
    y.sum().backward()
    assert torch.equal(first, x.grad)


# -- the keeper alone ---------------------------------------------------------------------------------------------------


class Log:
    """A place that says what is asked of it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def accepts(self, tensor: Tensor, *, is_cut: bool) -> bool:
        return True

    def put(self, flat: Tensor) -> Resting:
        return Resting(self.said, flat.clone())


class Resting:
    def __init__(self, said: list[str], flat: Tensor) -> None:
        self.said, self.flat = said, flat
        self._say("put")

    def _say(self, what: str) -> None:
        self.said.append(f"{what} {int(self.flat[0])}")

    def advance(self) -> None:
        pass

    def settle(self) -> None:
        self._say("settle")

    def bring(self) -> None:
        self._say("bring")

    def value(self) -> Tensor:
        self._say("value")
        return self.flat


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def keeper(log: Log) -> Keeper:
    return Keeper(log, TensorShards(AxisGroup((0,), 0)), ahead=2, min_numel=2)


def _segment(keeper: Keeper, tensor: Tensor) -> Kept:
    row = keeper.begin()
    kept = keeper.keep(tensor, row)
    assert kept is not None
    keeper.seal(row)
    return kept


def test_inputs_leave_one_part_later_and_come_back_ahead_of_need(log: Log, keeper: Keeper) -> None:
    kept = [_segment(keeper, torch.full((3,), float(number))) for number in range(6)]
    assert log.said == ["put 0", "put 1", "put 2", "settle 0", "put 3", "settle 1", "put 4", "settle 2"]
    assert [each.state for each in kept] == [KeptState.AWAY] * 5 + [KeptState.HERE]
    log.said.clear()
    assert keeper.take(kept.pop()).tolist() == [5.0] * 3
    assert log.said == ["bring 4", "bring 3"]
    log.said.clear()
    assert keeper.take(kept.pop()).tolist() == [4.0] * 3
    assert log.said == ["bring 4", "bring 3", "bring 2", "value 4"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(3, 4, 5).transpose(0, 2),
        lambda: torch.rand(3, 4).t(),
        lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.rand(1, 4, 1),
        lambda: torch.rand(20)[4:12].view(2, 4),
        lambda: torch.arange(6).view(2, 3),
        lambda: torch.rand(4, 4) < 0.5,
        lambda: torch.rand(4, 4, dtype=torch.float64),
    ],
)
def test_what_comes_back_has_the_values_strides_and_dtype_it_had(keeper: Keeper, make: Any) -> None:
    tensor = make()
    copy, strides = tensor.clone(), tensor.stride()
    kept = _segment(keeper, tensor)
    _segment(keeper, torch.ones(3))
    assert kept.state is KeptState.AWAY
    back = keeper.take(kept)
    assert back.dtype == copy.dtype
    assert back.stride() == strides
    assert torch.equal(back, copy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.ones(4)),
        lambda: torch.ones(4, requires_grad=True),
        lambda: torch.ones(4, 1).expand(4, 4),
        lambda: torch.rand(4, 4)[:, :2],
        lambda: torch.ones(1),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(4, dtype=torch.complex64),
    ],
)
def test_what_would_free_nothing_or_is_no_plain_tensor_stays(keeper: Keeper, make: Any) -> None:
    assert keeper.keep(make(), keeper.begin()) is None


def test_a_tensor_that_has_left_is_not_there_any_more(keeper: Keeper) -> None:
    tensor = torch.ones(3)
    seen, kept = weakref.ref(tensor), _segment(keeper, tensor)
    del tensor
    assert seen() is not None
    _segment(keeper, torch.ones(3))
    assert seen() is None
    assert keeper.take(kept).tolist() == [1.0] * 3


def test_a_tensor_changed_in_place_before_it_left_stays_and_is_refused(keeper: Keeper) -> None:
    tensor = torch.ones(3)
    kept = _segment(keeper, tensor)
    tensor.add_(1)
    _segment(keeper, torch.ones(3))
    assert kept.state is KeptState.HERE
    with pytest.raises(UsageError, match="modified by an inplace operation"):
        keeper.take(kept)


def test_a_tensor_changed_in_place_after_it_left_comes_back_as_it_was_saved(keeper: Keeper) -> None:
    tensor = torch.ones(3)
    kept = _segment(keeper, tensor)
    _segment(keeper, torch.ones(3))
    tensor.add_(1)
    assert keeper.take(kept).tolist() == [1.0] * 3


def test_a_tensor_saved_again_after_a_change_is_kept_apart(keeper: Keeper) -> None:
    tensor = torch.ones(3)
    row = keeper.begin()
    first = keeper.keep(tensor, row)
    tensor.add_(1)
    second = keeper.keep(tensor, row)
    assert second is not None
    assert second is not first
    assert keeper.take(second).tolist() == [2.0] * 3
