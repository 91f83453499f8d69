"""How long is one training step of a GPT that is cut into two stages, with 4 and with 8 micro-batches?

Goals: at most 0.85 of the original's time, 0.95 of `torch.distributed.pipelining`'s (Schedule1F1B, fused AdamW), and 1.10
of the ideal: (micro-batches + stages - 1) x the slowest stage's forward and backward of one micro-batch, which `ideal`
measures on both ranks at once, without messages and without an update. `ours, zero_bubble` is ours with that schedule.

Model: width 512, 6 blocks, 8 heads, vocabulary 4096, 128 positions, micro-batches of 2 rows; embedding and 3 blocks on the
first stage, 3 blocks and the output layer on the second, for every contender. Loading data is inside: it is a list.

`pipeline_step bubble` trains layers that only wait, 60 ms forward and 120 ms backward on each of its stages, so that nothing
but the order costs time: the share of a step in which a stage is not in its layer, against
(stages - 1) / (micro-batches + stages - 1). Goal: off by at most a tenth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.models import Block
from benchmarks.harness.trainers import LEARNING_RATE, WEIGHT_DECAY, adamw, rank

IDEAL = "ideal"
PIPELINING = "torch pipelining"
OURS_ZERO_BUBBLE = "ours, zero_bubble"
STAGES = 2
_SCHEDULES = {OURS: {}, OURS_ZERO_BUBBLE: {"pipeline": {"schedule": "zero_bubble"}}, ORIGINAL: {}}
_WIDTH, _BLOCKS, _HEADS, _VOCABULARY, _POSITIONS, _ROWS = 512, 6, 8, 4096, 128, 2
_FORWARD_SECONDS, _BACKWARD_SECONDS = 0.060, 0.120  # about those of the model above

CASES = (
    *(
        Case(
            f"pipeline_step {micro_batches} micro-batches",
            benchmark=__name__.rpartition(".")[2],
            contenders=(OURS, OURS_ZERO_BUBBLE, PIPELINING, IDEAL, ORIGINAL),
            figures=("step_ms", "first_loss", "last_loss"),
            of=PIPELINING,
            ranks=STAGES,
            goals=(
                Goal("step_ms", 0.85, of=ORIGINAL),
                Goal("step_ms", 0.95, of=PIPELINING),
                Goal("step_ms", 1.10, of=IDEAL),
            ),
            pairs=3,
            side_pairs=1,
            loss_tolerance=1e-4,
            arguments={"micro_batches": micro_batches, "warm": 1, "steps": 3},
        )
        for micro_batches in (4, 8)
    ),
    *(
        Case(
            f"pipeline_step bubble, {stages} stages",
            benchmark=__name__.rpartition(".")[2],
            contenders=(OURS,),
            figures=("bubble_off", "bubble"),
            of=OURS,
            ranks=stages,
            goals=(Goal("bubble_off", 0.10),),
            pairs=3,
            arguments={"stages": stages, "waits": 8, "warm": 1, "steps": 5},
        )
        for stages in (2, 4)
    ),
)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Embedding(_POSITIONS, _WIDTH)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD: Tensor = self.tokens(tokens_BT) + self.places.weight[: tokens_BT.shape[1]]
        return x_BTD


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.to_vocabulary = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.to_vocabulary(self.norm(x_BTD))
        return logits_BTV


def _loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embedding(), *(Block(_WIDTH, _HEADS) for _ in range(_BLOCKS)), Output()]


def _own(layers: list[nn.Module]) -> nn.Module:
    half = len(layers) // STAGES
    return nn.Sequential(*layers[rank() * half : (rank() + 1) * half])


def _batches(micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(_VOCABULARY, (_ROWS, _POSITIONS + 1), generator=generator) for _ in range(micro_batches)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


# -- contenders: each is one function `step() -> mean loss` ---------------------------------------------------------------


def _engine(contender: str, layers: list[nn.Module], micro_batches: int) -> Callable[[], float]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    net = PipelineModule(layers=layers, num_stages=STAGES, loss_fn=_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **_SCHEDULES[contender],
    }
    parameters = [param for param in net.parameters() if param.requires_grad]
    engine: Any = deepspeed.initialize(model=net, model_parameters=parameters, config=config)[0]
    batches = _batches(micro_batches)
    return lambda: float(engine.train_batch(data_iter=iter(batches)))


def _pipelining(layers: list[nn.Module], micro_batches: int) -> Callable[[], float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    module = _own(layers)
    stage = PipelineStage(module, rank(), STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=_loss)
    optimizer = adamw(module)
    inputs, labels = (torch.cat(parts) for parts in zip(*_batches(micro_batches), strict=True))

    def step() -> float:
        losses: list[Tensor] = []
        if rank() == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return statistics.fmean(map(float, losses)) if losses else 0.0

    return step


def _ideal_step(layers: list[nn.Module], micro_batches: int) -> Callable[[], float]:
    """The slots of the schedule one after another, as if both stages were always busy."""
    dist.init_process_group("gloo")
    module = _own(layers)
    (tokens, labels), *_ = _batches(1)
    hidden = torch.randn(_ROWS, _POSITIONS, _WIDTH, requires_grad=rank() > 0)
    gradient = torch.randn(_ROWS, _POSITIONS, _WIDTH)

    def step() -> float:
        for _ in range(micro_batches + STAGES - 1):
            if rank() == 0:
                module(tokens).backward(gradient)
            else:
                _loss(module(hidden), labels).backward()
        return 0.0

    return step


_busy_seconds = [0.0]  # of this rank's layer, since it was last read


def _wait(seconds: float) -> None:
    """Be busy for this long; a machine wakes a sleeper late, and that is time of the layer, too."""
    began = time.perf_counter()
    time.sleep(seconds)
    _busy_seconds[0] += time.perf_counter() - began


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _wait(_FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _wait(_BACKWARD_SECONDS)
        return gradient


class Waiting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = Wait.apply(super().forward(x))
        return waited


def _timed(step: Callable[[], float], warm: int, steps: int) -> Iterator[tuple[float, float]]:
    for number in range(warm + steps):
        dist.barrier()
        began = time.perf_counter()
        loss = step()
        if number >= warm:
            yield time.perf_counter() - began, loss


def _bubble(arguments: Mapping[str, Any]) -> Measured:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    stages, micro_batches = arguments["stages"], arguments["waits"]
    net = PipelineModule(
        layers=[Waiting() for _ in range(stages)],
        num_stages=stages,
        loss_fn=lambda out, _: out.sum(),
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine: Any = deepspeed.initialize(model=net, config=config)[0]
    batch = [(torch.ones(1, 4), torch.ones(1))] * micro_batches

    def step() -> float:
        _busy_seconds[0] = 0.0
        engine.train_batch(iter(batch))
        return _busy_seconds[0]

    timed = _timed(step, arguments["warm"], arguments["steps"])
    bubble = statistics.median(1 - busy / seconds for seconds, busy in timed)
    expected = (stages - 1) / (micro_batches + stages - 1)
    return Measured({"bubble": bubble, "bubble_off": abs(bubble / expected - 1)})


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    if "waits" in arguments:
        return _bubble(arguments)
    layers, micro_batches = _layers(), arguments["micro_batches"]
    if contender in _SCHEDULES:
        step = _engine(contender, layers, micro_batches)
    else:
        step = {PIPELINING: _pipelining, IDEAL: _ideal_step}[contender](layers, micro_batches)
    timed = list(_timed(step, arguments["warm"], arguments["steps"]))
    figures = {"step_ms": statistics.median(seconds for seconds, _ in timed) * 1e3}
    if contender == IDEAL:
        return Measured(figures)
    losses = {"first": timed[0][1], "last": timed[-1][1]}
    if contender == PIPELINING:  # the last stage alone knows it; the mean over ranks is shown
        losses = {name: value * STAGES for name, value in losses.items()}
    return Measured(figures, losses)
