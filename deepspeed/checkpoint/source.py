"""One checkpoint as every reader of it sees it, whatever layout is on the disk.

    our manifest + safetensors      reader.CheckpointReader     --.
    the original's stage files      original.StageSource          +--> CheckpointSource --> resume, export, convert, show
    the original's universal files  original.UniversalSource    --'

Tensors are global: a name (the table in `disk.names`), a shape, and any range of the flattened elements. So a resume on
another topology, an export and a conversion are one piece of code each. Lives here: the contract. Does not live here: how to
find the layout of a folder (`disk.layouts`), how to open one (`opening`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from typing_extensions import NotRequired

from deepspeed.sharding.cut import Cut

__all__ = ["CheckpointSource", "EngineState", "OptimizerState"]


class OptimizerState(TypedDict):
    """`EngineState["optimizer"]`: what an optimizer keeps besides tensors. Its tensors are `optimizer/<parameter>/<key>`."""

    name: str | None
    """Class of the optimizer, e.g. `AdamW`; None where the layout does not say."""

    groups: list[dict[str, Any]]
    """Hyperparameters of each parameter group (`lr`, `betas`, ...), without its parameters."""

    members: list[list[str]]
    """Names of each group's parameters, in the optimizer's order."""

    scalars: dict[str, dict[str, Any]]
    """Parameter name -> state key -> plain number, e.g. `step`."""


class EngineState(TypedDict):
    """What an engine keeps besides tensors. A layout that does not store a value gives the default that is named."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    """Micro-batches so far; where it is not stored: global steps times accumulation steps."""

    dp_world_size: int
    mesh: NotRequired[Mapping[str, int]]
    """Ranks along each axis of the mesh that has more than one; absent where the layout does not say."""

    zero_stage: int
    ds_config: Mapping[str, Any] | None
    """The configuration of the engine that saved, without secrets; None where it is not stored."""

    shared_parameters: Mapping[str, str]
    """Tied parameters: second and later names -> the name under which the tensor is stored."""

    frozen_parameters: list[str]
    """Names of the parameters that did not require gradients, stored or not."""

    has_frozen_parameters: bool
    """Whether their values are in the checkpoint (`exclude_frozen_parameters` of the save)."""

    buffers: list[str]
    """Names of the persistent buffers."""

    extra_state: Mapping[str, Any]
    """What modules keep besides tensors (`get_extra_state`): module name -> value; "" is the module itself."""

    optimizer: OptimizerState | None
    """None: saved by an engine without an optimizer."""

    loss_scaler: Mapping[str, Any]
    """As `precision.loss_scaler` keeps it; empty where it is not stored."""

    lr_scheduler: Mapping[str, Any] | None
    data: Mapping[str, int] | None
    """Place in the data (`data.loader`); None where it is not stored."""


class CheckpointSource(Protocol):
    """One checkpoint, open for reading. Holds no lock; reading is not collective and needs no order.

    Weights stand under `module/<name>` in the model's dtype and, where there is an fp32 master copy, under `master/<name>`;
    either or both may be there, and the master counts. Tied parameters stand there once, under their first name.
    """

    folder: Path
    tag: str

    @property
    def state(self) -> EngineState:
        """What the engine stored besides tensors."""

    def with_members(self, members: Sequence[Sequence[str]]) -> CheckpointSource:
        """The same checkpoint for an optimizer whose parameter groups have these parameters, in the optimizer's order.

        A layout that stores the optimizer's entries by number names them so; the others give themselves.
        """

    def client_state(self) -> dict[str, Any]:
        """What the user stored, anew at each call; tensors are on the CPU."""

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What `rank` of the writing job stored for itself; empty when it stored nothing, or there was no such rank."""

    def names(self, prefix: str = "") -> list[str]:
        """Names of all tensors that start with `prefix`, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor on the disk."""

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        """Read elements `[start, start + length)` of the flattened tensor, and no other bytes.

        Where the tensor is stored in parts, they are put together in blocks of rows; `parts.read_part` reads a part.

        Args:
            name: the tensor's global name.
            start: first element.
            length: elements; None for all up to the end, or as many as `out` has.
            out: flat tensor of `length` elements to fill, on any device and of any dtype (elements are converted). None
                makes a new tensor.

        Returns:
            `out`, or the new flat tensor on the CPU.

        Raises:
            ArgumentError: the range or `out` does not fit the tensor, or there is no tensor of that name.
            CheckpointDamagedError: a file ends too early or does not hold what it should.
        """

    def cut(self, name: str) -> Cut | None:
        """How the tensor is stored in parts; None: in its own order."""

    def read_stored(self, name: str, start: int, out: Tensor) -> Tensor:
        """As `read`, where elements count in stored order: those of the parts of `cut(name)`, one after another."""

    def check_own_share(self) -> None:
        """Compare this rank's share of the files with the checksums that the layout has. Not collective.

        Raises:
            CheckpointDamagedError: naming every file that is missing, cut short or changed.
        """
