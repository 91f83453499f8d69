"""The loss scale: the published rules as an independent counter machine, properties, state and refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.precision import BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig
from deepspeed.errors import NonFiniteError
from deepspeed.precision import DynamicLossScaler, LossScaler, NullScaler, StaticLossScaler, build_loss_scaler
from deepspeed.precision.loss_scaler import CreateLossScaler, ScaleRules, ScaleState, next_state

OVERFLOWS = st.lists(st.booleans(), max_size=60)


def after(scaler: LossScaler, *overflows: bool) -> list[float]:
    scales = []
    for overflow in overflows:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


class Counted:
    """The published rules, told with step numbers instead of a count of good steps."""

    def __init__(self, scale: float, window: int, hysteresis: int, consecutive: bool, floor: float) -> None:
        self.scale, self.window, self.hysteresis, self.consecutive, self.floor = (
            scale,
            window,
            hysteresis,
            consecutive,
            floor,
        )
        self.left, self.step, self.last_overflow = hysteresis, 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.left == 1:
                self.scale = max(self.scale / 2, self.floor)
            else:
                self.left -= 1
            self.last_overflow = self.step
        else:
            if self.consecutive:
                self.left = self.hysteresis
            if (self.step - self.last_overflow) % self.window == 0:
                self.left = self.hysteresis
                self.scale *= 2
        self.step += 1


@given(
    overflows=OVERFLOWS,
    window=st.integers(1, 8),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    floor=st.sampled_from([0.25, 1.0, 64.0]),
)
def test_the_machine_follows_the_published_rules(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool, floor: float
) -> None:
    ours = DynamicLossScaler(256, window, floor, hysteresis, consecutive, raise_error_at_min_scale=False)
    published = Counted(256, window, hysteresis, consecutive, floor)
    for overflow in overflows:
        ours.update(overflow)
        published.update(overflow)
        assert ours.scale == published.scale


@given(overflows=OVERFLOWS, window=st.integers(1, 5), floor=st.sampled_from([0.5, 3.0]))
def test_the_scale_stays_between_its_bounds(overflows: list[bool], window: int, floor: float) -> None:
    scaler = DynamicLossScaler(2.0**126, window, floor, raise_error_at_min_scale=False)
    assert all(floor <= scale <= 2.0**127 for scale in after(scaler, *overflows))


def test_the_scale_doubles_after_a_window_of_good_steps_and_never_before() -> None:
    assert after(DynamicLossScaler(8, scale_window=3), *[False] * 7) == [8, 8, 16, 16, 16, 32, 32]


def test_an_overflow_starts_the_window_anew() -> None:
    scaler = DynamicLossScaler(8, scale_window=3)
    assert after(scaler, False, False, True, False, False, False) == [8, 8, 4, 4, 4, 8]


def test_hysteresis_tolerates_overflows_until_it_is_used_up() -> None:
    scaler = DynamicLossScaler(64, scale_window=4, delayed_shift=3)
    assert after(scaler, True, True, True, True) == [64, 64, 32, 16]  # it is not refilled by a fall


def test_a_full_window_refills_the_tolerance() -> None:
    scaler = DynamicLossScaler(64, scale_window=2, delayed_shift=2)
    assert after(scaler, True, False, False, True, True) == [64, 64, 128, 128, 64]


def test_consecutive_hysteresis_counts_only_overflows_in_a_row() -> None:
    scattered = [True, False] * 4
    assert after(DynamicLossScaler(64, 100, delayed_shift=2, consecutive_hysteresis=True), *scattered)[-1] == 64
    assert after(DynamicLossScaler(64, 100, delayed_shift=2), *scattered)[-1] == 8


def test_an_overflow_at_the_minimum_says_so_and_changes_nothing() -> None:
    scaler = DynamicLossScaler(2, scale_window=3, min_scale=1)
    assert after(scaler, True) == [1]
    before = scaler.state
    with pytest.raises(NonFiniteError, match=r"the loss scale is at its minimum, 1: .*lower the learning rate"):
        scaler.update(True)
    assert scaler.state == before


def test_an_overflow_at_the_minimum_may_be_let_pass() -> None:
    assert after(DynamicLossScaler(1, raise_error_at_min_scale=False), True, True) == [1, 1]


def test_the_state_function_is_pure() -> None:
    rules = ScaleRules(window=2, hysteresis=1, consecutive=False, min_scale=1, raise_at_min=True, factor=4.0)
    state = ScaleState(16.0, 1, 1)
    assert next_state(state, False, rules) == ScaleState(64.0, 1, 0)
    assert next_state(state, True, rules) == ScaleState(4.0, 1, 0)
    assert state == ScaleState(16.0, 1, 1)


@given(before=OVERFLOWS, later=OVERFLOWS, window=st.integers(1, 5), hysteresis=st.integers(1, 3))
def test_a_loaded_scaler_continues_alike(before: list[bool], later: list[bool], window: int, hysteresis: int) -> None:
    def fresh() -> DynamicLossScaler:
        return DynamicLossScaler(2**16, window, 1e-6, hysteresis, raise_error_at_min_scale=False)

    whole, resumed = fresh(), fresh()
    after(whole, *before)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert after(whole, *later) == after(resumed, *later)


def test_a_fixed_scale_ignores_overflow_and_other_scalers_state() -> None:
    scaler = StaticLossScaler(128)
    assert after(scaler, True, True, False) == [128, 128, 128]
    scaler.load_state_dict(DynamicLossScaler(4).state_dict())
    assert scaler.scale == 128
    assert not scaler.dynamic


def test_a_dynamic_scale_stays_what_it_is_after_training_without_a_scale() -> None:
    scaler = DynamicLossScaler(2**8)
    scaler.load_state_dict(NullScaler().state_dict())
    assert scaler.scale == 2**8


def test_a_dynamic_scale_takes_the_scale_of_a_fixed_one() -> None:
    scaler = DynamicLossScaler(4, delayed_shift=2)
    scaler.load_state_dict(StaticLossScaler(128).state_dict())
    assert scaler.state == ScaleState(128.0, 2, 0)


def test_published_names_read_the_same_scale() -> None:
    scaler = DynamicLossScaler(4)
    scaler.update_scale(True)
    assert (scaler.scale, scaler.loss_scale, scaler.cur_scale, scaler.dynamic) == (2, 2, 2, True)
    assert LossScaler().scale == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LossScaler(0), "scale=0, but a finite number above 0"),
        (lambda: LossScaler(float("inf")), "scale=inf"),
        (lambda: DynamicLossScaler(float("nan")), "init_scale=nan"),
        (lambda: DynamicLossScaler(min_scale=-2), "min_scale=-2"),
        (lambda: DynamicLossScaler(scale_window=0), "scale_window=0, but a whole number of at least 1"),
        (lambda: DynamicLossScaler(delayed_shift=-1), "delayed_shift=-1"),
    ],
)
def test_senseless_settings_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_only_fp16_needs_a_scale() -> None:
    assert isinstance(CreateLossScaler(torch.bfloat16, 128, True, None), NullScaler)
    assert CreateLossScaler(torch.float16, 128, False, None).scale == 128
    made = CreateLossScaler(torch.float16, 0, True, {"init_scale": 32, "scale_window": 1})
    assert after(made, False) == [64]


def config(**blocks: Any) -> Any:
    given = {name: {"enabled": True, **keys} for name, keys in blocks.items()}
    return SimpleNamespace(
        fp16=FP16Config(**given.get("fp16", {})),
        bf16=BF16Config(**given.get("bf16", {})),
        torch_autocast=TorchAutocastConfig(**given.get("torch_autocast", {})),
        data_types=DataTypesConfig(),
        communication_data_type=None,
    )


def test_the_config_decides_the_scaler() -> None:
    assert build_loss_scaler(config()).scale == 1
    assert build_loss_scaler(config(bf16={})).scale == 1
    assert build_loss_scaler(config(fp16={"loss_scale": 512})).state_dict() == {"scale": 512.0}
    dynamic = build_loss_scaler(config(fp16={}))
    assert isinstance(dynamic, DynamicLossScaler)
    assert dynamic.rules == ScaleRules(1000, 2, False, 1.0, True, 2.0)
    assert dynamic.scale == 2**16
    assert isinstance(build_loss_scaler(config(torch_autocast={"dtype": "fp16"})), DynamicLossScaler)
    assert isinstance(build_loss_scaler(config(torch_autocast={"dtype": "bf16"})), NullScaler)


def test_autocast_without_a_format_follows_the_device() -> None:
    assert isinstance(build_loss_scaler(config(torch_autocast={}), "cuda"), DynamicLossScaler)
    assert isinstance(build_loss_scaler(config(torch_autocast={}), "cpu"), NullScaler)
