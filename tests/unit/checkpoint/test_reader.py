from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint import CheckpointReader, Piece, open_checkpoint
from deepspeed.checkpoint import parts as parts_module
from deepspeed.checkpoint import reader as reader_module
from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.disk.container import read_header
from deepspeed.checkpoint.disk.file_check import share_files
from deepspeed.checkpoint.disk.manifest import Fragment, Manifest, TensorEntry
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from tests.support.checkpoints import write_checkpoint
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads, use_thread_ranks

_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether writes reach the platter makes no difference to what a process sees; the order of it has its own test."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _write(folder: Path, tag: str = "t", **tensors: torch.Tensor) -> Path:
    pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
    return write_checkpoint(folder, tag, pieces, {}, {}, rank=0, world_size=1)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)


@given(data=st.data())
@pytest.mark.usefixtures("patched")
def test_whatever_number_of_ranks_wrote_any_number_reads_any_range(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    writers, readers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4))
    dtypes = [data.draw(st.sampled_from(_DTYPES)) for _ in shapes]
    tensors = {
        f"w{n}": (torch.arange(int(np.prod(shape))).view(shape) % 97).to(dtype)
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    cuts = {name: sorted(data.draw(st.integers(0, t.numel())) for _ in range(writers - 1)) for name, t in tensors.items()}
    ranges = {
        (name, rank): sorted(data.draw(st.integers(0, t.numel())) for _ in range(2))
        for name, t in tensors.items()
        for rank in range(readers)
    }
    folder = tmp_path_factory.mktemp("save")

    def write(ranks: ThreadRanks) -> Any:
        pieces = []
        for name, tensor in tensors.items():
            bounds = [0, *cuts[name], tensor.numel()]
            own = tensor.reshape(-1)[bounds[ranks.rank] : bounds[ranks.rank + 1]]
            pieces.append(Piece(name, tuple(tensor.shape), bounds[ranks.rank], own))
        return write_checkpoint(folder, "t", pieces, {}, {}, rank=ranks.rank, world_size=writers, group=ranks)

    def read(ranks: ThreadRanks) -> Any:
        reader = open_checkpoint(folder, rank=ranks.rank, world_size=readers, group=ranks)
        return {
            name: reader.read(name, low, high - low) for (name, rank), (low, high) in ranges.items() if rank == ranks.rank
        }

    assert run_threads(writers, write) == [folder / "t"] * writers
    for rank, got in enumerate(run_threads(readers, read)):
        for name, tensor in tensors.items():
            low, high = ranges[name, rank]
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor.reshape(-1)[low:high])
    shutil.rmtree(folder)


def test_names_shapes_and_dtypes_are_told_without_reading(tmp_path: Path) -> None:
    _write(tmp_path, **{"module/b": torch.ones(2, 3).half(), "module/a": torch.tensor(1), "master/b": torch.ones(6)})
    reader = open_checkpoint(tmp_path)
    assert reader.names("module/") == ["module/a", "module/b"]
    assert reader.names() == ["master/b", "module/a", "module/b"]
    assert reader.shape("module/a") == ()
    assert reader.shape("module/b") == (2, 3)
    assert reader.dtype("module/b") == torch.float16
    assert reader.tag == "t"
    assert reader.folder == tmp_path / "t"


def test_states_of_the_engine_the_user_and_each_rank_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)

    def write(ranks: ThreadRanks) -> Any:
        own = {"rng": torch.tensor([ranks.rank], dtype=torch.uint8), "position": ranks.rank} if ranks.rank < 2 else {}
        state, client = {"betas": (0.9, 0.99)}, {"best": torch.tensor(0.5), "seen": {1, 2}}
        return write_checkpoint(tmp_path, "t", [], state, client, rank=ranks.rank, world_size=3, rank_state=own, group=ranks)

    run_threads(3, write)
    reader = open_checkpoint(tmp_path)
    assert reader.state == {"betas": (0.9, 0.99)}
    assert reader.client_state() == {"best": torch.tensor(0.5), "seen": {1, 2}}
    assert [reader.rank_state(rank) for rank in range(4)] == [
        {"rng": torch.tensor([0], dtype=torch.uint8), "position": 0},
        {"rng": torch.tensor([1], dtype=torch.uint8), "position": 1},
        {},
        {},
    ]


def test_each_reading_of_the_client_state_is_the_users_to_change(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "t", [], {}, {"a": [1], "w": torch.zeros(1)}, rank=0, world_size=1)
    reader = open_checkpoint(tmp_path)
    first = reader.client_state()
    first["a"].append(2)
    first["w"] += 1
    assert reader.client_state() == {"a": [1], "w": torch.zeros(1)}


@pytest.mark.parametrize(
    "out",
    [torch.empty(4), torch.empty(4, dtype=torch.float64), torch.empty(8)[::2], torch.nn.Parameter(torch.empty(4))],
    ids=["direct", "converted", "strided", "parameter"],
)
def test_a_range_is_read_into_what_is_given(out: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_STAGING_NUMEL", 3)
    _write(tmp_path, w=torch.arange(12.0).view(3, 4))
    assert open_checkpoint(tmp_path).read("w", 5, out=out) is out
    assert out.tolist() == [5, 6, 7, 8]


def test_a_destination_in_the_stored_form_is_filled_in_place(tmp_path: Path) -> None:
    flat = torch.zeros(6)
    _write(tmp_path, w=torch.arange(3.0))
    open_checkpoint(tmp_path).read("w", out=flat[2:5])
    assert flat.tolist() == [0, 0, 0, 1, 2, 0]


def test_only_the_bytes_that_are_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write(tmp_path, w=torch.arange(1000.0))
    reader = open_checkpoint(tmp_path)
    asked = []
    real = reader_module.read_into
    monkeypatch.setattr(reader_module, "read_into", lambda *args: (asked.append((args[1], len(args[2]))), real(*args)))
    assert reader.read("w", 10, 3).tolist() == [10, 11, 12]
    assert asked == [(read_header(folder / "rank_00000.safetensors").tensors["w"].start_nbytes + 40, 12)]
    assert (folder / "rank_00000.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("x",), "holds no tensor 'x'"),
        (("module/wieght",), "Nearest names: 'module/weight'"),
        (("module/weight", 5, 8), "elements 5 to 13 of 'module/weight' were asked for; it has 12"),
        (("module/weight", -1), "elements -1 to 12"),
        (("module/weight", 13), "elements 13 to 12"),
        (("module/weight", 0, 4, torch.empty(2, 2)), r"out for 4 elements of 'module/weight' has shape \(2, 2\)"),
        (("module/weight", 0, 4, torch.empty(3)), r"has shape \(3,\); it must be \(4,\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_does_not_fit_says_what_there_is(arguments: Any, text: str, tmp_path: Path) -> None:
    _write(tmp_path, **{"module/weight": torch.ones(3, 4)})
    with pytest.raises(ArgumentError, match=text):
        open_checkpoint(tmp_path).read(*arguments)


def test_a_missing_checkpoint_lists_the_tags_there_are(tmp_path: Path) -> None:
    _write(tmp_path, "one", w=torch.ones(1))
    with pytest.raises(CheckpointNotFoundError, match="Tags there: 'one'"):
        open_checkpoint(tmp_path, "two")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no file 'latest'.*Tags there: 'one'"):
        open_checkpoint(tmp_path)
    (tmp_path / "half").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"half holds no checkpoint of a known layout.*Tags there: 'one'"):
        open_checkpoint(tmp_path, "half")


def _harm(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(raw[: len(raw) * 2 // 3])
    elif how == "flip":
        raw[len(raw) // 2] ^= 0x40
        path.write_bytes(raw)
    elif how == "longer":
        path.write_bytes(raw + b"\0")
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "flip", "longer", "empty", "gone"])
@pytest.mark.parametrize("file", ["rank_00000.safetensors", "rank_00001.safetensors", "client_state.json", "manifest.json"])
def test_damage_to_any_file_is_named_on_all_ranks_before_anything_is_read(
    file: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_thread_ranks(monkeypatch)

    def write(ranks: ThreadRanks) -> Any:
        pieces = [Piece("w", (8,), 4 * ranks.rank, torch.ones(4))]
        return write_checkpoint(tmp_path, "t", pieces, {}, {"a": 1}, rank=ranks.rank, world_size=2, group=ranks)

    run_threads(2, write)
    _harm(tmp_path / "t" / file, how)
    errors = run_threads(3, lambda ranks: open_checkpoint(tmp_path, rank=ranks.rank, world_size=3, group=ranks))
    kind = CheckpointNotFoundError if (file, how) == ("manifest.json", "gone") else CheckpointDamagedError
    assert [type(error) for error in errors] == [kind] * 3
    assert len({str(error) for error in errors}) == 1
    assert file in str(errors[0])


def test_every_damaged_file_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)

    def write(ranks: ThreadRanks) -> Any:
        pieces = [Piece("w", (8,), 4 * ranks.rank, torch.ones(4))]
        return write_checkpoint(tmp_path, "t", pieces, {}, {}, rank=ranks.rank, world_size=2, group=ranks)

    run_threads(2, write)
    for rank in range(2):
        _harm(tmp_path / "t" / f"rank_0000{rank}.safetensors", "flip")
    for error in run_threads(2, lambda ranks: open_checkpoint(tmp_path, rank=ranks.rank, world_size=2, group=ranks)):
        assert "rank_00000.safetensors" in str(error)
        assert "rank_00001.safetensors" in str(error)


def test_files_can_be_checked_later(tmp_path: Path) -> None:
    folder = _write(tmp_path, w=torch.ones(4))
    _harm(folder / "rank_00000.safetensors", "flip")
    reader = open_checkpoint(tmp_path, verify=False)
    with pytest.raises(CheckpointDamagedError, match=r"rank_00000.safetensors differs from what was written"):
        reader.check_own_share()


def test_a_file_that_loses_its_end_after_the_check_gives_an_error_and_no_wrong_numbers(tmp_path: Path) -> None:
    folder = _write(tmp_path, w=torch.ones(100))
    reader = open_checkpoint(tmp_path)
    reader.read("w", 0, 1)
    _harm(folder / "rank_00000.safetensors", "cut")
    with pytest.raises(CheckpointDamagedError, match=r"rank_00000.safetensors"):
        reader.read("w")


def test_a_manifest_that_promises_what_a_file_lacks_is_damage(tmp_path: Path) -> None:
    folder = _write(tmp_path, w=torch.ones(4))
    old = Manifest.parse((folder / "manifest.json").read_bytes(), "m")
    for key, dtype in (("other", "F32"), ("w", "F16")):
        fragment = Fragment(start=0, length=4, file="rank_00000.safetensors", key=key)
        tensors = {"w": TensorEntry(shape=[4], dtype=dtype, fragments=[fragment])}
        (folder / "manifest.json").write_bytes(old.model_copy(update={"tensors": tensors}).dump())
        with pytest.raises(CheckpointDamagedError, match=r"rank_00000.safetensors does not hold"):
            open_checkpoint(tmp_path).read("w")


def test_fragments_may_lie_inside_a_larger_stored_tensor(tmp_path: Path) -> None:
    folder = _write(tmp_path, flat=torch.arange(10.0))
    old = Manifest.parse((folder / "manifest.json").read_bytes(), "m")
    parts = [(0, 2, 7), (2, 3, 1)]  # start, length, offset
    fragments = [
        Fragment(start=start, length=length, file="rank_00000.safetensors", key="flat", offset=offset)
        for start, length, offset in parts
    ]
    tensors = {"w": TensorEntry(shape=[5], dtype="F32", fragments=fragments)}
    (folder / "manifest.json").write_bytes(old.model_copy(update={"tensors": tensors}).dump())
    assert open_checkpoint(tmp_path).read("w", 1).tolist() == [8, 1, 2, 3]


def test_a_pickle_in_every_place_a_reader_looks_runs_nothing(tmp_path: Path) -> None:
    class _Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "exploded",))

    bomb = tmp_path / "bomb"
    torch.save(_Bomb(), bomb)
    _write(tmp_path, w=torch.ones(4))
    files = ["latest", "t/manifest.json", "t/client_state.json", "t/rank_00000.safetensors"]
    for file in files:
        saved = (tmp_path / file).read_bytes()
        shutil.copy(bomb, tmp_path / file)
        for verify in (True, False):
            with pytest.raises((CheckpointError, ArgumentError)):
                _read_all(open_checkpoint(tmp_path, verify=verify))
        (tmp_path / file).write_bytes(saved)
    assert not (tmp_path / "exploded").exists()
    _read_all(open_checkpoint(tmp_path))


def _read_all(reader: CheckpointReader) -> None:
    assert reader.read("w").tolist() == [1] * 4
    assert reader.client_state() == {}
    assert reader.rank_state(0) == {}
    assert reader.state == {}


def test_a_newer_format_version_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = _write(tmp_path, w=torch.ones(1))
    old = Manifest.parse((folder / "manifest.json").read_bytes(), "m")
    (folder / "manifest.json").write_bytes(old.model_copy(update={"version": 9}).dump())
    with pytest.raises(CheckpointError, match=r"format version 9.*upgrade"):
        open_checkpoint(tmp_path)


def test_a_set_aside_checkpoint_is_read(tmp_path: Path) -> None:
    folder = _write(tmp_path, w=torch.ones(2))
    folder.rename(tmp_path / ".t.replaced-0123456789abcdef")
    assert open_checkpoint(tmp_path).read("w").tolist() == [1, 1]


def test_a_reader_of_one_process_needs_no_group(tmp_path: Path) -> None:
    folder = _write(tmp_path, w=torch.ones(2))
    assert CheckpointReader(folder, "t", Alone()).read("w").tolist() == [1, 1]


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 100), max_size=9), st.integers(1, 5))
def test_files_are_shared_out_whole_and_evenly(sizes: dict[str, int], world_size: int) -> None:
    shares = share_files(sizes, world_size)
    assert sorted(file for share in shares for file in share) == sorted(sizes)
    loads = [sum(sizes[file] for file in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
