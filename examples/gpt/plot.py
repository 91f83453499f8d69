"""The loss curve, drawn from the CSV files that the engine's monitor wrote."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

SMOOTHING = 0.97
"""Weight of the past in the running mean of the training loss."""


def read_metric(path: Path) -> tuple[list[int], list[float]]:
    """Samples and values of one metric, in order; where a run was taken up again earlier, the later row counts."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    values = {int(float(samples)): float(value) for samples, value in rows}
    return sorted(values), [values[samples] for samples in sorted(values)]


def running_mean(values: Sequence[float]) -> list[float]:
    """Exponential mean of the values so far, weighted so that the first ones are not favoured."""
    total = weight = 0.0
    means = []
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(total / weight)
    return means


def draw_curve(
    training_csv: Path, validation_csv: Path, out: Path, *, unigram_entropy: float, context: int, resumed_at: Sequence[int]
) -> None:
    """Write a PNG of both losses over the tokens read.

    Args:
        training_csv: loss of each step.
        validation_csv: loss on the validation text, now and then.
        out: the PNG.
        unigram_entropy: nats per token; drawn as a line.
        context: tokens per sample.
        resumed_at: samples at which training went on from a checkpoint; each is drawn as a line.
    """
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="tight")
    axes = figure.subplots()
    samples, losses = read_metric(training_csv)
    millions = [count * context / 1e6 for count in samples]
    axes.plot(millions, losses, color="tab:blue", alpha=0.2, linewidth=0.6)
    axes.plot(millions, running_mean(losses), color="tab:blue", linewidth=1.5, label="training (running mean)")
    samples, losses = read_metric(validation_csv)
    axes.plot(
        [count * context / 1e6 for count in samples], losses, "o", color="tab:orange", markersize=4, label="validation"
    )
    axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1, label="entropy of single tokens")
    for number, samples_then in enumerate(resumed_at):
        label = "resumed from the checkpoint" if number == 0 else None
        axes.axvline(samples_then * context / 1e6, color="tab:green", linestyle=":", linewidth=1.5, label=label)
    axes.set(xlabel="tokens read (millions)", ylabel="loss (nats per token)", title="GPT through deepspeed.initialize")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(out)
