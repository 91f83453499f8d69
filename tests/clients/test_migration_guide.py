"""What docs/guide/migration.md says: its loops train alike, before and after, its commands run, its keys exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint.tools.main import main as checkpoint_command
from deepspeed.config.check import main as config_command
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


_REFERENCE = _GUIDE.parents[1] / "reference" / "config.md"
_COMMANDS = {"deepspeed-checkpoint": checkpoint_command, "deepspeed-config": config_command}


def _spans(first: str) -> list[str]:
    """Pieces of code within lines of text that begin with `first`."""
    return [span for span in re.findall(r"`([^`\n]+)`", _GUIDE.read_text()) if span.startswith(first)]


def test_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    Path("ds_config.json").write_text(json.dumps(config))
    engine = deepspeed.initialize(model=_Blocks(), config=config)[0]
    engine.backward(engine(torch.ones(4, 6)).square().mean())
    engine.step()
    engine.save_checkpoint("ckpt")
    engine.destroy()
    lines = [line.split() for name in _COMMANDS for line in _spans(name + " ")]
    assert [line[:2] for line in lines] == [
        ["deepspeed-checkpoint", "show"],
        ["deepspeed-checkpoint", "export"],
        ["deepspeed-config", "check"],
    ]
    for name, *arguments in lines:
        assert _COMMANDS[name](arguments) in (0, None), (name, arguments)
    assert len(list(Path("out").rglob("*optim_states.pt"))) == 8  # as many ranks as the guide's line has


def test_keys_of_the_guide_are_in_the_reference() -> None:
    documented = set(re.findall(r"^\| `(\w+)`", _REFERENCE.read_text(), re.MULTILINE))
    blocks = set(re.findall(r"`(\w+)`", _REFERENCE.read_text()))
    keys = {key for span in _spans('"') for key in re.findall(r'"(\w+)":', span)}
    assert len(keys) > 5
    assert keys - documented - blocks == set()
