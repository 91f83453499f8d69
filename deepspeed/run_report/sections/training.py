"""Sections about training itself: loss, rates and norms, the loss scale, speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed.run_report import facts, texts
from deepspeed.run_report.charts import Mark, line_chart
from deepspeed.run_report.columns import Rows
from deepspeed.run_report.facts import Curve, curve
from deepspeed.run_report.sections.kinds import Absent, Section, of_charts

__all__ = ["precision", "speed", "training"]


def training(told: facts.Steps, marks: Sequence[Mark]) -> Section | Absent:
    """Loss, learning rate, gradient norm, and other values by name."""
    number = texts.number
    more = told.kept.names("more")
    loss = line_chart(
        "chart-loss",
        "Loss",
        [curve("loss", told.kept, "loss"), *(_more(name, told.kept) for name in more if "loss" in name)],
        number,
        faint=[curve("loss given up", told.redone, "loss")] if len(told.redone) else (),
        marks=marks,
        may_be_log=True,
    )
    others = [
        line_chart(f"chart-more-{at}", name, [_more(name, told.kept)], number, marks=marks)
        for at, name in enumerate(name for name in more if "loss" not in name)
    ]
    rate = line_chart("chart-lr", "Learning rate", _rates(told.kept), number, marks=marks, from_zero=True)
    norm = line_chart(
        "chart-norm",
        "Gradient norm",
        [curve("gradient norm", told.kept, "grad_norm")],
        number,
        marks=marks,
        may_be_log=True,
    )
    made = of_charts("training", "Training", "", [loss, rate, norm, *others[:12]])
    return made or Absent(
        "Training",
        "rank 0 writes loss, learning rate and gradient norm every run_log.every steps; no step is in the log yet",
    )


def precision(told: facts.Steps, marks: Sequence[Mark]) -> Section | Absent:
    """The loss scale and skipped steps, where either moved."""
    scale = curve("loss scale", told.kept, "loss_scale")
    skipped = curve("skipped", told.kept, "skipped")
    if len(np.unique(scale.known)) < 2 and not skipped.known.any():
        return Absent(
            "Loss scale and skipped steps",
            'the scale did not change and no step was skipped; "fp16": {"enabled": true} has a dynamic one',
        )
    charts = [
        line_chart("chart-scale", "Loss scale", [scale], texts.number, marks=marks, may_be_log=True),
        line_chart("chart-skipped", "Skipped steps so far", [skipped], texts.number, marks=marks, from_zero=True),
    ]
    made = of_charts(
        "precision", "Loss scale", "A step whose gradients overflow is skipped, and the scale is lowered.", charts
    )
    assert made is not None  # one of the curves has values
    return made


def speed(told: facts.Steps, marks: Sequence[Mark]) -> Section | Absent:
    """Samples and seconds, and what of the device is used."""
    samples = line_chart(
        "chart-samples",
        "Samples per second",
        [curve("samples per second", told.kept, "samples_per_second")],
        texts.number,
        marks=marks,
        from_zero=True,
    )
    seconds = line_chart(
        "chart-seconds",
        "Seconds per step",
        [curve("seconds per step", told.kept, "seconds")],
        texts.seconds,
        "seconds",
        marks=marks,
        from_zero=True,
    )
    mfu = curve("MFU", told.kept, "mfu")
    flops = curve("FLOPS", told.kept, "flops_per_second")
    use = (
        line_chart(
            "chart-mfu", "MFU: share of the device's peak FLOPS", [mfu], texts.share, "share", marks=marks, from_zero=True
        )
        if len(mfu.known)
        else line_chart("chart-flops", "FLOPS", [flops], _flops, "rate", marks=marks, from_zero=True)
    )
    intro = (
        ""
        if use
        else "FLOPS and MFU are known where flops_profiler counts a step and peak_tflops says what a device could do."
    )
    made = of_charts("speed", "Speed", intro, [samples, seconds, use])
    return made or Absent("Speed", "rank 0 writes samples per second with each reported step; no step is in the log yet")


def _more(name: str, steps: Rows) -> Curve:
    """Another value, at the steps that have it."""
    whole = curve(name, steps, name, "more")
    is_known = ~np.isnan(whole.values)
    return Curve(name, whole.steps[is_known], whole.values[is_known])


def _rates(steps: Rows) -> list[Curve]:
    """A curve for each group of parameters; those that are equal throughout are one."""
    curves: list[Curve] = []
    for group in steps.names("lr"):
        rate = curve(f"group {group}", steps, group, "lr")
        if not any(np.array_equal(rate.values, other.values, equal_nan=True) for other in curves):
            curves.append(rate)
    return curves if len(curves) > 1 else [Curve("learning rate", each.steps, each.values) for each in curves]


def _flops(value: float | None) -> str:
    return texts.count(value, "FLOPS")
