"""The JSON Schema."""

from __future__ import annotations

import json

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import ConfigModel
from deepspeed.config.schema import json_schema
from deepspeed.config.walk import sections


def test_every_key_and_spelling_is_in_the_schema() -> None:
    schema = json_schema()
    defined = {"": schema} | schema["$defs"]
    for section in sections(DeepSpeedConfig):
        properties = defined[section.model.__name__ if section.path else ""]["properties"]
        assert set(section.model.known_keys()) <= set(properties), section.path
        assert all(entry.get("description") for name, entry in properties.items() if section.path)


def test_unknown_keys_are_refused_by_the_schema() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    open_blocks = {name for name, entry in schema["$defs"].items() if entry.get("additionalProperties", True)}
    assert open_blocks == {
        section.model.__name__ for section in sections(DeepSpeedConfig) if section.model.model_config["extra"] == "allow"
    }


def test_references_lead_somewhere() -> None:
    schema = json_schema()
    text = json.dumps(schema)
    names = {part.partition('"')[0] for part in text.split("#/$defs/")[1:]}
    assert names == set(schema["$defs"])


def test_required_keys_are_required() -> None:
    schema = json_schema()
    assert schema["$defs"]["OptimizerConfig"]["required"] == ["type"]
    assert set(schema["$defs"]["OneCycleParams"]["required"]) == {"cycle_min_lr", "cycle_max_lr"}


def test_models_have_names_of_their_own() -> None:
    models: dict[str, type[ConfigModel]] = {}
    for section in sections(DeepSpeedConfig):
        assert models.setdefault(section.model.__name__, section.model) is section.model
