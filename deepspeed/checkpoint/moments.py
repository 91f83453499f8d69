"""Optimizer state out of a checkpoint, by parameter name, without an engine.

Lives here: the public reader. What the file holds is described in `docs/reference/checkpoint-format.md`. Called by users.
"""

from __future__ import annotations

import os
from typing import Any

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.opening import open_checkpoint

__all__ = ["read_optimizer_state"]


def read_optimizer_state(load_dir: str | os.PathLike[str], tag: str | None = None) -> dict[str, dict[str, Any]]:
    """Read the moments of every parameter, whole, whatever stage and number of ranks wrote them. Not collective.

    Args:
        load_dir: folder of all tags.
        tag: which checkpoint; the one `latest` names if left out.

    Returns:
        Parameter name -> state name ("exp_avg", "step", ...) -> tensor in the parameter's shape on the CPU, or plain number.
        Empty when the checkpoint was written without an optimizer.

    Raises:
        CheckpointNotFoundError: no such checkpoint; the text lists those there are.
        CheckpointDamagedError: a file differs from what was written.
    """
    reader = open_checkpoint(load_dir, tag)
    optimizer = reader.state["optimizer"]
    if optimizer is None:
        return {}
    states: dict[str, dict[str, Any]] = {name: dict(scalars) for name, scalars in optimizer["scalars"].items()}
    for stored in reader.names("optimizer/"):
        name, key = names.split_optimizer_tensor(stored)
        states.setdefault(name, {})[key] = reader.read(stored).view(reader.shape(stored))
    return states
