"""Runs whose ranks share a model, of which `deepspeed plan` says what they take, and what they took.

    python -m tests.support.planned_meshes        all of them, as a table; minutes

As `tests.support.planned_runs`, which has the runs of ranks that all hold one model: planned for a CPU, run for two steps,
and measured in a third. Of a pipeline each stage is compared. Callers: tests/ranks/test_planned_meshes.py.

A plan takes routers for balanced. Those of `experts` are: each has room for half of an even share of the tokens, so that
all are full. Those of `mixtral` are what random weights make of random tokens.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.planning import RankPlan, plan
from deepspeed.sequence.hugging_face import UlyssesSPAttentionHF
from tests.support.engines import make_engine
from tests.support.measured_memory import Measured, measure_step
from tests.support.planned_runs import small_scratch
from tests.support.ranks import run_ranks
from tests.support.tensor_bytes import bytes_of_tensors

__all__ = ["MODELS", "PIPELINES", "Compared", "OfModel", "OfPipeline", "compare"]

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


# -- models whose ranks share layers, experts or tokens ---------------------------------------------------------------


class Experts(nn.Module):
    """Blocks of experts that ranks share out."""

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCABULARY, _WIDTH)
        expert = nn.Sequential(nn.Linear(_WIDTH, 3 * _WIDTH), nn.GELU(), nn.Linear(3 * _WIDTH, _WIDTH))
        options: dict[str, Any] = {"num_experts": 4, "ep_size": 2, "k": k, "capacity_factor": 0.5}
        self.layers = nn.ModuleList(MoE(_WIDTH, expert, **options) for _ in range(4))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=_VOCABULARY, **sizes, **heads, tie_word_embeddings=False))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, **sizes, **heads, tie_word_embeddings=False))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "experts, k=2": partial(Experts, 2),
    "mixtral": _mixtral,
    "llama": _llama,
}


@dataclass(frozen=True)
class OfModel:
    """One configuration."""

    model: str
    zero: int = 0
    precision: str = "fp32"
    ranks: int = 2
    rows: int = 4
    sequence: int = 1
    blocks: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short, for tables."""
        parts = [self.model, f"ZeRO {self.zero}", self.precision, f"{self.ranks} ranks"]
        parts += [f"{value}" for value in self.blocks.values()] + [f"{self.sequence} sequence ranks"] * (self.sequence > 1)
        return ", ".join(parts)

    @property
    def sharing(self) -> int:
        """Ranks that have the same samples."""
        return self.sequence * int(self.blocks.get("tensor_parallel", {}).get("autotp_size", 1))

    def config(self) -> dict[str, Any]:
        """Of the engine."""
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": self.zero, "stage3_param_persistence_threshold": 100},
            **({} if self.precision == "fp32" else {self.precision: {"enabled": True}}),
            **({} if self.sequence == 1 else {"sequence_parallel_size": self.sequence}),
            **self.blocks,
        }

    def build(self) -> nn.Module:
        """The model, without DeepSpeed."""
        torch.manual_seed(0)
        return _MODELS[self.model]()

    def batch(self, seed: int = 0, sequence_rank: int = 0) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Of one rank."""
        length = 2 * _TOKENS
        tokens = torch.randint(_VOCABULARY, (self.rows, length), generator=torch.Generator().manual_seed(seed))
        if self.model.startswith("experts"):
            return (tokens, tokens), {}
        positions = torch.arange(length).expand(self.rows, -1)
        part = slice(sequence_rank * length // self.sequence, (sequence_rank + 1) * length // self.sequence)
        names = {"input_ids": tokens, "labels": tokens} | ({} if self.sequence == 1 else {"position_ids": positions})
        return (), {name: value[:, part].contiguous() for name, value in names.items()}


MODELS = (
    OfModel("experts", 1, "bf16"),
    OfModel("mixtral", 2, "bf16", blocks={"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    OfModel("llama", 0, blocks={"tensor_parallel": {"autotp_size": 2}}),
    OfModel("llama", 1, "bf16", sequence=2),
    OfModel("experts, k=2", 2, ranks=4),
    OfModel("mixtral", 3, blocks={"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    OfModel("llama", 2, "bf16", ranks=4, blocks={"tensor_parallel": {"autotp_size": 2}}),
    OfModel("llama", 3, "bf16", blocks={"tensor_parallel": {"autotp_size": 2}}),
    OfModel("llama", 3, ranks=4, sequence=2),
)


def _run_model(rank: int, world_size: int, setting: OfModel, folder: str) -> Measured:
    with small_scratch(is_apart=False):
        before = bytes_of_tensors()
        model = setting.build()
        if setting.sequence > 1:
            UlyssesSPAttentionHF.register_with_transformers(model, None, setting.sequence, setting.rows)
        engine = make_engine(model, setting.config())

        def step() -> None:
            args, kwargs = setting.batch(rank // setting.sharing, rank % setting.sequence)
            output = engine(*args, **kwargs)
            loss = getattr(output, "loss", output)
            del output
            engine.backward(loss)
            del loss
            engine.step()

        for _ in range(2):
            step()
        return measure_step(before, step, Path(folder), world_size)


# -- comparisons ------------------------------------------------------------------------------------------------------


def compare(setting: OfPipeline | OfModel) -> list[Compared]:
    """Plan a setting, and run it; of a pipeline one for each stage, else one for the fullest rank."""
    run = _run_pipeline if isinstance(setting, OfPipeline) else _run_model
    with tempfile.TemporaryDirectory() as folder:
        measured: list[Measured] = run_ranks(run, setting.ranks, setting, folder, timeout_seconds=120)
    if isinstance(setting, OfModel):
        with small_scratch(is_apart=False):
            planned = plan(setting.build(), setting.config(), setting.ranks, batch=setting.batch(), device_type="cpu").asked
        return [_compared("", planned, measured)]
    with small_scratch(is_apart=False):
        found = plan(setting.build, setting.config(), setting.ranks, batch=(setting.micro_batch(), {}), device_type="cpu")
    assert found.asked.terms in [stage.terms for stage in found.stages]
    by_stage = [measured[first : first + setting.data] for first in range(0, setting.ranks, setting.data)]
    return [_compared(stage.label, stage, ranks) for stage, ranks in zip(found.stages, by_stage, strict=True)]


def _compared(label: str, planned: RankPlan, ranks: list[Measured]) -> Compared:
    return Compared(
        label,
        (planned.nbytes("device", ["always"]), Measured.device_at_rest(ranks)),
        (planned.peak_nbytes("device"), Measured.device_peak(ranks)),
    )


def main() -> None:
    """Print the table of those whose numbers were given, or of all."""
    table = Table("", "setting", "rank", *("at rest MB", "took", "", "peak MB", "took", ""))
    settings: tuple[OfPipeline | OfModel, ...] = (*PIPELINES, *MODELS)
    for number in [int(each) for each in sys.argv[1:]] or range(len(settings)):
        setting = settings[number]
        for found in compare(setting):
            row = [str(number), setting.label, found.label]
            for planned, took in (found.states, found.peak):
                row += [f"{planned / 1e6:.2f}", f"{took / 1e6:.2f}", f"{planned / took - 1:+.1%}"]
            table.add_row(*row)
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
