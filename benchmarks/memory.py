"""How much memory does training take at its peak, beyond the model?

Goal: at most DistributedDataParallel's, counted either way. At ZeRO stages 1, 2 and 3: at most torch's peer's and the
original's; at stage 3 `ours` (parameters stay gathered from forward to backward) is held against the original, and
`ours, regathering` against FSDP2, which holds as little.

Two ranks train the model of `train_step`. Both figures are the most during the steps after the first, less what the
process held when model and process group were there but nothing else.

    peak_rss_mib   from VmHWM: every resident page of the process, shared or not. It sees each moment.
    peak_pss_mib   a page that several processes map counts for each with its share, so the sum over ranks is what the
                   machine holds: gradient buffers that the ranks of one host share count once. The kernel keeps no
                   peak of it, so it is read at fixed moments: after each block of forward, at each block of backward,
                   after backward and after the step. What happens between two of these is not seen.

The figure shown is the worst rank's. `steady_pss_mib` is what is held between two steps. `bare` leaves the matrix
products out, and with them the activations: weights, gradients, optimizer state and buffers remain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.models import Model, blocks_of, build_model, make_batches
from benchmarks.harness.probes import memory, peak_rss_mib, reset_peak
from benchmarks.harness.trainers import (
    DDP,
    OURS_AT_STAGE,
    PEER_OF_STAGE,
    Training,
    contenders_at_stage,
    join,
    make_trainer,
    rank,
    run_steps,
)


def _case(title: str, **arguments: Any) -> Case:
    return Case(
        f"memory {title}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, DDP, ORIGINAL),
        figures=("peak_rss_mib", "peak_pss_mib", "steady_pss_mib"),
        of=DDP,
        ranks=2,
        goals=(Goal("peak_rss_mib", 1.0, of=DDP), Goal("peak_pss_mib", 1.0, of=DDP)),
        pairs=2,
        side_pairs=1,
        multiplies_bf16=arguments["dtype"] == "bf16" and not arguments.get("bare"),
        arguments={**arguments, "steps": 2},
    )


def _case_at_stage(stage: int, dtype: str, accumulation: int) -> Case:
    peer = PEER_OF_STAGE[stage]
    against = ((OURS_AT_STAGE[stage], peer), (OURS, ORIGINAL))
    goals = tuple(
        Goal(figure, 1.0, of=other, contender=ours) for ours, other in against for figure in ("peak_rss_mib", "peak_pss_mib")
    )
    return dataclasses.replace(
        _case(f"stage {stage} {dtype} accumulation {accumulation}", dtype=dtype, accumulation=accumulation, stage=stage),
        contenders=contenders_at_stage(stage),
        of=peer,
        goals=goals,
    )


CASES = (
    _case("bf16 accumulation 1", dtype="bf16", accumulation=1),
    _case("bf16 accumulation 4", dtype="bf16", accumulation=4),
    _case("fp32 accumulation 1", dtype="fp32", accumulation=1),
    _case("bare bf16", dtype="bf16", bare=True),
    *(
        _case_at_stage(stage, dtype, accumulation)
        for stage in (1, 2, 3)
        for dtype, accumulation in (("bf16", 1), ("bf16", 4), ("fp32", 1))
    ),
)


class _PssPeak:
    """Reads PSS at chosen moments of the steps and keeps the most; silent until `start`."""

    def __init__(self) -> None:
        self.peak_mib: float | None = None

    def start(self) -> None:
        self.peak_mib = 0.0

    def read(self) -> None:
        if self.peak_mib is not None:
            self.peak_mib = max(self.peak_mib, memory().pss_mib)

    def watch(self, model: Model) -> None:
        """Read after every block's forward, and when backward reaches the block's output."""

        def after_forward(block: object, inputs: object, output: Tensor) -> None:
            self.read()
            output.register_hook(lambda _: self.read())

        for block in blocks_of(model):
            block.register_forward_hook(after_forward)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    training = Training.of(arguments)
    model = build_model(arguments)
    batches = make_batches(model, training.rows, rank())
    join(contender)
    dist.barrier()  # the peers have mapped their libraries too: PSS divides those pages alike in every run
    base = memory()
    pss = _PssPeak()
    pss.watch(model)
    micro_step = make_trainer(contender, model, training, mark=pss.read)

    def watched(batch: Tensor, is_boundary: bool) -> Tensor:
        loss = micro_step(batch, is_boundary)
        pss.read()
        return loss

    run_steps(watched, batches, training.accumulation, warm=1, steps=1)
    reset_peak()
    pss.start()
    run_steps(watched, batches, training.accumulation, warm=0, steps=arguments["steps"])
    assert pss.peak_mib is not None  # start() was called
    dist.barrier()
    return Measured(
        {
            "peak_rss_mib": peak_rss_mib() - base.rss_mib,
            "peak_pss_mib": pss.peak_mib - base.pss_mib,
            "steady_pss_mib": memory().pss_mib - base.pss_mib,
        }
    )
