"""Config blocks, objects and callables become optimizers and schedules; everything unusable is refused with a cure."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.config.optimizer import KNOWN_OPTIMIZERS, OptimizerConfig
from deepspeed.config.scheduler import KNOWN_SCHEDULES, SchedulerConfig
from deepspeed.errors import ConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.optim import build_optimizer, build_scheduler, client_optimizer, client_scheduler, parameter_groups
from deepspeed.optim import schedules as ours
from deepspeed.optim.schedules import VALID_LR_SCHEDULES, WarmupLR


def block(type: str, **params: Any) -> Any:
    return SimpleNamespace(type=type, params=params)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("type", "params", "on_host", "kind"),
    [
        ("Adam", {}, False, FusedAdam),
        ("AdamW", {}, False, FusedAdam),
        ("Adam", {}, True, DeepSpeedCPUAdam),
        ("adamw", {"torch_adam": True}, False, torch.optim.AdamW),
        ("Adam", {"torch_adam": True}, True, torch.optim.AdamW),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, False, torch.optim.Adam),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False}, False, torch.optim.AdamW),
        ("Adagrad", {}, False, torch.optim.Adagrad),
        ("Adagrad", {}, True, DeepSpeedCPUAdagrad),
        ("Lion", {}, False, FusedLion),
        ("LION", {}, True, DeepSpeedCPULion),
        ("Lamb", {}, False, FusedLamb),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, False, torch.optim.SGD),
        ("NAdam", {}, False, torch.optim.NAdam),
    ],
)
def test_the_selection_table(type: str, params: dict[str, Any], on_host: bool, kind: Any) -> None:
    for made in (block(type, **params), OptimizerConfig(type=type, params=params)):
        optimizer = build_optimizer(made, model().parameters(), on_host=on_host)
        assert optimizer.__class__ is kind
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lion", "Lamb"])
@pytest.mark.parametrize("on_host", [True, False])
def test_documented_defaults_reach_the_optimizer(name: str, on_host: bool) -> None:
    config = OptimizerConfig(type=name)
    (group,) = build_optimizer(config, model().parameters(), on_host=on_host).param_groups
    for key, value in config.params.items():
        if key in group and key != "max_grad_norm":
            assert group[key] == value, key
    bare = build_optimizer(block(name), model().parameters(), on_host=on_host).param_groups[0]
    assert {key: bare[key] for key in bare if key != "params"} == {key: group[key] for key in group if key != "params"}


@pytest.mark.parametrize(
    ("type", "mode", "decoupled"), [("Adam", None, True), ("Adam", False, False), ("AdamW", False, True)]
)
def test_adam_decays_the_parameters_unless_told_otherwise(type: str, mode: bool | None, decoupled: bool) -> None:
    params = {} if mode is None else {"adam_w_mode": mode}
    for on_host in (False, True):
        optimizer = build_optimizer(block(type, **params), model().parameters(), on_host=on_host)
        assert optimizer.adam_w_mode is decoupled  # type: ignore[attr-defined]


def test_torch_adam_takes_one_fused_call_unless_another_way_is_chosen() -> None:
    def built(**params: Any) -> dict[str, Any]:
        return build_optimizer(block("Adam", torch_adam=True, **params), model().parameters()).param_groups[0]

    assert built()["fused"] is True
    assert built(amsgrad=True)["amsgrad"] is True
    assert built(foreach=True)["fused"] is None
    assert built()["weight_decay"] == 0.0


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_torchs_other_fused_kernels_are_taken_unless_another_way_is_chosen(kind: str) -> None:
    def built(**params: Any) -> Any:
        return build_optimizer(block(kind, lr=0.1, **params), torch.nn.Linear(2, 2).parameters()).param_groups[0]

    assert built()["fused"] is True
    assert built(foreach=True)["fused"] is None
    assert built(fused=False)["fused"] is False


def test_torch_adam_on_a_device_without_the_kernel_is_not_fused() -> None:
    layer = nn.Linear(2, 2, device="meta")
    assert build_optimizer(block("Adam", torch_adam=True), layer.parameters()).param_groups[0]["fused"] is None


def test_torch_adam_cannot_leave_the_bias_uncorrected() -> None:
    with pytest.raises(ConfigError, match=r"bias_correction = false: torch's Adam always corrects"):
        build_optimizer(block("Adam", torch_adam=True, bias_correction=False), model().parameters())


def test_amsgrad_without_torch_adam_is_a_runtime_error_that_names_the_way() -> None:
    with pytest.raises(RuntimeError, match=r'"torch_adam": true'):
        build_optimizer(block("Adam", amsgrad=True), model().parameters())


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("Adm", "Adam"), ("sgd", "SGD"), ("AdamWW", "AdamW"), ("Lio", "Lion"), ("lr_scheduler", None), ("Optimizer", None)],
)
def test_an_unknown_type_names_the_nearest(given: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError, match=f'optimizer.type = "{given}": not a type') as refusal:
        build_optimizer(block(given), model().parameters())
    if nearest:
        assert f'Did you mean "{nearest}"?' in str(refusal.value)


@pytest.mark.parametrize(
    ("type", "params", "text"),
    [
        (
            "AdamW",
            {"weight_decy": 0.1},
            r"params.weight_decy: FusedAdam has no such parameter. Did you mean \"weight_decay\"\?",
        ),
        ("SGD", {"momentun": 0.9}, r"params.momentun: SGD has no such parameter. Did you mean \"momentum\"\?"),
        ("SGD", {"params": []}, r"params.params: SGD has no such parameter"),
        ("SGD", {"lr": -1.0}, r"params for SGD: Invalid learning rate: -1.0"),
        ("SGD", {"lr": "fast"}, r"params for SGD: .*Correct the value"),
        ("Adam", {"fused": True}, r"params.fused: FusedAdam has no such parameter"),
        ("Lamb", {"max_coef": 1}, r"Did you mean \"max_coeff\"\?"),
    ],
)
def test_an_unusable_parameter_is_named_with_a_cure(type: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_optimizer(block(type, **params), model().parameters())


def test_max_grad_norm_points_at_gradient_clipping() -> None:
    with pytest.raises(ConfigError, match=r"max_grad_norm = 1.0.*\"gradient_clipping\""):
        build_optimizer(block("AdamW", max_grad_norm=1.0), model().parameters())
    build_optimizer(block("AdamW", max_grad_norm=0.0), model().parameters())


def test_every_type_that_the_config_knows_and_this_room_builds_takes_its_params() -> None:
    for name in KNOWN_OPTIMIZERS.keys() & {"Adam", "AdamW", "Adagrad", "Lion", "Lamb"}:
        for on_host in (False, True):
            optimizer = build_optimizer(OptimizerConfig(type=name), model().parameters(), on_host=on_host)
            params = optimizer.param_groups[0]["params"]
            before = [p.detach().clone() for p in params]
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            assert not any(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_groups_keep_their_own_options_and_empty_ones_are_dropped() -> None:
    first, second = model()
    groups = [{"params": first.parameters(), "lr": 0.5}, {"params": []}, {"params": second.weight, "weight_decay": 0.2}]
    optimizer = build_optimizer(block("AdamW", lr=0.1, weight_decay=0.1), groups)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [(0.5, 0.1, 2), (0.1, 0.2, 1)]
    assert len(groups[0]) == 2  # the caller's groups are not touched
    assert groups[1] == {"params": []}


def test_named_parameters_keep_their_names() -> None:
    optimizer = build_optimizer(block("AdamW"), model().named_parameters())
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


def test_a_parameter_in_two_groups_is_named() -> None:
    network = model()
    shared = network[0].weight
    groups = [{"params": list(network.parameters())}, {"params": [shared]}]
    with pytest.raises(AssertionError, match=r"more than one group: one of shape \(4, 3\)\. Each parameter needs"):
        build_optimizer(block("AdamW"), groups)
    names = {p: name for name, p in network.named_parameters()}
    with pytest.raises(ValueError, match=r"more than one group: '0.weight'"):
        build_optimizer(block("AdamW"), groups, names=names)
    with pytest.raises(ValueError, match=r"more than one group: 'again'"):
        parameter_groups([{"params": [("once", shared)]}, {"params": [("again", shared)]}])


def test_a_long_list_of_repeated_parameters_is_cut_short() -> None:
    params = [nn.Parameter(torch.ones(i)) for i in range(1, 9)]
    with pytest.raises(ValueError, match=r"\(5,\) and 3 more\. "):
        parameter_groups([{"params": params}, {"params": params}])


def test_a_parameter_given_twice_in_one_group_counts_once() -> None:
    p = nn.Parameter(torch.ones(2))
    assert parameter_groups([p, p]) == [{"params": [p]}]


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_groups_come_out_whole_and_in_order(counts: list[int]) -> None:
    given = [{"params": [nn.Parameter(torch.ones(1)) for _ in range(count)], "index": i} for i, count in enumerate(counts)]
    if not any(counts):
        with pytest.raises(ValueError, match="parameters is empty"):
            parameter_groups(given)
        return
    groups = parameter_groups(iter(given))
    assert [group["index"] for group in groups] == [i for i, count in enumerate(counts) if count]
    for group in groups:
        assert all(p is q for p, q in zip(group["params"], given[group["index"]]["params"], strict=True))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ([], "parameters is empty"),
        (nn.Parameter(torch.ones(1)), "parameters is one Parameter; a list"),
        ({"params": []}, "parameters is one dict; a list"),
        (["weight"], "among the parameters is a str"),
        ([{"lr": 1}], r"keys \['lr'\], but needs 'params'"),
    ],
)
def test_something_else_than_parameters_is_refused(parameters: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parameter_groups(parameters)


def test_a_clients_optimizer_is_taken_as_it_is_without_its_empty_groups() -> None:
    network = model()
    optimizer = torch.optim.SGD(
        [{"params": network[0].parameters()}, {"params": []}, {"params": network[1].parameters()}], lr=0.1
    )
    kept = list(optimizer.param_groups)
    taken = client_optimizer(optimizer, network.parameters())
    assert taken is optimizer
    assert taken.param_groups == [kept[0], kept[2]]


def test_a_callable_makes_the_optimizer_from_the_parameters() -> None:
    network = model()
    seen: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        seen.append(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    assert isinstance(client_optimizer(make, network.parameters()), torch.optim.SGD)
    assert seen.pop() == list(network.parameters())
    optimizer = client_optimizer(make, [{"params": network[0].parameters(), "lr": 0.5}, {"params": []}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


@pytest.mark.parametrize("client", ["AdamW", 3, lambda parameters: None])
def test_a_client_that_is_no_optimizer_is_refused(client: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer is, or made, a \w+; an object with param_groups and step"):
        client_optimizer(client, model().parameters())


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_each_of_our_schedules_is_built_from_its_block(name: str) -> None:
    needed = {"OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}, "WarmupDecayLR": {"total_num_steps": 9}}
    params = needed.get(name, {"total_num_steps": 9} if name == "WarmupCosineLR" else {})
    optimizer = torch.optim.Adam(model().parameters())
    for made in (block(name, **params), SchedulerConfig(type=name, params=params)):
        schedule = build_scheduler(made, SimpleNamespace(optimizer=optimizer))
        assert schedule.__class__ is getattr(ours, name)
        schedule.step()
        assert schedule.state_dict() == {"last_batch_iteration": 0}


def test_the_config_and_this_room_know_the_same_schedules() -> None:
    assert set(KNOWN_SCHEDULES) == set(VALID_LR_SCHEDULES)


def test_torchs_schedules_are_built_by_name() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    schedule = build_scheduler(block("StepLR", step_size=1, gamma=0.5), optimizer)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (block("WarmupDecay"), r'scheduler.type = "WarmupDecay".*Did you mean "WarmupDecayLR"\?'),
        (block("LRScheduler"), r'scheduler.type = "LRScheduler": not a type'),
        (block("Adam"), r'scheduler.type = "Adam": not a type'),
        (block("WarmupLR", warmup_num_step=3), r'params.warmup_num_step: WarmupLR has no such.*"warmup_num_steps"'),
        (block("WarmupLR", optimizer=3), r"params.optimizer: WarmupLR has no such"),
        (block("WarmupDecayLR"), r"params for WarmupDecayLR: .*total_num_steps"),
        (block("StepLR", step_sise=1), r'"step_size"'),
    ],
)
def test_an_unusable_scheduler_block_is_refused_with_a_cure(made: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_scheduler(made, torch.optim.SGD(model().parameters(), lr=1.0))


@pytest.mark.parametrize(
    "client",
    [
        WarmupLR,
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    ],
)
def test_a_clients_schedule_may_be_a_callable_or_an_object(client: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    made = client_scheduler(client, SimpleNamespace(optimizer=optimizer))
    assert made.optimizer is optimizer  # type: ignore[attr-defined]
    assert client_scheduler(made, optimizer) is made


@pytest.mark.parametrize("client", [3, lambda optimizer: None])
def test_a_client_that_is_no_schedule_is_refused(client: Any) -> None:
    with pytest.raises(ValueError, match=r"lr_scheduler is, or made, a \w+; an object with step"):
        client_scheduler(client, torch.optim.SGD(model().parameters(), lr=1.0))
