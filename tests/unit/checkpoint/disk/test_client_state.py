from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import random
import types
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deepspeed.checkpoint.disk import client_state, strict_json
from deepspeed.checkpoint.disk.client_state import UnstorableStateError, decode_client_state, encode_client_state
from deepspeed.checkpoint.disk.container import dtype_name
from deepspeed.errors import CheckpointError

_PAGE = (Path(__file__).parents[4] / "docs/reference/checkpoint-format.md").read_text()
_NUMPY_DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
_NUMPY_DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
_TORCH_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def _through_the_disk(value: object) -> Any:
    encoded, tensors = encode_client_state(value)
    return decode_client_state(strict_json.loads(strict_json.dumps(encoded)), lambda number: tensors[number].clone())


def _same(one: Any, other: Any) -> bool:
    """Equal in type and value, NaN equal to itself, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_raw(one), _raw(other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (float, complex, np.inexact)):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one.items(), other.items(), strict=True))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (argparse.Namespace, types.SimpleNamespace)):
        return _same(vars(one), vars(other))
    return bool(one == other)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


_keys = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
_keys |= st.tuples(st.integers(), st.text(max_size=2)) | st.frozensets(st.integers(), max_size=2)
_leaves = (
    _keys
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=5).map(bytearray)
    | st.sets(st.integers() | st.text(max_size=3), max_size=3)
    | st.sampled_from(_TORCH_DTYPES)
    | st.sampled_from(["cpu", "cuda:1", "meta"]).map(torch.device)
    | st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
    | st.text("abc./", min_size=1).map(Path)
    | st.sampled_from(_NUMPY_DTYPES).flatmap(lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, min_side=0)))
    | st.sampled_from(_NUMPY_DTYPES).flatmap(lambda name: hnp.arrays(name, (1,)).map(lambda array: array[0]))
    | st.tuples(st.sampled_from(_TORCH_DTYPES), st.lists(st.integers(0, 3), max_size=3)).map(
        lambda made: torch.ones(made[1]).to(made[0])
    )
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    attributes = st.dictionaries(st.text("ab$", min_size=1), inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=3)
        | attributes.map(lambda fields: argparse.Namespace(**fields))
        | attributes.map(lambda fields: types.SimpleNamespace(**fields))
    )


@given(st.recursive(_leaves, _nested, max_leaves=8))
def test_whatever_is_accepted_comes_back_equal(value: Any) -> None:
    assert _same(_through_the_disk(value), value)


@given(st.dictionaries(st.text("$a", min_size=1, max_size=8), st.integers(), max_size=3))
def test_keys_that_look_like_tags_are_only_keys(value: dict[str, int]) -> None:
    assert _through_the_disk(value) == value


@given(st.floats(width=32), st.floats())
def test_floats_keep_every_bit_of_their_value(single: float, double: float) -> None:
    back = _through_the_disk([np.float32(single), double])
    assert repr(back) == repr([np.float32(single), double])


def test_states_of_random_generators_come_back_ready_for_use() -> None:
    generator = np.random.default_rng(7)
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    drawn = random.random(), np.random.rand(), generator.random(), torch.rand(1).item()
    back = _through_the_disk(states)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    generator.bit_generator.state = back["generator"]
    torch.set_rng_state(back["torch"])
    assert (random.random(), np.random.rand(), generator.random(), torch.rand(1).item()) == drawn


@dataclasses.dataclass
class _Settings:
    rate: float
    names: list[str]


class _Level(enum.Enum):
    LOW = 1


class _Colour(str, enum.Enum):
    RED = "red"


class _Number(enum.IntEnum):
    TWO = 2


class _Loud(str):
    def __str__(self) -> str:
        return self.upper()


_Point = namedtuple("_Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (_Settings(0.1, ["a"]), {"rate": 0.1, "names": ["a"]}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (_Point(1, 2), (1, 2)),
        (_Colour.RED, "red"),
        (_Number.TWO, 2),
        (_Loud("quiet"), "quiet"),
        (np.str_("text"), "text"),
        (np.bytes_(b"raw"), b"raw"),
        ({_Colour.RED: 1}, {"red": 1}),
        (PurePosixPath("a/b"), Path("a/b")),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="i4")),
        (np.arange(6)[::-2], np.array([5, 3, 1])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_richer_classes_come_back_as_plain_values(value: Any, plain: Any) -> None:
    assert _same(_through_the_disk(value), plain)


def test_parameters_and_tensors_with_history_come_back_as_values() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    back = _through_the_disk([weight, weight * 2])
    assert [tensor.tolist() for tensor in back] == [[1.0, 2.0], [2.0, 4.0]]
    assert not any(tensor.requires_grad for tensor in back)


def test_only_tensors_leave_the_json() -> None:
    encoded, tensors = encode_client_state({"best": torch.tensor(0.5), "step": 3})
    assert encoded == {"best": {"$tensor": 0}, "step": 3}
    assert tensors == [torch.tensor(0.5)]


class _Model:
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("state", "place", "cure"),
    [
        ({"a": [0, {"hook": print}]}, "client_state['a'][1]['hook'] is a builtins.builtin_function", "Store plain values"),
        ({"model": _Model()}, "client_state['model'] is a", "client_state['model'].state_dict()"),
        ({"level": _Level.LOW}, "client_state['level'] is a", "client_state['level'].value"),
        ({"generator": torch.Generator()}, "client_state['generator'] is a torch", "get_state()"),
        ({"words": np.array(["a", "b"])}, "client_state['words'] is a numpy.ndarray", ".tolist()"),
        ({"objects": np.array([None])}, "client_state['objects'] is a numpy.ndarray", ".tolist()"),
        ({"when": np.datetime64("2026-01-01", "ns")}, "client_state['when'] is a numpy.datetime64", "str("),
        ({"long": np.longdouble(1)}, "client_state['long'] is a numpy.longdouble", "float("),
        ({"longs": np.ones(2, np.longdouble)}, "client_state['longs'] is a numpy.ndarray", ".astype(float)"),
        ({"sparse": torch.eye(2).to_sparse()}, "client_state['sparse'] is a torch.Tensor", ".to_dense()"),
        ({"meta": torch.empty(2, device="meta")}, "client_state['meta'] is a torch.Tensor", "with data"),
        ({(1, _Model): 2}, "the key (1, ", "Store plain values"),
        (argparse.Namespace(model=_Model), "client_state.model is a builtins.type", "Store plain values"),
        (_Settings(0.1, [_Model()]), "client_state.names[0] is a", "state_dict()"),  # type: ignore[list-item]
    ],
    ids=lambda value: None if isinstance(value, str) else "state",
)
def test_anything_else_is_refused_with_its_place_and_a_cure(state: object, place: str, cure: str) -> None:
    with pytest.raises(UnstorableStateError) as caught:
        encode_client_state(state)
    assert str(caught.value).startswith(place)
    assert cure in str(caught.value)
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, TypeError)


def test_a_dtype_without_a_place_in_the_file_is_refused_by_path() -> None:
    with pytest.raises(CheckpointError, match=r"client_state\['x'\] has dtype torch.float8_e8m0fnu.*\.view\(torch.uint8\)"):
        encode_client_state({"x": torch.ones(2).to(torch.float8_e8m0fnu)})


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32], ids=str)
def test_complex_numbers_that_files_do_not_know_are_stored_as_their_parts(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.view_as_complex(torch.randn(*shape, 2, dtype=torch.float64)).to(dtype)
    encoded, tensors = encode_client_state([values, values.conj()])
    back, conjugate = decode_client_state(encoded, lambda number: tensors[number])
    assert all(dtype_name(tensor.dtype, "it") in ("F64", "F16") for tensor in tensors)
    assert back.dtype == conjugate.dtype == dtype
    assert back.shape == shape
    assert torch.equal(torch.view_as_real(back), torch.view_as_real(values))
    assert torch.equal(torch.view_as_real(conjugate), torch.view_as_real(values.conj().resolve_conj()))


def test_a_structure_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {"inner": []}
    loop["inner"].append(loop)
    with pytest.raises(UnstorableStateError, match=r"client_state\['inner'\]\[0\] contains itself"):
        encode_client_state(loop)


def test_a_structure_too_deep_for_json_parsers_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(UnstorableStateError, match="more than 100 levels"):
        encode_client_state(deep)


def test_the_same_object_in_two_places_is_no_loop() -> None:
    shared = [1, 2]
    assert _through_the_disk({"a": shared, "b": shared}) == {"a": [1, 2], "b": [1, 2]}


def test_equal_sets_give_equal_files() -> None:
    names = [f"name{number}" for number in range(50)]
    backwards = names[::-1]
    assert encode_client_state(set(names)) == encode_client_state(set(backwards))


@pytest.mark.parametrize(
    "encoded",
    [
        {"$object": "os.system"},
        {"$tuple": [], "more": 1},
        {"$dtype": "load"},
        {"$dtype": "no_such"},
        {"$int": "zz"},
        {"$numpy": ["float32"]},
        {"$bytes": "not base64!"},
        {"$dict": [[{}, 1]]},
        {"$set": [[1]]},
        {"$complex": 1},
        {"$tensor": 5},
    ],
    ids=str,
)
def test_json_that_this_library_did_not_write_is_refused(encoded: Any) -> None:
    with pytest.raises(CheckpointError, match="the stored state holds"):
        decode_client_state(encoded, [].__getitem__)


def test_the_reference_page_tells_every_tag() -> None:
    assert all(f"`{tag}" in _PAGE or f'{{"{tag}": ' in _PAGE for tag in client_state._DECODERS)


def test_infinite_and_missing_numbers_are_strict_json_on_the_way() -> None:
    encoded, _ = encode_client_state([math.inf, -math.inf, math.nan, -0.0])
    assert encoded == [{"$float": "inf"}, {"$float": "-inf"}, {"$float": "nan"}, -0.0]
