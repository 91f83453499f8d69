"""Timelines as text, and as a picture."""

from __future__ import annotations

from pathlib import Path

from deepspeed.pipe.drawing import save_png, text_lines
from deepspeed.pipe.orders import OrderName, order_of
from deepspeed.pipe.timeline import Costs, Timeline, simulate


def _timeline(name: OrderName, stages: int, micro_batches: int, costs: Costs, chunks: int = 1) -> Timeline:
    return simulate([order_of(name, stage, stages, micro_batches, chunks) for stage in range(stages)], costs)


def test_columns_are_units_of_time() -> None:
    assert text_lines(_timeline("1f1b", 2, 3, Costs(1, 1, 1))) == [
        "stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "stage 1  .  F0 B0--- F1 B1--- F2 B2---",
    ]
    assert text_lines(_timeline("zero_bubble", 2, 2, Costs(1, 1, 1))) == [
        "stage 0  F0 F1 .  B0 W0 B1 W1",
        "stage 1  .  F0 B0 F1 B1 W0 W1",
    ]


def test_a_column_divides_all_times() -> None:
    assert text_lines(_timeline("gpipe", 2, 1, Costs(1, 1, 0.5))) == [
        "stage 0  F0--- .  .  .  .  .  B0------",
        "stage 1  .  .  F0--- B0------",
    ]


def test_chunks_are_numbered_but_for_the_first() -> None:
    assert text_lines(_timeline("interleaved", 2, 2, Costs(2, 1, 1), chunks=2)) == [
        "stage 0  F0   F1   F0.1 F1.1 .    B0.1 .    B1.1 B0   B1",
        "stage 1  .    F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1",
    ]


def test_times_without_a_common_unit_are_drawn_about_where_they_are() -> None:
    lines = text_lines(_timeline("1f1b", 2, 2, Costs(1, 0.7310585, 0.2689414)))
    for line, stage in zip(lines, (0, 1), strict=True):
        assert [word.rstrip("-") for word in line.split()[2:] if word != "."] == [
            str(w) for w in order_of("1f1b", stage, 2, 2)
        ]
        assert len(line) < 500


def test_a_picture_is_written(tmp_path: Path) -> None:
    save_png(_timeline("interleaved", 2, 3, Costs(), chunks=2), "title", tmp_path / "one.png")
    save_png(_timeline("zero_bubble", 3, 3, Costs()), "title", tmp_path / "two.png")
    for path in (tmp_path / "one.png", tmp_path / "two.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
