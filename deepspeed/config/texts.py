"""The text under each field, read from the source of the models.

Lives here: reading attribute docstrings. pydantic can do it too, but at import, which every program would pay for; only the
reference page and the JSON Schema need them. Called by these two.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys

from deepspeed.config.base import ConfigModel

__all__ = ["field_texts", "model_text"]


def field_texts(model: type[ConfigModel]) -> dict[str, str]:
    """Return field -> text, on one line, for the fields of a model that have one; inherited fields included."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, ConfigModel) and base is not ConfigModel:
            texts |= _texts_of_module(base.__module__).get(base.__name__, {})
    return {name: texts[name] for name in model.model_fields if name in texts}


def model_text(model: type[ConfigModel]) -> str:
    """Return the first paragraph of a model's docstring without the path in front, on one line."""
    first = inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0]
    path, _, text = " ".join(first.split()).partition(": ")
    return text or path


@functools.cache
def _texts_of_module(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _texts_of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts_of_class(node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        is_text = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            assert isinstance(after, ast.Expr)  # is_text
            assert isinstance(after.value, ast.Constant)
            texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts
