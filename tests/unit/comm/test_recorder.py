from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.algorithms import record_as
from deepspeed.comm.recorder import (
    RECORDER,
    CommsLogger,
    bandwidth,
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    reset_log,
    table,
)


@pytest.fixture(autouse=True)
def _the_log_starts_and_ends_untouched() -> object:
    RECORDER.restore_defaults()
    yield
    RECORDER.restore_defaults()


MIB = 1 << 20
RATE = MIB / 2.0 * 8 / 1e6  # 1 MiB in 2 ms, in Gbit/s


@pytest.mark.parametrize(
    ("operation", "algorithm", "bus"),
    [
        ("all_reduce", RATE, 2 * RATE * 3 / 4),
        ("inference_all_reduce", RATE, 2 * RATE * 3 / 4),
        ("all_gather_into_tensor", RATE, RATE * 3 / 4),
        ("allgather_fn", RATE, RATE * 3 / 4),
        ("reduce_scatter_tensor", RATE, RATE * 3 / 4),
        ("gather", RATE, RATE * 3 / 4),
        ("scatter", RATE, RATE * 3 / 4),
        ("all_to_all_single", RATE, RATE * 3 / 4),
        ("broadcast", RATE, RATE),
        ("send", RATE, RATE),
        ("reduce", RATE, RATE),
        ("barrier", RATE, RATE),
    ],
)
def test_bandwidth_follows_the_formula_of_the_operation(operation: str, algorithm: float, bus: float) -> None:
    assert bandwidth(operation, MIB, 2.0, 4) == pytest.approx((algorithm, bus), rel=1e-12)


@given(nbytes=st.integers(0, 1 << 40), milliseconds=st.floats(0, 1e6), ranks=st.integers(1, 1024))
def test_the_bus_never_carries_more_than_twice_the_algorithm(nbytes: int, milliseconds: float, ranks: int) -> None:
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        algorithm, bus = bandwidth(operation, nbytes, milliseconds, ranks)
        assert 0 <= bus <= 2 * algorithm


def test_records_are_kept_by_name_and_size() -> None:
    log = CommsLogger()
    log.append("all_reduce", "all_reduce", 2.0, MIB, 4)
    log.append("all_reduce", "all_reduce", 4.0, MIB, 4)
    log.append("broadcast", "weights", 1.0, 10, 4)
    count, milliseconds, algorithm, bus = log.comms_dict["all_reduce"][MIB]
    assert (count, milliseconds) == (2, [2.0, 4.0])
    assert algorithm == pytest.approx([RATE, RATE / 2])
    assert bus == pytest.approx([1.5 * RATE, 0.75 * RATE])
    assert log.count() == 3
    assert log.operations() == ["all_reduce", "weights"]


def test_the_summary_averages_and_tells_what_stragglers_cost() -> None:
    log = CommsLogger()
    for milliseconds in (2.0, 4.0):
        log.append("all_reduce", "all_reduce", milliseconds, MIB, 4)
    plain = log.summary()["all_reduce"][MIB]
    assert plain["count"] == 2
    assert plain["total_latency_ms"] == 6.0
    assert plain["avg_latency_ms"] == 3.0
    assert plain["tput_avg_gbps"] == pytest.approx(0.75 * RATE)
    assert "straggler_ms" not in plain
    late = log.summary({("all_reduce", MIB): 2.0})["all_reduce"][MIB]
    assert (late["min_latency_ms"], late["straggler_ms"]) == (2.0, 4.0)


def test_the_table_has_a_line_per_operation_and_size() -> None:
    log = CommsLogger()
    log.append("all_reduce", "all_reduce", 2.0, MIB, 4)
    log.append("all_reduce", "all_reduce", 2.0, 8, 4)
    lines = table(log.summary()).splitlines()
    assert " ".join(lines[0].split()) == (
        "Comm. Op Message Size Count Total Latency(ms) Avg Latency(ms) tput_avg (Gbps) busbw_avg (Gbps)"
    )
    assert lines[1].split()[:4] == ["all_reduce", "8", "B", "1"]
    assert lines[2].split()[:4] == ["all_reduce", "1.00", "MiB", "1"]
    assert table(CommsLogger().summary()).startswith("Comm. Op")


def test_columns_of_the_table_are_aligned_however_long_names_are() -> None:
    log = CommsLogger()
    log.append("all_reduce", "all_reduce | [Caller Func: a_function_with_a_long_name]", 1234.5, MIB, 4)
    log.append("send", "send", 2.0, 8, 4)
    lines = table(log.summary({("send", 8): 1.5})).splitlines()
    assert len({len(line) for line in lines}) == 1  # numbers end at one place
    assert [re.split(" {2,}", line) for line in lines[1:]] == [
        [log.operations()[0], "1.00 MiB", "1", "1234.50", "1234.50", "0.01", "0.01", "-", "-"],
        ["send", "8 B", "1", "2.00", "2.00", "0.00", "0.00", "1.50", "0.50"],
    ]
    assert re.split(" {2,}", lines[0])[-2:] == ["Min Latency(ms)", "Straggler(ms)"]


def test_the_log_is_off_until_enabled() -> None:
    assert not RECORDER.enabled
    configure(enabled=True)
    assert RECORDER.enabled
    configure(verbose=True)
    assert RECORDER.enabled
    assert RECORDER.verbose


@pytest.mark.parametrize("as_model", [False, True])
def test_the_config_block_is_applied_and_arguments_win(as_model: bool) -> None:
    block = {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"], "verbose": False, "debug": True}
    config = SimpleNamespace(comms_logger=SimpleNamespace(**block)) if as_model else {"comms_logger": block}
    configure(config, verbose=True)
    assert (RECORDER.enabled, RECORDER.prof_all, RECORDER.verbose, RECORDER.debug) == (True, False, True, True)
    assert RECORDER.wants("all_reduce", prof=False)
    assert not RECORDER.wants("broadcast", prof=False)
    assert RECORDER.wants("broadcast", prof=True)


def test_a_config_without_the_block_changes_nothing() -> None:
    configure(enabled=True)
    for config in (None, {}, {"comms_logger": None}, {"comms_logger": {}}, SimpleNamespace()):
        configure(config)
    assert RECORDER.enabled


def test_the_log_can_be_asked_and_emptied() -> None:
    assert not has_comm_data()
    RECORDER.append("send", "send", 1.0, 8, 2)
    assert has_comm_data()
    assert get_comm_operation_count() == 1
    assert get_logged_comm_ops() == ["send"]
    reset_log()
    assert not has_comm_data()
    assert get_comm_operation_count() == 0


def test_a_verbose_log_tells_each_call(caplog: pytest.LogCaptureFixture) -> None:
    RECORDER.verbose = True
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        RECORDER.append("all_reduce", "all_reduce", 2.0, MIB, 4)
    assert caplog.records[0].getMessage() == (
        "comm op: all_reduce | time (ms): 2.00 | msg size: 1.00 MiB | algbw (Gbps): 4.19 | busbw (Gbps): 6.29"
    )


def test_sums_that_no_collective_carries_tell_their_caller_too() -> None:
    configure(enabled=True, debug=True)
    done = record_as("reduce_scatter_tensor")(64, 2)
    assert done is not None
    done()
    caller = "test_sums_that_no_collective_carries_tell_their_caller_too"
    assert list(get_logged_comm_ops()) == [f"reduce_scatter_tensor | [Caller Func: {caller}]"]
