"""The JSON Schema of a configuration file, for editors.

Lives here: joining the schemas of the blocks, with every accepted spelling and "auto". Does not live here: keys. Called by
`deepspeed-config schema` and by the reference page.
"""

from __future__ import annotations

from typing import Any

from deepspeed.config.base import ConfigModel, block_of
from deepspeed.config.blocks import blocks_of
from deepspeed.config.root import BLOCK_SPELLINGS, MONITORS, DeepSpeedConfig
from deepspeed.config.texts import field_texts, model_text
from deepspeed.config.top import TopLevel
from deepspeed.config.typed import TypedBlock

__all__ = ["json_schema", "model_properties"]

_Schema = dict[str, Any]
_AUTO: _Schema = {"const": "auto"}


def json_schema() -> _Schema:
    """Return the JSON Schema (draft 2020-12) of a whole configuration."""
    definitions: dict[str, _Schema] = {}
    properties = _properties(TopLevel, definitions)
    for name, block in blocks_of(DeepSpeedConfig).items():
        properties[name] = _reference(block.model, definitions)
    properties |= {spelling: properties[name] for spelling, name in BLOCK_SPELLINGS.items()}
    monitors = {name: properties[name] for name in MONITORS}
    properties["monitor_config"] = {"type": "object", "properties": monitors, "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def model_properties(model: type[ConfigModel]) -> dict[str, _Schema]:
    """Return field -> schema as pydantic sees it, for the fields of one model."""
    schema: _Schema = model.model_json_schema()
    properties: dict[str, _Schema] = schema.get("properties", {})
    return properties


def _properties(model: type[ConfigModel], definitions: dict[str, _Schema]) -> dict[str, _Schema]:
    """Return accepted spelling -> schema; blocks inside become references."""
    texts = field_texts(model)
    properties: dict[str, _Schema] = {}
    for name, schema in model_properties(model).items():
        inner = block_of(model.model_fields[name].annotation)
        if inner is not None:
            _reference(inner, definitions)
        plain = {key: value for key, value in schema.items() if key not in ("title", "description", "default")}
        entry: _Schema = {"anyOf": [plain, _AUTO], "description": texts.get(name, "")}
        if schema.get("default") is not None:
            entry["default"] = schema["default"]
        properties[name] = entry
    return properties | {spelling: properties[name] for spelling, name in model.spellings.items()}


def _reference(model: type[ConfigModel], definitions: dict[str, _Schema]) -> _Schema:
    """Define a block once and return the reference to it."""
    if model.__name__ not in definitions:
        entry: _Schema = {"type": "object", "description": model_text(model)}
        definitions[model.__name__] = entry  # before its fields: blocks may hold one another
        entry["properties"] = _properties(model, definitions)
        required = [name for name, field in model.model_fields.items() if field.is_required()]
        if required:
            entry["required"] = required
        if model.model_config.get("extra") != "allow":
            entry["additionalProperties"] = False
        if issubclass(model, TypedBlock):
            entry["allOf"] = [_params_of(model, kind, definitions) for kind in model.known]
    return {"$ref": f"#/$defs/{model.__name__}"}


def _params_of(model: type[TypedBlock], kind: str, definitions: dict[str, _Schema]) -> _Schema:
    """Say which parameters go with one type."""
    params = _reference(model.params_model(kind), definitions)
    return {
        "if": {"properties": {"type": {"const": kind}}, "required": ["type"]},
        "then": {"properties": {"params": params}},
    }
