"""Thirty configurations of which `deepspeed plan` says what they take, and what they took.

    python -m tests.support.planned_runs        all of them, as a table; minutes

Each is planned for a CPU, and run: two steps, then one that is measured (`measured_memory`). Where state is offloaded, host
memory is made another place than the device's, as it is on accelerators, so that the tiers can be told apart.
Scratch of a fixed size (sub-groups of the update, blocks of the mean), made for models a thousand times larger, is made
small in the plan and in the run alike. Callers: tests/ranks/test_planned_peaks.py.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.comm import mean
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.offload import placement
from deepspeed.planning import RankPlan, plan
from deepspeed.zero import master
from tests.support.engines import make_engine
from tests.support.measured_memory import Measured, measure_step
from tests.support.ranks import run_ranks
from tests.support.tensor_bytes import bytes_of_tensors

__all__ = ["SETTINGS", "Compared", "Setting", "compare", "small_scratch"]

_SUB_GROUP_NUMEL, _BLOCK_NUMEL = 4096, 512
_TOKENS, _VOCABULARY = 128, 1024
_GPT = Path(__file__).parents[2] / "examples" / "gpt" / "model.py"


@dataclass(frozen=True)
class Setting:
    """One configuration."""

    model: str
    stage: int
    precision: str = "fp32"
    ranks: int = 2
    rows: int = 4
    accumulation: int = 1
    optimizer: str = "AdamW"
    recomputes: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short, for tables."""
        parts = [self.model, f"stage {self.stage}", self.precision, f"{self.ranks} rank(s)", f"{self.rows} rows"]
        parts += [f"x {self.accumulation}"] * (self.accumulation > 1) + [self.optimizer] * (self.optimizer != "AdamW")
        parts += ["recomputed"] * self.recomputes
        parts += [f"{key.removeprefix('stage3_')}={_shown(value)}" for key, value in (self.zero | self.blocks).items()]
        return ", ".join(parts)

    @property
    def is_apart(self) -> bool:
        """Whether anything rests on the host."""
        return any(key.startswith("offload") for key in self.zero)

    def config(self, folder: str) -> dict[str, Any]:
        """Of the engine."""
        zero = {"stage3_param_persistence_threshold": 100, **self.zero, "stage": self.stage}
        for key in ("offload_optimizer", "offload_param"):
            if key in zero:
                zero[key] = {**zero[key], "nvme_path": folder} if zero[key]["device"] == "nvme" else zero[key]
        precision = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        if self.precision == "fp16":
            precision["fp16"]["initial_scale_power"] = 8
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-3}},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            **precision,
            **self.blocks,
        }

    def build(self) -> nn.Module:
        """The model, without DeepSpeed."""
        torch.manual_seed(0)
        model = _MODELS[self.model]()
        if self.recomputes:
            switch = getattr(model, "gradient_checkpointing_enable", None)
            if switch is None:
                model.recomputes = True
            else:
                switch()
        return model

    def batch(self, seed: int = 0) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Of one rank."""
        generator = torch.Generator().manual_seed(seed)
        if self.model == "conv":
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)
            images = torch.randn(self.rows, 3, 32, 32, generator=generator).to(dtype)
            return (images, torch.randint(10, (self.rows,), generator=generator)), {}
        tokens = torch.randint(_VOCABULARY, (self.rows, _TOKENS), generator=generator)
        return ((tokens, tokens), {}) if self.model == "gpt" else ((), {"input_ids": tokens, "labels": tokens})


def _shown(value: Any) -> Any:
    return value["device"] if isinstance(value, dict) and "device" in value else value


# -- models -----------------------------------------------------------------------------------------------------------


@cache
def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gpt_model", _GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Gpt(nn.Module):
    """The model of examples/gpt; its blocks may be recomputed, by `deepspeed.checkpointing`."""

    def __init__(self) -> None:
        super().__init__()
        example = _example()
        self.gpt = example.GPT(example.GPTConfig(_VOCABULARY, _TOKENS, depth=6, width=192, heads=6))
        self.recomputes = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if not self.recomputes:
            loss: Tensor = self.gpt(tokens, targets)
            return loss
        gpt = self.gpt
        hidden = gpt.embedding(tokens)
        for block in gpt.blocks:
            hidden = deepspeed.checkpointing.checkpoint(block, hidden, gpt.cosines, gpt.sines)
        logits = F.linear(gpt.norm(hidden), gpt.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=160,
            intermediate_size=448,
            num_hidden_layers=6,
            num_attention_heads=5,
            num_key_value_heads=5,
            tie_word_embeddings=False,
        )
    )


class _Conv(nn.Module):
    """A few convolutions with batch normalisation, and a perceptron behind them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 96)
        self.features = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in pairwise(sizes)
            )
        )
        self.head = nn.Sequential(nn.Linear(96 * 16, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(images).flatten(1)).float(), labels)


_MODELS: dict[str, Any] = {"gpt": _Gpt, "llama": _llama, "conv": _Conv}

# -- settings ---------------------------------------------------------------------------------------------------------

_CPU, _NVME = {"device": "cpu"}, {"device": "nvme"}
_SMALL_BUCKETS = {"reduce_bucket_size": 150_000, "allgather_bucket_size": 150_000}
_NOT_KEPT = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
_TIGHT = {"stage3_max_live_parameters": 1_000_000, "stage3_max_reuse_distance": 0}
_NVME_PARAM = {**_NVME, "max_in_cpu": 0, "buffer_size": 2_000_000}

SETTINGS: tuple[Setting, ...] = (
    Setting("gpt", 0, ranks=1),
    Setting("gpt", 0, "bf16"),
    Setting("gpt", 0, "fp16", accumulation=2),
    Setting("gpt", 1),
    Setting("gpt", 1, "bf16", zero=_SMALL_BUCKETS),
    Setting("gpt", 1, "fp16", recomputes=True),
    Setting("gpt", 2, zero=_SMALL_BUCKETS),
    Setting("gpt", 2, "bf16", rows=2, accumulation=2),
    Setting("gpt", 3),
    Setting("gpt", 3, "bf16", zero=_NOT_KEPT),
    Setting("gpt", 3, "bf16", recomputes=True, zero=_TIGHT),
    Setting("gpt", 3, "fp16", ranks=1, rows=8),
    Setting("llama", 0, "bf16", ranks=1),
    Setting("llama", 0, "bf16", rows=1, accumulation=2, optimizer="Lion"),
    Setting("llama", 1, "bf16", zero={"offload_optimizer": _CPU}),
    Setting("llama", 1, "bf16", zero={"offload_optimizer": _NVME, "sub_group_size": 200_000}),
    Setting("llama", 2, "bf16", zero={"offload_optimizer": _CPU, **_SMALL_BUCKETS}),
    Setting("llama", 2, recomputes=True),
    Setting("llama", 2, blocks={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    Setting("llama", 3, "bf16", zero={"offload_optimizer": _CPU, "offload_param": _CPU, **_NOT_KEPT}),
    Setting("llama", 3, "bf16", zero={"offload_optimizer": _NVME, "sub_group_size": 200_000}),
    Setting("llama", 3, zero={"offload_optimizer": _NVME, "offload_param": _NVME_PARAM, "sub_group_size": 200_000}),
    Setting("llama", 3, "fp16", rows=8, optimizer="Lion", zero=_TIGHT),
    Setting("llama", 3, "bf16", recomputes=True, zero={"offload_optimizer": _CPU}),
    Setting("conv", 0, ranks=1, rows=32),
    Setting("conv", 0, "bf16", rows=16),
    Setting("conv", 1, rows=16, optimizer="SGD"),
    Setting("conv", 2, "bf16", rows=16, accumulation=2),
    Setting("conv", 2, rows=32, zero={"offload_optimizer": _CPU}),
    Setting("conv", 3, rows=64, optimizer="Adagrad"),
)

# -- one comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """Bytes of one setting, planned and measured."""

    setting: Setting
    planned: RankPlan
    states: tuple[float, float]
    """Model states and buckets on the device between two steps."""

    peak: tuple[float, float]
    """The most on the device."""

    host: tuple[float, float]
    """Between two steps."""

    nvme: tuple[float, float]


@contextmanager
def small_scratch(*, is_apart: bool) -> Iterator[None]:
    """Scratch of a fixed size is small, as this module's text has it; `is_apart`: host memory is another place."""
    kept = master.SUB_GROUP_NUMEL["cpu"], mean.BLOCK_NUMEL, placement.is_host_apart
    master.SUB_GROUP_NUMEL["cpu"], mean.BLOCK_NUMEL = _SUB_GROUP_NUMEL, _BLOCK_NUMEL
    placement.is_host_apart = lambda device: is_apart
    try:
        yield
    finally:
        master.SUB_GROUP_NUMEL["cpu"], mean.BLOCK_NUMEL, placement.is_host_apart = kept


def _run(rank: int, world_size: int, setting: Setting, folder: str) -> Measured:
    with small_scratch(is_apart=setting.is_apart):
        before = bytes_of_tensors()
        engine = make_engine(setting.build(), setting.config(folder))

        def step() -> None:
            for number in range(setting.accumulation):
                args, kwargs = setting.batch(rank + number)
                loss = _loss(engine(*args, **kwargs))
                engine.backward(loss)
                del loss
                engine.step()

        for _ in range(2):
            step()
        is_moved = setting.zero.get("offload_optimizer") == _CPU
        return measure_step(before, step, Path(folder), world_size, list(_states(engine)) if is_moved else ())


def _states(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Of the optimizer, by whom they are made."""
    for state in engine.optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor) and each.dim())


def _loss(output: Any) -> Tensor:
    loss: Tensor = getattr(output, "loss", output)
    return loss


def compare(setting: Setting) -> Compared:
    """Plan a setting, and run it."""
    with tempfile.TemporaryDirectory() as folder:
        measured = run_ranks(_run, setting.ranks, setting, folder, timeout_seconds=120)
        with small_scratch(is_apart=setting.is_apart):
            planned = plan(
                setting.build(), setting.config(folder), setting.ranks, batch=setting.batch(), device_type="cpu"
            ).asked
    return Compared(
        setting,
        planned,
        (planned.nbytes("device", ["always"]), Measured.device_at_rest(measured)),
        (planned.peak_nbytes("device"), Measured.device_peak(measured)),
        (planned.nbytes("host", ["always"]), max(rank.host for rank in measured)),
        (planned.peak_nbytes("nvme"), max(rank.nvme for rank in measured)),
    )


def main() -> None:
    """Print the table of those whose numbers were given, or of all."""
    table = Table("", "setting", *("at rest MB", "took", "", "peak MB", "took", "", "host MB", "took", "nvme MB", "took"))
    for number in [int(each) for each in sys.argv[1:]] or range(len(SETTINGS)):
        found = compare(SETTINGS[number])
        row = [str(number), found.setting.label]
        for planned, took in (found.states, found.peak):
            row += [f"{planned / 1e6:.2f}", f"{took / 1e6:.2f}", f"{planned / took - 1:+.1%}"]
        for planned, took in (found.host, found.nvme):
            row += [f"{planned / 1e6:.2f}", f"{took / 1e6:.2f}"] if planned or took else ["", ""]
        table.add_row(*row)
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
