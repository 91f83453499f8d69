"""Lines of keys in a text."""

from __future__ import annotations

import json
from typing import Any

import hjson
from hypothesis import given, reject
from hypothesis import strategies as st

from deepspeed.config.scan import Repeat, key_lines, repeated_keys

TEXT = st.text(st.characters(codec="ascii", exclude_characters="\r"), max_size=8)
KEY = st.text("abcxyz_01", min_size=1, max_size=5)
VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=8,
)


def keys_in_order(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, list):
        return [key for item in value for key in keys_in_order(item, path)]
    if not isinstance(value, dict):
        return []
    return [k for key, item in value.items() for k in ((*path, key), *keys_in_order(item, (*path, key)))]


@given(st.dictionaries(KEY, VALUE, max_size=4))
def test_every_key_of_json_is_found(value: dict[str, Any]) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=2)):
        assert [path for _, path, _ in key_lines(text)] == keys_in_order(value)
        assert repeated_keys(text) == []


@given(st.dictionaries(KEY, VALUE, max_size=4))
def test_every_key_of_hjson_is_found(value: dict[str, Any]) -> None:
    text = hjson.dumps(value)
    try:
        hjson.loads(text)
    except hjson.HjsonDecodeError:  # the library writes some texts with quotes that it does not read
        reject()
    assert [path for _, path, _ in key_lines(text)] == keys_in_order(hjson.loads(text))


def test_comments_texts_and_lists_do_not_confuse_it() -> None:
    text = """{
  # a: 1
  /* a: 2
     a: 3 */
  a: 1 // a: 4
  "b": "{a: 5, b: 6}"
  list: [{x: 1, y: 2}, {x: 3}]
  words: a: b: c {
  many: '''
    a: 7
  '''
  a: 8
}
"""
    assert repeated_keys(text) == [Repeat(("a",), (5, 12))]


def test_a_text_without_outer_braces_is_read() -> None:
    assert repeated_keys("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [Repeat(("a",), (1, 3)), Repeat(("b", "c"), (2, 2))]
