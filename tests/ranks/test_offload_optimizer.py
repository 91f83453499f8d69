"""Offload of the optimizer never changes numbers: every form equals the same run without it, to the last bit.

    precision x ZeRO stage are crossed; form, model, accumulation, clipping, optimizer alternate (the sweep crosses forms)

Forms: files with and without overlap; "apart": host memory that is pretended to be another place than the device's, so that
masters, state and gradients lie there and values are delivered. One launch per world size runs every setting.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.offload import placement
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.zero.disk_residence import DiskResidence
from deepspeed.zero.residence import InMemory, OnHost
from tests.support.engines import Outcome, config, make_engine, moments, train, zero
from tests.support.models import Batches, Branching, Lora, TiedGpt, TinyModel, build, cast_batches, make_batches
from tests.support.ranks import run_ranks
from tests.support.sweeps import IS_SWEEP

STEPS = 4
CLIP = 0.05
SUB_GROUP_NUMEL = 128  # with 7 buffers and overlap 64: torch's kernels compute the last elements of a range otherwise
FORMS: dict[str, dict[str, Any]] = {
    "nvme": {"device": "nvme"},
    "nvme, overlapped": {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 7},
    "host apart": {"device": "cpu"},
    "nvme, apart": {"device": "nvme", "pipeline_write": True, "pin_memory": True},
}
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp64": (torch.float64, {}),
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"bf16": {"enabled": True}}),
    "bf16, wide": (torch.bfloat16, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    "bf16 masters": (torch.bfloat16, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    "bf16 all": (
        torch.bfloat16,
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    ),
    "fp16": (torch.float16, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
}
MODELS: tuple[type[TinyModel], ...] = (TiedGpt, Lora, Branching)
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    ("Lion", {"lr": 1e-3}),
    ("AdamW", {"lr": 1e-2, "torch_adam": True}),
    ("client's Adagrad", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-1, "momentum": 0.9}),
)


@dataclass(frozen=True)
class Setting:
    """One training without a form of offload, to which each form is compared."""

    number: int
    precision: str
    stage: int

    @property
    def accumulation(self) -> int:
        return (1, 3)[self.number % 2]

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision][0]

    @property
    def optimizer(self) -> tuple[str, dict[str, Any]]:
        kind, params = OPTIMIZERS[self.number % len(OPTIMIZERS)]
        if self.precision in ("bf16 masters", "bf16 all") and params.get("torch_adam"):
            return OPTIMIZERS[0]
        return kind, params

    def forms(self) -> list[tuple[str, dict[str, Any]]]:
        """Every second form, so that each meets every precision and stage; all of them in the sweep."""
        return list(FORMS.items()) if IS_SWEEP else list(FORMS.items())[self.number % 2 :: 2]

    def model(self) -> TinyModel:
        is_16_bit = self.dtype.itemsize == 2
        return build(MODELS[self.number % len(MODELS)], dtype=torch.float32 if is_16_bit else self.dtype)

    def batches(self, world_size: int) -> Batches:
        return cast_batches(make_batches(self.model(), STEPS, self.accumulation, world_size), self.dtype)

    def engine(self, offload: dict[str, Any] | None) -> DeepSpeedEngine:
        model = self.model()
        kind, params = self.optimizer
        keys: dict[str, Any] = {"sub_group_size": SUB_GROUP_NUMEL, "reduce_bucket_size": (150, 10**6)[self.number % 2]}
        if self.stage == 3:
            keys["stage3_param_persistence_threshold"] = (0, 50)[self.number // 2 % 2]
        if offload is not None:
            keys["offload_optimizer"] = offload
        blocks = zero(self.stage, **keys) | PRECISIONS[self.precision][1]
        blocks |= {"gradient_clipping": (0.0, CLIP)[self.number // 3 % 2], "zero_allow_untested_optimizer": True}
        if kind == "client's Adagrad":
            optimizer = DeepSpeedCPUAdagrad(_groups(model), **params)
            return make_engine(model, config(self.accumulation, **blocks), optimizer=optimizer)
        blocks["optimizer"] = {"type": kind, "params": params}
        return make_engine(model, config(self.accumulation, **blocks), model_parameters=_groups(model))


SETTINGS = tuple(Setting(number, *each) for number, each in enumerate(itertools.product(PRECISIONS, (1, 2, 3))))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices, and the rest at another rate."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "lr": 3e-3},
    ]


def _everything(engine: DeepSpeedEngine, batches: Batches, rank: int) -> tuple[Outcome, dict[str, dict[str, Tensor]]]:
    return train(engine, batches, rank), moments(engine)


def _differences(
    plain: tuple[Outcome, dict[str, dict[str, Tensor]]], ours: tuple[Outcome, dict[str, dict[str, Tensor]]]
) -> list[str]:
    found = []
    for what in ("losses", "norms"):
        if getattr(plain[0], what) != getattr(ours[0], what):
            found.append(f"{what}: {getattr(plain[0], what)} became {getattr(ours[0], what)}")
    named = {
        "master": (plain[0].weights, ours[0].weights),
        "weight": (plain[0].model_weights, ours[0].model_weights),
        **{f"state of {name}": (plain[1].get(name, {}), ours[1].get(name, {})) for name in plain[1].keys() | ours[1].keys()},
    }
    for what, (before, after) in named.items():
        if before.keys() != after.keys():
            found.append(f"{what}: {sorted(before)} became {sorted(after)}")
        found += [f"{what} {key}" for key in before.keys() & after.keys() if not torch.equal(before[key], after[key])]
    return found


def _residence(form: str) -> type:
    return DiskResidence if FORMS[form]["device"] == "nvme" else OnHost


def _train_all(rank: int, world_size: int, folder: str) -> list[str]:
    found = []
    for setting in SETTINGS:
        batches = setting.batches(world_size)
        engine = setting.engine(None)
        assert type(engine.optimizer.master.residence) is InMemory
        plain = _everything(engine, batches, rank)
        engine.destroy()
        for form, block in setting.forms():
            placement.is_host_apart = lambda device, form=form: form.endswith("apart")
            engine = setting.engine(block | ({"nvme_path": folder} if block["device"] == "nvme" else {}))
            assert type(engine.optimizer.master.residence) is _residence(form)
            difference = _differences(plain, _everything(engine, batches, rank))
            found += [f"rank {rank}, {setting}, {form}: {each}" for each in difference]
            engine.destroy()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_form_equals_the_run_without_offload(world_size: int, tmp_path: Path) -> None:
    found = [each for of_rank in run_ranks(_train_all, world_size, str(tmp_path), timeout_seconds=300) for each in of_rank]
    assert not found, "\n".join(found[:20])
    assert list(tmp_path.iterdir()) == []  # every engine has removed its files
