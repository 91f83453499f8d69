"""What is planned for: a model without memory and a batch of its shapes, from whatever the user has.

    nn.Module                        itself; its values are not read
    Hugging Face configuration       the object, a name, a folder or a config.json: its architecture, on the meta device
    "module:function"                called on the meta device; returns a model, or (model, args, kwargs)
    a number                         parameters; the paper's formula then serves

Called by `comparison`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.planning.tracing import Batch

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True)
class Subject:
    """A model to plan for."""

    name: str
    numel: int
    """Parameters, each counted once."""
    module: nn.Module | None = None
    """None: only the number is known."""
    batch: Batch | None = None
    """Arguments of forward for one micro-batch; None: unknown, and activations are left out."""
    is_batch_given: bool = False
    """By the user, not made here from the model's configuration."""


def subject_of(source: Any, micro_batch: int, sequence_length: int | None, batch: Batch | None) -> Subject:
    """Read what the user handed in.

    Args:
        source: see the module's table.
        micro_batch: rows of a micro-batch, for models whose inputs are known (Hugging Face).
        sequence_length: tokens of a row; None: what the model allows, at most 2,048.
        batch: arguments of forward; None: made where the inputs are known.

    Raises:
        ArgumentError: the source is none of these; the text has what was tried.
    """
    if isinstance(source, int | float):
        return Subject("a model of this size", int(source))
    if isinstance(source, nn.Module):
        return _of_module(source, micro_batch, sequence_length, batch)
    if isinstance(source, str | Path) and ":" in str(source) and not Path(source).exists():
        made = _called(str(source))
        module, given = (made[0], (tuple(made[1]), dict(made[2]))) if isinstance(made, tuple) else (made, None)
        return _of_module(module, micro_batch, sequence_length, batch or given)
    return _of_module(_hugging_face(source), micro_batch, sequence_length, batch)


def _of_module(module: nn.Module, micro_batch: int, sequence_length: int | None, batch: Batch | None) -> Subject:
    numel = sum(param.numel() for param in module.parameters())
    name = type(module).__name__
    return Subject(name, numel, module, batch or _tokens(module, micro_batch, sequence_length), batch is not None)


def _tokens(module: nn.Module, rows: int, length: int | None) -> Batch | None:
    """Token ids and labels for a Hugging Face language model; None for other modules."""
    config = getattr(module, "config", None)
    if not hasattr(config, "vocab_size") or not hasattr(module, "get_input_embeddings"):
        return None
    at_most = getattr(config, "max_position_embeddings", None) or 2048
    ids = torch.empty(rows, length or min(at_most, 2048), dtype=torch.long, device="meta")
    return (), {"input_ids": ids, "labels": ids}


def _called(path: str) -> Any:
    module_name, _, function = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as cause:
        raise ArgumentError(
            f"{path!r} was taken for module:function, but: {cause}. Run the command where the module can be imported "
            "(PYTHONPATH=. helps), or give a folder with a config.json."
        ) from cause
    with torch.device("meta"):
        return found()


def _hugging_face(source: Any) -> nn.Module:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as cause:
        raise ArgumentError(
            f"{source!r} is neither a module nor a number, and Hugging Face's configurations need: pip install transformers"
        ) from cause
    config = source if isinstance(source, transformers.PretrainedConfig) else _read_config(source, transformers)
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    with torch.device("meta"):
        for kind in named:
            if kind is not None:
                made: nn.Module = kind(config)
                return made
        try:
            return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
        except ValueError as cause:
            raise ArgumentError(
                f"{type(config).__name__} names no architecture, and is none of a causal language model. Put "
                '"architectures": ["ItsModelClass"] into it, or give module:function that builds the model.'
            ) from cause


def _read_config(source: Any, transformers: Any) -> Any:
    path = Path(str(source))
    try:
        if path.is_file():
            values: Mapping[str, Any] = json.loads(path.read_text())
            return transformers.AutoConfig.for_model(**values)
        return transformers.AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError, TypeError) as cause:
        raise ArgumentError(
            f"{source!r} is no model to plan for: {cause}. Give a folder with a config.json, such a file, a name that "
            "transformers finds, module:function, or --params 13e9."
        ) from cause
