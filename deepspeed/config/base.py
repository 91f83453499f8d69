"""The base of every block: strict, tolerant of old spellings, and complete in its complaints.

Lives here: `ConfigModel`. Does not live here: any key. Every block derives from it; `config.root` puts them together.

    a JSON block                                                  the typed model
      |  tidy:  other spellings -> field names, "auto" and null -> left out, unknown keys -> faults
      |  pydantic: types, ranges, nested blocks (each does the same for itself)
      |  check: what two keys of the block forbid each other
      v
    ValidationError whose every line is of type "fault", its path spelled as the user did

[Note: all faults at once] When a value is wrong, the block is built again without it, so that `check` still sees the
others; refusals that rest on a wrong value are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, PydanticUndefined
from typing_extensions import Self

from deepspeed.common.logging import warn_once
from deepspeed.config.faults import ABSENT, Fault, Refusal, nearest

__all__ = ["AUTO", "WHO_FILLS_AUTO", "ConfigModel", "block_of", "fault_line", "faults_of", "parse", "unknown_key"]

AUTO = "auto"
WHO_FILLS_AUTO = (
    'The Hugging Face Trainer or Accelerate replaces "auto" before the engine sees it; nobody did here. Write a value.'
)
_Location = tuple[int | str, ...]
_Model = TypeVar("_Model", bound=BaseModel)


class ConfigModel(BaseModel):
    """A block of the configuration: unknown keys are refused, defaults and assignments are validated."""

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        allow_inf_nan=False,
        defer_build=True,  # a block that the configuration does not use costs next to nothing
        protected_namespaces=(),
    )

    spellings: ClassVar[Mapping[str, str]] = {}
    """Other accepted spelling of a key -> its field."""
    deprecated: ClassVar[Mapping[str, str]] = {}
    """Old key -> what to write instead. Using one warns; it stands in `spellings` or `adapt` moves it."""

    @classmethod
    def adapt(cls, given: dict[str, object]) -> Iterable[Refusal]:
        """Move deprecated keys to their replacements, in place; `given` is this block's own copy."""
        return ()

    @classmethod
    def must_fill(cls, field: str) -> bool:
        """Tell whether "auto" is a fault for this field: where there is a default, it means the default."""
        return field in cls.model_fields and cls.model_fields[field].is_required()

    def check(self) -> Iterable[Refusal]:
        """Yield what keys of this block forbid each other."""
        return ()

    @classmethod
    def known_keys(cls) -> tuple[str, ...]:
        """Every accepted key, other spellings included."""
        return (*cls.model_fields, *cls.spellings)

    @model_validator(mode="wrap")
    @classmethod
    def _report_all(cls, given: Any, build: Callable[[Any], Self]) -> Self:
        if not isinstance(given, Mapping):
            return _build_other(cls, given, build)
        tidy, names, lines = _tidy(cls, given)
        model, wrong = parse(build, tidy)
        bad = {line["loc"][0] for line in lines}
        lines += [line for error in wrong if (line := _translate(cls, error, names))["loc"][0] not in bad]
        bad = {line["loc"][0] for line in lines}
        if model is not None:
            for key, needed, cure in model.check():
                head, *rest = key.split(".")
                if (spelled := names.get(head, head)) not in bad:
                    lines.append(fault_line((spelled, *rest), _value(model, key), needed, cure))
        if lines or model is None:
            raise ValidationError.from_exception_data(cls.__name__, _merge(lines))
        return model


def parse(build: Callable[[Any], _Model], given: Mapping[str, object]) -> tuple[_Model | None, list[ErrorDetails]]:
    """Build a model; when that fails, build it without what was wrong ([Note: all faults at once]).

    Returns:
        The model (None when even the rest cannot be built) and the errors.
    """
    try:
        return build(given), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    rest: Any = given
    for wrong in errors:
        rest = _without(rest, wrong["loc"])
    try:
        return build(rest), errors
    except ValidationError:
        return None, errors


def faults_of(errors: Iterable[ErrorDetails], prefix: str = "") -> list[Fault]:
    """Turn the lines of a block's ValidationError into faults; `prefix` is the block's path."""
    return [
        Fault(
            ".".join(map(str, (prefix, *e["loc"]) if prefix else e["loc"])), e["input"], e["ctx"]["needed"], e["ctx"]["cure"]
        )
        for e in errors
    ]


def block_of(annotation: object) -> type[ConfigModel] | None:
    """Return the block model inside a field's type: plain, optional, or the values of a list or dict; else None."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation
    origin = get_origin(annotation)
    if origin in (Union, UnionType, dict, list, Annotated):
        return next((found for part in get_args(annotation) if (found := block_of(part))), None)
    return None


def unknown_key(key: str, block: str, known: Iterable[str]) -> tuple[str, str]:
    """Say `(needed, cure)` for a key that does not exist in `block`."""
    names = sorted(known)
    close = nearest(key, names)
    listed = f"Keys here: {', '.join(names)}." if len(names) <= 24 else "docs/reference/config.md lists the keys."
    return f"unknown key of {block}", f'Did you mean "{close}"?' if close else listed


def _build_other(cls: type[_Model], given: object, build: Callable[[Any], _Model]) -> _Model:
    """Let instances pass; refuse what is neither a block nor an instance."""
    if isinstance(given, cls):
        return build(given)
    hint = f'{{"enabled": {str(given).lower()}}}' if isinstance(given, bool) and "enabled" in cls.model_fields else "{...}"
    raise PydanticCustomError("fault", "{needed}. {cure}", {"needed": "needed a block of keys", "cure": f"Write {hint}."})


def _tidy(
    cls: type[ConfigModel], given: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, str], list[InitErrorDetails]]:
    """Bring a block to field names.

    Returns:
        The block for pydantic, field -> the spelling the user chose, and the faults found on the way.
    """
    copy = dict(given)
    lines = [fault_line((r.key,), given.get(r.key, ABSENT), r.needed, r.cure) for r in cls.adapt(copy)]
    tidy: dict[str, object] = {}
    names: dict[str, str] = {}
    for key, value in copy.items():
        field = cls.spellings.get(key, key)
        if key in given and key in cls.deprecated:
            warn_once(("config", cls.__name__, key), "config key %r is deprecated: %s", key, cls.deprecated[key])
        if field not in cls.model_fields:
            if cls.model_config.get("extra") != "allow":
                lines.append(fault_line((key,), value, *unknown_key(key, _title(cls), cls.known_keys())))
                continue
        elif field in names:
            both = f'"{names[field]}" and "{key}" are one setting'
            lines.append(fault_line((key,), value, both, f'Keep "{field}" alone.'))
            continue
        names[field] = key
        if not _is_left_out(cls, field, value):
            tidy[field] = value
        if value == AUTO and isinstance(value, str) and cls.must_fill(field):
            lines.append(fault_line((key,), value, 'needed a value in place of "auto"', WHO_FILLS_AUTO))
    return tidy, names, lines


def _is_left_out(cls: type[ConfigModel], field: str, value: object) -> bool:
    """Tell whether a value means that the key is not there: "auto", or null where null is the default or a block is."""
    if isinstance(value, str) and value == AUTO:
        return True
    if value is not None or field not in cls.model_fields:
        return False
    info = cls.model_fields[field]
    return info.default is None or block_of(info.annotation) is not None


def _translate(cls: type[ConfigModel], error: ErrorDetails, names: Mapping[str, str]) -> InitErrorDetails:
    """Bring one pydantic error to the type "fault", with the user's spelling as its path."""
    head, *rest = error["loc"]
    spelled: _Location = (names.get(str(head), head),)
    info = cls.model_fields.get(str(head))
    if error["type"] == "fault":
        needed, cure = error["ctx"]["needed"], error["ctx"]["cure"]
        location = (*spelled, *rest)
    else:
        needed, cure = _needed(error), error.get("ctx", {}).get("cure", "")
        # where keys are the user's own they tell the place; other texts are names of a union's branches
        has_keys = info is not None and get_origin(info.annotation) is dict
        location = (*spelled, *(part for part in rest if has_keys or isinstance(part, int)))
    given = ABSENT if error["type"] == "missing" else error["input"]
    return fault_line(location, given, needed, cure or _cure(error, info))


_WHOLE, _NUMBER = "needed a whole number", "needed a number"
_NEEDED = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "needed a finite number",
    "bool_type": "needed true or false",
    "bool_parsing": "needed true or false",
    "string_type": "needed a text",
    "path_type": "needed a path",
    "list_type": "needed a list",
    "dict_type": "needed a block of keys",
    "missing": "needed, and has no default",
    "none_required": "needed null",
}
_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def _needed(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "refused":
        return str(context["needed"])
    if kind in _BOUNDS:
        sign, key = _BOUNDS[kind]
        return f"needed a number {sign} {context[key]:g}"
    if kind == "literal_error":
        return f"needed {context['expected']}"
    return _NEEDED.get(kind, error["msg"])


def _cure(error: ErrorDetails, info: FieldInfo | None) -> str:
    if error["type"] == "literal_error":
        choices = [part.strip(" '") for part in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        close = nearest(error["input"], choices)
        if close:
            return f'Did you mean "{close}"?'
    if info is None or info.is_required():
        return "Give a value."
    default = info.default
    if default is PydanticUndefined or default is None:
        return "Correct it, or leave it out."
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return f"Correct it, or leave it out for the default, {text}."


def fault_line(location: _Location, given: object, needed: str, cure: str) -> InitErrorDetails:
    """Make one line of a ValidationError in the form that this room understands."""
    error = PydanticCustomError("fault", "{needed}. {cure}", {"needed": needed, "cure": cure})
    return InitErrorDetails(type=error, loc=location, input=given)


def _merge(lines: list[InitErrorDetails]) -> list[InitErrorDetails]:
    """Join lines about one place: the branches of a union each say what they needed."""
    merged: dict[_Location, InitErrorDetails] = {}
    for line in lines:
        first = merged.get(line["loc"])
        if first is None:
            merged[line["loc"]] = line
            continue
        old, new = _context(first), _context(line)
        if new["needed"] not in old["needed"]:
            needed = f"{old['needed']} or {new['needed'].removeprefix('needed ')}"
            merged[line["loc"]] = fault_line(line["loc"], line["input"], needed, old["cure"])
    return list(merged.values())


def _context(line: InitErrorDetails) -> dict[str, str]:
    error = line["type"]
    assert isinstance(error, PydanticCustomError)  # every line here was made by fault_line
    return error.context or {}


def _without(given: Any, location: _Location) -> Any:
    """Copy nested dicts without the deepest key of `location` that exists; lists are dropped whole."""
    if not location or not isinstance(given, Mapping) or location[0] not in given:
        return given
    head, *rest = location
    inner = given[head]
    copy = dict(given)
    if rest and isinstance(inner, Mapping) and rest[0] in inner:
        copy[head] = _without(inner, tuple(rest))
    else:
        del copy[head]
    return copy


def _value(model: BaseModel, key: str) -> object:
    value: object = model
    for name in key.split("."):
        value = getattr(value, name, ABSENT)
    return value


def _title(cls: type[ConfigModel]) -> str:
    """The block's name as its docstring gives it in backquotes, else the class name."""
    parts = (cls.__doc__ or "").split("`")
    return f'"{parts[1]}"' if len(parts) > 2 else cls.__name__
