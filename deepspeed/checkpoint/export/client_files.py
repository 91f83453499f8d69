"""The two files of a checkpoint that clients open themselves, for any layout.

A client that collects a checkpoint into one file of its own calls `torch.load` on them: for the ZeRO stage, and for the
client state, which it takes from the top-level keys of the model-state file that are not the engine's. The layouts of the
original have such files. Ours has none, so summaries of plain values are written into a private temporary folder, which
goes when the process ends; the checkpoint is not touched.

Does not live here: weights (`full_state`). Called by clients through `deepspeed.utils.zero_to_fp32`.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.disk.layouts import Layout, layout_of
from deepspeed.checkpoint.opening import open_folder
from deepspeed.errors import CheckpointNotFoundError

__all__ = ["get_model_state_file", "get_optim_files"]

_MODEL_FILES = ("mp_rank_*_model_states.pt", "zero_pp_rank_*_mp_rank_*_model_states.pt")
_OPTIMIZER_FILES = ("zero_pp_rank_*_optim_states.pt", "bf16_zero_pp_rank_*_optim_states.pt")
_SHARDS_PARAMETERS = 3


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Files of which the first says `["optimizer_state_dict"]["zero_stage"]`.

    Args:
        checkpoint_dir: folder of one tag.

    Raises:
        FileNotFoundError: no such folder, or it holds no optimizer state.
    """
    folder = Path(checkpoint_dir)
    if layout_of(folder) is Layout.OURS:
        state = open_folder(folder, folder.name, Alone()).state
        return [_summary("optim_states.pt", {"optimizer_state_dict": {"zero_stage": int(state["zero_stage"])}})]
    found = sorted(path for pattern in _OPTIMIZER_FILES for path in folder.glob(pattern))
    if not found:
        raise _missing(folder, "optimizer states (*_optim_states.pt)")
    return [str(path) for path in found]


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """File whose top-level keys that are not the engine's are the client state.

    Args:
        checkpoint_dir: folder of one tag.
        zero_stage: ZeRO stage of the engine that saved.

    Raises:
        FileNotFoundError: no such folder, or it holds no such file.
    """
    folder = Path(checkpoint_dir)
    if layout_of(folder) is Layout.OURS:
        source = open_folder(folder, folder.name, Alone())
        counters = {key: source.state[key] for key in ("global_steps", "skipped_steps", "dp_world_size")}
        return _summary("model_states.pt", {**counters, "mp_world_size": 1, **source.client_state()})
    found = sorted(folder.glob(_MODEL_FILES[int(zero_stage) >= _SHARDS_PARAMETERS]))
    if not found:
        raise _missing(folder, f"model states of ZeRO stage {zero_stage} ({_MODEL_FILES[int(zero_stage) >= 3]})")
    return str(found[0])


def _missing(folder: Path, what: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{folder} holds no {what}. Give the folder of one tag, which the file 'latest' names.")


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """One folder per process; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="checkpoint-summaries-")


def _summary(name: str, values: Mapping[str, Any]) -> str:
    folder = tempfile.mkdtemp(dir=_scratch().name)
    path = os.path.join(folder, name)
    torch.save(_plain(dict(values)), path)
    return path


def _plain(value: Any) -> Any:
    """`value` out of types that `torch.load(weights_only=True)` knows; others as the nearest of those."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return _plain(vars(value))
    if isinstance(value, (set, frozenset)):
        return {_plain(item) for item in value}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_plain(item) for item in value)
    return _plain_leaf(value)


def _plain_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, PurePath) else value
