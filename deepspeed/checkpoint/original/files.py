"""The grammar of the file names of a stage checkpoint: which file holds what.

    mp_rank_MM_model_states.pt                        one model-parallel rank (pipeline and tensor ranks share the count)
    zero_pp_rank_D_mp_rank_MM_model_states.pt         the same at ZeRO stage 3: one data-parallel rank
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt  optimizer shard of a data-parallel rank
    layer_LL[-model_MM]-model_states.pt               one layer of a pipeline, one tensor slice of it
    layer_L_expert_E_mp_rank_MM_model_states.pt       one expert
    expp_rank_E_mp_rank_MM_optim_states.pt            optimizer of an expert-parallel rank, ZeRO stage 0

Pure: no file is opened. Does not live here: what the files hold (`reading.slices`). Called by `reading.stages` and the
converters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = [
    "ExpertFile",
    "ExpertOptimizerFile",
    "LayerFile",
    "ModelFile",
    "OptimizerFile",
    "StageFile",
    "StageFiles",
    "parse_file_name",
]


@dataclass(frozen=True, order=True)
class ModelFile:
    """Model and engine state; `data_rank` is None below ZeRO stage 3."""

    model_rank: int
    data_rank: int | None
    name: str


@dataclass(frozen=True, order=True)
class OptimizerFile:
    """Optimizer shard of one data-parallel rank."""

    model_rank: int
    data_rank: int
    is_bf16: bool
    name: str


@dataclass(frozen=True, order=True)
class LayerFile:
    """One pipeline layer; `tensor_rank` is None without tensor parallelism."""

    layer: int
    tensor_rank: int | None
    name: str


@dataclass(frozen=True, order=True)
class ExpertFile:
    """Weights of one expert, counted over all ranks; `layer` is None in files before the layer was named."""

    layer: int | None
    expert: int
    model_rank: int
    name: str


@dataclass(frozen=True, order=True)
class ExpertOptimizerFile:
    """Optimizer state of one expert-parallel rank at ZeRO stage 0."""

    model_rank: int
    expert_rank: int
    name: str


StageFile = ModelFile | OptimizerFile | LayerFile | ExpertFile | ExpertOptimizerFile

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def parse_file_name(name: str) -> StageFile | None:
    """What the file of that name holds; None when it is no file of the format."""
    if found := _MODEL.fullmatch(name):
        return ModelFile(int(found[2]), _number(found[1]), name)
    if found := _OPTIMIZER.fullmatch(name):
        return OptimizerFile(int(found[3]), int(found[2]), found[1] is not None, name)
    if found := _LAYER.fullmatch(name):
        return LayerFile(int(found[1]), _number(found[2]), name)
    if found := _EXPERT.fullmatch(name):
        return ExpertFile(_number(found[1]), int(found[2]), int(found[3]), name)
    if found := _EXPERT_OPTIMIZER.fullmatch(name):
        return ExpertOptimizerFile(int(found[2]), int(found[1]), name)
    return None


@dataclass(frozen=True)
class StageFiles:
    """The files of one stage checkpoint by kind, each list in order of its numbers."""

    models: list[ModelFile] = field(default_factory=list)
    optimizers: list[OptimizerFile] = field(default_factory=list)
    layers: list[LayerFile] = field(default_factory=list)
    experts: list[ExpertFile] = field(default_factory=list)
    expert_optimizers: list[ExpertOptimizerFile] = field(default_factory=list)

    @classmethod
    def of(cls, names: Iterable[str]) -> StageFiles:
        """Sort the names in a folder; those that are none of the format's are left out."""
        parsed = [file for name in names if (file := parse_file_name(name)) is not None]
        return cls(
            models=sorted((f for f in parsed if isinstance(f, ModelFile)), key=lambda f: (f.model_rank, f.data_rank or 0)),
            optimizers=sorted(f for f in parsed if isinstance(f, OptimizerFile)),
            layers=sorted((f for f in parsed if isinstance(f, LayerFile)), key=lambda f: (f.layer, f.tensor_rank or 0)),
            experts=sorted((f for f in parsed if isinstance(f, ExpertFile)), key=lambda f: (f.layer or 0, f.expert)),
            expert_optimizers=sorted(f for f in parsed if isinstance(f, ExpertOptimizerFile)),
        )

    @property
    def names(self) -> list[str]:
        """Names of all files of the checkpoint."""
        kinds = (self.models, self.optimizers, self.layers, self.experts, self.expert_optimizers)
        return [file.name for kind in kinds for file in kind]


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
