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
TWO_NODES = {"num_gpus_per_node": 8, "num_nodes": 2}

# What the original (0.19.8) returned, run as it is: (devices per node, nodes, options, bytes). 1000 parameters, of which 300
# in the largest layer; `additional_buffer_factor` is 1.
STAGE_2 = [
    (1, 1, True, (16_000, 2_000)),
    (1, 1, False, (4_000, 20_000)),
    (2, 1, True, (16_000, 2_000)),
    (2, 1, False, (8_000, 11_000)),
    (8, 2, True, (64_000, 2_000)),
    (8, 2, False, (32_000, 3_125)),
]
# Options: cpu_offload, cpu_offload_params, zero_init.
STAGE_3 = [
    (1, 1, (True, True, True), (18_000, 1_200, 1_200)),
    (1, 1, (True, True, False), (18_000, 1_200, 1_200)),
    (1, 1, (True, False, True), (16_000, 3_200, 1_200)),
    (1, 1, (True, False, False), (16_000, 3_200, 1_200)),
    (1, 1, (False, False, True), (1_200, 19_200, 1_200)),
    (1, 1, (False, False, False), (4_000, 19_200, 1_200)),
    (1, 1, (False, True, True), (1_200, 19_200, 1_200)),
    (2, 1, (True, False, True), (16_000, 2_200, 1_200)),
    (2, 1, (False, False, True), (2_400, 10_200, 1_200)),
    (2, 1, (False, False, False), (8_000, 10_200, 1_200)),
    (8, 2, (True, True, True), (9_000, 1_200, 1_200)),
    (8, 2, (True, True, False), (32_000, 1_200, 1_200)),
    (8, 2, (True, False, True), (8_000, 1_325, 1_200)),
    (8, 2, (True, False, False), (32_000, 1_325, 1_200)),
    (8, 2, (False, False, True), (9_600, 2_325, 1_200)),
    (8, 2, (False, False, False), (32_000, 2_325, 1_200)),
    (8, 2, (False, True, False), (32_000, 2_325, 1_200)),
]
# And of its table for 2851 million parameters, 32 million in the largest layer, 8 devices: GB per host and per device.
TABLE_3 = [(71.69, 0.12), (127.45, 0.12), (63.72, 0.78), (127.45, 0.78), (1.43, 6.09), (127.45, 6.09)]


@pytest.mark.parametrize(("devices", "nodes", "offload", "expected"), STAGE_2)
def test_stage_2_is_the_originals_to_the_byte(devices: int, nodes: int, offload: bool, expected: tuple[int, int]) -> None:
    for factor in (1, 1.5):
        host, device = estimate_zero2_model_states_mem_needs(1000, devices, nodes, offload, factor)
        assert (host, device) == (expected[0] * factor, expected[1])
        assert (type(host), type(device)) == (int, int)


@pytest.mark.parametrize(("devices", "nodes", "options", "expected"), STAGE_3)
def test_stage_3_is_the_originals_to_the_byte(
    devices: int, nodes: int, options: tuple[bool, bool, bool], expected: tuple[int, int, int]
) -> None:
    for factor in (1, 1.5):
        host, device, layer = estimate_zero3_model_states_mem_needs(1000, 300, devices, nodes, *options, factor)
        assert (host, device, layer) == (expected[0] * factor, *expected[1:])
        assert {type(host), type(device), type(layer)} == {int}


def test_the_numbers_are_those_worked_out_by_hand() -> None:
    """13 billion parameters on two nodes of eight: 2 bytes of weights, 4 of gradients, 12 of masters and moments."""
    _, device = estimate_zero2_model_states_mem_needs(13 * BILLION, cpu_offload=False, **TWO_NODES)
    assert device == (2 * 13 + (2 + 4 + 12) * 13 / 16) * BILLION  # and 2 of gradients before they become fp32
    options = {"additional_buffer_factor": 1, **TWO_NODES}
    host, device, layer = estimate_zero3_model_states_mem_needs(13 * BILLION, BILLION, cpu_offload_params=False, **options)
    assert layer == (2 + 2) * BILLION
    assert device == layer + 2 * 13 * BILLION / 16
    assert host == (4 + 12) * 13 * BILLION / 2  # half of the ranks are on it
    host, device, _ = estimate_zero3_model_states_mem_needs(13 * BILLION, BILLION, **options)
    assert (host, device) == (18 * 13 * BILLION / 2, layer)


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
    found = [[float(part.split()[0]) for part in line.split("|")[:2]] for line in lines[4:]]
    assert [tuple(row) for row in found] == TABLE_3
    assert lines[-1].endswith("offload_param=none  offload_optimizer=none  zero.Init=no")
    estimate_zero2_model_states_mem_needs_all_live(plain)
    assert capsys.readouterr().out.count("offload_optimizer=") == 2
