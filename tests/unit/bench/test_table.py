from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.bench.command import launcher_argv, numels, parse
from deepspeed.bench.table import Measurement, bus_factor, lines, plot, size_text


def test_bandwidths_follow_from_bytes_and_seconds() -> None:
    measured = Measurement("all-reduce", "float32", 1_000_000_000, 0.5, 4)
    assert measured.throughput("GBps") == pytest.approx(2.0)
    assert measured.throughput("Gbps") == pytest.approx(16.0)
    assert measured.bus_bandwidth("GBps") == pytest.approx(3.0), "each rank sends and receives 2 (n - 1) / n of it"


@pytest.mark.parametrize(
    ("operation", "factor"), [("all-reduce", 1.0), ("all-gather", 0.5), ("all-to-all", 0.5), ("broadcast", 1), ("pt2pt", 1)]
)
def test_the_bus_factor_of_two_ranks(operation: str, factor: float) -> None:
    assert bus_factor(operation, 2) == factor


def test_sizes_grow_by_powers_of_two_and_divide_among_ranks() -> None:
    assert list(numels(4, 1, is_scan=True)) == [1, 2, 4, 8, 16]
    assert list(numels(4, 3, is_scan=True)) == [3, 6, 9, 18]
    assert list(numels(4, 3, is_scan=False)) == [18]


def test_the_table_has_a_part_per_operation_and_dtype() -> None:
    measured = [Measurement("all-reduce", dtype, 2**20 * n, 1e-3, 2) for dtype in ("float32", "bfloat16") for n in (1, 2)]
    shown = lines(measured, "GBps")
    assert [line for line in shown if line.startswith("----")] == [
        "---- all-reduce, float32, 2 ranks ----",
        "---- all-reduce, bfloat16, 2 ranks ----",
    ]
    assert "busbw (GBps)" in shown[1]
    assert shown[2].split() == ["1", "MiB", "float32", "x", "2", "ranks", "1.000", "ms", "1.049", "1.049"]
    assert lines(measured, "GBps", raw=True)[2].split()[0] == "1048576"


@pytest.mark.parametrize(("nbytes", "text"), [(4, "4 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (2**42, "4096 GiB")])
def test_sizes_are_read_easily(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    measured = [Measurement("all-reduce", "float32", 2**n, 1e-3, 2) for n in range(2, 20)]
    plot(measured, "Gbps", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_it_starts_itself_on_every_device_and_on_two_ranks_of_a_cpu() -> None:
    words = ["--all-reduce", "--scan"]
    assert launcher_argv(parse(words), words, 1)[-6:] == ["2", "--quiet", "--module", "deepspeed.bench", *words]
    assert "8" in launcher_argv(parse(words), words, 8)
    assert "3" in launcher_argv(parse([*words, "--ranks", "3"]), words, 8)


@pytest.mark.parametrize("words", [["--dtype", "float31"], ["--trials", "0"], ["--mem-factor", "2"], ["--backend", "smoke"]])
def test_settings_that_cannot_be_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err
