"""The loops of docs/guide/migration.md, before and after, train alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.clients import assert_same_curve
from tests.support.ranks import run_ranks

_GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "migration.md"
_PARTS = ("## From DistributedDataParallel", "## From FSDP")


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def _loop(part: str, which: str) -> str:
    """The code of the block that begins with `# which`, in the section that begins with `part`."""
    section = _GUIDE.read_text().split(part, 1)[1].split("\n## ", 1)[0]
    [code] = [code for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL) if code.startswith(f"# {which}\n")]
    return code


def _losses(rank: int, world_size: int, code: str) -> Any:
    import torch.nn.functional as F
    from torch.distributed.fsdp import fully_shard

    import deepspeed

    names: dict[str, Any] = {"torch": torch, "F": F, "fully_shard": fully_shard, "deepspeed": deepspeed}
    exec(code, names)  # the guide's own text
    torch.manual_seed(0)
    model = _Blocks()
    generator = torch.Generator().manual_seed(rank)
    batches = [tuple(torch.randn(2, 4, 6, generator=generator)) for _ in range(8)]
    return names["train"](model, batches)


def test_loops_of_the_guide_train_alike() -> None:
    for part in _PARTS:
        before, after = (run_ranks(_losses, 2, _loop(part, which)) for which in ("before", "after"))
        for expected, losses in zip(before, after, strict=True):
            assert_same_curve(losses, expected)
