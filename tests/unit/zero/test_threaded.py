"""Which slices the second thread steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.zero import OffloadOptimizerConfig
from deepspeed.zero.threaded import StepThread, split


@given(numels=st.lists(st.integers(1, 50), max_size=30), share=st.floats(0, 1))
def test_the_thread_gets_its_share_as_near_as_slices_allow(numels: list[int], share: float) -> None:
    taken = sum(numel for numel, takes in zip(numels, split(numels, share), strict=True) if takes)
    assert abs(taken - share * sum(numels)) <= max(numels, default=0)


def test_shares_are_spread_over_the_slices() -> None:
    assert split([4] * 8, 0.5) == [True, False] * 4
    assert split([4] * 4, 0.25) == [False, True, False, False]
    assert split([3, 5], 0.0) == [False, False]
    assert split([3, 5], 1.0) == [True, True]


def thread(**keys: object) -> StepThread | None:
    return StepThread.of(OffloadOptimizerConfig.model_validate({"device": "cpu", **keys}))


def test_the_config_says_whether_there_is_a_thread() -> None:
    assert StepThread.of(None) is None
    assert thread() is None
    assert thread(device="none", ratio=0.5) is None
    own = torch.get_num_threads()
    assert thread(ratio=0.5) == StepThread(0.5, max(1, own // 2))
    assert thread(super_offload=True, cpuadam_cores_perc=1.0) == StepThread(1.0, own)
    assert thread(super_offload=True, cpuadam_cores_perc=0.0) == StepThread(1.0, 1)


def test_a_part_that_would_stay_on_a_device_is_refused() -> None:
    block = OffloadOptimizerConfig.model_validate({"device": "cpu", "ratio": 0.5})
    with pytest.raises(NotImplementedError, match=r"ratio = 0.5 on an accelerator"):
        StepThread.of(block, is_host_apart=True)
