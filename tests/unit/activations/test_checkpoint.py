"""`deepspeed.checkpointing.checkpoint` in one process: gradients of a plain call, bit for bit, whatever it is given."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import deepspeed
from deepspeed import checkpointing
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, ConfigError
from deepspeed.offload import placement
from deepspeed.topology.mesh import AxisGroup

FORMS = {"default": checkpointing.checkpoint, "re-entrant": checkpointing.reentrant_checkpoint}
Form = Callable[..., Any]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Layers(nn.Module):
    """Residual layers with dropout, and a mask that all of them are given."""

    def __init__(self, layers: int = 4, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor, form: Form) -> Tensor:
        torch.manual_seed(2)
        mask = torch.rand(x.shape) < 0.9
        for layer in self.layers:
            x = form(lambda x, mask, layer=layer: x + layer(x) * mask, x, mask=mask)
        return x.square().mean()


def _gradients(form: Form, **arguments: Any) -> list[Tensor]:
    """Of the input and the parameters of `Layers`."""
    model = Layers(**arguments)
    width = model.layers[0][0].in_features
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(3), requires_grad=True)
    model(x * 1, form).backward()
    return [gradient for tensor in (x, *model.parameters()) if (gradient := tensor.grad) is not None]


def _assert_as_plain(form: Form = checkpointing.checkpoint, **arguments: Any) -> None:
    plain, ours = _gradients(_plain, **arguments), _gradients(form, **arguments)
    assert len(plain) == len(ours) == 1 + 4 * 4
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


# -- what a function may be given and give ------------------------------------------------------------------------------


def test_dropout_draws_the_same_numbers_in_recomputation(form: Form) -> None:
    _assert_as_plain(form)


def test_functions_take_and_give_containers_none_and_other_things(form: Form) -> None:
    def function(pair: Any, nothing: None, *, named: dict[str, Any], scale: float) -> Any:
        assert nothing is None
        (a, flag), [b, text] = pair
        assert (flag, text) == (True, "text")
        return {"sum": a * b * scale, "inner": [named["c"].exp(), (None, 7)], "flag": flag}

    def gradients(run: Form) -> list[Tensor | None]:
        a, b, c = (torch.full((2, 3), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 2.0, 3.0))
        output = run(function, ((a, True), [b, "text"]), None, named={"c": c, "d": None}, scale=2.0)
        assert output["flag"] is True
        assert output["inner"][1] == (None, 7)
        (output["sum"].sum() + 3 * output["inner"][0].sum()).backward()
        return [a.grad, b.grad, c.grad]

    for plain, ours in zip(gradients(_plain), gradients(form), strict=True):
        assert plain is not None
        assert ours is not None
        assert torch.equal(plain, ours)


def test_gradients_reach_parameters_and_closures_although_no_input_takes_one() -> None:
    layer, factor = nn.Linear(3, 2), torch.tensor(2.0, requires_grad=True)
    tokens = torch.ones(4, 3)
    checkpointing.checkpoint(lambda x: layer(x) * factor, tokens).sum().backward()
    assert factor.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 8.0))


def test_the_default_form_works_with_autograd_grad_and_twice() -> None:
    x = torch.tensor(0.5, requires_grad=True, dtype=torch.float64)
    y = checkpointing.checkpoint(lambda x: x.exp().sin(), x)
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    plain = x.exp().sin()
    (plain_first,) = torch.autograd.grad(plain, x, create_graph=True)
    (plain_second,) = torch.autograd.grad(plain_first, x)
    assert torch.equal(first, plain_first)
    assert torch.equal(second, plain_second)


def test_autocast_is_as_it_was_in_forward(form: Form) -> None:
    layer, seen = nn.Linear(4, 4), []

    def function(x: Tensor) -> Tensor:
        y = layer(x)
        seen.append(y.dtype)
        return y.tanh()

    with torch.autocast("cpu", torch.bfloat16):
        y = form(function, torch.ones(2, 4, requires_grad=True))
    y.float().sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_without_gradients_it_is_a_plain_call(form: Form) -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    x = torch.ones(3)
    with torch.no_grad():
        assert torch.equal(form(function, x), x * 2)
    assert calls[0] is x


def test_a_function_that_computes_something_else_the_second_time_is_an_error() -> None:
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return x.exp().sin() if len(calls) == 1 else x[:2].exp().sin()

    y = checkpointing.checkpoint(function, torch.ones(3, requires_grad=True))
    with pytest.raises(CheckpointError):
        y.sum().backward()


def test_an_input_changed_in_place_is_refused_as_ever(form: Form) -> None:
    x = torch.ones(3, requires_grad=True) * 1
    y = form(lambda x: x.exp().sin(), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_published_class_is_the_re_entrant_form() -> None:
    outputs: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    returned = checkpointing.CheckpointFunction.apply(lambda x: (x * 2, 5), outputs, x)
    assert returned[1] == outputs[1] == 5
    assert returned[0] is outputs[0]
    outputs[0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with pytest.warns(UserWarning, match="None of the inputs"), pytest.raises(RuntimeError, match="does not require grad"):
        checkpointing.reentrant_checkpoint(lambda: nn.Linear(2, 2)(torch.ones(2))).sum().backward()


def test_nothing_of_the_function_is_alive_between_forward_and_backward() -> None:
    inside: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        inside.append(weakref.ref(y))
        return y.sin()

    z = checkpointing.checkpoint(function, torch.ones(3, requires_grad=True))
    assert inside[0]() is None
    z.sum().backward()


def test_a_part_inside_of_a_part(form: Form) -> None:
    def outer(x: Tensor, layer: nn.Module) -> Tensor:
        return form(lambda x: torch.tanh(form(layer, x)), x) * 2

    def run(run: Form) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5))
        x = torch.ones(3, 5, requires_grad=True)
        run(outer, x, layer).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(form), run(_plain))


# -- streams ------------------------------------------------------------------------------------------------------------


def test_recomputation_draws_from_streams_what_forward_drew(form: Form) -> None:
    checkpointing.model_parallel_cuda_manual_seed(3)
    tracker = checkpointing.get_cuda_rng_tracker()
    drawn: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        with tracker.fork():
            drawn.append(torch.rand(3))
        return (x * drawn[-1]).exp()

    y = form(function, torch.ones(3, requires_grad=True))
    with tracker.fork():
        following = torch.rand(3)
    after = tracker.get_states()
    y.sum().backward()
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], following)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], after["model-parallel-rng"])


# -- settings -----------------------------------------------------------------------------------------------------------


def test_lightning_configures_on_every_run_with_none_for_what_it_does_not_know() -> None:
    assert not checkpointing.is_configured()
    for _ in range(2):
        deepspeed.checkpointing.configure(
            mpu_=None,
            partition_activations=False,
            contiguous_checkpointing=False,
            checkpoint_in_cpu=False,
            profile=None,
        )
    assert checkpointing.is_configured()
    _assert_as_plain()


def test_none_keeps_what_there_is_and_arguments_win_over_the_block() -> None:
    block = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4}}
    checkpointing.configure(None, deepspeed_config=block, num_checkpoints=7)
    checkpointing.configure(None, partition_activations=True)
    now = checkpointing._current.settings.block
    assert (now.cpu_checkpointing, now.number_checkpoints, now.partition_activations) == (True, 7, True)
    checkpointing.set_num_layers(9)
    checkpointing.partition_activations_in_checkpoint(False)
    now = checkpointing._current.settings.block
    assert (now.number_checkpoints, now.partition_activations) == (9, False)
    checkpointing.reset()
    assert checkpointing._current.settings.block == now


@pytest.mark.parametrize("arguments", [{}, {"partition_activations": True}, {"num_checkpoints": 3}])
def test_buffers_need_shards_and_a_number(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="needed partition_activations = true and number_checkpoints") as error:
        checkpointing.configure(None, contiguous_checkpointing=True, **arguments)
    assert isinstance(error.value, AssertionError)
    assert not checkpointing.is_configured()


def test_faults_of_a_config_are_told() -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": {"offload": {"device": "nvme"}}})
    with pytest.raises(ArgumentError, match="number_checkpoints"):
        checkpointing.configure(None, num_checkpoints=-1)


def test_an_engine_brings_its_block_unless_configure_was_called(tmp_path: Path) -> None:
    def engine(**block: Any) -> None:
        config = {"train_batch_size": 1, "activation_checkpointing": block}
        deepspeed.initialize(model=nn.Linear(2, 2), config=config)

    engine(synchronize_checkpoint_boundary=True)
    assert not checkpointing.is_configured()
    assert checkpointing._current.settings.block.synchronize_checkpoint_boundary
    checkpointing.configure(None, synchronize=False)
    engine(synchronize_checkpoint_boundary=True)
    assert not checkpointing._current.settings.block.synchronize_checkpoint_boundary


def test_an_engine_brings_its_tensor_parallel_ranks_unless_an_mpu_did() -> None:
    def axis_after_initialize(ranks: tuple[int, ...]) -> tuple[int, ...]:
        checkpointing.adopt(DeepSpeedConfig({"train_batch_size": 1}), AxisGroup(ranks, ranks[0]))
        return checkpointing._current.settings.axis.ranks

    checkpointing.configure(None, partition_activations=True)
    assert axis_after_initialize((4, 5)) == (4, 5)
    checkpointing.configure(None, profile=False)
    assert checkpointing._current.settings.axis.ranks == (4, 5)
    checkpointing.configure(object())
    assert axis_after_initialize((4, 5)) == (0,)


def test_hooks_around_it_get_what_stays(form: Form, tmp_path: Path) -> None:
    checkpointing.configure(None, _block(offload={"device": "nvme", "nvme_path": str(tmp_path), "min_numel": 100}))
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    x, small = torch.rand(200, requires_grad=True), torch.rand(50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = form(lambda x, small: (x.view(4, 50) * small).exp(), x.exp() * 1, small * 1)
    y.sum().backward()
    assert sorted(packed) == [50, 200]  # the small input, and what exp saves outside of the part
    assert torch.allclose(x.grad, torch.autograd.grad((x.exp().view(4, 50) * small).exp().sum(), x)[0])


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_micro_batches_may_be_in_flight_at_once_and_have_other_lengths(device: str, tmp_path: Path) -> None:
    """The order of a pipeline's first stage: F0 F1 B0 F2 B1 F3 B2 B3."""
    path = str(tmp_path) if device == "nvme" else None
    checkpointing.configure(None, _block(offload={"device": device, "nvme_path": path, "min_numel": 1}))
    order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]

    def gradients(run: Form) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        inputs = [torch.rand(3 + 2 * number, 8, requires_grad=True) for number in range(4)]
        losses: dict[int, Tensor] = {}
        for what, number in order:
            if what == "B":
                losses.pop(number).backward()
                continue
            x = inputs[number] * 1
            for layer in layers:
                x = run(lambda x, layer=layer: layer(x).tanh(), x)
            losses[number] = x.sum()
        return [tensor.grad for tensor in (*inputs, *layers.parameters()) if tensor.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(_plain), gradients(checkpointing.checkpoint), strict=True))


# -- every place, the same numbers ----------------------------------------------------------------------------------------


@pytest.fixture
def host_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "is_host_apart", lambda device: True)


def _block(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 1, "activation_checkpointing": keys}


@pytest.mark.usefixtures("host_is_apart")
def test_cpu_checkpointing_gives_the_same_numbers(form: Form) -> None:
    checkpointing.configure(None, _block(offload={"device": "cpu", "min_numel": 1}))
    _assert_as_plain(form)


@pytest.mark.parametrize("is_apart", [False, True])
def test_nvme_gives_the_same_numbers(form: Form, is_apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "is_host_apart", lambda device: is_apart)
    checkpointing.configure(None, _block(offload={"device": "nvme", "nvme_path": str(tmp_path), "min_numel": 1}))
    for _ in range(2):
        _assert_as_plain(form)
    checkpointing.forget()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("host_is_apart")
def test_contiguous_buffers_on_the_host_give_the_same_numbers() -> None:
    checkpointing.configure(None, _block(offload={"device": "cpu", "min_numel": 1}))
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3)
    for _ in range(2):
        _assert_as_plain()


def test_contiguous_buffers_give_the_same_numbers_and_grow_with_a_warning(
    form: Form, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        _assert_as_plain(form)
    warnings = [record.getMessage() for record in caplog.records if "number_checkpoints = 2" in record.getMessage()]
    assert len(warnings) == 1
    caplog.clear()
    checkpointing.set_num_layers(3)
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        for _ in range(3):
            _assert_as_plain(form)
    assert not caplog.records


@pytest.mark.parametrize("keys", [{"profile": True}, {"synchronize": True}])
def test_watched_boundaries_give_the_same_numbers(form: Form, keys: dict[str, bool]) -> None:
    checkpointing.configure(None, **keys)
    _assert_as_plain(form)


def test_profile_logs_forward_and_backward_of_each_part(form: Form, caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(None, profile=True)
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        _gradients(form)
    lines = [record.getMessage() for record in caplog.records if "time (ms)" in record.getMessage()]
    assert [line.split("| ")[1].split(":")[0] for line in lines] == ["forward"] * 4 + ["backward"] * 4


def test_profile_sees_a_backward_whose_inputs_take_no_gradient(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(None, profile=True)
    layer = nn.Linear(3, 3)
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        checkpointing.checkpoint(lambda x: layer(x).exp(), torch.ones(2, 3)).sum().backward()
    assert sum("backward" in record.getMessage() for record in caplog.records) == 1
    assert layer.weight.grad is not None
