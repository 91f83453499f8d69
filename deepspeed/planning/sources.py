"""What is planned for: a model without memory and a batch of its shapes, from whatever the user has.

    nn.Module                        itself; its values are not read
    Hugging Face configuration       the object, a name, a folder or a config.json: its architecture, on the meta device

Called by `of_module`. Not here: functions that build a model (`building`), a bare number of parameters (`formula`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepspeed.errors import ArgumentError
from deepspeed.planning.tracing import Batch

__all__ = ["Subject", "subject_of"]

_LONGEST = 2048
_FILLERS = (Tensor.uniform_, Tensor.normal_, Tensor.zero_, Tensor.fill_)


@dataclass(frozen=True)
class Subject:
    """A model to plan for."""

    name: str
    numel: int
    """Parameters, each counted once."""
    module: nn.Module
    batch: Batch | None = None
    """Arguments of forward for one micro-batch; None: unknown, and activations are left out."""
    is_batch_given: bool = False
    """By the user, not made here from the model's configuration."""


class _Rows(NamedTuple):
    """What a batch is made of."""

    rows: int
    length: int | None
    sequence_ranks: int


def subject_of(
    source: Any, micro_batch: int, sequence_length: int | None, batch: Batch | None, *, sequence_ranks: int = 1
) -> Subject:
    """Read what the user handed in.

    Args:
        source: see the module's table.
        micro_batch: rows of a micro-batch, for models whose inputs are known (Hugging Face).
        sequence_length: tokens of a row; None: what the model allows, at most 2,048.
        batch: arguments of forward; None: made where the inputs are known.
        sequence_ranks: that share a row's tokens; a batch that is made has one rank's.

    Raises:
        ArgumentError: the source is none of these; the text has what was tried.
    """
    made_for = _Rows(micro_batch, sequence_length, sequence_ranks)
    if isinstance(source, nn.Module):
        return _of_module(source, made_for, batch)
    return _of_module(_hugging_face(source), made_for, batch)


class _WithoutValues(TorchFunctionMode):
    """Skips what fills new parameters: on the meta device it changes nothing, and takes half of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLERS and args and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _of_module(module: nn.Module, rows: _Rows, batch: Batch | None) -> Subject:
    numel = sum(param.numel() for param in module.parameters())
    name = type(module).__name__
    return Subject(name, numel, module, batch or _tokens(module, rows), batch is not None)


def _tokens(module: nn.Module, rows: _Rows) -> Batch | None:
    """Token ids and labels for a Hugging Face language model; None for other modules."""
    config = getattr(module, "config", None)
    if not hasattr(config, "vocab_size") or not hasattr(module, "get_input_embeddings"):
        return None
    at_most = getattr(config, "max_position_embeddings", None) or 2048
    length = rows.length or min(at_most, _LONGEST)
    ids = torch.empty(rows.rows, -(-length // rows.sequence_ranks), dtype=torch.long, device="meta")
    return (), {"input_ids": ids, "labels": ids}


def _hugging_face(source: Any) -> nn.Module:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as cause:
        raise ArgumentError(
            f"{source!r} is neither a module nor a number, and Hugging Face's configurations need: pip install transformers"
        ) from cause
    config = source if isinstance(source, transformers.PretrainedConfig) else _read_config(source, transformers)
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    with torch.device("meta"), _WithoutValues():
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
