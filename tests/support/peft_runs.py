"""Adapters of PEFT trained in a plain loop: by an engine on this rank's rows, or by torch alone on all of them.

        adapted model  ->  train (engine, or torch alone)  ->  Tuned: losses, the adapter saved and loaded again, merged

At stage 3 the base model is built sharded, as Transformers does it: while a configuration of ours is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.zero import GatheredParameters
from tests.support.clients import Sentences, tiny_llama

UPDATES = 6
ROWS = 2
"""Rows of a batch on each rank."""

RATE = 1e-2
_ALL_LINEAR = ["q_proj", "v_proj", "down_proj"]


class Tuned(NamedTuple):
    """What a training came to. All losses but the first are of the same unseen rows."""

    losses: list[float]
    """Of each update, mean over the ranks."""

    loaded: float
    """Of the saved adapter on a fresh base."""

    merged: float | None
    """Of that, merged into the base; None where the method cannot."""

    in_place: list[float]
    """Of the trained model itself, with the adapter merged for a while, and after that."""

    saved: dict[str, Tensor]
    """The saved adapter."""


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=_ALL_LINEAR)


def _dora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=_ALL_LINEAR, use_dora=True)


def _adalora() -> Any:
    from peft import AdaLoraConfig

    ranks = {"init_r": 6, "target_r": 3, "lora_alpha": 8, "target_modules": _ALL_LINEAR}
    times = {"tinit": 1, "tfinal": 2, "deltaT": 1, "total_step": UPDATES}  # masks from update 2 on, for good from 4 on
    return AdaLoraConfig(task_type="CAUSAL_LM", **ranks, **times)


def _ia3() -> Any:
    from peft import IA3Config

    return IA3Config(task_type="CAUSAL_LM", target_modules=_ALL_LINEAR, feedforward_modules=["down_proj"])


def _prompt() -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, prompt_tuning_init="SAMPLE_VOCAB")


METHODS: dict[str, Callable[[], Any]] = {
    "lora": _lora,
    "dora": _dora,
    "adalora": _adalora,
    "ia3": _ia3,
    "prompt": _prompt,
}
_CANNOT_MERGE = ("prompt",)


def tuned_alone(method: str, base: Path, folder: Path, ranks: int) -> Tuned:
    """Train in this process alone on the rows of all ranks. `base` has the model, `folder` gets the adapter."""
    model = _adapted(method, base)
    optimizer = torch.optim.AdamW(_trained(model), lr=RATE)
    losses = []
    for update in range(UPDATES):
        loss = model(**_rows(range(update * ranks * ROWS, (update + 1) * ranks * ROWS))).loss
        loss.backward()
        if method == "adalora":
            model.base_model.update_and_allocate(update)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(str(folder))
    loss_of = _loss_of(model)
    merged = [] if method in _CANNOT_MERGE else _merged_for_a_while(model, loss_of)
    return Tuned(losses, *_reloaded(method, folder), [loss_of(), *merged], _saved(folder))


def tuned(method: str, zero: Mapping[str, Any], base: Path, folder: Path, rank: int, ranks: int) -> Tuned:
    """Train with an engine on this rank's rows. All ranks call it; the result is rank 0's, but for the losses."""
    from transformers.integrations import HfDeepSpeedConfig

    config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": dict(zero)}
    alive = HfDeepSpeedConfig(config)  # Transformers and PEFT ask whether there is one, and forget it with this name
    model = _adapted(method, base)
    engine = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(_trained(model), lr=RATE))[0]
    losses = []
    for update in range(UPDATES):
        first = (update * ranks + rank) * ROWS
        loss = engine(**_rows(range(first, first + ROWS))).loss
        engine.backward(loss)
        if method == "adalora":
            _allocate(model, update)
        engine.step()
        losses.append(_mean_over_ranks(loss))
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) if zero["stage"] == 3 else None
    if rank == 0:
        model.save_pretrained(str(folder), state_dict=state)
    loss_of = _loss_of(engine)
    in_place = [loss_of()]
    if method not in _CANNOT_MERGE:
        with GatheredParameters(model.parameters()):
            in_place += _merged_for_a_while(model, loss_of)
        in_place[-1] = loss_of()
    engine.destroy()
    del alive
    deepspeed.comm.barrier()
    return Tuned(losses, *_reloaded(method, folder), in_place, _saved(folder))


def _adapted(method: str, base: Path) -> Any:
    from peft import get_peft_model
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(0)  # adapters draw
    return get_peft_model(model, METHODS[method]())


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _allocate(model: Any, update: int) -> None:
    """AdaLoRA looks at values and gradients of whole adapters, and masks them: between backward and step, on all ranks."""
    with GatheredParameters(_trained(model), modifier_rank=0):
        model.base_model.update_and_allocate(update)


def _merged_for_a_while(model: Any, loss_of: Callable[[], float]) -> list[float]:
    model.merge_adapter()
    merged = loss_of()
    model.unmerge_adapter()
    return [merged, loss_of()]


def _reloaded(method: str, folder: Path) -> tuple[float, float | None]:
    from peft import PeftModel

    model: Any = PeftModel.from_pretrained(tiny_llama(), str(folder), is_trainable=method == "adalora")  # which asks
    loaded = _loss_of(model)()
    return loaded, None if method in _CANNOT_MERGE else _loss_of(model.merge_and_unload())()


def _saved(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def _rows(numbers: range, seed: int = 0) -> dict[str, Tensor]:
    samples = [Sentences(seed=seed)[number] for number in numbers]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _loss_of(model: nn.Module) -> Callable[[], float]:
    def loss() -> float:
        model.eval()
        with torch.no_grad():
            return float(model(**_rows(range(4), seed=1)).loss)

    return loss


def _mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    deepspeed.comm.all_reduce(total)
    return total.item() / deepspeed.comm.get_world_size()
