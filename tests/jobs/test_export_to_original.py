"""Our checkpoints as the original's stage files: the original itself resumes from them and goes on as we do.

Needs a Python that has the original (`tests.support.original_runs`).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from torch import Tensor

from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.disk.names import master_tensor, module_tensor
from deepspeed.checkpoint.original.reading.stages import StageSource
from deepspeed.checkpoint.original.writing.to_stages import Precision, ZeroStage, write_stages
from tests.support.original_runs import ORIGINAL, run_engines, two_groups

pytestmark = pytest.mark.skipif(
    not Path(ORIGINAL).is_file(), reason="DEEPSPEED_ORIGINAL_PYTHON names no Python that has the original 0.19.8"
)

STEPS_BEFORE, STEPS_AFTER = 3, 2


# fp32: sums over ranks in another order, a few units in the last place of weights and losses below 4. bf16: the original
# sums gradients in bf16 and we in fp32, so they differ by 2**-8 of themselves; Adam turns that into at most as much of a
# step, and the two steps move no weight by more than 0.04 and no loss by more than 1.
WORST_AFTER = {"fp32": 4e-6, "bf16": 2.0**-8}


class Target(NamedTuple):
    """What the original resumes as."""

    stage: ZeroStage
    dtype: Precision
    world_size: int


TARGETS = [Target(stage, dtype, ranks) for ranks in (2, 3) for dtype in ("fp32", "bf16") for stage in get_args(ZeroStage)]


def _tensors(folder: Path, members: list[list[str]]) -> dict[str, Tensor]:
    """Every weight and buffer, in the highest precision stored, and the optimizer's tensors."""
    source = open_checkpoint(folder)
    if isinstance(source, StageSource):
        source = source.with_members(members)  # stage 0 has numbers in place of names
    prefixes = (module_tensor(""), master_tensor(""), "optimizer/")
    names = {name.removeprefix(prefix): name for prefix in prefixes for name in source.names(prefix)}
    return {name: source.read(tensor).float() for name, tensor in names.items()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`fp32` and `bf16`: checkpoints of ours, trained at ZeRO stage 2 on two ranks."""
    folder = tmp_path_factory.mktemp("ours")
    cases = [
        {"config": two_groups(2, dtype), "load": None, "save": str(folder / dtype), "steps": STEPS_BEFORE}
        for dtype in get_args(Precision)[:2]
    ]
    run_engines(sys.executable, folder / "training", 2, cases)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_original_goes_on_from_the_export_as_we_do_from_the_checkpoint(
    ours: Path, tmp_path: Path, world_size: int
) -> None:
    targets = [target for target in TARGETS if target.world_size == world_size]
    cases: dict[str, list[dict[str, Any]]] = {"ours": [], "original": []}
    for number, (stage, dtype, _) in enumerate(targets):
        exported = tmp_path / "exported" / str(number)
        write_stages(open_checkpoint(ours / dtype), exported, stage=stage, world_size=world_size, dtype=dtype)
        for who, load in (("ours", ours / dtype), ("original", exported)):
            save = str(tmp_path / who / str(number))
            cases[who].append({"config": two_groups(stage, dtype), "load": str(load), "save": save, "steps": STEPS_AFTER})
    reports = {
        who: run_engines(python, tmp_path / f"run-{who}", world_size, cases[who])
        for who, python in (("ours", sys.executable), ("original", ORIGINAL))
    }
    optimizer = open_checkpoint(ours / "fp32").state["optimizer"]
    assert optimizer is not None
    for number, target in enumerate(targets):
        _assert_same_training(target, *([rank[number] for rank in reports[who]] for who in cases))
        for moment in ("-loaded", ""):
            mine, its = (_tensors(tmp_path / who / f"{number}{moment}", optimizer["members"]) for who in cases)
            assert set(mine) == set(its), target
            worst = max(float((mine[name] - its[name]).abs().max()) for name in mine)
            assert worst <= (WORST_AFTER[target.dtype] if moment == "" else 0.0), (target, moment, worst)


def _assert_same_training(target: Target, ours: list[dict[str, Any]], original: list[dict[str, Any]]) -> None:
    for mine, its in zip(ours, original, strict=True):
        worst = max(abs(a - b) for a, b in zip(mine["losses"], its["losses"], strict=True))
        assert worst <= WORST_AFTER[target.dtype], (target, mine, its)
        if target.dtype == "fp32":  # the original's forward in bf16 is not that of plain torch
            assert mine["losses"][:2] == its["losses"][:2], f"{target}: the forward of equal weights is equal"
        assert mine["rates"] == pytest.approx(its["rates"], abs=1e-15)
        for key in ("epoch", "steps", "samples"):
            assert mine[key] == its[key], (target, key, mine, its)
