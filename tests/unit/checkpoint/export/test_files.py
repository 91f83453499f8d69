from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.export.files import export_weights
from deepspeed.checkpoint.export.weights_source import NoLatestError, open_weights
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from tests.unit.checkpoint.export_checkpoints import BUFFERS, FROZEN, TIED, Net, save_net
from tests.unit.checkpoint.faulty_storage import FullDisk


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """As other programs load a folder: the whole file if there is one, else what the index names."""
    for kind, read in (("pytorch_model.bin", _load_torch), ("model.safetensors", load_file)):
        if (folder / kind).exists():
            return dict(read(folder / kind))
        if (folder / f"{kind}.index.json").exists():
            where = json.loads((folder / f"{kind}.index.json").read_text())["weight_map"]
            files = {file: read(folder / file) for file in {*where.values()}}
            assert sorted(name for held in files.values() for name in held) == sorted(where)
            return {name: files[file][name] for name, file in where.items()}
    raise FileNotFoundError(folder)


def _load_torch(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
    return loaded


def _assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("max_shard_size", ["5GB", 100, 1, None])
@pytest.mark.parametrize("safe", [False, True])
def test_the_state_dict_is_complete_and_a_model_loads_it(tmp_path: Path, safe: bool, max_shard_size: Any) -> None:
    expected = save_net(tmp_path / "in")
    files = export_weights(
        open_weights(tmp_path / "in"), tmp_path / "out", max_shard_size=max_shard_size, safe_serialization=safe
    )
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    assert len(files) == 1 or files[-1].name.endswith(".index.json")
    got = load_weights(tmp_path / "out")
    _assert_equal(got, expected)
    Net().load_state_dict(got, strict=True)


def test_the_order_is_buffers_frozen_trained_as_the_optimizer_has_them_then_tied_names(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    export_weights(open_weights(tmp_path / "in"), tmp_path / "out")
    got = list(load_weights(tmp_path / "out"))
    assert got[: len(BUFFERS) + 1] == BUFFERS + FROZEN
    assert got[-len(TIED) :] == list(TIED)
    trained = got[len(BUFFERS) + 1 : -len(TIED)]
    assert trained[-1] == "none"  # of the second group
    assert "fc.weight" in trained


def test_tied_weights_are_stored_once_in_a_torch_file(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    export_weights(open_weights(tmp_path / "in"), tmp_path / "out")
    got = load_weights(tmp_path / "out")
    assert got["head.weight"].data_ptr() == got["emb.weight"].data_ptr()


def test_frozen_parameters_are_left_out_on_request_under_all_their_names(tmp_path: Path) -> None:
    expected = save_net(tmp_path / "in")
    export_weights(open_weights(tmp_path / "in"), tmp_path / "out", exclude_frozen=True)
    left = {name: value for name, value in expected.items() if TIED.get(name, name) not in FROZEN}
    _assert_equal(load_weights(tmp_path / "out"), left)


def test_frozen_parameters_that_the_save_left_out_are_missed_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_net(tmp_path / "in", has_frozen_parameters=False)
    export_weights(open_weights(tmp_path / "in"), tmp_path / "out")
    assert "1 frozen parameters (frozen.weight" in caplog.text
    assert not {*FROZEN, "also_frozen.weight"} & load_weights(tmp_path / "out").keys()


@pytest.mark.parametrize(("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F64", torch.float64)])
def test_floating_point_values_take_the_type_that_was_asked_for(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    expected = save_net(tmp_path / "in")
    export_weights(open_weights(tmp_path / "in"), tmp_path / "out", dtype=name)
    want = {key: value.to(dtype) if value.is_floating_point() else value for key, value in expected.items()}
    _assert_equal(load_weights(tmp_path / "out"), want)


def test_without_a_type_everything_stays_as_it_is_stored(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    export_weights(open_weights(tmp_path / "in"), tmp_path / "out", dtype=None)
    got = load_weights(tmp_path / "out")
    assert (got["emb.weight"].dtype, got["frozen.weight"].dtype) == (torch.float32, torch.bfloat16)


def test_an_export_replaces_the_one_before_and_leaves_other_files_alone(tmp_path: Path) -> None:
    out, expected = tmp_path / "out", save_net(tmp_path / "in")
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_text("of somebody else")
    source = open_weights(tmp_path / "in")
    for size in (100, 200, "5GB", 300):
        files = export_weights(source, out, max_shard_size=size)
        kept = {out / "config.json", out / "model.safetensors"}
        assert {*out.iterdir()} == {*files} | kept, size
        (out / "model.safetensors").rename(tmp_path / "aside")
        _assert_equal(load_weights(out), expected)
        (tmp_path / "aside").rename(out / "model.safetensors")


def test_weights_of_an_earlier_export_in_the_other_format_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_net(tmp_path / "in")
    source = open_weights(tmp_path / "in")
    export_weights(source, tmp_path / "out", safe_serialization=True, max_shard_size=300)
    assert caplog.text == ""
    export_weights(source, tmp_path / "out")
    assert "in the other format (model-00001-of-" in caplog.text
    assert "model.safetensors.index.json" in caplog.text


def test_a_full_disk_leaves_the_weights_that_were_there(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    out, source = tmp_path / "out", open_weights(tmp_path / "in")
    (file,) = export_weights(source, out)
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"No space left.*that were there are intact. Free space"):
        export_weights(source, out, dtype="F16", storage=FullDisk(500))
    assert [*out.iterdir()] == [file]
    assert file.read_bytes() == before


def _killed_at(operation: int) -> Storage:
    """A storage whose process ends before its `operation`-th operation."""
    done = 0

    class Killed(Storage):
        def __getattribute__(self, name: str) -> Any:
            nonlocal done
            if name in ("make_folder", "create", "write_file", "sync_folder", "rename", "remove"):
                done += 1
                if done > operation:
                    os._exit(9)
            return super().__getattribute__(name)

    return Killed()


@pytest.mark.parametrize("sizes", [(None, None), (200, 200), (200, None), (None, 200)])
def test_a_kill_at_any_moment_leaves_the_old_weights_or_the_new_and_never_a_mixture(tmp_path: Path, sizes: Any) -> None:
    expected = save_net(tmp_path / "in")
    source = open_weights(tmp_path / "in")
    old = {name: value.bfloat16().float() if value.is_floating_point() else value for name, value in expected.items()}
    export_weights(source, tmp_path / "old", dtype="BF16", max_shard_size=sizes[0])
    seen = []
    for operation in range(40):
        out = tmp_path / str(operation)
        shutil.copytree(tmp_path / "old", out)
        pid = os.fork()
        if pid == 0:
            export_weights(source, out, max_shard_size=sizes[1], storage=_killed_at(operation))
            os._exit(0)
        is_done = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        seen.append(_which(out, old, expected))
        if is_done:
            break
    assert is_done
    assert (seen[0], seen[-1]) == ("old", "new")
    assert {*seen} <= {"old", "new"} | ({"none"} if sizes == (200, 200) else set())  # no index while shards are renamed
    left = tmp_path / str(operation - 1)
    export_weights(source, left, max_shard_size=sizes[1])
    assert _which(left, old, expected) == "new"
    assert not [path for path in left.iterdir() if path.name.startswith(".")]


def _which(out: Path, old: dict[str, Tensor], new: dict[str, Tensor]) -> str:
    try:
        got = {name: value.float() if value.is_floating_point() else value for name, value in load_weights(out).items()}
    except FileNotFoundError:
        return "none"
    for which, want in (("new", new), ("old", old)):
        if got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want):
            return which
    return "mixture"


def test_progress_is_settled_in_bytes_per_file(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    told: dict[str, int] = {}

    def progress(file: str, nbytes: int) -> None:
        told[file] = told.get(file, 0) + nbytes

    *files, index = export_weights(open_weights(tmp_path / "in"), tmp_path / "out", max_shard_size=100, progress=progress)
    assert sum(told.values()) == json.loads(index.read_text())["metadata"]["total_size"]
    assert {*told} <= {file.name for file in files}


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    file = tmp_path / "in" / "t" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match=r"rank_00000.safetensors differs"):
        open_weights(tmp_path / "in")


def test_what_is_not_there_is_settled_as_the_builtin_that_callers_catch(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint 'x'.*'t'") as caught:
        open_weights(tmp_path / "in", "x")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        open_weights(tmp_path / "nowhere")
    (tmp_path / "in" / "latest").unlink()
    with pytest.raises(ValueError, match=r"no file 'latest', so a tag is needed. Tags there: 't'") as no_latest:
        open_weights(tmp_path / "in")
    assert isinstance(no_latest.value, NoLatestError)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint '5'"):
        open_weights(tmp_path / "in", 5)  # type: ignore[arg-type]  # numbers are taken as at a save
    assert open_weights(tmp_path / "in", "t").folder == tmp_path / "in" / "t"


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    (tmp_path / "out").write_text("")
    with pytest.raises(ArgumentError, match="out is a file"):
        export_weights(open_weights(tmp_path / "in"), tmp_path / "out")


def test_a_whole_export_of_our_layout_loads_no_torch(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    code = (
        "import sys\n"
        "from deepspeed.checkpoint.export.files import export_weights\n"
        "from deepspeed.checkpoint.export.weights_source import open_weights\n"
        f"export_weights(open_weights({str(tmp_path / 'in')!r}), {str(tmp_path / 'out')!r}, dtype='BF16')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "out" / "pytorch_model.bin").exists()


def test_memory_does_not_grow_with_the_model_nor_with_the_output_file(tmp_path: Path) -> None:
    """The peak of the whole process, minus that of the same process with a model of some bytes."""
    save_net(tmp_path / "small")
    big_nbytes = 96 << 20
    weights = {f"w{n}": torch.ones(big_nbytes // 4 // 4) for n in range(4)}
    save_net(tmp_path / "big", extra=weights)
    peaks, size = [], "max_shard_size='48MB'"
    for name, more in (("small", ""), ("big", ""), ("big", ", dtype='BF16', safe_serialization=True")):
        code = (
            "import re\n"
            "from deepspeed.checkpoint.export.files import export_weights\n"
            "from deepspeed.checkpoint.export.weights_source import open_weights\n"
            f"export_weights(open_weights({str(tmp_path / name)!r}), {str(tmp_path / 'out')!r}, {size}{more})\n"
            "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout) << 10)
    largest_nbytes = 24 << 20  # one weight: two would be more than 48 MB
    assert max(peaks) - peaks[0] < 1.2 * largest_nbytes, peaks


def test_an_export_flushes_every_file_before_it_is_renamed(tmp_path: Path) -> None:
    events: list[str] = []

    class Recording(Storage):
        def create(self, path: Path) -> Any:
            file = super().create(path)
            finish = file.finish
            file.finish = lambda: (events.append(f"flushed {path.name}"), finish())[1]  # type: ignore[method-assign]
            return file

        def rename(self, source: Path, target: Path) -> None:
            events.append(f"renamed {source.name}")
            super().rename(source, target)

    save_net(tmp_path / "in")
    files = export_weights(open_weights(tmp_path / "in"), tmp_path / "out", max_shard_size=100, storage=Recording())
    names = [file.name for file in files]
    assert events == [f"flushed {name}" for name in names] + [f"renamed {name}" for name in names]
