"""What an engine must know of the other stages, when its module is one stage of a pipeline; nothing where it is a model.

Does not live here: what is done with it (`partition`, `training`, `saving`), batches (`pipeline`). Called by `engine.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError, UnbuiltFeatureError
from deepspeed.pipe.module import PipelineModule
from deepspeed.topology.mesh import AxisGroup

__all__ = ["Stage", "refuse_for_pipelines", "refuse_own_norm"]


@dataclass(frozen=True)
class Stage:
    """A module's place among others."""

    axes: Mapping[str, AxisGroup] = field(default_factory=dict)
    """Key of each tie -> the ranks with the copies that correspond to this rank's."""

    tie_of: Mapping[int, str] = field(default_factory=dict)
    """id of each tied parameter -> key of its tie."""

    tied_layers: Mapping[str, int] = field(default_factory=dict)
    """Key of each tie of the whole model -> index of its first layer, by which the original may store it."""

    stored_elsewhere: frozenset[str] = frozenset()
    """Names of parameters and buffers that an earlier stage writes into checkpoints."""

    @classmethod
    def of(cls, module: nn.Module) -> Stage:
        """That of `module`."""
        if not isinstance(module, PipelineModule):
            return cls()
        tie_of: dict[int, str] = {}
        elsewhere: set[str] = set()
        axes: dict[str, AxisGroup] = {}
        for tie in module.tie_groups:
            if tie.axis is None:
                continue  # between other stages
            axes[tie.key] = tie.axis
            tied = module.tied_modules[tie.key]
            tie_of.update((id(param), tie.key) for param in tied.parameters())
            if tie.axis.rank > 0:
                named = (*tied.named_parameters(), *tied.named_buffers())
                elsewhere.update(f"tied_modules.{tie.key}.{name}" for name, _ in named)
        return cls(axes, tie_of, module.tied_layers, frozenset(elsewhere))


def refuse_for_pipelines(config: DeepSpeedConfig, module: PipelineModule) -> None:
    """Refuse what has no meaning, or is not built, for a `PipelineModule`.

    Raises:
        ConfigError: the text has the reason and what to do.
        UnbuiltFeatureError: likewise.
    """
    zero = config.zero_optimization
    if zero.stage >= 2:
        raise ConfigError(
            f"zero_optimization.stage = {zero.stage} with a PipelineModule: ZeRO stages 2 and 3 reduce (and gather) for "
            "every micro-batch what a pipeline adds up over all of them, which would undo what it saves. Use stage 0 or 1."
        )
    if not config.managed_gradient_accumulation:
        raise ConfigError(
            "managed_gradient_accumulation = false with a PipelineModule: train_batch() accumulates the micro-batches of a "
            "batch itself. Leave it out."
        )
    if zero.zenflow is not None and zero.stage > 0:
        raise UnbuiltFeatureError("zero_optimization.zenflow with a PipelineModule is not built yet. Leave it out.")
    _refuse_other_chunks(config.pipeline.schedule, module.num_chunks)


def refuse_own_norm(optimizer: Optimizer | None, module: nn.Module) -> None:
    """Refuse an optimizer of a pipeline that clips by a norm of its own: it would be that of one stage.

    Raises:
        UnbuiltFeatureError: the text says what to do.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    clips = getattr(optimizer, "needs_parameter_sums", False) and any(g.get("max_grad_norm", 0.0) > 0 for g in groups)
    if clips and isinstance(module, PipelineModule) and module.num_stages > 1:
        raise UnbuiltFeatureError(
            f"max_grad_norm of {type(optimizer).__name__} with a PipelineModule is not built yet: each stage would clip by "
            'its own norm. Use "gradient_clipping" of the config, which clips the gradient of the whole model.'
        )


def _refuse_other_chunks(schedule: str, chunks: int) -> None:
    """One schedule alone passes through several parts of a stage, and it is pointless for one."""
    if schedule == "interleaved" and chunks == 1:
        raise ConfigError(
            'pipeline.schedule = "interleaved" with PipelineModule(num_chunks=1): it interleaves the parts of the model '
            'that a stage has, and there is one. Build PipelineModule(num_chunks=2) or more, or set "schedule": "1f1b".'
        )
    if schedule != "interleaved" and chunks > 1:
        raise ConfigError(
            f'pipeline.schedule = "{schedule}" with PipelineModule(num_chunks={chunks}): it passes through one part of the '
            'model per stage. Set "schedule": "interleaved" in the block "pipeline", or leave num_chunks out.'
        )
