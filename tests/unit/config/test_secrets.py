"""Secrets of a configuration stay out of logs and files."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.secrets import without_secrets

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
