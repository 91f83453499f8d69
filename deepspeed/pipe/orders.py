"""What each stage of a pipeline computes, and in which order: pure data, no torch, no processes.

    one_f_one_b, 4 stages, 6 micro-batches
      stage 0:  F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5       fill, then a forward per backward, then drain
      stage 3:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

Lives here: the orders by name, what each work has to wait for (`needs`), the activations that an order keeps (`live_peak`),
and the proof that orders fit each other (`check`). Does not live here: when things happen (`timeline`), the published view
by ticks (`schedule`), and doing it (the pipeline engine, the main caller).

A stage holds `chunks` parts of the model: chunk c of stage s is virtual stage `c * stages + s`, and activations pass through
the virtual stages in order. Every order takes the backwards of a chunk by ascending micro-batch, so that gradients are
summed in the order of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from deepspeed.errors import ArgumentError, PipelineError

__all__ = [
    "OrderName",
    "Work",
    "activation_bound",
    "check",
    "gpipe",
    "in_turn",
    "inference",
    "interleaved",
    "live_peak",
    "needs",
    "one_f_one_b",
    "order_of",
    "text",
    "zero_bubble",
]

OrderName = Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "inference"]
"""Names of orders; all but the last, which has no backward, are values of `pipeline.schedule`."""


class Work(NamedTuple):
    """One computation of one stage."""

    kind: Literal["F", "B", "W"]
    """Forward; backward; or the gradients of weights alone. Where an order has W, its B makes gradients of inputs alone."""
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def text(order: Sequence[Work]) -> str:
    """Write an order down: `F0 F1 B0 B1`, with `.c` after works of chunk c > 0."""
    return " ".join(map(str, order))


# -- the orders -----------------------------------------------------------------------------------------------------------


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Work]:
    """All forwards, then all backwards; every activation is alive in between. (GPipe, arXiv:1811.06965, section 2.3.)

    The paper takes the backwards from the last to the first; here they ascend, see above.

        stage 0 of 2, 3 micro-batches:  F0 F1 F2 B0 B1 B2
    """
    yield from (Work("F", each) for each in range(micro_batches))
    yield from (Work("B", each) for each in range(micro_batches))


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Work]:
    """Fill, then one forward per backward, then drain. (PipeDream-Flush, arXiv:2006.09503, section 2.2.)

    At most `stages - stage` activations are alive on the stage.

        stage 0 of 2, 4 micro-batches:  F0 F1 B0 F2 B1 F3 B2 B3
    """
    yield from _delayed(micro_batches, stages - 1 - stage)


def zero_bubble(stage: int, stages: int, micro_batches: int) -> Iterator[Work]:
    """1F1B with the gradients of weights put off into what would be idle: ZB-H1. (arXiv:2401.10241, section 2.2.)

    Stage s lags s micro-batches behind with its W, so that every stage keeps at most `stages` activations, as many as the
    first stage of 1F1B does.

        stage 1 of 2, 4 micro-batches:  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    """
    yield from _delayed(micro_batches, stages - 1 - stage, weights_lag=stage)


def _delayed(micro_batches: int, lag: int, weights_lag: int | None = None) -> Iterator[Work]:
    """In step t: forward t, then backward t - lag, then, unless None, the weights that are `weights_lag` behind that."""
    for step in range(micro_batches + lag + (weights_lag or 0)):
        if step < micro_batches:
            yield Work("F", step)
        if 0 <= step - lag < micro_batches:
            yield Work("B", step - lag)
        if weights_lag is not None and step - lag - weights_lag >= 0:
            yield Work("W", step - lag - weights_lag)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Work]:
    """1F1B over `chunks` parts per stage, which makes fill and drain that much shorter. (arXiv:2104.04473, section 2.2.)

    Micro-batches go in groups: a group passes the stages with chunk 0, then with chunk 1, and so on. The paper needs
    `micro_batches` to be a multiple of `stages`; here groups are of equal size up to one, none smaller than `stages`, and
    where there are fewer micro-batches than stages, the missing ones are left out of the order for as many as stages.

        stage 0 of 2, 2 micro-batches, 2 chunks:  F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1

    [Note: no deadlock] Let every stage do one forward and then one backward per step: stage s does the k-th forward in step
    k + s and the k-th backward in step k + lag + (stages - 1 - s), with lag = (chunks - 1) * largest group + stages - 1.
    A forward then needs what the stage before did one step earlier or, on stage 0, what the last stage did `group size -
    stages + 1 >= 1` steps earlier; backwards likewise. The last virtual stage needs its own forward, which lies at most
    (chunks - 1) * largest group places further on in the list of forwards: the same step at the latest, and forwards come
    first. Works depend on works of the same micro-batch only, so leaving micro-batches out cannot make a wait.
    """
    if chunks == 1:
        yield from one_f_one_b(stage, stages, micro_batches)
        return
    groups = _groups(stages, micro_batches)
    forwards = [(each, chunk) for group in groups for chunk in range(chunks) for each in group]
    backwards = [(each, chunk) for group in groups for chunk in reversed(range(chunks)) for each in group]
    lag = (chunks - 1) * max(map(len, groups)) + 2 * (stages - 1 - stage)
    for step in range(len(forwards) + lag):
        if step < len(forwards) and forwards[step][0] < micro_batches:
            yield Work("F", *forwards[step])
        if step >= lag and backwards[step - lag][0] < micro_batches:
            yield Work("B", *backwards[step - lag])


def inference(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> Iterator[Work]:
    """Forwards alone, in the order of `interleaved`.

    stage 0 of 2, 3 micro-batches:  F0 F1 F2
    """
    for group in _groups(stages, micro_batches):
        yield from (Work("F", each, chunk) for chunk in range(chunks) for each in group if each < micro_batches)


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Cut at least `stages` micro-batches into as many groups of at least `stages` as possible, the larger ones first."""
    padded = max(micro_batches, stages)
    count = padded // stages
    starts = [padded // count * at + min(at, padded % count) for at in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def order_of(name: OrderName, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Work, ...]:
    """Return the order of a stage by the name of the schedule.

    Raises:
        ArgumentError: an unknown name, a count below 1, a stage outside, or several chunks where the order knows one.
    """
    if name not in get_args(OrderName):
        raise ArgumentError(f"schedule {name!r} is not known. Use one of {', '.join(get_args(OrderName))}.")
    if min(stages, micro_batches, chunks) < 1 or not 0 <= stage < stages:
        raise ArgumentError(
            f"stage={stage}, stages={stages}, micro_batches={micro_batches}, chunks={chunks}: counts are at least 1, "
            "and stages are numbered from 0."
        )
    if name == "interleaved":
        return tuple(interleaved(stage, stages, micro_batches, chunks))
    if name == "inference":
        return tuple(inference(stage, stages, micro_batches, chunks))
    if chunks > 1:
        raise ArgumentError(f"schedule {name!r} has one chunk per stage, and {chunks} were given. Use 'interleaved'.")
    whole = {"1f1b": one_f_one_b, "gpipe": gpipe, "zero_bubble": zero_bubble}
    return tuple(whole[name](stage, stages, micro_batches))


# -- what holds for them --------------------------------------------------------------------------------------------------


def activation_bound(name: OrderName, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Return how many activations (of one chunk each) a stage keeps at most; inference keeps none beyond the running one."""
    if name == "gpipe":
        return micro_batches
    if name == "zero_bubble":
        return min(stages, micro_batches)
    if name == "inference":
        return 0
    if chunks == 1:
        return min(stages - stage, micro_batches)
    largest = len(_groups(stages, micro_batches)[0])
    return min((chunks - 1) * largest + 2 * (stages - 1 - stage) + 1, chunks * micro_batches)


def live_peak(order: Sequence[Work]) -> int:
    """Return how many activations are alive at most: from F until W or, without W, until B; without either, none."""
    last = "W" if any(work.kind == "W" for work in order) else "B"
    alive = peak = 0
    if any(work.kind == last for work in order):
        for work in order:
            alive += (work.kind == "F") - (work.kind == last)
            peak = max(peak, alive)
    return peak


def needs(work: Work, stage: int, stages: int, chunks: int) -> list[tuple[int, Work]]:
    """Return what must have been computed before `work` on `stage` can be: pairs of stage and work.

    What lies on another stage has to be received; the first pair is the stage's own where there is one.
    """
    kind, micro_batch, chunk = work
    virtual = chunk * stages + stage
    if kind == "W":
        return [(stage, Work("B", micro_batch, chunk))]
    own = [] if kind == "F" else [(stage, Work("F", micro_batch, chunk))]
    before = virtual - 1 if kind == "F" else virtual + 1
    if 0 <= before < stages * chunks:
        own.append((before % stages, Work(kind, micro_batch, before // stages)))
    return own


def check(orders: Sequence[Sequence[Work]], bounds: Sequence[int] | None = None) -> None:
    """Prove that orders, one per stage, belong to one batch and can be carried out.

    Every micro-batch passes every chunk of every stage once (all of F and B, or all of F, B and W, or F alone), no stage
    waits for ever when it does its works one after the other, and no stage keeps more activations than its bound.

    Args:
        orders: of all stages, first to last.
        bounds: most activations of each stage, see `activation_bound`; None checks none.

    Raises:
        PipelineError: the text names the stage and the work.
    """
    chunks = 1 + max(work.chunk for order in orders for work in order)
    micro_batches = 1 + max(work.micro_batch for order in orders for work in order)
    kinds = sorted({work.kind for order in orders for work in order})
    expected = {Work(kind, each, chunk) for kind in kinds for each in range(micro_batches) for chunk in range(chunks)}
    for stage, order in enumerate(orders):
        if set(order) != expected or len(order) != len(expected):
            wrong = sorted(set(order) ^ expected) or sorted({work for work in order if order.count(work) > 1})
            raise PipelineError(f"stage {stage} has not each of its works once; missing or repeated: {text(wrong)}.")
    for _ in in_turn(orders):
        pass  # it raises where it cannot go on
    for stage, (order, bound) in enumerate(zip(orders, bounds or (), strict=bounds is not None)):
        if live_peak(order) > bound:
            raise PipelineError(f"stage {stage} keeps {live_peak(order)} activations; at most {bound} are allowed.")


def in_turn(orders: Sequence[Sequence[Work]]) -> Iterator[tuple[int, Work]]:
    """Yield all works of all stages, with their stage, in an order in which each finds what it needs done before it.

    Raises:
        PipelineError: the orders wait for each other; the text names the works at which they do.
    """
    stages = len(orders)
    chunks = 1 + max(work.chunk for order in orders for work in order)
    done: set[tuple[int, Work]] = set()
    at = [0] * stages
    while len(done) < sum(map(len, orders)):
        before = len(done)
        for stage, order in enumerate(orders):
            while at[stage] < len(order) and done.issuperset(needs(order[at[stage]], stage, stages, chunks)):
                done.add((stage, order[at[stage]]))
                yield stage, order[at[stage]]
                at[stage] += 1
        if len(done) == before:
            stuck = {f"stage {stage}": str(order[at[stage]]) for stage, order in enumerate(orders) if at[stage] < len(order)}
            raise PipelineError(f"the orders of the stages wait for each other for ever, at {stuck}.")
