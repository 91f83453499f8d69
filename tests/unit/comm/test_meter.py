"""Sums over the collectives of a process."""

from __future__ import annotations

from deepspeed.comm.meter import Meter, OpSums


def test_sums_are_kept_by_operation() -> None:
    meter = Meter()
    meter.add("all_reduce", 8, 0.5)
    meter.add("all_reduce", 4, 0.25)
    meter.add("broadcast", 2, 1.0)
    meter.waited(0.5)
    meter.waited(0.25)
    assert meter.ops() == {"all_reduce": OpSums(2, 12, 0.75), "broadcast": OpSums(1, 2, 1.0)}
    assert meter.waited_seconds == 0.75


def test_it_is_on_while_anybody_reads() -> None:
    meter = Meter()
    assert not meter.is_on
    meter.begin()
    meter.begin()
    meter.end()
    assert meter.is_on
    meter.end()
    assert not meter.is_on
