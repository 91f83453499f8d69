from __future__ import annotations

import pytest
from torch import nn

from deepspeed.zero import Init
from deepspeed.zero.memory_needs import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

BILLION = 10**9
GUIDE = {"num_gpus_per_node": 8, "num_nodes": 2}  # the guide's example: 13 billion parameters on two nodes of eight


def test_a_device_needs_what_the_guide_says_when_nothing_is_offloaded() -> None:
    _, device = estimate_zero2_model_states_mem_needs(13 * BILLION, cpu_offload=False, **GUIDE)
    assert device == (26 + 182 / 16) * BILLION
    _, device, layer = estimate_zero3_model_states_mem_needs(13 * BILLION, 0, cpu_offload=False, **GUIDE)
    assert (device, layer) == (13 * BILLION, 0)


def test_what_is_offloaded_moves_from_the_device_to_the_host() -> None:
    host, device = estimate_zero2_model_states_mem_needs(13 * BILLION, additional_buffer_factor=1, **GUIDE)
    assert device == 26 * BILLION
    assert host == max(4 * 13 * 8, 14 * 13 / 2) * BILLION  # the model while it is built, here
    options = {"additional_buffer_factor": 1, **GUIDE}
    host, device, layer = estimate_zero3_model_states_mem_needs(13 * BILLION, BILLION, cpu_offload_params=False, **options)
    assert layer == 4 * BILLION
    assert device == layer + 2 * 13 * BILLION / 16
    assert host == 14 * 13 * BILLION / 2
    host, device, _ = estimate_zero3_model_states_mem_needs(13 * BILLION, BILLION, **options)
    assert device == layer
    assert host == 16 * 13 * BILLION / 2
    doubled, _, _ = estimate_zero3_model_states_mem_needs(13 * BILLION, BILLION, additional_buffer_factor=2, **GUIDE)
    assert doubled == 2 * host


def test_without_zero_init_every_rank_of_a_host_builds_the_whole_model() -> None:
    host, _, _ = estimate_zero3_model_states_mem_needs(
        13 * BILLION, BILLION, zero_init=False, additional_buffer_factor=1, **GUIDE
    )
    assert host == 4 * 13 * BILLION * 8


def test_the_tables_count_a_model_sharded_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    plain = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    estimate_zero3_model_states_mem_needs_all_live(plain, 2)
    first = capsys.readouterr().out
    assert "0.0M parameters, 0.0M of them in the largest layer; nodes: 1, devices per node: 2" in first
    assert first.count("GB | offload_param=") == 6
    with Init():
        sharded = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    estimate_zero3_model_states_mem_needs_all_live(sharded, 2)
    assert capsys.readouterr().out == first
    estimate_zero3_model_states_mem_needs_all_cold(2851 * 10**6, 32 * 10**6, 8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "2851M parameters, 32.0M of them in the largest layer; nodes: 1, devices per node: 8"
    # 16 bytes of 2851 million over 8 ranks, and 4 bytes of the largest layer, in GiB
    assert lines[-1] == " 127.45 GB |    5.43 GB | offload_param=none  offload_optimizer=none  zero.Init=no"
    estimate_zero2_model_states_mem_needs_all_live(plain)
    assert capsys.readouterr().out.count("offload_optimizer=") == 2
