from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.disk import strict_json

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(_JSON, st.sampled_from([None, 1]))
def test_what_is_dumped_is_loaded_again(value: Any, indent: int | None) -> None:
    assert strict_json.loads(strict_json.dumps(value, indent=indent)) == value


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 3}', "[NaN]", "-Infinity", "{", "1 2", b"\xff", "[" * 100_000])
def test_text_on_which_parsers_differ_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json.loads(text)


def test_a_key_given_twice_is_named() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        strict_json.loads('{"b": 0, "a": 1, "a": 3}')


def test_numbers_that_json_lacks_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json.dumps([float("nan")])
