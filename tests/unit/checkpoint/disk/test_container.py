from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from deepspeed.checkpoint.disk import container, safetensors_header
from deepspeed.checkpoint.disk.container import Entry, Located, read_header, read_range, write_container
from deepspeed.errors import CheckpointDamagedError, CheckpointError

_DTYPES = list(container._DTYPES.values())


class _Memory:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview) -> None:
        self.data += data


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    sink = _Memory()
    write_container(sink, [Entry(key, tuple(t.shape), t) for key, t in tensors.items()], metadata or {})
    path.write_bytes(sink.data)
    return path


def _bits(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(container.bytes_of(one)) == bytes(container.bytes_of(other))
    )


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_the_safetensors_package_reads_what_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"whole": _bits(12, dtype).view(3, 4), "single": _bits(1, dtype).view(()), "empty": _bits(0, dtype).view(0, 2)}
    loaded = load_file(_write(tmp_path / "f", tensors))
    assert loaded.keys() == tensors.keys()
    assert all(_same(loaded[key], tensors[key]) for key in tensors)


def test_mixed_dtypes_are_each_aligned_to_their_own_element(tmp_path: Path) -> None:
    tensors = {str(dtype): _bits(3, dtype) for dtype in reversed(_DTYPES)}
    path = _write(tmp_path / "f", tensors, {"rank_state": "{}"})
    header = read_header(path)
    assert all(located.start_nbytes % located.dtype.itemsize == 0 for located in header.tensors.values())
    assert all(_same(load_file(path)[key], tensors[key]) for key in tensors)


def test_metadata_comes_back_and_the_package_sees_it(tmp_path: Path) -> None:
    path = _write(tmp_path / "f", {"w": torch.ones(2)}, {"rank_state": '{"a": "\u00e9"}'})
    assert read_header(path).metadata == {"rank_state": '{"a": "\u00e9"}'}
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"rank_state": '{"a": "\u00e9"}'}


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.view(10, 10)[:, 3],
        lambda base: base.view(10, 10).t(),
        lambda base: base[17:23],
        lambda base: base[:1].expand(5),
        lambda base: torch.view_as_complex(base.view(50, 2)).conj()[3:9],
    ],
    ids=["column", "transposed", "slice", "expanded", "conjugated"],
)
def test_a_view_is_written_as_its_own_elements_only(view: object, tmp_path: Path) -> None:
    tensor = view(torch.arange(100.0))  # type: ignore[operator]
    path = _write(tmp_path / "f", {"v": tensor})
    assert torch.equal(load_file(path)["v"], tensor)
    assert path.stat().st_size < 200 + tensor.numel() * tensor.element_size()


def test_a_tensor_larger_than_one_write_is_whole(tmp_path: Path) -> None:
    tensor = _bits(3 * container._COPY_NBYTES // 4 + 5, torch.float32)
    assert _same(load_file(_write(tmp_path / "f", {"w": tensor}))["w"], tensor)


def test_contiguous_host_tensors_are_not_copied() -> None:
    tensor = torch.zeros(8)
    container.bytes_of(tensor)[0:4] = b"\x00\x00\x80\x3f"
    assert tensor[0] == 1.0


@given(numel=st.integers(0, 40), data=st.data())
def test_any_range_is_read_into_place(numel: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    dtype = data.draw(st.sampled_from(_DTYPES))
    tensor = _bits(numel, dtype)
    path = _write(tmp_path_factory.mktemp("range") / "f", {"other": torch.ones(3), "w": tensor})
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    out = torch.empty(stop - start, dtype=dtype)
    read_range(path, read_header(path).tensors["w"], start, out)
    assert _same(out, tensor[start:stop])


@pytest.mark.parametrize("dtype", [torch.complex128, torch.quint8])
def test_a_dtype_that_the_format_lacks_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match="'master/w' has dtype torch"):
        container.dtype_name(dtype, "tensor 'master/w'")


def test_a_dtype_of_a_later_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'F4'"):
        container.dtype_of("F4", "tensor 'w'")


@pytest.mark.parametrize("nbytes", [0, 7, 8, 40, 99])
def test_a_header_that_is_cut_names_the_file(nbytes: int, tmp_path: Path) -> None:
    path = _write(tmp_path / "shard", {"w": torch.ones(20), "v": torch.ones(3)})
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(CheckpointDamagedError, match="shard"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}',
        b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [2]}}',
        b'{"w": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}',
        b'{"w": 3}',
        b"\xff\xfe",
    ],
)
def test_a_header_that_makes_no_sense_names_the_file(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointDamagedError, match="shard"):
        read_header(path)


def test_reading_past_the_end_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(16))
    with pytest.raises(CheckpointDamagedError, match="ends 16 bytes too early"):
        read_range(path, Located(torch.float32, 8, 0), 0, torch.empty(8))


def test_the_header_and_torch_agree_about_every_element_type() -> None:
    assert {name: dtype.itemsize for name, dtype in container._DTYPES.items()} == safetensors_header.ITEM_NBYTES
