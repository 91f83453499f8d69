"""The commands in this process; `tests/jobs/test_zero_to_fp32.py` runs them as a user does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepspeed.utils import zero_to_fp32

ORIGINAL = Path(__file__).parents[3] / "fixtures" / "original"
NAMES = [
    "stage1-fp32",
    "stage1-bf16-fp32acc",
    "stage2-bf16",
    "stage3-bf16",
    "pipeline-stage1-bf16",
    "universal-from-stage1-fp32",
    "universal-from-stage3-bf16",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_of_the_original_gives_its_complete_weights(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the original's own command leaves frozen weights out (stage 1), or gives up."""
    expected = load_file(ORIGINAL / name.removeprefix("universal-from-") / "expected_fp32.safetensors")
    assert zero_to_fp32.main([str(ORIGINAL / name), str(tmp_path), "--max_shard_size", "1KB"]) == 0
    got = {key: value for file in tmp_path.glob("*.bin") for key, value in torch.load(file, weights_only=True).items()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    assert "Detected checkpoint of type zero stage" in capsys.readouterr().out
