"""The contenders of the training benchmarks: each is one function `micro_step(batch, is_boundary) -> loss`.

| contender | what it is |
|---|---|
| ours, original | `deepspeed.initialize` at ZeRO stage 0, in the one package or the other; only public calls |
| ddp | DistributedDataParallel, gradients as bucket views, `no_sync` between boundaries, fused AdamW, autocast for bf16 |
| plain | the loop of ddp without the wrapper, for one rank |
| forward+backward | the least that any contender does: no reduction, no update; in bf16 the model itself is bf16 |

All use AdamW with lr 1e-3 and weight decay 0.01.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.cases import ORIGINAL, OURS

MicroStep = Callable[[Tensor, bool], Tensor]

DDP = "ddp"
PLAIN = "plain"
FLOOR = "forward+backward"
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


@dataclass(frozen=True)
class Training:
    """How a model is trained: `rows` per micro-batch, `accumulation` micro-batches per step and rank."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    accumulation: int = 1
    rows: int = 2

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Training:
        """Read it from the arguments of a case."""
        return cls(**{key: arguments[key] for key in ("dtype", "accumulation", "rows") if key in arguments})

    @property
    def is_bf16(self) -> bool:
        """Whether arithmetic is in bfloat16."""
        return self.dtype == "bf16"

    def cast(self, batch: Tensor) -> Tensor:
        """Give floating-point inputs the dtype of the model; tokens stay."""
        return batch.bfloat16() if self.is_bf16 and batch.is_floating_point() else batch


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def join(contender: str) -> None:
    """Import what the contender needs and meet the other ranks, so that this is over before anything is timed."""
    if contender in (OURS, ORIGINAL):
        import deepspeed

        deepspeed.init_distributed()
    else:
        dist.init_process_group("gloo")


def make_trainer(contender: str, model: nn.Module, training: Training, mark: Callable[[], None] = lambda: None) -> MicroStep:
    """Wrap `model`. `mark` is called after each backward, before the update."""
    if contender in (OURS, ORIGINAL):
        return _engine(model, training, mark)
    if contender == FLOOR:
        return _forward_backward(model, training)
    return _ddp(model, training, mark) if contender == DDP else _loop(model, training, mark)


def _engine(model: nn.Module, training: Training, mark: Callable[[], None]) -> MicroStep:
    engine = make_engine(model, training)

    def micro_step(batch: Tensor, is_boundary: bool) -> Tensor:
        loss: Tensor = engine(training.cast(batch))
        engine.backward(loss)
        mark()
        engine.step()
        return loss

    return micro_step


def make_engine(model: nn.Module, training: Training) -> Any:
    """`deepspeed.initialize` with the least config that says what is trained, and stage 0 spelled out."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": training.rows,
        "gradient_accumulation_steps": training.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,  # the original clips at 1.0 unless told otherwise
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if training.is_bf16 else {}),
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Torch's fused AdamW over the model's parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _loop(
    model: nn.Module,
    training: Training,
    mark: Callable[[], None],
    no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> MicroStep:
    optimizer = adamw(model)

    def micro_step(batch: Tensor, is_boundary: bool) -> Tensor:
        with contextlib.nullcontext() if is_boundary else no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=training.is_bf16):
                loss: Tensor = model(batch)
            (loss / training.accumulation).backward()
        mark()
        if is_boundary:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _ddp(model: nn.Module, training: Training, mark: Callable[[], None]) -> MicroStep:
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(replica, training, mark, replica.no_sync)


def _forward_backward(model: nn.Module, training: Training) -> MicroStep:
    if training.is_bf16:
        model.bfloat16()

    def micro_step(batch: Tensor, is_boundary: bool) -> Tensor:
        loss: Tensor = model(training.cast(batch))
        loss.backward()
        if is_boundary:
            model.zero_grad()
        return loss

    return micro_step


@dataclass(frozen=True)
class Steps:
    """Median seconds of the timed steps of this rank, and its losses: mean over the micro-batches of a step."""

    seconds: float
    first_loss: float
    last_loss: float


def run_steps(micro_step: MicroStep, batches: list[Tensor], accumulation: int, warm: int, steps: int) -> Steps:
    """Train `warm + steps` steps, all ranks together; a step is `accumulation` micro-batches and one update."""
    seconds, losses = [], []
    dist.barrier()
    for _ in range(warm + steps):
        began = time.perf_counter()
        parts = [micro_step(batches[i % len(batches)], i == accumulation - 1) for i in range(accumulation)]
        seconds.append(time.perf_counter() - began)
        losses.append(statistics.fmean(float(part.detach()) for part in parts))  # read outside the timing
    return Steps(statistics.median(seconds[warm:]), losses[0], losses[-1])
