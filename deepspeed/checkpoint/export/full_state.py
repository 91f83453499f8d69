"""The complete state dict of a checkpoint as tensors, at once or each when it is asked for.

Does not live here: which entries there are (`weights_table`), files (`files`). Called by users through the doors
`deepspeed.utils.zero_to_fp32` and `zero_to_torch`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.disk.container import dtype_name, dtype_of
from deepspeed.checkpoint.export.files import export_weights, parse_dtype
from deepspeed.checkpoint.export.weights_source import find_checkpoint, open_weights
from deepspeed.checkpoint.export.weights_table import list_weights
from deepspeed.checkpoint.opening import open_folder
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.errors import CheckpointError

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "full_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


class LazyTensor:
    """A tensor of a checkpoint that is read when it is asked for, anew each time."""

    def __init__(self, source: CheckpointSource, stored: str, dtype: torch.dtype) -> None:
        self.shape = torch.Size(source.shape(stored))
        self.dtype = dtype
        self._source = source
        self._stored = stored

    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    def contiguous(self) -> Tensor:
        """Read the tensor.

        Raises:
            CheckpointDamagedError: a file is gone or changed.
        """
        values = torch.empty(self.shape, dtype=self.dtype)
        self._source.read(self._stored, out=values.view(-1))
        return values

    def __repr__(self) -> str:
        return f"LazyTensor({self._stored!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def full_state_dict(
    source: CheckpointSource, *, dtype: torch.dtype | None = torch.float32, exclude_frozen: bool = False
) -> dict[str, LazyTensor]:
    """Every entry that `module.load_state_dict(strict=True)` asks for; tied names are one object.

    Args:
        source: a checkpoint of any layout.
        dtype: type of all floating-point values; None keeps each as it is stored. Other values keep theirs.
        exclude_frozen: leave out parameters that did not require gradients.
    """
    tensors = {n: (dtype_name(source.dtype(n), f"tensor {n!r}"), source.shape(n)) for n in source.names()}
    found: dict[str, LazyTensor] = {}
    for weight in list_weights(tensors, {**source.state}, exclude_frozen=exclude_frozen):
        if weight.owner is not None:
            found[weight.name] = found[weight.owner]
            continue
        stored_dtype = dtype_of(weight.dtype, f"tensor {weight.stored!r}")
        is_cast = dtype is not None and stored_dtype.is_floating_point
        found[weight.name] = LazyTensor(source, weight.stored, dtype if is_cast and dtype is not None else stored_dtype)
    return found


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The complete state dict in fp32, on the CPU, whatever stage, layout and number of ranks wrote the checkpoint.

    Args:
        checkpoint_dir: folder of all tags.
        tag: which checkpoint; the one `latest` names if left out.
        exclude_frozen_parameters: leave out parameters that did not require gradients.
        lazy_mode: give `LazyTensor`s; `.contiguous()` reads one. For models that memory does not hold at once.

    Raises:
        ValueError: no tag and no `latest`.
        FileNotFoundError: no such checkpoint; the text lists those there are.
        CheckpointDamagedError: a file differs from what was written.
    """
    lazy = full_state_dict(_open(checkpoint_dir, tag), exclude_frozen=exclude_frozen_parameters)
    if lazy_mode:
        return dict(lazy)
    read: dict[int, Tensor] = {}
    for tensor in lazy.values():
        if id(tensor) not in read:
            read[id(tensor)] = tensor.contiguous()
    return {name: read[id(tensor)] for name, tensor in lazy.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Put a checkpoint's weights into a plain module, which is moved to the CPU; return it.

    Raises:
        CheckpointError: names or shapes differ. Frozen parameters that the save left out may lack.
        ValueError, FileNotFoundError, CheckpointDamagedError: see `get_fp32_state_dict_from_zero_checkpoint`.
    """
    source = _open(checkpoint_dir, tag)
    state_dict = {name: tensor.contiguous() for name, tensor in full_state_dict(source).items()}
    state = source.state
    may_lack = set() if state["has_frozen_parameters"] else {*state["frozen_parameters"], *state["shared_parameters"]}
    names = set(model.state_dict())
    missing, extra = sorted(names - state_dict.keys() - may_lack), sorted(state_dict.keys() - names)
    if missing or extra:
        raise CheckpointError(
            f"checkpoint {source.folder} does not fit the model: it lacks {missing[:5] or 'nothing'} and has "
            f"{extra[:5] or 'nothing'} that the model does not have. Build the same model, or take what fits from "
            "get_fp32_state_dict_from_zero_checkpoint()."
        )
    model = model.cpu()
    try:
        model.load_state_dict(state_dict, strict=False)
    except RuntimeError as error:  # how torch says that shapes differ
        raise CheckpointError(
            f"checkpoint {source.folder} does not fit the model: {error}. Build the model with the sizes it was saved with."
        ) from error
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    dtype: torch.dtype | str | None = None,
) -> None:
    """Write the complete state dict as files, in any floating-point type.

    Args:
        checkpoint_dir: folder of all tags.
        output_dir: folder for the files.
        max_shard_size: limit per file, e.g. `"5GB"`; None for one file.
        safe_serialization: safetensors instead of torch files.
        tag: which checkpoint; the one `latest` names if left out.
        exclude_frozen_parameters: leave out parameters that did not require gradients.
        dtype: type of all floating-point values: fp32, fp16 or bf16; None keeps each as it is stored.

    Raises:
        ValueError, FileNotFoundError, CheckpointDamagedError: see `get_fp32_state_dict_from_zero_checkpoint`.
        CheckpointError: the files could not be written; what was in `output_dir` is intact.
    """
    name = None if dtype is None else parse_dtype(str(dtype).removeprefix("torch."))
    export_weights(
        open_weights(checkpoint_dir, tag),
        output_dir,
        dtype=name,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        exclude_frozen=exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """As `convert_zero_checkpoint_to_state_dict` with dtype fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters, "fp32"
    )


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> CheckpointSource:
    folder = find_checkpoint(checkpoint_dir, tag)
    source = open_folder(folder, folder.name, Alone())
    source.check_own_share()
    return source
