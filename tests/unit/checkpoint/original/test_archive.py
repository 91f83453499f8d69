"""Reading `.pt` archives: plain data comes out, no code runs, refused names and damage are told."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import tarfile
import zipfile
from collections import Counter, OrderedDict, deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed.checkpoint.original.archive import RefusedClassError, check_archive, load_archive
from deepspeed.checkpoint.original.pickles import save_archive
from deepspeed.checkpoint.original.stand_ins import DynamicLossScaler, FragmentAddress, LossScaler, ZeroStageEnum
from deepspeed.errors import CheckpointDamagedError, CheckpointError
from tests.support.original_net import FIXTURES, member_ranges

SHARD = FIXTURES / "stage1-fp32/step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = FIXTURES / "stage1-fp32/step3/mp_rank_00_model_states.pt"


class Bomb:
    """Leaves a file behind when a pickle runs it."""

    def __init__(self, path: Path, function: Any = os.system) -> None:
        self._call = (function, (f"touch {path}" if function is os.system else f"open({str(path)!r}, 'w')",))

    def __reduce__(self) -> Any:
        return self._call


class BombInState:
    """The same through `__setstate__` arguments: the call is inside the object's state."""

    def __init__(self, bomb: Bomb) -> None:
        self.inner = bomb


class TensorLike:
    """A tensor whose rebuilding gets a bomb among its arguments."""

    def __init__(self, bomb: Bomb) -> None:
        self._bomb = bomb

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (self._bomb, 0, (1,), (1,), False, OrderedDict())


def places_of_bombs(bomb: Bomb) -> dict[str, Any]:
    whole: dict[str, Any] = {"module": OrderedDict(w=torch.ones(2)), "ds_version": "0.19.8"}
    return {
        "client state": {**whole, "note": bomb},
        "module": {**whole, "module": OrderedDict(w=bomb)},
        "key of a dictionary": {**whole, "x": {bomb: 1}},
        "inside a tensor": {**whole, "module": OrderedDict(w=TensorLike(bomb))},
        "inside a namespace": {**whole, "args": argparse.Namespace(a=[bomb])},
        "state of an object": {**whole, "args": BombInState(bomb)},
        "attribute of a scaler": {"optimizer_state_dict": {"loss_scaler": bomb}},
        "alone": bomb,
    }


@pytest.mark.parametrize("function", [os.system, eval, exec])
@pytest.mark.parametrize("place", places_of_bombs(Bomb(Path())))
def test_no_pickle_bomb_runs_wherever_it_lies(tmp_path: Path, place: str, function: Any) -> None:
    mark = tmp_path / "ran"
    torch.save(places_of_bombs(Bomb(mark, function))[place], tmp_path / "a.pt")
    with pytest.raises(RefusedClassError) as caught:
        load_archive(tmp_path / "a.pt")
    assert not mark.exists()
    assert any(name.endswith(function.__name__) for name in caught.value.names)
    assert str(tmp_path / "a.pt") in str(caught.value)
    assert "torch.serialization.add_safe_globals" in str(caught.value)


@pytest.mark.parametrize("protocol", range(6))
def test_no_bomb_runs_in_any_pickle_protocol_or_without_a_zip(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "ran"
    torch.save({"x": Bomb(mark)}, tmp_path / "zip.pt", pickle_protocol=max(protocol, 2))
    torch.save({"x": Bomb(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(mark), protocol=protocol))
    for name in ("zip.pt", "old.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=name):
            load_archive(tmp_path / name)
        assert check_archive(tmp_path / name) is None or name != "zip.pt"
    assert not mark.exists()


def test_a_bomb_that_numpy_would_unpickle_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for value in (np.array([Bomb(mark)], dtype=object), np.array([{"plain": 1}], dtype=object)):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=r"a\.pt|NumPy"):
            load_archive(tmp_path / "a.pt")
    assert not mark.exists()


def test_nothing_runs_even_when_the_environment_asks_torch_for_full_unpickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"x": Bomb(tmp_path / "ran")}, tmp_path / "a.pt")
    with pytest.raises(RefusedClassError, match=r"posix\.system|nt\.system"):
        load_archive(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


class Harmless:
    """Stands for a class of a user's own."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_a_refused_class_is_read_once_the_user_allows_it(tmp_path: Path) -> None:
    torch.save({"mine": Harmless(3), "other": timedelta(1)}, tmp_path / "a.pt")
    with pytest.raises(RefusedClassError, match=r"datetime\.timedelta.*Harmless") as caught:
        load_archive(tmp_path / "a.pt")
    assert len(caught.value.names) == 2
    with torch.serialization.safe_globals([Harmless]), pytest.raises(RefusedClassError, match="timedelta"):
        load_archive(tmp_path / "a.pt")
    with torch.serialization.safe_globals([Harmless, timedelta]):
        assert load_archive(tmp_path / "a.pt")["mine"].value == 3


def test_what_is_allowed_here_is_not_left_allowed() -> None:
    before = set(torch.serialization.get_safe_globals())
    load_archive(SHARD)
    assert set(torch.serialization.get_safe_globals()) == before


def test_plain_data_of_every_usual_kind_comes_back(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3))
    value = {
        "namespace": argparse.Namespace(hidden=12, dtype=torch.bfloat16, values=np.float32(2.5)),
        "arrays": [array, np.array([True, False]), np.array(["ab", "c"]), np.arange(3, dtype=">i4"), np.zeros((0, 2))],
        "scalars": (np.int64(3), np.float32(0.5), np.bool_(True)),
        "sets": {1, 2} | {3},
        "frozen": frozenset({"a"}),
        "counter": Counter("aab"),
        "ordered": OrderedDict(b=1, a=2),
        "numbers": [1, 2**70, -1.5, 3j, None, True, b"bytes", "text"],
        "torch": [
            torch.Size([2, 3]),
            torch.device("cpu"),
            torch.float16,
            nn.Parameter(torch.ones(2)),
            torch.get_rng_state(),
        ],
        np.int64(7): "key",
    }
    torch.save(value, tmp_path / "a.pt")
    found = load_archive(tmp_path / "a.pt")
    assert found["namespace"] == value["namespace"]
    for one, other in zip(found["arrays"], value["arrays"], strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert found["arrays"][0].flags.f_contiguous
    assert found["scalars"] == value["scalars"]
    assert [type(x) for x in found["scalars"]] == [np.int64, np.float32, np.bool_]
    for key in ("sets", "frozen", "counter", "ordered", "numbers"):
        assert found[key] == value[key]
        assert type(found[key]) is type(value[key])
    assert found["torch"][:3] == value["torch"][:3]
    assert torch.equal(found["torch"][4], value["torch"][4])
    assert found[7] == "key"


def test_a_value_that_contains_itself_is_read(tmp_path: Path) -> None:
    value: dict[str, Any] = {"number": np.float64(1)}
    value["self"] = value
    torch.save(value, tmp_path / "a.pt")
    found = load_archive(tmp_path / "a.pt")
    assert found["self"] is found
    assert found["number"] == 1


def test_what_torch_cannot_build_is_settled_without_its_advice_to_unpickle_everything(tmp_path: Path) -> None:
    torch.save({"x": deque([1])}, tmp_path / "a.pt")
    with torch.serialization.safe_globals([deque]), pytest.raises(CheckpointDamagedError, match="lists") as caught:
        load_archive(tmp_path / "a.pt")
    assert "weights_only" not in str(caught.value)


def test_classes_of_the_original_become_plain_records() -> None:
    shard = load_archive(SHARD)["optimizer_state_dict"]
    assert type(shard["loss_scaler"]) is LossScaler
    assert vars(shard["loss_scaler"]) == {"cur_scale": 1.0, "dynamic": False}
    assert shard["zero_stage"] is ZeroStageEnum.optimizer_states
    assert shard["param_slice_mappings"][0]["fc1.weight"] == FragmentAddress(numel=160, start=204)
    assert issubclass(DynamicLossScaler, LossScaler)


def test_changing_a_mapped_tensor_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(8)}, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    load_archive(tmp_path / "a.pt")["w"].zero_()
    assert (tmp_path / "a.pt").read_bytes() == before
    assert load_archive(tmp_path / "a.pt", mmap=False)["w"].sum() == 8


def _old_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"), io.BytesIO())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b"not an archive"), "not a zip"),
        (lambda path: torch.save([1], path, _use_new_zipfile_serialization=False), "not a zip"),
        (_old_tar, "not a zip"),
        (lambda path: path.write_bytes(MODEL.read_bytes()[:-1000]), "cannot be read"),
        (lambda path: path.write_bytes(MODEL.read_bytes()[:700]), "cannot be read"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "not a zip"),
        (lambda path: None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_whole_archive_is_damaged_and_named(tmp_path: Path, make: Any, text: str) -> None:
    path = tmp_path / "a.pt"
    make(path)
    with pytest.raises(CheckpointDamagedError, match=text) as caught:
        load_archive(path)
    assert str(path) in str(caught.value)
    assert check_archive(path) is not None
    assert "a.pt" in str(check_archive(path))


def test_a_zip_of_something_else_is_no_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme", "hello")
    assert "data.pkl" in str(check_archive(tmp_path / "a.pt"))
    with pytest.raises(CheckpointDamagedError, match=r"a\.pt"):
        load_archive(tmp_path / "a.pt")


def test_a_flipped_bit_in_any_member_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    whole = MODEL.read_bytes()
    for name, start, nbytes in member_ranges(MODEL):
        for at in (start, start + nbytes // 2, start + nbytes - 1):
            content = bytearray(whole)
            content[at] ^= 1 << (at % 8)
            path.write_bytes(content)
            assert "damaged" in str(check_archive(path)), name


def test_every_fixture_passes_the_check() -> None:
    paths = sorted(FIXTURES.rglob("*.pt"))
    assert len(paths) > 100
    assert [check_archive(path) for path in paths] == [None] * len(paths)


def test_an_archive_written_without_checksums_is_not_called_damaged(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(8)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert check_archive(tmp_path / "a.pt") is None


class Attribute:
    """Asks `getattr` for something, as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, of: Any, name: str) -> None:
        self._asked = (of, name)

    def __reduce__(self) -> Any:
        return getattr, self._asked


def test_a_member_of_the_enumeration_is_read_however_python_pickled_it(tmp_path: Path) -> None:
    save_archive({"zero_stage": Attribute(ZeroStageEnum, "gradients")}, tmp_path / "a.pt")
    save_archive({"zero_stage": ZeroStageEnum.gradients}, tmp_path / "b.pt")
    assert load_archive(tmp_path / "a.pt") == load_archive(tmp_path / "b.pt") == {"zero_stage": ZeroStageEnum.gradients}


@pytest.mark.parametrize(
    ("of", "name"),
    [(ZeroStageEnum, "__class__"), (LossScaler, "__init__"), ("text", "format"), (ZeroStageEnum.gradients, "name")],
)
def test_no_other_attribute_is_asked_for(tmp_path: Path, of: Any, name: str) -> None:
    save_archive({"x": Attribute(of, name)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"the attribute '{name}' of"):
        load_archive(tmp_path / "a.pt")


def test_enumerations_are_written_alike_on_every_python() -> None:
    assert ZeroStageEnum.gradients.__reduce_ex__(2) == (ZeroStageEnum, (2,))
