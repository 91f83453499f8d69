"""Models cut over the tensor axis compute and train as one process does: every family, 2 and 4 ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.tensor_parallel.auto import apply_auto_tp
from deepspeed.tensor_parallel.layers import part_of
from deepspeed.topology.mesh import AxisGroup, ParallelMesh
from tests.support.cut_net import cuts_of
from tests.support.families import FAMILIES, build, double_throughout, logits_of, loss_of, tokens
from tests.support.ranks import run_ranks

ROUNDING = 1e-10
STEPS = 10


def expected_parts(whole: nn.Module, cut: nn.Module, rank: int, what: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(Name, the whole model's part, the cut model's value) of every parameter, or of its gradient."""
    cuts = cuts_of(cut)
    wholes = dict(whole.named_parameters())
    for name, param in cut.named_parameters():
        expected, found = ((each.grad if what == "gradient" else each.detach()) for each in (wholes[name], param))
        if expected is None and found is None:
            continue
        assert found is not None, f"{name} has no gradient"
        assert expected is not None, f"{name} has a gradient"
        yield name, part_of(expected, cuts[name], rank) if name in cuts else expected, found


def compare(whole: nn.Module, cut: nn.Module, rank: int, what: str) -> None:
    for name, expected, found in expected_parts(whole, cut, rank, what):
        torch.testing.assert_close(
            found, expected, rtol=ROUNDING, atol=ROUNDING, msg=lambda text, n=name: f"{what} of {n}: {text}"
        )


def train_alike(name: str, axis: AxisGroup, keys: dict[str, Any], changes: dict[str, Any]) -> int:
    """Train a whole and a cut model; how many layers were cut."""
    with double_throughout(name):
        whole = build(name, **changes)
        cut = copy.deepcopy(whole)
        apply_auto_tp(cut, TensorParallelConfig(autotp_size=axis.size, **keys), axis)
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (whole, cut)]
        for step in range(STEPS):
            ids = tokens(seed=step)
            logits = [logits_of(model, ids) for model in (whole, cut)]
            torch.testing.assert_close(logits[1], logits[0], rtol=ROUNDING, atol=ROUNDING)
            for each, optimizer in zip(logits, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(each, ids).backward()
            if step == 0:
                compare(whole, cut, axis.rank, "gradient")
            for optimizer in optimizers:
                optimizer.step()
        compare(whole, cut, axis.rank, "weight")
    return len(cuts_of(cut))


def tensor_axis(size: int) -> AxisGroup:
    """Of all ranks, over a store that groups of some of them can use: torch's file store ends with the first such group."""
    comm.init_distributed("gloo")
    return ParallelMesh.build(tensor=size).axis("tensor")


def _families(rank: int, world_size: int, names: list[str], size: int) -> dict[str, int]:
    axis = tensor_axis(size)
    found = {}
    for name in names:
        try:
            found[name] = train_alike(name, axis, {}, {})
        except Exception as error:
            raise AssertionError(f"{name} over {size} ranks: {error}") from error
    return found


_GROUPS = [list(FAMILIES)[first::3] for first in range(3)]


@pytest.mark.parametrize("names", _GROUPS, ids="-".join)
@pytest.mark.parametrize("size", [2, 4])
def test_every_family_trains_as_one_process_does(names: list[str], size: int) -> None:
    for found in run_ranks(_families, size, names, size, timeout_seconds=120, init=False):
        assert all(count > 4 for count in found.values()), found


WAYS: list[tuple[str, dict[str, Any], int]] = [
    *((name, {"preset_model": name}, 12) for name in ("llama", "qwen2", "bloom")),
    ("phi3", {"preset_model": "phi3"}, 8),
    ("mixtral", {"preset_model": "mixtral"}, 12),
    ("llama", {"injection_policy_tuple": ("self_attn.o_proj", "mlp.down_proj")}, 14),
    ("gpt2", {"injection_policy_tuple": ("attn.c_proj", "mlp.c_proj")}, 8),
    ("bert", {"injection_policy_tuple": ("attention.output.dense", "output.dense")}, 12),
]
"""Family, what says where to cut, and the fewest parameters that are then parts."""


def _ways(rank: int, world_size: int) -> list[tuple[str, str, int]]:
    axis = tensor_axis(world_size)
    return [(name, next(iter(keys)), train_alike(name, axis, keys, {})) for name, keys, _ in WAYS]


def test_presets_and_names_of_rows_train_as_one_process_does() -> None:
    for found in run_ranks(_ways, 2, timeout_seconds=120, init=False):
        few = [(*each, least) for each, (_, _, least) in zip(found, WAYS, strict=True) if each[2] < least]
        assert few == []
