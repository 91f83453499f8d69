"""All sections, in the order of the page."""

from __future__ import annotations

from deepspeed.run_report import facts
from deepspeed.run_report.charts import Mark
from deepspeed.run_report.reading import Run
from deepspeed.run_report.sections import course, models, ranks, training
from deepspeed.run_report.sections.kinds import Absent, Section

__all__ = ["sections"]


def sections(run: Run) -> tuple[list[Section], list[Absent]]:
    """Everything there is to show, and what there is not."""
    marks = _marks(run)
    told = facts.steps(run)
    found: list[Section] = []
    absent: list[Absent] = []
    for made in (
        training.training(told, marks),
        training.precision(told, marks),
        training.speed(told, marks),
        ranks.memory(run, marks),
        ranks.phases(run, marks),
        ranks.communication(run),
        ranks.waits(run),
        models.pipeline(run),
        models.experts(run, marks),
        models.modules(run),
        course.restarts(run),
        course.ranks(run),
        course.config(run),
        course.log(run),
    ):
        if isinstance(made, Section):
            found.append(made)
        elif made is not None:
            absent.append(made)
    return found, absent


def _marks(run: Run) -> list[Mark]:
    """Saved checkpoints and restarts, by step."""
    marks = [Mark(each.step, "save") for each in facts.checkpoints(run) if each.action == "save" and each.step is not None]
    firsts = [attempt.steps.column("step")[:1] for attempt in run.attempts[1:]]
    marks += [Mark(float(step), "restart") for first in firsts for step in first]
    return sorted(marks, key=lambda mark: mark.step)
