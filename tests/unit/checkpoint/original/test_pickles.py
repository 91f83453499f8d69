"""Archives that this library writes: what torch, its restricted reader and the original's names make of them."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint.disk import torch_records
from deepspeed.checkpoint.original import pickles
from deepspeed.checkpoint.original.archive import check_archive, load_archive
from deepspeed.checkpoint.original.pickles import StreamedTensor, save_archive
from deepspeed.checkpoint.original.stand_ins import DynamicLossScaler, FragmentAddress, LossScaler, ZeroStageEnum
from deepspeed.errors import CheckpointError


def _counting(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> StreamedTensor:
    def fill(start: int, out: Tensor) -> None:
        out.copy_(torch.arange(start, start + out.numel()))

    return StreamedTensor(shape, dtype, fill)


def _globals_in(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        text = archive.read(f"{path.stem}/data.pkl")
    return {str(name).replace(" ", ".") for opcode, name, _ in pickletools.genops(text) if opcode.name == "GLOBAL"}


def _offset(path: Path, number: int) -> int:
    """Where torch's own reader finds the elements of a record."""
    reader: Any = torch._C.PyTorchFileReader(str(path))
    return int(reader.get_record_offset(f"data/{number}"))


@pytest.mark.parametrize("dtype", list(pickles._STORAGES))
def test_torch_reads_tensors_of_every_dtype_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 2], [1, 0, 3]]).to(dtype)
    save_archive({"t": tensor, "view": tensor[:, 1:].t(), "none": tensor[:0], "one": tensor[0, 1]}, tmp_path / "a.pt")
    read = torch.load(tmp_path / "a.pt", weights_only=True)
    assert read["t"].dtype == dtype
    for key, expected in {"t": tensor, "view": tensor[:, 1:].t(), "none": tensor[:0], "one": tensor[0, 1]}.items():
        torch.testing.assert_close(read[key], expected, rtol=0, atol=0)


def test_a_streamed_tensor_is_asked_for_block_by_block_and_comes_back_whole(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    numel = pickles._BLOCK_NUMEL * 2 + 5

    def fill(start: int, out: Tensor) -> None:
        asked.append((start, out.numel()))
        out.copy_(torch.arange(start, start + out.numel()))

    save_archive([StreamedTensor((numel,), torch.int32, fill)], tmp_path / "a.pt")
    assert asked == [(0, pickles._BLOCK_NUMEL), (pickles._BLOCK_NUMEL, pickles._BLOCK_NUMEL), (2 * pickles._BLOCK_NUMEL, 5)]
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)[0], torch.arange(numel, dtype=torch.int32))


def test_one_tensor_at_two_places_is_stored_once_and_read_as_one(tmp_path: Path) -> None:
    tied = _counting((3, 2))
    save_archive({"emb": tied, "head": tied}, tmp_path / "a.pt")
    read = torch.load(tmp_path / "a.pt", weights_only=True)
    assert read["emb"].data_ptr() == read["head"].data_ptr()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert [name for name in archive.namelist() if "/data/" in name] == ["a/data/0"]


def test_stand_ins_go_by_the_names_of_the_original_and_come_back_with_their_values(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_archive(
        {
            "static": LossScaler(cur_scale=1.0, dynamic=False),
            "moving": DynamicLossScaler(cur_scale=4.0, dtype=torch.float16),
            "stage": ZeroStageEnum(2),
            "where": [FragmentAddress(numel=204, start=3), FragmentAddress(numel=1, start=207)],
        },
        path,
    )
    assert _globals_in(path) == {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "torch.float16",
    }
    read = load_archive(path)
    assert vars(read["static"]) == {"cur_scale": 1.0, "dynamic": False}
    assert type(read["moving"]) is DynamicLossScaler
    assert vars(read["moving"]) == {"cur_scale": 4.0, "dtype": torch.float16}
    assert read["stage"] is ZeroStageEnum.gradients
    assert read["where"] == [FragmentAddress(204, 3), FragmentAddress(1, 207)]


def test_the_pickle_is_like_that_of_torch_but_for_the_names(tmp_path: Path) -> None:
    obj = {"a": 1, "size": torch.Size([2, 3]), "t": torch.ones(2), "deep": [(None, True, 2.5, "text"), {"set": {1}}]}
    save_archive(obj, tmp_path / "ours.pt")
    torch.save(obj, tmp_path / "torch.pt")
    assert _globals_in(tmp_path / "ours.pt") == _globals_in(tmp_path / "torch.pt")


def test_elements_begin_at_multiples_of_64_bytes_so_the_file_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "some_n\u00e4me.pt"
    save_archive([_counting((n,)) for n in (1, 5, 33, 0, 7)], path)
    assert [_offset(path, number) % 64 for number in range(5)] == [0] * 5
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert [tensor.tolist() for tensor in mapped] == [list(range(n)) for n in (1, 5, 33, 0, 7)]


def test_a_record_beyond_4_gib_is_found_where_its_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_records, "_ZIP64_FROM_NBYTES", 16)  # from here on the long form of the headers is used
    save_archive([_counting((3,)), _counting((50,)), _counting((40,))], tmp_path / "a.pt")
    assert [_offset(tmp_path / "a.pt", number) % 64 for number in range(3)] == [0] * 3
    assert [tensor.numel() for tensor in torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)] == [3, 50, 40]


def test_checksums_are_written_so_that_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_archive({"t": _counting((100,))}, path)
    assert check_archive(path) is None
    offset = _offset(path, 0)
    content = bytearray(path.read_bytes())
    content[offset + 10] ^= 4
    path.write_bytes(content)
    assert "a.pt" in str(check_archive(path))


def test_what_the_original_could_not_resolve_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"deepspeed.errors.CheckpointError is something of this library"):
        save_archive({"client": CheckpointError}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"torch.float8_e4m3fn cannot be written"):
        save_archive([torch.zeros(2).to(torch.float8_e4m3fn)], tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []
