"""Where the tokens went, drawn from the routing.csv of two runs: with the load-balancing loss and without it."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure


def read_routing(path: Path, block: int) -> tuple[list[int], list[float], list[list[float]]]:
    """Of one block: steps, validation losses, and each step's share of every expert."""
    with path.open(newline="") as file:
        rows = [row for row in list(csv.reader(file))[1:] if int(row[1]) == block]
    return [int(row[0]) for row in rows], [float(row[2]) for row in rows], [[float(s) for s in row[3:]] for row in rows]


def draw_routing(runs: dict[str, Path], out: Path, *, block: int = 0) -> None:
    """Write a PNG with a panel for each run: every expert's share of the choices over the steps.

    Args:
        runs: title -> routing.csv.
        out: the PNG.
        block: which.
    """
    figure = Figure(figsize=(9, 3.6), dpi=80, layout="tight")
    panels = figure.subplots(1, len(runs), sharey=True)
    for axes, (title, path) in zip(panels, runs.items(), strict=True):
        steps, losses, shares = read_routing(path, block)
        experts = len(shares[0])
        for number in range(experts):
            axes.plot(steps, [row[number] for row in shares], linewidth=1.5)
        axes.axhline(1 / experts, color="gray", linestyle="--", linewidth=1)
        axes.set(title=f"{title}\nvalidation loss {losses[-1]:.2f}, least used expert {min(shares[-1]):.1%}", xlabel="step")
        axes.grid(alpha=0.25)
    panels[0].set(ylabel=f"share of the choices in block {block}", ylim=(0, None))
    figure.savefig(out)
