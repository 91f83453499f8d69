"""Experts whose matrices tensor ranks share, held by every data rank or spread over them, train as one process does.

AutoTP    finds the two layers of each expert by their names
marked    experts that are built in parts, as Megatron's are: parameters say so, an mpu says who shares them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from tests.support import moe_models
from tests.support.cut_net import TensorUnit, _CopyIn, _SumOut, cuts_of
from tests.support.engines import config, make_engine, zero
from tests.support.models import Batch, TinyModel, build
from tests.support.moe_models import WIDTH, MoeNet, fill
from tests.support.ranks import run_ranks

STEPS, CLIP, EXPERTS, INNER = 10, 0.05, (4, 4), 6
ROUNDING = 1e-12


class Named(nn.Module):
    """Layers by names that AutoTP knows."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.tanh(self.fc1(rows)))
        return out


class Marked(nn.Module):
    """This rank's part of such an expert; its bias is whole."""

    def __init__(self, unit: TensorUnit) -> None:
        super().__init__()
        inner = INNER // unit.get_model_parallel_world_size()
        self.up, self.down = nn.Parameter(torch.zeros(inner, WIDTH)), nn.Parameter(torch.zeros(WIDTH, inner))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        for param, dim in ((self.up, 0), (self.down, 1)):
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
        self._group = [unit.get_model_parallel_group()]

    def forward(self, rows: Tensor) -> Tensor:
        inner = torch.tanh(_CopyIn.apply(rows, self._group[0]) @ self.up.T)
        return _SumOut.apply(inner @ self.down.T, self._group[0]) + self.bias


def _net(ep_size: int, data_rank: int) -> MoeNet:
    """Values out of global names, whatever rank holds an expert."""

    def make() -> MoeNet:
        model = MoeNet((), k=2)
        model.layers = nn.ModuleList(
            MoE(
                WIDTH,
                Named(),
                num_experts=count,
                ep_size=ep_size,
                k=2,
                enable_expert_tensor_parallelism=True,
                **moe_models.PLAIN,
            )
            for count in EXPERTS
        )
        return model

    model = build(make)
    for layer in model.modules():
        if isinstance(layer, Experts) and ep_size > 1:
            layer.place(data_rank % ep_size)
    return fill(model, torch.float64)


def _batch(step: int, data_rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return tuple(torch.randn(5, TinyModel.VALUES, generator=generator, dtype=torch.float64) for _ in range(2))


def _reference(model: nn.Module, data: int, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([model(*_batch(step, rank)) for rank in range(data)]).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return norms


def _settings(stage: int, tensor: int) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
    settings = config(1, 5, **zero(stage, stage3_gather_16bit_weights_on_model_save=True), optimizer=optimizer)
    settings["gradient_clipping"] = CLIP
    if tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": tensor}
    return settings


def _trained(rank: int, world_size: int, folder: Path, tensor: int, ep_size: int, stages: tuple[int, ...]) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    for stage in stages:
        model = _net(ep_size, rank // tensor)
        engine = make_engine(model, _settings(stage, tensor))
        half = STEPS // 2
        norms = _steps(engine, range(half))
        engine.save_checkpoint(folder, f"half-{stage}")
        engine.destroy()
        # goes on where all ranks share each matrix, and no expert is spread
        model = _net(1, 0)
        engine = make_engine(model, _settings(0, world_size))
        engine.load_checkpoint(folder, f"half-{stage}")
        wrong += [] if cuts_of(model) else ["nothing was cut"]
        engine.save_checkpoint(folder, f"wide-{stage}")
        engine.destroy()
        model = _net(ep_size, rank // tensor)
        engine = make_engine(model, _settings(stage, tensor))
        engine.load_checkpoint(folder, f"wide-{stage}")
        norms += _steps(engine, range(half, STEPS))
        engine.save_16bit_model(folder, f"{stage}.bin")
        engine.destroy()
        whole = _net(1, 0)
        wanted = _reference(whole, world_size // tensor, STEPS)
        if norms != pytest.approx(wanted, rel=1e-10):
            wrong.append(f"stage {stage}: norms {norms}, not {wanted}")
        found = torch.load(folder / f"{stage}.bin", weights_only=True)
        wrong += [f"stage {stage}: names {found.keys() ^ whole.state_dict().keys()}"] * (
            found.keys() != whole.state_dict().keys()
        )
        wrong += [
            f"stage {stage}: {name} is off"
            for name, value in whole.state_dict().items()
            if found[name].shape != value.shape or (found[name] - value).abs().max() > ROUNDING
        ]
    return wrong


def _steps(engine: Any, steps: range) -> list[float]:
    norms = []
    for step in steps:
        engine.backward(engine(*_batch(step, engine.get_data_parallel_rank())))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


@pytest.mark.parametrize(
    ("world_size", "tensor", "ep_size", "stages"), [(2, 2, 1, (0, 3)), (4, 2, 2, (0, 1, 2, 3)), (4, 2, 1, (1,))]
)
def test_experts_in_parts_train_move_and_come_together_as_in_one_process(
    world_size: int, tensor: int, ep_size: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    for wrong in run_ranks(_trained, world_size, tmp_path, tensor, ep_size, stages, timeout_seconds=120):
        assert wrong == []


def _marked(rank: int, world_size: int, folder: Path) -> list[str]:
    unit = TensorUnit(2)
    place, data_rank = unit.get_model_parallel_rank(), unit.get_data_parallel_rank()
    model = _net(2, data_rank)
    for layer in model.layers:
        experts = layer.deepspeed_moe.experts.deepspeed_experts
        for number, expert in list(experts.named_children()):
            made = Marked(unit).double()
            with torch.no_grad():
                made.up.copy_(expert.fc1.weight.chunk(2)[place])
                made.down.copy_(expert.fc2.weight.chunk(2, 1)[place])
                made.bias.copy_(expert.fc2.bias)
            setattr(experts, number, made)
        layer.deepspeed_moe.experts.mark()
    engine = make_engine(model, _settings(1, 1), mpu=unit)
    norms = _steps(engine, range(STEPS))
    engine.save_16bit_model(folder, "marked.bin")
    engine.destroy()
    whole = _net(1, 0)
    for each in whole.modules():
        if isinstance(each, Named):
            each.fc1.bias = None
    wanted = _reference(whole, 2, STEPS)
    if norms != pytest.approx(wanted, rel=1e-10):
        return [f"norms {norms}, not {wanted}"]
    comm.barrier()
    found = torch.load(folder / "marked.bin", weights_only=True)
    names = {"fc1.weight": "up", "fc2.weight": "down", "fc2.bias": "bias"}
    wrong = []
    for name, value in whole.state_dict().items():
        ending = next((each for each in names if name.endswith(each)), "")
        got = found[name.removesuffix(ending) + names.get(ending, "")]
        if got.shape != value.shape or (got - value).abs().max() > ROUNDING:
            wrong.append(f"{name} is off")
    return wrong


def test_experts_that_are_built_in_parts_train_as_in_one_process(tmp_path: Path) -> None:
    for wrong in run_ranks(_marked, 4, tmp_path):
        assert wrong == []
