"""Runs whose ranks share a model, of which `deepspeed plan` says what they take, and what they took.

    python -m tests.support.planned_meshes        all of them, as a table; minutes

As `tests.support.planned_runs`, which has the runs of ranks that all hold one model: planned for a CPU, run for two steps,
and measured in a third. Of a pipeline each stage is compared. Callers: tests/ranks/test_planned_meshes.py.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.planning import plan
from tests.support.engines import make_engine
from tests.support.measured_memory import Measured, measure_step
from tests.support.planned_runs import small_scratch
from tests.support.ranks import run_ranks
from tests.support.tensor_bytes import bytes_of_tensors

__all__ = ["PIPELINES", "Compared", "OfPipeline", "compare"]

_WIDTH, _VOCABULARY, _TOKENS = 192, 512, 64


@dataclass(frozen=True)
class Compared:
    """Bytes of one rank, planned and measured."""

    label: str
    states: tuple[float, float]
    """Between two steps."""

    peak: tuple[float, float]


# -- pipelines --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A perceptron around its norm, with causal attention before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.joint = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.joint(self.norms[0](hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + attended
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


def _logits(embedding: nn.Module, hidden: Tensor) -> Tensor:
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    return F.linear(hidden, weight)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True)
class OfPipeline:
    """One configuration."""

    schedule: str
    stages: int
    data: int = 1
    zero: int = 0
    precision: str = "fp32"
    micro_batches: int = 4
    rows: int = 2
    blocks: int = 6
    module: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short, for tables."""
        parts = [self.schedule, f"{self.stages} stages x {self.data}", f"ZeRO {self.zero}", self.precision]
        parts += [f"{self.micro_batches} micro-batches"] + [f"{key}={value}" for key, value in self.module.items()]
        return ", ".join(parts)

    @property
    def ranks(self) -> int:
        """How many."""
        return self.stages * self.data

    def config(self) -> dict[str, Any]:
        """Of the engine."""
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": self.zero},
            "pipeline": {"schedule": self.schedule},
            **({} if self.precision == "fp32" else {self.precision: {"enabled": True}}),
        }

    def build(self) -> PipelineModule:
        """The model, on whichever rank calls."""
        torch.manual_seed(0)
        embedding = partial(TiedLayerSpec, "embedding", nn.Embedding, _VOCABULARY, _WIDTH)
        layers = [embedding(), *(LayerSpec(Block) for _ in range(self.blocks)), embedding(forward_fn=_logits)]
        return PipelineModule(layers, num_stages=self.stages, loss_fn=_loss, **self.module)

    def micro_batch(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Of one rank."""
        tokens = torch.randint(_VOCABULARY, (self.rows, _TOKENS), generator=torch.Generator().manual_seed(seed))
        return tokens, tokens.clone()


PIPELINES = (
    OfPipeline("1f1b", 2, data=2, zero=1, precision="bf16", micro_batches=3),
    OfPipeline("zero_bubble", 2),
    OfPipeline("1f1b", 3, micro_batches=6),
    OfPipeline("interleaved", 2, precision="bf16", module={"num_chunks": 2}),
    OfPipeline("gpipe", 2, zero=1, precision="fp16", module={"activation_checkpoint_interval": 1}),
)


def _run_pipeline(rank: int, world_size: int, setting: OfPipeline, folder: str) -> Measured:
    with small_scratch(is_apart=False):
        before = bytes_of_tensors()
        engine: Any = make_engine(setting.build(), setting.config())

        def step() -> None:
            engine.train_batch(iter([setting.micro_batch(number) for number in range(setting.micro_batches)]))

        for _ in range(2):
            step()
        return measure_step(before, step, Path(folder), world_size)


def compare(setting: OfPipeline) -> list[Compared]:
    """Plan a setting, and run it; one for each stage."""
    with tempfile.TemporaryDirectory() as folder:
        measured = run_ranks(_run_pipeline, setting.ranks, setting, folder, timeout_seconds=120)
    with small_scratch(is_apart=False):
        found = plan(setting.build, setting.config(), setting.ranks, batch=(setting.micro_batch(), {}), device_type="cpu")
    assert found.asked.terms in [stage.terms for stage in found.stages]
    compared = []
    for number, planned in enumerate(found.stages):
        ranks = measured[number * setting.data : (number + 1) * setting.data]
        at_rest, peak = Measured.device_at_rest(ranks), Measured.device_peak(ranks)
        compared.append(
            Compared(planned.label, (planned.nbytes("device", ["always"]), at_rest), (planned.peak_nbytes("device"), peak))
        )
    return compared


def main() -> None:
    """Print the table of those whose numbers were given, or of all."""
    table = Table("", "setting", "rank", *("at rest MB", "took", "", "peak MB", "took", ""))
    for number in [int(each) for each in sys.argv[1:]] or range(len(PIPELINES)):
        setting = PIPELINES[number]
        for found in compare(setting):
            row = [str(number), setting.label, found.label]
            for planned, took in (found.states, found.peak):
                row += [f"{planned / 1e6:.2f}", f"{took / 1e6:.2f}", f"{planned / took - 1:+.1%}"]
            table.add_row(*row)
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
