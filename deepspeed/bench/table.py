"""Bandwidths from seconds, and how they are shown: table, plot, JSON. Pure but for the plot's file.

| operation | bytes told | bus factor for n ranks |
|---|---|---|
| all-reduce | of each rank's tensor | 2 (n - 1) / n |
| all-gather, all-to-all | of the whole, all ranks together (all-to-all: of each rank's tensor) | (n - 1) / n |
| broadcast, point to point | of the tensor | 1 |

Throughput is bytes over seconds; bus bandwidth is throughput times the factor: what each rank's link carries, which can be
compared with the hardware's. Source: the convention of nccl-tests (doc/PERFORMANCE.md).

Does not live here: the measurement (`bench.measure`). `bench.command` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.common.plotting import new_figure

__all__ = ["UNITS", "Measurement", "bus_factor", "lines", "plot", "size_text"]

UNITS = {"Gbps": 8e-9, "GBps": 1e-9}
"""How many of the unit one byte per second is."""


@dataclass(frozen=True)
class Measurement:
    """One operation at one size.

    Attributes:
        operation: as its flag calls it: "all-reduce".
        dtype: of the elements: "float32".
        nbytes: see the module's table.
        seconds: of one call, the slowest rank's, the mean over trials.
        ranks: that took part.
    """

    operation: str
    dtype: str
    nbytes: int
    seconds: float
    ranks: int

    def throughput(self, unit: str) -> float:
        """Bytes over seconds, in a unit of `UNITS`."""
        return self.nbytes / self.seconds * UNITS[unit]

    def bus_bandwidth(self, unit: str) -> float:
        """What each rank's link carries, in a unit of `UNITS`."""
        return self.throughput(unit) * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes over a rank's link for each byte told; see the module's table."""
    if operation == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in ("all-gather", "all-to-all") else 1.0


def size_text(nbytes: int) -> str:
    """For example "64 KiB"."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def lines(measurements: Sequence[Measurement], unit: str, *, raw: bool = False) -> list[str]:
    """One table per operation and dtype.

    Args:
        measurements: in the order of the table.
        unit: of `UNITS`.
        raw: numbers alone: bytes and seconds.
    """
    shown: list[str] = []
    heads = dict.fromkeys((each.operation, each.dtype, each.ranks) for each in measurements)
    for operation, dtype, ranks in heads:
        shown.append(f"---- {operation}, {dtype}, {ranks} ranks ----")
        shown.append(
            f"{'size':>14} {'description':>24} {'duration':>14} {f'throughput ({unit})':>18} {f'busbw ({unit})':>14}"
        )
        for each in measurements:
            if (each.operation, each.dtype, each.ranks) != (operation, dtype, ranks):
                continue
            size = str(each.nbytes) if raw else size_text(each.nbytes)
            duration = f"{each.seconds:.9f}" if raw else f"{each.seconds * 1e3:.3f} ms"
            shown.append(
                f"{size:>14} {dtype + ' x ' + str(ranks) + ' ranks':>24} {duration:>14} "
                f"{each.throughput(unit):>18.4g} {each.bus_bandwidth(unit):>14.4g}"
            )
    return shown


def plot(measurements: Sequence[Measurement], unit: str, path: Path) -> None:
    """Draw bus bandwidth over size, a line per operation and dtype, into `path`.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure = new_figure(7, 4.5, asked_by="--plot")
    axes = figure.subplots()
    operations = list(dict.fromkeys(each.operation for each in measurements))
    dtypes = list(dict.fromkeys(each.dtype for each in measurements))
    for operation, dtype in dict.fromkeys((each.operation, each.dtype) for each in measurements):
        mine = [each for each in measurements if (each.operation, each.dtype) == (operation, dtype)]
        sizes, speeds = [each.nbytes for each in mine], [each.bus_bandwidth(unit) for each in mine]
        colour, style = f"C{operations.index(operation)}", ("-", "--", ":", "-.")[dtypes.index(dtype) % 4]
        axes.plot(sizes, speeds, style, color=colour, marker="o", markersize=3, label=f"{operation}, {dtype}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({each.nbytes for each in measurements})
    ticks = ticks[:: max(1, len(ticks) // 8)]
    axes.set_xticks(ticks, [size_text(each) for each in ticks], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("size")
    axes.set_ylabel(f"bus bandwidth ({unit})")
    axes.set_title(f"Collectives of {measurements[0].ranks} ranks")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
