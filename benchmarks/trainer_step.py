"""How long is one update of Transformers' Trainer, from one step's begin to the next, at ZeRO stages 2 and 3?

Goal: at most 0.85 of the time with the original. `ddp` is the same Trainer with no engine: what a user has without either.
The Trainer does what it does for everybody: its loader and collator, logging of each loss and norm, clipping, the client's
schedule; AdamW is named in the configuration, as the client's documentation has it, and decays no
weights: the client's own optimizer would except some parameters.

Model: a Llama of width 384, 6 blocks, 6 query and 2 key/value heads, MLPs of 1024, vocabulary 4096 (12.7M parameters);
2 micro-batches of 2 rows of 128 tokens an update and rank, fp32. Both interpreters need transformers and accelerate.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.trainers import DDP, LEARNING_RATE

_VOCABULARY, _TOKENS, _ROWS, _ACCUMULATION = 4096, 128, 2, 2
_WIDTHS = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": _VOCABULARY, "max_position_embeddings": _TOKENS}
_SHAPE = {**_WIDTHS, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2}
_AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")

CASES = tuple(
    Case(
        f"trainer_step stage {stage}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, DDP, ORIGINAL),
        figures=("step_ms", "first_loss", "last_loss"),
        of=ORIGINAL,
        ranks=2,
        goals=(Goal("step_ms", 0.85, of=ORIGINAL),),
        pairs=5,
        side_pairs=2,
        loss_tolerance=1e-4,
        arguments={"stage": stage, "warm": 3, "steps": 12},
    )
    for stage in (2, 3)
)


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens_RT = torch.randint(_VOCABULARY, (rows, _TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens_RT)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens_RT[row], "labels": self._tokens_RT[row]}


def _config(stage: int) -> dict[str, Any]:
    adamw = {"type": "AdamW", "params": {"lr": LEARNING_RATE}}
    zero = {"stage": stage, **dict.fromkeys(_BUCKETS, "auto")}
    return {**dict.fromkeys(_AUTO, "auto"), "optimizer": adamw, "zero_optimization": zero}


def _arguments(contender: str, arguments: Mapping[str, Any], folder: str) -> Any:
    """The client's arguments; without a device it finds no back end by itself, so its state is made before."""
    from accelerate import PartialState
    from transformers import TrainingArguments

    has_engine = contender != DDP
    if has_engine:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=not has_engine, backend="gloo")
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=_ROWS,
        gradient_accumulation_steps=_ACCUMULATION,
        max_steps=arguments["warm"] + arguments["steps"],
        learning_rate=LEARNING_RATE,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=not has_engine,
        accelerator_config={"use_configured_state": True},
        ddp_find_unused_parameters=False,
        deepspeed=_config(arguments["stage"]) if has_engine else None,
    )


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

    begins: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

    updates = arguments["warm"] + arguments["steps"]
    with tempfile.TemporaryDirectory() as folder:
        made = _arguments(contender, arguments, folder)
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE))
        rows = _Rows(updates * _ROWS * _ACCUMULATION * made.world_size)
        trainer = Trainer(model, made, train_dataset=rows, callbacks=[Clock()])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [after - before for before, after in itertools.pairwise(begins)]
    step_ms = statistics.median(seconds[arguments["warm"] :]) * 1e3
    return Measured({"step_ms": step_ms}, {"first": losses[0], "last": losses[-1]})
