from __future__ import annotations

import gc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspeed.checkpoint.disk import torch_records
from deepspeed.checkpoint.disk.container import _DTYPES, bytes_of, dtype_name
from deepspeed.checkpoint.disk.safetensors_header import Field
from deepspeed.checkpoint.export.weights_file import weights_file


def _bits(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (3, 5, 2 * dtype.itemsize), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype)


TENSORS = {
    **{name: _bits(dtype) for name, dtype in _DTYPES.items()},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "a name that is not ascii \u00e9": torch.ones(1),
}


class _File:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: memoryview) -> None:
        self._file.write(data)

    def close(self) -> None:
        self._file.close()


def _write(path: Path, tensors: dict[str, Tensor], *, order: Any = list, **more: Any) -> None:
    sink = _File(path)
    fields = [Field(name, dtype_name(t.dtype, name), tuple(t.shape)) for name, t in tensors.items()]
    with weights_file(path.name, sink, fields, **more) as file:
        for name in order(file.order):
            data = bytes_of(tensors[name])
            file.put(name, (data[start : start + 7] for start in range(0, len(data), 7)))
    sink.close()


def _assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape, got[name].stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert bytes(bytes_of(got[name])) == bytes(bytes_of(tensor)), name


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("order", [list, reversed])
def test_torch_reads_every_type_without_running_code(tmp_path: Path, mmap: bool, order: Any) -> None:
    _write(tmp_path / "m.bin", TENSORS, order=order)
    got = torch.load(tmp_path / "m.bin", weights_only=True, mmap=mmap)
    assert type(got) is dict
    _assert_equal(got, TENSORS)


def test_safetensors_reads_every_type(tmp_path: Path) -> None:
    _write(tmp_path / "m.safetensors", TENSORS)
    got = load_file(tmp_path / "m.safetensors")
    _assert_equal({name: got[name] for name in TENSORS}, TENSORS)


def test_an_alias_shares_its_storage(tmp_path: Path) -> None:
    _write(tmp_path / "m.bin", {"emb": torch.rand(4, 3), "w": torch.rand(2)}, aliases={"head": "emb"})
    got = torch.load(tmp_path / "m.bin", weights_only=True)
    assert list(got) == ["emb", "w", "head"]
    assert got["head"].data_ptr() == got["emb"].data_ptr()
    assert torch.equal(got["head"], got["emb"])


def test_the_metadata_of_a_state_dict_comes_back(tmp_path: Path) -> None:
    state_dict = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    _write(tmp_path / "m.bin", dict(state_dict), metadata=state_dict._metadata)
    got = torch.load(tmp_path / "m.bin", weights_only=True)
    assert type(got) is type(state_dict)
    assert got._metadata == state_dict._metadata


def test_records_are_aligned_and_their_checksums_are_right(tmp_path: Path) -> None:
    _write(tmp_path / "m.bin", {name: tensor for name, tensor in TENSORS.items() if tensor.numel()})
    with zipfile.ZipFile(tmp_path / "m.bin") as archive:
        assert archive.testzip() is None
    reader = torch._C.PyTorchFileReader(str(tmp_path / "m.bin"))
    offsets = [reader.get_record_offset(name) for name in reader.get_all_records()]
    assert len(offsets) > len(TENSORS)
    assert not any(offset % 64 for offset in offsets)


def test_large_records_are_aligned_and_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As records above 1 GiB are written, but without their size."""
    monkeypatch.setattr(torch_records, "_ZIP64_FROM_NBYTES", 100)
    tensors = {"a": torch.rand(3), "b": torch.rand(100), "c": torch.rand(50)}
    _write(tmp_path / "m.bin", tensors)
    _assert_equal(torch.load(tmp_path / "m.bin", weights_only=True, mmap=True), tensors)
    reader = torch._C.PyTorchFileReader(str(tmp_path / "m.bin"))
    assert not any(reader.get_record_offset(name) % 64 for name in reader.get_all_records())


def test_an_empty_state_dict_is_a_file_too(tmp_path: Path) -> None:
    for name in ("m.bin", "m.safetensors"):
        _write(tmp_path / name, {})
    assert torch.load(tmp_path / "m.bin", weights_only=True) == {}
    assert load_file(tmp_path / "m.safetensors") == {}


@pytest.mark.parametrize("name", ["m.bin", "m.safetensors"])
def test_a_file_that_failed_writes_nothing_more(tmp_path: Path, name: str) -> None:
    """Its sink may be closed by then, and the number of the file in use for another."""
    sink = _File(tmp_path / name)
    with pytest.raises(OSError, match="gone"), weights_file(name, sink, [Field("w", "F32", (2,))]) as file:
        file.put("w", _fails())
    sink.close()
    del file
    gc.collect()  # pytest fails on exceptions that a destructor raises


def _fails() -> Iterator[memoryview]:
    yield memoryview(b"1234")
    raise OSError("gone")
