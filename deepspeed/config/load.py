"""From what a user hands over to a plain dict: a dict, the path of a JSON or HJSON file, or base64 of such a text.

Lives here: finding and decoding the text, and refusing keys that stand twice in one block, with their lines. Does not live
here: what the keys mean. Called by `config.root`, by the command in `config.check`, and as `deepspeed.load_ds_config`.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.config.scan import repeated_keys
from deepspeed.errors import ConfigError

__all__ = ["Source", "load_config", "strip_auto"]

Source = Mapping[str, Any] | str | os.PathLike[str]


def load_config(source: Source) -> dict[str, Any]:
    """Read a configuration.

    Args:
        source: a dict (copied, never changed); the path of a file in JSON or HJSON (comments, keys without quotes, trailing
            commas); or the url-safe base64 of such a text in UTF-8.

    Returns:
        The blocks as nested dicts and lists that belong to the caller; other values are the user's own objects.

    Raises:
        ConfigError: neither a file nor base64, no JSON inside, or keys that stand twice in one block.
    """
    if isinstance(source, Mapping):
        return {str(key): _copy(value) for key, value in source.items()}
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"the configuration is a {type(source).__name__}; "
            "needed a dict, the path of a JSON file, or base64 of JSON text. Pass one of these as config=."
        )
    path = Path(source)
    if _is_file(path):
        return _parse(path.read_text(encoding="utf-8"), str(path))
    return _parse(_decode(source), "base64")


def strip_auto(block: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration without the keys that are "auto", at any depth: what is known before a client fills them."""
    return {
        key: strip_auto(value) if isinstance(value, Mapping) else value
        for key, value in block.items()
        if not (isinstance(value, str) and value == "auto")
    }


def _copy(value: Any) -> Any:
    """Copy containers and share everything else: process groups and dtypes may stand in a dict."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # base64 text may be too long for a file name
        return False


def _decode(source: str | os.PathLike[str]) -> str:
    text = os.fspath(source)
    try:
        if isinstance(source, str):
            standard = text.strip().replace("-", "+").replace("_", "/")
            return base64.b64decode(standard, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        pass  # not base64: the error below says what it should have been
    shown = text if len(text) <= 80 else text[:77] + "..."
    raise ConfigError(f"{shown!r} is no existing file and no base64 text: needed one of these, or a dict. {_hint(text)}")


def _hint(text: str) -> str:
    """Say what to do about a path that does not lead to a file."""
    if text.lstrip().startswith("{"):
        return "It looks like JSON itself: pass json.loads(text)."
    path = Path(text)
    if _is_directory(path):
        return "It is a directory: name a file in it."
    if _is_directory(path.parent):
        close = difflib.get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), n=1)
        here = path.parent.resolve()
        return f"Did you mean {str(path.parent / close[0])!r}?" if close else f"There is nothing like it in {str(here)!r}."
    return f"The directory {str(path.parent)!r} does not exist either."


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError:
        loaded = _parse_hjson(text, name)
    if not isinstance(loaded, _Pairs):
        raise ConfigError(
            f"{name} holds a {type(loaded).__name__}; needed a block of keys. Write {{ ... }} around the keys."
        )
    if _has_repeats(loaded):
        _refuse_repeats(text, name)
    plain: dict[str, Any] = _plain(loaded)
    return plain


def _parse_hjson(text: str, name: str) -> object:
    hjson = importlib.import_module("hjson")  # slow to import, and only needed where plain JSON does not do
    if not text.strip():
        return _Pairs([])
    try:
        loaded: object = hjson.loads(text, object_pairs_hook=_Pairs)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(
            f"{name}, line {error.lineno}, column {error.colno}: {error.msg}; needed JSON or HJSON. "
            "Look for a bracket, quote or colon that is missing on this line or the one before."
        ) from error
    return loaded


class _Pairs(list[tuple[str, Any]]):
    """A block before it becomes a dict: repeated keys are still there."""


def _has_repeats(value: object) -> bool:
    if isinstance(value, _Pairs):
        return len({key for key, _ in value}) < len(value) or any(_has_repeats(item) for _, item in value)
    return isinstance(value, list) and any(_has_repeats(item) for item in value)


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _plain(item) for key, item in value}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _refuse_repeats(text: str, name: str) -> None:
    found = [
        f"  {'.'.join(repeat.path)}: lines {', '.join(map(str, repeat.lines[:-1]))} and {repeat.lines[-1]}"
        for repeat in repeated_keys(text)
    ]
    raise ConfigError("\n".join([f"Duplicate keys in {name}; each key may stand once in its block. Keep one of:", *found]))
