"""Runs of Transformers' Trainer on gloo ranks, with a configuration of ours or without us, as often in a process as asked.

        a run of ours  (`deepspeed` is a file or dict)    Trainer -> Accelerate -> deepspeed.initialize
        the reference  (`deepspeed` is None)              Trainer -> Accelerate -> DistributedDataParallel

Both are the same client on the same ranks with the same seeds and batches. Ranks are started with `init=False`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.clients import Sentences, assert_same_curve, tiny_llama

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
_WARM_UP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
_SCHEDULER = {"type": "WarmupDecayLR", "params": {**dict.fromkeys(_WARM_UP, "auto"), "warmup_type": "linear"}}


class Update(NamedTuple):
    """What the Trainer logs of one update."""

    loss: float
    grad_norm: float
    learning_rate: float


def auto_config(stage: int, *, optimizer: bool = False, scheduler: bool = False, **zero: Any) -> dict[str, Any]:
    """Every value that the client fills in as "auto"; optimizer and schedule are the client's unless asked for here.

    Args:
        stage: the ZeRO stage.
        optimizer: the configuration names the optimizer (AdamW), too.
        scheduler: it names the schedule, too: a linear rise and fall, as the client's default.
        zero: further keys of `zero_optimization`.
    """
    config: dict[str, Any] = dict.fromkeys(_SIZES, "auto")
    config |= {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    gathered = {"stage3_gather_16bit_weights_on_model_save": True}
    config["zero_optimization"] = {"stage": stage, **dict.fromkeys(_BUCKETS, "auto"), **gathered, **zero}
    config |= {"optimizer": _OPTIMIZER} if optimizer else {}
    config |= {"scheduler": _SCHEDULER} if scheduler else {}
    return json.loads(json.dumps(config))  # copies of the blocks


def arguments(folder: Path | str, deepspeed: Path | dict[str, Any] | None, **settings: Any) -> Any:
    """TrainingArguments of a run on this rank, started anew: Accelerate forgets the run before.

    Accelerate finds no back end without a device, so its state is made first (spec of the clients, section 15).

    Args:
        folder: where the run writes.
        deepspeed: the configuration, or None for the reference under DDP.
        settings: further arguments; `cls` is the class, TrainingArguments unless given.
    """
    from accelerate.state import AcceleratorState, PartialState
    from transformers import TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if deepspeed is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=deepspeed is None, backend="gloo")
    cls = settings.pop("cls", TrainingArguments)
    ours = {
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": deepspeed is None,
        "accelerator_config": {"use_configured_state": True},
        "deepspeed": str(deepspeed) if isinstance(deepspeed, Path) else deepspeed,
    }
    return cls(output_dir=str(folder), **{**ours, **settings})


def trainer(
    folder: Path | str,
    deepspeed: Path | dict[str, Any] | None,
    *,
    model: Any = None,
    make_model: Callable[[], Any] | None = None,
    rows: int = 32,
    eval_rows: int = 0,
    **settings: Any,
) -> Any:
    """A Trainer over `rows` sentences, not yet run; `settings` are those of `arguments`.

    Args:
        folder: where the run writes.
        deepspeed: the configuration, or None for the reference.
        model: what to train; the tiny Llama unless given.
        make_model: makes the model anew for each training instead.
        rows: of the training data.
        eval_rows: of the evaluation data, other sentences; 0 for none.
        settings: further arguments.
    """
    from transformers import Trainer

    made = arguments(folder, deepspeed, **settings)
    unseen = Sentences(eval_rows, seed=1) if eval_rows else None
    if model is None and make_model is None:
        model = tiny_llama()
    return Trainer(model, made, model_init=make_model, train_dataset=Sentences(rows), eval_dataset=unseen)


def updates(run: Any) -> list[Update]:
    """What a Trainer has logged, update by update."""
    entries = [entry for entry in run.state.log_history if "loss" in entry]
    return [Update(*(float(entry[name]) for name in Update._fields)) for entry in entries]


def assert_same_run(got: Sequence[Update], expected: Sequence[Update], *, rates_ahead: bool = False) -> None:
    """Fail unless two runs had the same losses, gradient norms and rates.

    Norms are compared to 1e-4 of themselves: they are sums over all parameters of gradients that agree to about 1e-5.

    Args:
        got: by a run of ours.
        expected: by the reference.
        rates_ahead: the engine of `got` holds the schedule and steps it inside backward, before the client looks at the
            rate; the client then logs the one of the next update.
    """
    assert_same_curve([update.loss for update in got], [update.loss for update in expected])
    norms = [update.grad_norm for update in expected]
    assert [update.grad_norm for update in got] == pytest.approx(norms, rel=1e-4)
    rates = [update.learning_rate for update in expected][rates_ahead:]
    assert [update.learning_rate for update in got][: len(rates)] == pytest.approx(rates, rel=1e-6, abs=1e-12)
