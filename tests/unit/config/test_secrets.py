"""Secrets of a configuration stay out of logs and files."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.secrets import without_secrets
from deepspeed.errors import ConfigError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(plain)
def test_a_configuration_without_secrets_is_copied_as_it_is(value: Any) -> None:
    assert without_secrets(value) == value


def test_the_key_is_hidden_at_every_level_and_the_original_keeps_it() -> None:
    given = {"comet": {"enabled": True, "api_key": "s3cret"}, "monitor_config": {"comet": {"api_key": None}}}
    before = copy.deepcopy(given)
    shown = without_secrets(given)
    assert "s3cret" not in repr(shown)
    assert shown["comet"] == {"enabled": True, "api_key": "(hidden)"}
    assert shown["monitor_config"]["comet"]["api_key"] is None
    assert given == before


def test_what_stands_before_the_host_in_an_address_is_hidden() -> None:
    given = {"mlflow": {"tracking_uri": "https://me:s3cret@host:5000/x"}, "a": ["http://t0ken@host", "sqlite:///a@b.db"]}
    shown = {"mlflow": {"tracking_uri": "https://(hidden)@host:5000/x"}, "a": ["http://(hidden)@host", "sqlite:///a@b.db"]}
    assert without_secrets(given) == shown


@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        ({"comet": {"api_key": 12345678}}, r"comet\.api_key = \(hidden\): needed a text"),
        ({"comet": {"apiKey": "12345678"}}, r'comet\.apiKey = \(hidden\): unknown key of "comet". Did you mean "api_key"'),
        ({"mlflow": {"token": "12345678"}}, r"mlflow\.token = \(hidden\): unknown key"),
        (
            {"mlflow": {"run_id": ["https://me:12345678@host"]}},
            r'mlflow\.run_id = \["https://\(hidden\)@host"\]: needed',
        ),
    ],
)
def test_an_error_about_a_secret_does_not_tell_it(blocks: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as raised:
        DeepSpeedConfig({"train_batch_size": 1, **blocks})
    assert "12345678" not in str(raised.value)


def test_a_wrong_value_of_a_table_is_told_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"mlflow\.tags\.data = 2: needed a text"):
        DeepSpeedConfig({"train_batch_size": 1, "mlflow": {"tags": {"data": 2}}})
