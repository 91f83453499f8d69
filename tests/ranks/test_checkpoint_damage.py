"""What harms a folder of checkpoints from outside: bits, cuts, bombs, full disks, left-overs, other jobs."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint import Manifest, Piece, list_tags, open_checkpoint
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.errors import CheckpointError, DeepSpeedError
from tests.support.checkpoints import write_checkpoint
from tests.support.ranks import run_ranks
from tests.support.sweeps import IS_SWEEP
from tests.unit.checkpoint.thread_ranks import run_threads, use_thread_ranks

_NUMEL = 600
_RANDOM_BITS = 300 if IS_SWEEP else 20  # of each file, besides those at places that are likely to be special


def _pieces(rank: int, world_size: int, value: float, numel: int = _NUMEL) -> list[Piece]:
    start, stop = numel * rank // world_size, numel * (rank + 1) // world_size
    values = torch.full((stop - start,), value)
    return [Piece("master/w", (numel,), start, values), Piece("module/w", (numel,), start, values.bfloat16())]


def _write(
    folder: Path | str, tag: str, value: float, rank: int, world_size: int, numel: int = _NUMEL, **options: Any
) -> None:
    write_checkpoint(
        folder,
        tag,
        _pieces(rank, world_size, value, numel),
        {"value": value},
        {"value": value, "tensor": torch.tensor(value)},
        rank=rank,
        world_size=world_size,
        rank_state={"value": value},
        **options,
    )


def _value(folder: Path | str, tag: str | None = None) -> float:
    """Read all there is of a checkpoint; it must agree on one value."""
    source = open_checkpoint(folder, tag)
    states = [source.state["value"], *source.client_state().values(), source.rank_state(0)["value"]]  # type: ignore[typeddict-item]
    held = {float(number) for number in states}
    held |= {float(number) for name in source.names() for number in source.read(name).unique()}
    assert len(held) == 1, f"{source.folder} holds {held}"
    return float(held.pop())


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoints `older` (1.0) and `t` (2.0) of three ranks; `latest` names `t`."""
    use_thread_ranks(monkeypatch)
    for tag, value in (("older", 1.0), ("t", 2.0)):
        run_threads(3, lambda ranks: _write(tmp_path / "saves", tag, value, ranks.rank, 3, group=ranks))  # noqa: B023
    assert _value(tmp_path / "saves") == 2.0
    return tmp_path / "saves"


# -- bits and cuts ----------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.is_file())
    shards = [f"rank_0000{rank}.safetensors" for rank in range(3)]
    assert [path.name for path in found] == ["client_state.json", "manifest.json", *shards]
    return found


def _flips(raw: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """`raw` with one bit turned: at both ends, around the header of a shard, in the middle, and anywhere."""
    header = 8 + int.from_bytes(raw[:8], "little") if raw[:1] != b"{" else len(raw) // 3
    places = {0, 1, 7, 8, header - 1, header, len(raw) // 2, len(raw) - 2, len(raw) - 1}
    places |= {rng.randrange(len(raw)) for _ in range(_RANDOM_BITS)}
    for at in sorted(place for place in places if place < len(raw)):
        bit = rng.randrange(8)
        yield f"bit {bit} of byte {at}", raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def _cuts(raw: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """`raw` cut short, longer than it was, or with a hole of zeros as a lost block leaves it."""
    for length in sorted({0, 1, 8, len(raw) // 2, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(_RANDOM_BITS))}):
        yield f"cut to {length} bytes", raw[:length]
    yield "one byte more", raw + b"\0"
    yield "zeros for its first half", bytes(len(raw) // 2) + raw[len(raw) // 2 :]
    yield "zeros all over", bytes(len(raw))


@pytest.mark.parametrize("harm", [_flips, _cuts], ids=["flipped", "cut"])
def test_one_bit_or_a_cut_in_any_file_is_named(harm: Callable[[bytes, random.Random], Any], saved: Path) -> None:
    rng = random.Random(1)
    missed = []
    count = 0
    for path in _files(saved / "t"):
        raw = path.read_bytes()
        for what, harmed in harm(raw, rng):
            path.write_bytes(harmed)
            count += 1
            try:
                value = _value(saved)
                missed.append(f"{path.name}, {what}: loaded {value}")
            except CheckpointError as error:
                if path.name not in str(error):
                    missed.append(f"{path.name}, {what}: not named in {error}")
        path.write_bytes(raw)
    assert missed == []
    assert count > 5 * _RANDOM_BITS // 2
    assert _value(saved) == 2.0


@pytest.mark.parametrize(
    "name",
    ["client_state.json", "manifest.json", "rank_00000.safetensors", "rank_00001.safetensors", "rank_00002.safetensors"],
)
def test_a_file_that_is_gone_or_another_one_is_named_and_the_older_checkpoint_still_loads(name: str, saved: Path) -> None:
    path = saved / "t" / name
    raw = path.read_bytes()
    path.write_bytes((saved / "older" / name).read_bytes())
    if name != "manifest.json":  # that one is right about the older files, which are not here
        with pytest.raises(CheckpointError, match=name):
            _value(saved)
    else:
        with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
            _value(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        _value(saved)
    path.mkdir()
    with pytest.raises(CheckpointError, match=name):
        _value(saved)
    path.rmdir()
    path.write_bytes(raw)
    assert (_value(saved), _value(saved, "older")) == (2.0, 1.0)


@pytest.mark.parametrize("content", [b"", b"nowhere", b"../t", b"t\0", b"\xff\xfe", b"x" * 5000], ids=lambda c: repr(c[:8]))
def test_a_latest_that_names_nothing_is_an_error_that_lists_the_tags(content: bytes, saved: Path) -> None:
    (saved / "latest").write_bytes(content)
    with pytest.raises(DeepSpeedError):
        _value(saved)
    assert _value(saved, "t") == 2.0


def test_every_damaged_file_is_named_not_only_the_first(saved: Path) -> None:
    for number in range(3):
        path = saved / "t" / f"rank_0000{number}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"(?s)rank_00000.*rank_00001.*rank_00002"):
        _value(saved)


# -- bombs ------------------------------------------------------------------------------------------------------------


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._mark,)


def _bombs(mark: Path) -> list[bytes]:
    plain, archive = pickle.dumps(_Bomb(mark)), mark.with_name("bomb.pt")
    torch.save({"module": {"w": torch.ones(2)}, "bomb": _Bomb(mark)}, archive)
    return [plain, archive.read_bytes()]


def _with_right_hash(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and let the manifest say that this is it: whoever plants a bomb can do that too."""
    (folder / name).unlink()
    entry = Storage().write_file(folder / name, content)
    path = folder / "manifest.json"
    manifest = Manifest.parse(path.read_bytes(), "")
    path.write_bytes(manifest.model_copy(update={"files": {**manifest.files, name: entry}}).dump())


def _tolerant_read(folder: Path) -> None:
    """Refused in words of ours is as good as read without running anything."""
    for tag in (None, "t"):
        with contextlib.suppress(DeepSpeedError):
            _value(folder, tag)


def test_the_bombs_would_go_off(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for bomb in _bombs(mark):
        path = tmp_path / "b"
        path.write_bytes(bomb)
        try:
            pickle.loads(bomb)
        except pickle.UnpicklingError:
            torch.load(path, weights_only=False)
        assert mark.is_dir()
        mark.rmdir()


def test_a_bomb_in_any_file_that_a_reader_looks_at_does_not_go_off(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    whole = tmp_path / "whole"
    shutil.copytree(saved, whole)
    places = [path.name for path in _files(saved / "t")]
    plain = [lambda bomb, name=name: (saved / name).write_bytes(bomb) for name in ("latest", "latest_universal")]
    plain += [lambda bomb, name=name: (saved / "t" / name).write_bytes(bomb) for name in places]
    hashed = [lambda bomb, name=name: _with_right_hash(saved / "t", name, bomb) for name in places if "manifest" not in name]
    for bomb in _bombs(mark):
        for plant in plain + hashed:
            plant(bomb)  # type: ignore[call-arg]
            _tolerant_read(saved)
            assert not mark.exists()
            shutil.rmtree(saved)
            shutil.copytree(whole, saved)


def test_a_bomb_beside_our_files_is_not_looked_at(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for bomb in _bombs(mark):
        for name in (
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "layer_00-model_states.pt",
            "rank_00009.safetensors",
            "rank_00000.pt",
            "data.pkl",
            "zero/w/fp32.pt",
            "zero/optimizer_state.pt",
            "__init__.py",
        ):
            path = saved / "t" / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(bomb)
    assert _value(saved) == 2.0
    (saved / "t" / "manifest.json").unlink()  # now the folder passes for one of the original's
    _tolerant_read(saved)
    shutil.rmtree(saved / "t" / "zero")
    _tolerant_read(saved)
    assert not mark.exists()


@pytest.mark.parametrize("where", ["client_state.json", "state", "rank_state"])
def test_states_that_name_code_stay_data(where: str, saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for bomb in (
        {"$pickle": base64.b64encode(pickle.dumps(_Bomb(mark))).decode()},
        {"$dataclass": ["os.mkdir", {"path": str(mark)}]},
        {"$dataclass": ["os.mkdir", str(mark)]},
        {"$numpy": ["object", {"$bytes": base64.b64encode(pickle.dumps(_Bomb(mark))).decode()}]},
        {"$ndarray": str(mark)},
        {"$dtype": "load"},
        {"$device": str(mark)},
        {"$namespace": {"__init__": "os.mkdir", "__class__": "os"}},
        {"__reduce__": ["os.mkdir", [str(mark)]]},
    ):
        content = {"value": 2.0, "tensor": 2.0, "bomb": bomb}
        if where == "client_state.json":
            _with_right_hash(saved / "t", where, json.dumps(content).encode())
        elif where == "state":
            path = saved / "t" / "manifest.json"
            manifest = Manifest.parse(path.read_bytes(), "")
            path.write_bytes(manifest.model_copy(update={"state": content}).dump())
        else:
            raw = (saved / "older" / "rank_00000.safetensors").read_bytes()
            nbytes = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + nbytes])
            header["__metadata__"]["rank_state"] = json.dumps(content)
            text = json.dumps(header).encode()
            _with_right_hash(
                saved / "t", "rank_00000.safetensors", len(text).to_bytes(8, "little") + text + raw[8 + nbytes :]
            )
        source = open_checkpoint(saved)
        try:
            read = {"client_state.json": source.client_state, "state": lambda: source.state}  # noqa: B023
            held = read.get(where, lambda: source.rank_state(0))()  # type: ignore[operator]  # noqa: B023
            assert type(held["bomb"]).__module__ in ("builtins", "argparse")
        except CheckpointError:
            pass  # refused in words of ours
        assert not mark.exists()


# -- full disks -------------------------------------------------------------------------------------------------------


def _names(folder: Path | str) -> list[str]:
    return sorted(os.listdir(folder))


def _fill(rank: int, world_size: int, folder: str, limit_nbytes: int | None) -> list[str]:
    """Save a little, then too much, over the same tag and under a new one, then a little; the errors that this rank met."""
    _write(folder, "t", 1.0, rank, world_size)
    texts = []
    if limit_nbytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_nbytes, resource.RLIM_INFINITY))
    for tag in ("t", "u"):
        with pytest.raises(CheckpointError) as caught:
            _write(folder, tag, 2.0, rank, world_size, numel=1_000_000)
        texts.append(str(caught.value))
        if rank == 0:
            assert (_names(folder), _value(folder)) == (["latest", "t"], 1.0)
        comm.barrier()
    _write(folder, "u", 3.0, rank, world_size)
    return texts


def _assert_full(met: list[list[str]], folder: Path, reason: str) -> None:
    for texts in met:
        assert texts == met[0]
        assert all("Any earlier checkpoint is intact" in text and reason in text for text in texts)
    assert (_names(folder), _value(folder), _value(folder, "t")) == (["latest", "t", "u"], 3.0, 1.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_the_same_error_on_all_ranks_and_leaves_nothing(small_disk: Path) -> None:
    _assert_full(run_ranks(_fill, 2, str(small_disk), None), small_disk, "Free space")


def test_a_limit_on_the_size_of_files_is_an_error_as_well(tmp_path: Path) -> None:
    _assert_full(run_ranks(_fill, 2, str(tmp_path), 1 << 20), tmp_path, "File too large")


# -- left-overs and other jobs ----------------------------------------------------------------------------------------


def test_a_partial_folder_is_not_read_and_the_next_save_removes_it(saved: Path) -> None:
    token = "0123456789abcdef"
    for tag in ("t", "new"):
        shutil.copytree(saved / "t", saved / f".{tag}.writing-{token}")
        (saved / f".{tag}.writing-{token}" / "manifest.json").unlink()
    (saved / f".latest.writing-{token}").write_text("new")
    assert _value(saved) == 2.0
    assert list_tags(saved) == ["older", "t"]
    with pytest.raises(CheckpointError, match="'new'"):
        _value(saved, "new")
    _write(saved, "t", 3.0, 0, 1)
    assert (_names(saved), _value(saved)) == (["latest", "older", "t"], 3.0)


def _two_jobs(rank: int, world_size: int, folder: str, saves: int) -> None:
    """Ranks 0 and 1 are one job, 2 and 3 another; both save as fast as they can, under own tags and under common ones."""
    groups = [comm.new_group([0, 1]), comm.new_group([2, 3])]
    job = rank // 2
    for number in range(saves):
        for tag in ("both", f"job{job}-{number}", f"both{number}"):
            value = float(2 * number + job)  # whole numbers below 256 are exact in bf16 too
            _write(folder, tag, value, rank % 2, 2, group=groups[job])


def test_two_jobs_in_one_folder_do_not_harm_each_other(tmp_path: Path) -> None:
    saves = 30 if IS_SWEEP else 5
    run_ranks(_two_jobs, 4, str(tmp_path), saves, timeout_seconds=120)
    tags = [f"{name}{number}" for name in ("job0-", "job1-", "both") for number in range(saves)]
    assert _names(tmp_path) == sorted(["latest", "both", *tags])
    for number in range(saves):
        assert _value(tmp_path, f"job0-{number}") == 2 * number
        assert _value(tmp_path, f"job1-{number}") == 2 * number + 1
        assert _value(tmp_path, f"both{number}") in (2 * number, 2 * number + 1)
    assert _value(tmp_path, "both") in (2 * saves - 2, 2 * saves - 1)
    assert (tmp_path / "latest").read_text() in tags
