"""Geometry: axes hold their values, outlines keep extremes, paths can be read back."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.run_log import Schedule
from deepspeed.run_report import texts
from deepspeed.run_report.charts import BUCKETS, Mark, line_chart, stacked_chart
from deepspeed.run_report.facts import curve_of
from deepspeed.run_report.grids import around_even, grid, joined, timeline
from deepspeed.run_report.sampling import averaged, evenly, outline
from deepspeed.run_report.scales import Scale, scale_of
from deepspeed.run_report.tables import Table

_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(values=st.lists(st.one_of(st.none(), _FLOATS), min_size=1, max_size=300), buckets=st.integers(1, 30))
def test_an_outline_keeps_ends_extremes_order_and_size(values: list[float | None], buckets: int) -> None:
    chosen = outline(np.array(values, dtype=np.float64), buckets)
    assert chosen == sorted(set(chosen))
    assert (chosen[0], chosen[-1]) == (0, len(values) - 1)
    assert len(chosen) <= 3 * buckets + 2
    known = [value for value in values if value is not None]
    drawn = [value for at in chosen if (value := values[at]) is not None]
    if known:
        assert (min(drawn), max(drawn)) == (min(known), max(known))
    assert (None in values) == any(values[at] is None for at in chosen)


@given(count=st.integers(0, 500), most=st.integers(0, 30))
def test_places_are_spread_evenly_with_both_ends(count: int, most: int) -> None:
    places = evenly(count, most)
    assert len(places) <= max(most, 0)
    assert places == sorted(set(places))
    if count and most >= 2:
        assert (places[0], places[-1]) == (0, count - 1)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), buckets=st.integers(1, 20))
def test_means_of_buckets_stay_within_the_values(values: list[float], buckets: int) -> None:
    means = averaged(values, buckets)
    assert len(means) == min(len(values), buckets)
    assert min(values) - 1e-6 <= min(means)
    assert max(means) <= max(values) + 1e-6


@given(values=st.lists(_FLOATS, max_size=20), from_zero=st.booleans(), may_be_log=st.booleans())
def test_an_axis_holds_its_values_in_order_between_its_ends(values: list[float], from_zero: bool, may_be_log: bool) -> None:
    scale = scale_of(values, from_zero=from_zero, may_be_log=may_be_log)
    assert scale.low < scale.high
    places = [scale.at(value) for value in sorted(values)]
    assert all(0 <= place <= 1 for place in places)
    assert places == sorted(places)
    ticks = [tick.at for tick in scale.ticks(texts.number)]
    assert ticks == sorted(ticks)
    assert all(-1e-6 <= tick <= 100 + 1e-6 for tick in ticks)
    assert len(ticks) <= 12


@pytest.mark.parametrize(
    ("values", "low", "high", "labels"),
    [
        ([0.0, 9.1], 0, 10, ["0", "2", "4", "6", "8", "10"]),
        ([2.2, 10.4], 2, 11, ["2", "4", "6", "8", "10"]),
        ([3.0, 3.0], 1.5, 4.5, ["2", "3", "4"]),
    ],
)
def test_axes_are_round(values: list[float], low: float, high: float, labels: list[str]) -> None:
    scale = scale_of(values)
    assert (scale.low, scale.high) == pytest.approx((low, high))
    assert [tick.label for tick in scale.ticks(texts.number)] == labels


def test_values_over_orders_of_magnitude_take_a_logarithmic_axis() -> None:
    scale = scale_of([0.01, 500.0], may_be_log=True)
    assert scale.is_log
    assert [tick.label for tick in scale.ticks(texts.number)] == ["0.01", "0.1", "1", "10", "100"]
    assert not scale_of([0.0, 500.0], may_be_log=True).is_log


def _read_back(path: str, x: Scale, y: Scale) -> list[tuple[float, float]]:
    pairs = [(int(a) / 10_000, 1 - int(b) / 10_000) for a, b in re.findall(r"(\d+) (\d+)", path)]
    return [(x.low + a * (x.high - x.low), y.low + b * (y.high - y.low)) for a, b in pairs]


def test_a_path_can_be_read_back_to_its_values() -> None:
    values = (3.0, 2.5, 2.75, 1.0)
    chart = line_chart("c", "Loss", [curve_of("loss", (1, 2, 3, 4), values)], texts.number)
    assert chart is not None
    (line,) = chart.lines
    for (step, value), (x, y) in zip(
        zip((1, 2, 3, 4), values, strict=True), _read_back(line.path, chart.x, chart.y), strict=True
    ):
        assert round(x) == step
        assert y == pytest.approx(value, abs=(chart.y.high - chart.y.low) / 10_000)


def test_a_line_breaks_where_values_are_not_known_and_a_value_alone_is_a_dot() -> None:
    curve = curve_of("loss", (0, 1, 2, 3, 4), (1.0, 2.0, None, 1.5, None))
    chart = line_chart("c", "Loss", [curve], texts.number)
    assert chart is not None
    assert chart.lines[0].path == "M0 10000L2500 0M7500 5000h1"


def test_ten_thousand_steps_are_drawn_as_an_outline_which_is_said() -> None:
    values = tuple(5.0 if at == 777 else 1.0 + at % 2 for at in range(10_000))
    chart = line_chart("c", "Loss", [curve_of("loss", tuple(range(10_000)), values)], texts.number)
    assert chart is not None
    assert len(chart.lines[0].path) < 12 * 2 * BUCKETS
    assert max(y for _, y in _read_back(chart.lines[0].path, chart.x, chart.y)) == pytest.approx(5.0, abs=1e-3)
    assert chart.note == "10,000 reported steps in 400 buckets: the lowest and highest value of each bucket are drawn."


def test_a_chart_tells_in_words_what_it_shows() -> None:
    marks = [Mark(2, "save"), Mark(3, "restart")]
    chart = line_chart("c", "Loss", [curve_of("loss", (1, 2, 3), (4.0, 6.0, 2.0))], texts.number, marks=marks)
    assert chart is not None
    assert chart.description == (
        "Steps 1 to 3. loss: from 4 to 2, lowest 2, highest 6. 1 saved checkpoints and 1 restarts are marked."
    )
    assert [label.label for label in chart.legend] == ["loss", "checkpoint saved", "restart"]
    assert chart.table.rows == (("1", "4"), ("2", "6"), ("3", "2"))


def test_nothing_is_drawn_of_nothing() -> None:
    assert line_chart("c", "Loss", [curve_of("loss", (1, 2), (None, None))], texts.number) is None
    assert stacked_chart("c", "Time", np.empty(0), [], texts.seconds, "seconds") is None


def test_layers_lie_on_each_other() -> None:
    chart = stacked_chart(
        "c",
        "Time",
        np.array([1.0, 2.0]),
        [("a", np.array([1.0, 2.0])), ("b", np.array([3.0, 2.0]))],
        texts.seconds,
        "seconds",
    )
    assert chart is not None
    assert (chart.y.low, chart.y.high) == (0, 4)
    assert [line.path for line in chart.lines] == [
        "M0 7500L10000 5000L10000 10000L0 10000Z",
        "M0 0L10000 0L10000 5000L0 7500Z",
    ]


@given(rows=st.integers(1, 5), count=st.integers(1, 200), columns=st.integers(1, 64))
def test_joined_columns_keep_the_largest(rows: int, count: int, columns: int) -> None:
    values = [[float((7 * at + row) % 11) for at in range(count)] for row in range(rows)]
    found = joined(values, columns)
    assert [len(row) for row in found] == [min(count, columns)] * rows
    assert [max(row) for row in found] == [max(row) for row in values]


@given(load=st.floats(0, 1e6))
def test_an_even_share_has_the_middle_colour(load: float) -> None:
    colour = around_even(load)
    assert 0 <= colour <= 12
    if load < 0.9:
        assert colour < 6
    if load > 1.2:
        assert colour > 6


@given(colours=st.lists(st.integers(0, 12), min_size=1, max_size=50))
def test_neighbours_of_one_colour_are_one_cell(colours: list[int]) -> None:
    table = Table("", (), ())
    made = grid("g", "", "", [("a", [0.0] * len(colours))], [colours], x_ticks=(), legend=("", ""), table=table)
    ((_, cells),) = made.rows
    assert [cell.colour for cell in cells for _ in range(cell.width)] == colours
    assert all(one.colour != other.colour for one, other in itertools.pairwise(cells))


def test_works_of_a_pipeline_lie_where_they_happen() -> None:
    works = ((0, 0.0, 1.0, "F", 0), (1, 1.0, 2.0, "F", 0), (1, 2.0, 4.0, "B", 0), (0, 4.0, 5.0, "optimizer", None))
    lanes = timeline(Schedule("1f1b", 2, 1, None, works, 0.4))
    assert lanes is not None
    assert [lane.label for lane in lanes.lanes] == ["stage 0", "stage 1"]
    assert [(work.left, work.width, work.kind, work.label) for work in lanes.lanes[1].works] == [
        (20.0, 20.0, "forward", "0"),
        (40.0, 40.0, "backward", "0"),
    ]
    assert lanes.kinds == (("forward", "forward"), ("backward", "backward"), ("other", "other work"))
    assert "idle for 40.0 %" in lanes.description


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (3.2e-6, "3.20 us"),
        (0.0041, "4.10 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (5400, "1 h 30 min"),
    ],
)
def test_times_are_written_for_people(value: float | None, text: str) -> None:
    assert texts.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1.3e10, "13.0 GB"), (123_456, "123 kB"), (999_999, "1.00 MB")]
)
def test_bytes_are_written_for_people(value: float, text: str) -> None:
    assert texts.nbytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.34567, "2.346"), (0.0003, "0.0003"), (1.234e-7, "1.23e-07"), (32768.0, "32,768"), (0, "0"), (1e300, "1e+300")],
)
def test_values_are_written_for_people(value: float, text: str) -> None:
    assert texts.number(value) == text


@given(value=st.floats())
def test_no_number_is_too_odd_to_be_written(value: float) -> None:
    for write in (texts.number, texts.count, texts.nbytes, texts.seconds, texts.share, texts.clock):
        assert 0 < len(write(value)) < 40
    if abs(value) < 1e15:
        assert texts.duration(value)
