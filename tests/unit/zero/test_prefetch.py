"""`deepspeed.zero.prefetch`: what to gather ahead, keep and release."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.zero import ZeroConfig
from deepspeed.zero.prefetch import GatherSettings, Idle, Lookahead, choose_victims, should_keep
from deepspeed.zero.trace import Trace

NUMELS = (10, 20, 30, 40)
FORWARD_BACKWARD = (0, 1, 2, 3, 3, 2, 1, 0)


def _trace(*sequence: int) -> Trace:
    trace = Trace(NUMELS)
    for unit in sequence:
        trace.use(unit)
    trace.close()
    return trace


def _always(_numel: int, _distance: int) -> bool:
    return True


def test_settings_are_read_from_the_config() -> None:
    keys = {
        "stage3_prefetch_bucket_size": 1,
        "stage3_max_live_parameters": 2,
        "stage3_max_reuse_distance": 3,
        "stage3_allgather_sequential": True,
        "stage3_use_all_reduce_for_fetch_params": True,
        "memory_efficient_linear": False,
        "log_trace_cache_warnings": True,
    }
    settings = GatherSettings.from_config(ZeroConfig.model_validate({"stage": 3, **keys}))
    assert settings == GatherSettings(1, 2, 3, True, True, False, True)
    assert GatherSettings.from_config(ZeroConfig.model_validate({"stage": 3})) == GatherSettings()


def test_a_unit_is_kept_within_the_reuse_distance_and_below_the_live_limit() -> None:
    settings = GatherSettings(max_live_numel=100, max_reuse_numel=50)
    assert should_keep(50, 100, settings)
    assert not should_keep(51, 100, settings)
    assert not should_keep(50, 101, settings)
    assert not should_keep(None, 0, settings)


def test_victims_are_the_units_needed_last() -> None:
    idle = [Idle(0, 10, 5), Idle(1, 10, 50), Idle(2, 10, None), Idle(3, 10, 20)]
    assert choose_victims(idle, 0) == []
    assert choose_victims(idle, 1) == [2]
    assert choose_victims(idle, 15) == [2, 1]
    assert choose_victims(idle, 100) == [2, 1, 3, 0]
    assert choose_victims(idle, 100, beyond=20) == [2, 1]


def test_prefetch_takes_what_comes_next_within_its_bucket() -> None:
    trace = _trace(*FORWARD_BACKWARD)
    trace.use(0)
    here = {0}
    ahead = Lookahead(trace, NUMELS, GatherSettings(prefetch_numel=50))
    assert ahead.choose(0, here.__contains__, _always) == [1, 2]
    here |= {1, 2}
    assert ahead.choose(50, here.__contains__, _always) == []
    trace.use(1)
    assert ahead.choose(30, here.__contains__, _always) == []
    trace.use(2)
    assert ahead.choose(0, here.__contains__, _always) == [3]


@pytest.mark.parametrize("settings", [GatherSettings(prefetch_numel=0), GatherSettings(is_sequential=True)])
def test_nothing_is_gathered_ahead_without_a_bucket_or_in_sequence(settings: GatherSettings) -> None:
    trace = _trace(*FORWARD_BACKWARD)
    trace.use(0)
    assert Lookahead(trace, NUMELS, settings).choose(0, {0}.__contains__, _always) == []


def test_prefetch_stops_where_there_is_no_room() -> None:
    trace = _trace(*FORWARD_BACKWARD)
    trace.use(0)
    ahead = Lookahead(trace, NUMELS, GatherSettings())
    asked: list[tuple[int, int]] = []

    def room(numel: int, distance: int) -> bool:
        asked.append((numel, distance))
        return numel < 30

    assert ahead.choose(0, {0}.__contains__, room) == [1]
    assert asked == [(20, 0), (50, 20)]  # what is chosen already needs room, too


def test_prefetch_stops_where_the_buffers_for_reads_are_used_up_and_goes_on_from_there() -> None:
    trace = _trace(*FORWARD_BACKWARD)
    lookahead = Lookahead(trace, NUMELS, GatherSettings(prefetch_numel=1000))
    trace.use(0)
    left = [2]

    def take(_unit: int) -> bool:
        left[0] -= 1
        return left[0] >= 0

    here: set[int] = {0}
    assert lookahead.choose(0, here.__contains__, _always, take) == [1, 2]
    here |= {1, 2}
    assert lookahead.choose(50, here.__contains__, _always, lambda unit: False) == []
    assert lookahead.choose(50, here.__contains__, _always, lambda unit: True) == [3]


def test_a_unit_released_because_it_is_used_far_away_is_not_gathered_at_once_again() -> None:
    trace = _trace(*FORWARD_BACKWARD)
    settings = GatherSettings(prefetch_numel=10**6, max_reuse_numel=0)
    ahead = Lookahead(trace, NUMELS, settings)
    here: set[int] = set()
    gathered_ahead: list[list[int]] = []
    for unit in FORWARD_BACKWARD:
        trace.use(unit)
        here.add(unit)
        chosen = ahead.choose(sum(NUMELS[u] for u in here - {unit}), here.__contains__, _always)
        gathered_ahead.append(chosen)
        here |= set(chosen)
        if trace.distance(unit) != 0:
            here.discard(unit)
            ahead.released(unit)
    assert gathered_ahead == [[1, 2, 3], [], [], [2], [], [1], [0], []]


def test_a_release_makes_the_lookahead_look_again() -> None:
    trace = _trace(0, 1, 2, 1, 3)
    trace.use(0)
    here = {0, 1, 2}
    ahead = Lookahead(trace, NUMELS, GatherSettings())
    assert ahead.choose(50, here.__contains__, _always) == [3]
    here.add(3)
    trace.use(1)
    here.discard(1)
    ahead.released(1)
    assert ahead.choose(70, here.__contains__, _always) == [1]
    trace.close()
    ahead.restart()
    trace.use(0)
    assert ahead.choose(0, {0}.__contains__, _always) == [1]  # the pass had ended after that


@given(
    sequence=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    prefetch_numel=st.integers(0, 120),
    live=st.integers(40, 200),
    reuse=st.integers(0, 200),
)
def test_what_is_ahead_never_exceeds_the_bucket(sequence: list[int], prefetch_numel: int, live: int, reuse: int) -> None:
    trace = _trace(*sequence)
    settings = replace(GatherSettings(), prefetch_numel=prefetch_numel, max_live_numel=live, max_reuse_numel=reuse)
    ahead = Lookahead(trace, NUMELS, settings)
    here: set[int] = set()
    waiting: set[int] = set()
    for unit in sequence:
        trace.use(unit)
        here.add(unit)
        waiting.discard(unit)
        chosen = ahead.choose(sum(NUMELS[u] for u in waiting), here.__contains__, _always)
        assert not here & set(chosen)
        here |= set(chosen)
        waiting |= set(chosen)
        assert sum(NUMELS[u] for u in waiting) <= prefetch_numel
        if not should_keep(trace.distance(unit), sum(NUMELS[u] for u in here), settings):
            here.discard(unit)
            ahead.released(unit)
