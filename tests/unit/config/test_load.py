"""Sources of a configuration."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.load import load_config, strip_auto
from deepspeed.errors import ConfigError

EXAMPLE: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 0}, "list": [{"a": 1}]}


def as_base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def test_a_dict_a_file_and_base64_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(EXAMPLE))
    for source in (EXAMPLE, path, str(path), as_base64(json.dumps(EXAMPLE))):
        assert load_config(source) == EXAMPLE


def test_the_users_dict_is_not_shared() -> None:
    given_dict = {"zero_optimization": {"stage": 0}, "list": [{"a": 1}]}
    loaded = load_config(given_dict)
    loaded["zero_optimization"]["stage"] = 3
    loaded["list"][0]["a"] = 2
    assert given_dict == {"zero_optimization": {"stage": 0}, "list": [{"a": 1}]}


def test_objects_inside_a_dict_are_shared() -> None:
    group = object()
    assert load_config({"tensor_parallel": {"tp": {"tp_group": group}}})["tensor_parallel"]["tp"]["tp_group"] is group


def test_hjson_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text("{\n  # batch\n  train_batch_size: 8\n  'fp16': {enabled: true,},\n}")
    assert load_config(path) == {"train_batch_size": 8, "fp16": {"enabled": True}}


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.integers() | st.text(max_size=5), st.lists, max_leaves=3)))
def test_base64_of_any_json_comes_back(value: dict[str, Any]) -> None:
    assert load_config(as_base64(json.dumps(value))) == value


def test_empty_base64_is_an_empty_configuration() -> None:
    assert load_config("") == {}


@pytest.mark.parametrize("encode", [True, False])
def test_duplicate_keys_are_refused_with_key_and_lines(tmp_path: Path, encode: bool) -> None:
    text = '{\n"fp16": {"enabled": true},\n"zero_optimization": {\n"stage": 1,\n"stage": 2},\n"fp16": {}\n}'
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(as_base64(text) if encode else path)
    assert "Duplicate keys" in str(error.value)
    assert "  fp16: lines 2 and 6" in str(error.value)
    assert "  zero_optimization.stage: lines 4 and 5" in str(error.value)


def test_duplicate_keys_in_a_list_and_in_hjson_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text("a: [\n{x: 1}\n{x: 1\nx: 2}\n]\n")
    with pytest.raises(ConfigError, match=r"a\.x: lines 3 and 4"):
        load_config(path)


def test_the_same_key_in_two_blocks_is_no_duplicate() -> None:
    text = '{"fp16": {"enabled": false}, "bf16": {"enabled": false}, "l": [{"a": 1}, {"a": 2}]}'
    assert load_config(as_base64(text)) == json.loads(text)


def test_a_misspelt_path_gets_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no existing file.*Did you mean.*ds_config\.json"):
        load_config(str(tmp_path / "ds_confg.json"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("/no/such/folder/ds.json", "directory '/no/such/folder' does not exist"),
        ('{"train_batch_size": 8}', "json.loads"),
        (17, "is a int"),
        (as_base64("[1, 2]"), "holds a list"),
        (as_base64("{a: [1}"), "line 1"),
    ],
)
def test_other_sources_are_refused_with_a_cure(source: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(source)
    assert text in str(error.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_a_bad_source_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="base64"):
        load_config("nothing.json")


def test_auto_is_stripped_at_any_depth() -> None:
    block = {"a": "auto", "b": {"c": "auto", "d": 1}, "e": [1]}
    assert strip_auto(block) == {"b": {"d": 1}, "e": [1]}
    assert block["a"] == "auto"
