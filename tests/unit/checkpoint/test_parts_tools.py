"""What the tools make of tensors that ranks hold in parts: the same as of whole ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint import Piece, open_checkpoint
from deepspeed.checkpoint.tools import main
from deepspeed.sharding import Cut, Span
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.checkpoints import write_checkpoint
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads, use_thread_ranks
from tests.unit.checkpoint.tool_checkpoints import STATE

FUSED = Cut.of_widths((6, 4), 0, [1, 1], [1, 1], [1, 1])
COLUMNS = Cut.of_widths((6, 5), 1, [3, 2])
COPIES = Cut((2, 3), 0, ((Span(0, 2),), (Span(0, 2),)))
CUTS = {"fused.weight": FUSED, "down.weight": COLUMNS, "kv.weight": COPIES}


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _tensors() -> dict[str, tuple[Tensor, Cut | None]]:
    found: dict[str, tuple[Tensor, Cut | None]] = {}
    generator = torch.Generator().manual_seed(1)
    for name, cut in {**CUTS, "norm.weight": None}.items():
        shape = (4,) if cut is None else cut.shape
        for stored in (f"master/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
            found[stored] = torch.rand(shape, generator=generator), cut
    return found


def _state(**changes: Any) -> dict[str, Any]:
    names = [*CUTS, "norm.weight"]
    optimizer = {"name": "AdamW", "groups": [{"lr": 0.1}], "members": [names], "scalars": {n: {"step": 3} for n in names}}
    return {**STATE, "shared_parameters": {}, "buffers": [], "optimizer": optimizer, **changes}


def _save_whole(folder: Path) -> None:
    pieces = [Piece.whole(name, value) for name, (value, _) in _tensors().items()]
    write_checkpoint(folder, "t", pieces, _state(), {}, rank=0, world_size=1)


def _save_parts(folder: Path) -> None:
    def pieces(rank: int) -> list[Piece]:
        found = []
        for name, (value, cut) in _tensors().items():
            if cut is not None:
                part = torch.cat([value.narrow(cut.dim, *span) for span in cut.parts[rank]], cut.dim)
                found.append(Piece(name, cut.shape, cut.stored_starts()[rank], part, cut))
            elif rank == 0:
                found.append(Piece.whole(name, value))
        return found

    def write(ranks: ThreadRanks) -> Any:
        state = _state(mesh={"tensor": 2})
        return write_checkpoint(folder, "t", pieces(ranks.rank), state, {}, rank=ranks.rank, world_size=2, group=ranks)

    assert run_threads(2, write) == [folder / "t"] * 2


def _run(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """The same values saved whole and in parts."""
    _save_whole(tmp_path / "whole")
    _save_parts(tmp_path / "parts")
    return tmp_path / "whole", tmp_path / "parts"


def test_they_do_not_differ_and_are_undamaged(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("diff", *both) == 0, capsys.readouterr().out
    assert _run("verify", both[1]) == 0
    assert _run("ls", both[1]) == 0


def test_show_tells_parts_and_what_they_take(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("show", both[1], "--json") == 0
    shown = {tensor["name"]: tensor for tensor in json.loads(capsys.readouterr().out)["tensors"]}
    assert shown["master/fused.weight"]["cut"] == "2 along 0"
    assert shown["master/down.weight"]["cut"] == "2 along 1"
    assert (shown["master/kv.weight"]["shape"], shown["master/kv.weight"]["nbytes"]) == ([2, 3], 2 * 6 * 4)
    assert shown["master/norm.weight"]["cut"] is None
    assert _run("show", both[1]) == 0
    table = capsys.readouterr().out
    assert "2 along 1" in table
    assert "tensor=2" in table
    assert _run("show", both[0]) == 0
    assert "along" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--safe-serialization"], ["--dtype", "bf16"]], ids=["bin", "safetensors", "bf16"])
def test_exported_files_are_the_same_to_the_last_byte(both: tuple[Path, Path], options: list[str], tmp_path: Path) -> None:
    written = []
    for number, folder in enumerate(both):
        assert _run("export", folder, tmp_path / str(number), *options) == 0
        written.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()})
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("form", "out", "options"),
    [("universal", "b/uni", []), ("stages", "b", ["--stage", "2", "--world-size", "3", "--dtype", "bf16"])],
)
def test_layouts_of_the_original_hold_the_same(
    both: tuple[Path, Path], form: str, out: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("export", both[1], tmp_path / out, "--to", form, *options) == 0
    assert _run("diff", both[0], tmp_path / "b") == 0, capsys.readouterr().out


def test_state_dicts_are_whole(both: tuple[Path, Path]) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(both[1])
    for name, (value, _) in _tensors().items():
        if name.startswith("master/"):
            assert torch.equal(found[name.removeprefix("master/")], value)
        assert torch.equal(open_checkpoint(both[1]).read(name).view(value.shape), value)


def test_a_changed_byte_of_a_part_is_named(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = both[1] / "t" / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert _run("verify", both[1]) == 1
    assert "rank_00001.safetensors" in capsys.readouterr().out
