"""State as JSON and tensors, without pickle: what goes in comes out equal, and what cannot is refused with its place.

| Python value                                        | JSON                                | comes back as             |
|-----------------------------------------------------|-------------------------------------|---------------------------|
| None, bool, int below 64 bits, finite float, str    | itself                              | the same                  |
| list; dict with str keys that do not start with `$` | itself                              | the same                  |
| other dicts                                         | `{"$dict": [[key, value], ...]}`    | dict                      |
| larger int; inf, nan; complex                       | `$int` (hex), `$float`, `$complex`  | the same                  |
| tuple, set, frozenset, torch.Size                   | `$tuple`, `$set`, `$frozenset`, `$size` | the same              |
| bytes, bytearray                                    | `$bytes`, `$bytearray` (base64)     | the same                  |
| torch tensor or Parameter                           | `{"$tensor": number}`               | tensor on the CPU         |
| torch.dtype, torch.device                           | `$dtype`, `$device`                 | the same                  |
| NumPy array, NumPy scalar                           | `$ndarray` (number), `$numpy`       | the same                  |
| complex128 (complex32) tensor, complex128 array     | `$complex_tensor`, `$complex_ndarray` | the same             |
| pathlib path                                        | `$path`                             | Path                      |
| argparse.Namespace, types.SimpleNamespace           | `$namespace`, `$simplenamespace`    | the same                  |
| dataclass instance                                  | `{"$dataclass": [name, fields]}`    | dict of its fields        |

Subclasses of the plain types (OrderedDict, named tuples, enums that are also str or int) come back as the plain value, which
compares equal. A dataclass comes back as a dict because loading imports no class that a file names. Random generator states
(`random.getstate()`, `numpy.random.get_state()`, `torch.get_rng_state()`) are made of these and need nothing special.

Lives here: the encoding in both directions. Does not live here: files (`save.writer`, `reader`).
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import enum
import math
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from deepspeed.checkpoint.disk import strict_json
from deepspeed.checkpoint.disk.container import dtype_name
from deepspeed.errors import CheckpointError

__all__ = ["UnstorableStateError", "decode_client_state", "encode_client_state"]

_MAX_DEPTH = 100

_SPLIT_DTYPES = (torch.complex128, torch.complex32)
"""Stored as real and imaginary parts along one more dimension, as safetensors files know complex64 only."""


class UnstorableStateError(CheckpointError, TypeError):
    """A value in the state has no plain form; the text says where it is and how to convert it."""


def encode_client_state(state: object, name: str = "client_state") -> tuple[JsonValue, list[Tensor]]:
    """Plain JSON for `state`, and the tensors in it, which the JSON names by their number in the list.

    Args:
        state: any nesting of the types in this module's table.
        name: what error texts call it.

    Raises:
        UnstorableStateError: something else is in it; the text gives its place, e.g. `client_state['a'][3].b`.
    """
    encoder = _Encoder()
    return encoder.encode(state, name, 0), encoder.tensors


def decode_client_state(encoded: JsonValue, tensor: Callable[[int], Tensor]) -> Any:
    """Inverse of `encode_client_state`.

    Args:
        encoded: the JSON.
        tensor: gives the tensor of a number.

    Raises:
        CheckpointError: the JSON holds a tag that this version does not know.
    """
    return _Decoder(tensor).decode(encoded)


class _Encoder:
    """One walk over a structure; `tensors` fills on the way, `_open` holds the containers the walk is inside of."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._open: set[int] = set()

    def encode(self, value: Any, path: str, depth: int) -> JsonValue:
        if value is None or type(value) in (bool, str):
            return value  # type: ignore[no-any-return]  # checked by type() just now
        if type(value) is int:
            return value if value.bit_length() < 64 else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if id(value) in self._open or depth > _MAX_DEPTH:
            raise UnstorableStateError(
                f"{path} contains itself, or is nested more than {_MAX_DEPTH} levels deep. Store a tree of values."
            )
        self._open.add(id(value))
        try:
            return self._encode_object(value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _encode_object(self, value: Any, path: str, depth: int) -> JsonValue:
        for kinds, method in _ENCODERS:
            if isinstance(value, kinds):
                return method(self, value, path, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return {"$dataclass": [_type_name(value), self._mapping(fields, path, ".{}", depth)]}
        raise _refusal(value, path)

    def _items(self, values: Iterable[Any], path: str, depth: int) -> list[JsonValue]:
        return [self.encode(item, f"{path}[{index}]", depth) for index, item in enumerate(values)]

    def _list(self, value: Any, path: str, depth: int) -> JsonValue:
        return self._items(value, path, depth)

    def _tuple(self, value: Any, path: str, depth: int) -> JsonValue:
        return {"$tuple": self._items(value, path, depth)}

    def _set(self, value: Any, path: str, depth: int) -> JsonValue:
        members = [self.encode(item, f"{path}{{{item!r}}}", depth) for item in value]
        tag = "$frozenset" if isinstance(value, frozenset) else "$set"
        return {tag: sorted(members, key=strict_json.dumps)}  # sets have no order; files of equal states should be equal

    def _dict(self, value: Any, path: str, depth: int) -> JsonValue:
        return self._mapping(value, path, "[{!r}]", depth)

    def _mapping(self, value: Mapping[Any, Any], path: str, step: str, depth: int) -> JsonValue:
        """Encode a mapping; `step` formats how a key continues the path."""
        items = {key: self.encode(item, path + step.format(key), depth) for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[self.encode(key, f"the key {key!r} of {path}", depth), item] for key, item in items.items()]}

    def _enum(self, value: Any, path: str, depth: int) -> JsonValue:
        is_plain: bool = isinstance(value, (str, int, float))
        if is_plain:
            return self.encode(value.value, path, depth)
        raise _refusal(value, path, f"Store {path}.value or {path}.name.")

    def _tensor(self, value: Any, path: str, depth: int) -> JsonValue:
        is_plain = type(value) in (Tensor, torch.nn.Parameter)
        if not is_plain or value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
            raise _refusal(
                value, path, "Store a dense tensor with data, for example .to_dense(), .full_tensor() or .dequantize()."
            )
        is_split = value.dtype in _SPLIT_DTYPES
        stored = torch.view_as_real(value.detach().resolve_conj()) if is_split else value.detach()
        dtype_name(stored.dtype, path)
        self.tensors.append(stored)
        return {"$complex_tensor" if is_split else "$tensor": len(self.tensors) - 1}

    def _ndarray(self, value: Any, path: str, depth: int) -> JsonValue:
        if type(value) is not np.ndarray or value.dtype.kind not in "biufc":
            raise _refusal(value, path, f"Its dtype is {value.dtype}; store .tolist() or an array of numbers.")
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        try:
            tensor = torch.from_numpy(native)
        except TypeError as error:
            raise _refusal(value, path, f"Its dtype is {value.dtype}; store another, for example .astype(float).") from error
        encoded = self._tensor(tensor, path, depth)
        assert isinstance(encoded, dict)  # _tensor gives {"$tensor": number} or {"$complex_tensor": number}
        return {tag.replace("tensor", "ndarray"): number for tag, number in encoded.items()}

    def _numpy_scalar(self, value: Any, path: str, depth: int) -> JsonValue:
        plain = value.item()
        if value.dtype.kind not in "biufc" or type(plain) not in (bool, int, float, complex):
            raise _refusal(value, path, f"Its dtype is {value.dtype}; store float({path}) or str({path}).")
        return {"$numpy": [value.dtype.name, self.encode(plain, path, depth)]}

    def _namespace(self, value: Any, path: str, depth: int) -> JsonValue:
        tag = "$namespace" if isinstance(value, argparse.Namespace) else "$simplenamespace"
        return {tag: self._mapping(vars(value), path, ".{}", depth)}


def _plain(tag: str, pack: Callable[[Any], JsonValue]) -> Callable[[_Encoder, Any, str, int], JsonValue]:
    return lambda encoder, value, path, depth: {tag: pack(value)}


def _as(plain: Callable[[Any], Any]) -> Callable[[_Encoder, Any, str, int], JsonValue]:
    """Encode a subclass of a plain type as the plain value, which `plain` gives whatever the subclass overrides."""
    return lambda encoder, value, path, depth: encoder.encode(plain(value), path, depth)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


_ENCODERS: list[tuple[Any, Callable[[_Encoder, Any, str, int], JsonValue]]] = [
    # The first match counts, so a subclass stands before its base: enums and NumPy scalars may be str, int or float too
    # (numpy.str_ and numpy.bytes_ are their plain types; the other NumPy scalars keep their dtype).
    (enum.Enum, _Encoder._enum),
    (str, _as(str.__str__)),
    (bytes, _plain("$bytes", _base64)),
    (np.generic, _Encoder._numpy_scalar),
    (int, _as(int.__int__)),
    (float, _as(float.__float__)),
    (complex, lambda encoder, value, path, depth: {"$complex": encoder._items((value.real, value.imag), path, depth)}),
    (dict, _Encoder._dict),
    (list, _Encoder._list),
    (torch.Size, _plain("$size", lambda value: [int(numel) for numel in value])),
    (tuple, _Encoder._tuple),
    ((set, frozenset), _Encoder._set),
    (Tensor, _Encoder._tensor),
    (np.ndarray, _Encoder._ndarray),
    (bytearray, _plain("$bytearray", _base64)),
    (torch.dtype, _plain("$dtype", lambda value: str(value).removeprefix("torch."))),
    (torch.device, _plain("$device", str)),
    (PurePath, _plain("$path", str)),
    ((argparse.Namespace, types.SimpleNamespace), _Encoder._namespace),
]


class _Decoder:
    def __init__(self, tensor: Callable[[int], Tensor]) -> None:
        self._tensor = tensor

    def decode(self, encoded: JsonValue) -> Any:
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        tag = next((key for key in encoded if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item) for key, item in encoded.items()}
        if len(encoded) > 1 or tag not in _DECODERS:
            raise CheckpointError(
                f"the stored state holds {sorted(encoded)}, which this version cannot read; "
                f"it knows {', '.join(_DECODERS)}. Load it with the version that wrote it."
            )
        try:
            return _DECODERS[tag](self, encoded[tag])
        except CheckpointError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"the stored state holds {tag} with unusable content ({error}): it was not written by this library."
            ) from error

    def tensor(self, number: int) -> Tensor:
        return self._tensor(number)


def _decode_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _decode_numpy(decoder: _Decoder, content: Any) -> Any:
    name, plain = content
    return np.dtype(name).type(decoder.decode(plain))


_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$int": lambda decoder, content: int(content, 16),
    "$float": lambda decoder, content: float(content),
    "$complex": lambda decoder, content: complex(*decoder.decode(content)),
    "$tuple": lambda decoder, content: tuple(decoder.decode(content)),
    "$set": lambda decoder, content: set(decoder.decode(content)),
    "$frozenset": lambda decoder, content: frozenset(decoder.decode(content)),
    "$size": lambda decoder, content: torch.Size(content),
    "$dict": lambda decoder, content: {decoder.decode(key): decoder.decode(item) for key, item in content},
    "$bytes": lambda decoder, content: base64.b64decode(content, validate=True),
    "$bytearray": lambda decoder, content: bytearray(base64.b64decode(content, validate=True)),
    "$tensor": lambda decoder, content: decoder.tensor(content),
    "$ndarray": lambda decoder, content: decoder.tensor(content).numpy(),
    "$complex_tensor": lambda decoder, content: torch.view_as_complex(decoder.tensor(content)),
    "$complex_ndarray": lambda decoder, content: torch.view_as_complex(decoder.tensor(content)).numpy(),
    "$numpy": _decode_numpy,
    "$dtype": lambda decoder, content: _decode_dtype(content),
    "$device": lambda decoder, content: torch.device(content),
    "$path": lambda decoder, content: Path(content),
    "$namespace": lambda decoder, content: argparse.Namespace(**decoder.decode(content)),
    "$simplenamespace": lambda decoder, content: types.SimpleNamespace(**decoder.decode(content)),
    "$dataclass": lambda decoder, content: decoder.decode(content[1]),
}


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _refusal(value: object, path: str, cure: str = "") -> UnstorableStateError:
    if not cure and hasattr(value, "state_dict") and not isinstance(value, type):
        cure = f"Store {path}.state_dict()."
    elif not cure and isinstance(value, torch.Generator):
        cure = f"Store {path}.get_state()."
    cure = cure or "Store plain values instead: numbers, strings, lists, dicts, tensors."
    return UnstorableStateError(
        f"{path} is a {_type_name(value)}, which a checkpoint cannot hold: it contains no pickle, so that loading never "
        f"runs code. {cure}"
    )
