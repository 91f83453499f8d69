"""When every work of a pipeline happens: orders carried out on paper, with given costs.

    orders + costs --> simulate --> Timeline     start and end of each work; makespan, idle share, live activations
                                       |-------> drawing.text_lines, drawing.save_png       `deepspeed-pipeline draw`

Lives here: the simulation, and the lengths that theory gives. Does not live here: the orders (`orders`), and drawing. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.errors import ArgumentError
from deepspeed.pipe.orders import OrderName, Work, in_turn, live_peak, needs

__all__ = ["Costs", "Span", "Timeline", "ideal_bubble", "ideal_makespan", "simulate"]


class Costs(NamedTuple):
    """Time that the works of one micro-batch take on a stage, all of its chunks together; in any unit."""

    forward: float = 1.0
    inputs: float = 1.0
    """Gradients of inputs: what B takes where weights are put off; elsewhere B takes `inputs + weights`."""
    weights: float = 1.0
    """Gradients of weights."""
    transfer: float = 0.0
    """From one stage to the next. It happens beside computing, so it delays the receiver alone."""

    @property
    def total(self) -> float:
        """All computing of one micro-batch."""
        return self.forward + self.inputs + self.weights


class Span(NamedTuple):
    """One work, and when it happens."""

    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What all stages do when, from 0 on."""

    spans: tuple[tuple[Span, ...], ...]
    """Of each stage, in its order."""

    @property
    def makespan(self) -> float:
        """When the last work ends."""
        return max(stage[-1].end for stage in self.spans)

    @property
    def bubble(self) -> float:
        """Share of the time of all stages in which they compute nothing."""
        busy = sum(span.end - span.start for stage in self.spans for span in stage)
        return 1 - busy / (self.makespan * len(self.spans))

    @property
    def live_peaks(self) -> list[int]:
        """Most activations (of one chunk each) that are alive at once, by stage."""
        return [live_peak([span.work for span in stage]) for stage in self.spans]


def simulate(orders: Sequence[Sequence[Work]], costs: Costs | Sequence[Costs]) -> Timeline:
    """Let every stage do its works in order, each as soon as what it needs is there.

    Args:
        orders: of all stages, first to last.
        costs: of every stage alike, or one for each.

    Raises:
        ArgumentError: not one entry of `costs` per stage.
        PipelineError: the orders wait for each other.
    """
    stages = len(orders)
    of_stage = [costs] * stages if isinstance(costs, Costs) else list(costs)
    if len(of_stage) != stages:
        raise ArgumentError(f"{len(of_stage)} costs for {stages} stages: give one, or one for each stage.")
    chunks = 1 + max(work.chunk for order in orders for work in order)
    has_weights = any(work.kind == "W" for order in orders for work in order)
    ends: dict[tuple[int, Work], float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    for stage, work in in_turn(orders):
        there = [
            ends[place, other] + (of_stage[place].transfer if place != stage else 0.0)
            for place, other in needs(work, stage, stages, chunks)
        ]
        start = max([spans[stage][-1].end if spans[stage] else 0.0, *there])
        end = start + _duration(work, of_stage[stage], has_weights) / chunks
        ends[stage, work] = end
        spans[stage].append(Span(work, start, end))
    return Timeline(tuple(map(tuple, spans)))


def _duration(work: Work, costs: Costs, has_weights: bool) -> float:
    whole = {"F": costs.forward, "B": costs.inputs + costs.weights, "W": costs.weights}
    return costs.inputs if work.kind == "B" and has_weights else whole[work.kind]


def ideal_makespan(name: OrderName, stages: int, micro_batches: int, chunks: int, costs: Costs) -> float:
    """Return how long a batch takes when stages are alike and transfers cost nothing, as the papers give it.

        1f1b, gpipe     (m + p - 1) (F + B + W)              m micro-batches, p stages, v chunks; B and W as in `Costs`
        interleaved     (m + (p - 1) / v) (F + B + W)        where m >= p
        zero_bubble     m (F + B + W) + (p - 1) (F + B - W)  where m >= p, and W takes no longer than F or B
        inference       (m + (p - 1) / v) F                  where m >= p or v = 1

    Sources: arXiv:2006.09503, section 2; arXiv:2104.04473, section 2.2; arXiv:2401.10241, table 1.
    """
    if name == "zero_bubble":
        return micro_batches * costs.total + (stages - 1) * (costs.forward + costs.inputs - costs.weights)
    each = costs.forward if name == "inference" else costs.total
    return (micro_batches + (stages - 1) / chunks) * each


def ideal_bubble(name: OrderName, stages: int, micro_batches: int, chunks: int, costs: Costs) -> float:
    """Return the idle share that goes with `ideal_makespan`; (p - 1) / (m + p - 1) for 1F1B and GPipe."""
    each = costs.forward if name == "inference" else costs.total
    return 1 - micro_batches * each / ideal_makespan(name, stages, micro_batches, chunks, costs)
