"""The contenders of the training benchmarks: each is one function `micro_step(batch, is_boundary) -> loss`.

| contender | what it is |
|---|---|
| ours, original | `deepspeed.initialize` at the case's ZeRO stage, in the one package or the other; only public calls |
| ours, regathering | ours at stage 3 with parameters gathered once more in backward, as FSDP2 with resharding does |
| ddp | DistributedDataParallel, gradients as bucket views, `no_sync` between boundaries, fused AdamW, autocast for bf16 |
| zero_redundancy | the same with ZeroRedundancyOptimizer around AdamW: torch's stage 1 |
| fsdp2, kept | `fully_shard` of each block and of the rest, parameters gathered once per step: torch's stage 2 |
| fsdp2 | the same with parameters released after forward: torch's stage 3 |
| fsdp2 by layer | `fsdp2` where a model without blocks is sharded layer by layer, not as one piece |
| plain | the loop of ddp without the wrapper, for one rank |
| forward+backward | the least that any contender does: no reduction, no update; in bf16 the model itself is bf16 |

All use AdamW with lr 1e-3 and weight decay 0.01. In bf16 FSDP2 keeps full-precision shards and moves bf16, as engines do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.cases import ORIGINAL, OURS

MicroStep = Callable[[Tensor, bool], Tensor]
Mark = Callable[[], None]
"""Called after each backward, before the update."""

DDP = "ddp"
ZERO_REDUNDANCY = "zero_redundancy"
FSDP_KEPT = "fsdp2, kept"
FSDP = "fsdp2"
FSDP_BY_LAYER = "fsdp2 by layer"
PLAIN = "plain"
FLOOR = "forward+backward"
OURS_REGATHERING = "ours, regathering"
PEER_OF_STAGE = {1: ZERO_REDUNDANCY, 2: FSDP_KEPT, 3: FSDP}
"""What torch offers at the memory of each ZeRO stage."""
OURS_AT_STAGE = {1: OURS, 2: OURS, 3: OURS_REGATHERING}
"""Which of ours keeps no more in memory than that peer, and so is held against it."""
_ENGINE_KEYS: Mapping[str, Mapping[str, Any]] = {
    OURS: {},
    OURS_REGATHERING: {"stage3_max_reuse_distance": 0},
    ORIGINAL: {},
}
"""The contenders that are engines, with the keys of `zero_optimization` that make the contender."""
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


def contenders_at_stage(stage: int, *more: str) -> tuple[str, ...]:
    """Ours (both ways at stage 3), torch's peer, `more`, and the original at a ZeRO stage from 1 to 3."""
    return (*dict.fromkeys((OURS, OURS_AT_STAGE[stage])), PEER_OF_STAGE[stage], *more, ORIGINAL)


@dataclass(frozen=True)
class Training:
    """How a model is trained: `rows` per micro-batch, `accumulation` micro-batches per step and rank.

    `stage` and `zero` (more keys of `zero_optimization`) speak to the engines alone.
    """

    dtype: Literal["fp32", "bf16"] = "fp32"
    accumulation: int = 1
    rows: int = 2
    stage: int = 0
    zero: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Training:
        """Read it from the arguments of a case."""
        return cls(**{key: arguments[key] for key in cls.__dataclass_fields__ if key in arguments})

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
    if contender in _ENGINE_KEYS:
        import deepspeed

        deepspeed.init_distributed()
    else:
        dist.init_process_group("gloo")


def make_trainer(contender: str, model: nn.Module, training: Training, mark: Mark = lambda: None) -> MicroStep:
    """Wrap `model` as `contender` does."""
    if contender in _ENGINE_KEYS:
        return _engine(make_engine(model, training, contender), training, mark)
    return _TORCH[contender](model, training, mark)


def _engine(engine: Any, training: Training, mark: Mark) -> MicroStep:
    def micro_step(batch: Tensor, is_boundary: bool) -> Tensor:
        loss: Tensor = engine(training.cast(batch))
        engine.backward(loss)
        mark()
        engine.step()
        return loss

    return micro_step


def engine_config(contender: str, training: Training) -> dict[str, Any]:
    """The least config that says what is trained, with the stage spelled out."""
    return {
        "train_micro_batch_size_per_gpu": training.rows,
        "gradient_accumulation_steps": training.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage": training.stage, **training.zero, **_ENGINE_KEYS[contender]},
        "gradient_clipping": 0.0,  # the original clips at 1.0 unless told otherwise
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if training.is_bf16 else {}),
    }


def make_engine(model: nn.Module, training: Training, contender: str = OURS) -> Any:
    """`deepspeed.initialize` of whichever package the interpreter has, with the contender's config."""
    import deepspeed

    config = engine_config(contender, training)
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Torch's fused AdamW over the model's parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _loop(
    replica: nn.Module,
    optimizer: torch.optim.Optimizer,
    training: Training,
    mark: Mark,
    *,
    is_autocast: bool,
    between_boundaries: Callable[[bool], AbstractContextManager[None]] = lambda is_boundary: contextlib.nullcontext(),
) -> MicroStep:
    """The loop that torch's documentation shows; `between_boundaries(is_boundary)` surrounds each micro-batch."""

    def micro_step(batch: Tensor, is_boundary: bool) -> Tensor:
        with between_boundaries(is_boundary):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                loss: Tensor = replica(batch)
            (loss / training.accumulation).backward()
        mark()
        if is_boundary:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _plain(model: nn.Module, training: Training, mark: Mark) -> MicroStep:
    return _loop(model, adamw(model), training, mark, is_autocast=training.is_bf16)


def _ddp(model: nn.Module, training: Training, mark: Mark) -> MicroStep:
    return _replicated(model, training, mark, adamw)


def _zero_redundancy(model: nn.Module, training: Training, mark: Mark) -> MicroStep:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def sharded_adamw(replica: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            replica.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    return _replicated(model, training, mark, sharded_adamw)


def _replicated(
    model: nn.Module, training: Training, mark: Mark, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> MicroStep:
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def between_boundaries(is_boundary: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if is_boundary else replica.no_sync()

    return _loop(
        replica,
        make_optimizer(replica),
        training,
        mark,
        is_autocast=training.is_bf16,
        between_boundaries=between_boundaries,
    )


def _fsdp(
    model: nn.Module, training: Training, mark: Mark, *, is_regathering: bool = True, is_by_layer: bool = False
) -> MicroStep:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pieces = getattr(model, "layers" if is_by_layer else "blocks", ())
    for piece in (*pieces, model):
        fully_shard(
            piece,
            mesh=mesh,
            reshard_after_forward=is_regathering,
            mp_policy=bf16 if training.is_bf16 else MixedPrecisionPolicy(),
        )
    sharded: Any = model  # fully_shard has given it more methods

    def between_boundaries(is_boundary: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(is_boundary)
        return contextlib.nullcontext()

    return _loop(model, adamw(model), training, mark, is_autocast=False, between_boundaries=between_boundaries)


def _forward_backward(model: nn.Module, training: Training, mark: Mark) -> MicroStep:
    if training.is_bf16:
        model.bfloat16()

    def micro_step(batch: Tensor, is_boundary: bool) -> Tensor:
        loss: Tensor = model(training.cast(batch))
        loss.backward()
        mark()
        if is_boundary:
            model.zero_grad()
        return loss

    return micro_step


_TORCH: Mapping[str, Callable[[nn.Module, Training, Mark], MicroStep]] = {
    DDP: _ddp,
    ZERO_REDUNDANCY: _zero_redundancy,
    FSDP_KEPT: functools.partial(_fsdp, is_regathering=False),
    FSDP: _fsdp,
    FSDP_BY_LAYER: functools.partial(_fsdp, is_by_layer=True),
    PLAIN: _plain,
    FLOOR: _forward_backward,
}


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
