"""`deepspeed.checkpointing`: checkpoint parts of a model, and say how what they are given is kept until backward.

    hidden = deepspeed.checkpointing.checkpoint(layer, hidden, mask=mask)    keeps its inputs; backward runs it again
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)          inputs wait in host memory

Works in any module, with an engine or without, at every ZeRO stage. Nothing has to be configured; `configure` may be
called again at any time, and holds from the next `checkpoint` on. An engine's config block holds as long as `configure`
was not called.

Lives here: the published names and this process's settings. Does not live here: recomputation (`segment`), its form and
why (there), where inputs rest (`keeping`). `deepspeed.runtime.activation_checkpointing.checkpointing` is this very
module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.activations.random_states import (
    MODEL_PARALLEL_STREAM,
    CudaRNGStatesTracker,
    set_device_rng_state,
    tracker,
)
from deepspeed.activations.segment import Checkpointer
from deepspeed.activations.settings import Settings
from deepspeed.config import DeepSpeedConfig
from deepspeed.topology.mesh import AxisGroup, tensor_axis_of

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reentrant_checkpoint",
    "reset",
    "set_num_layers",
]

Output = TypeVar("Output")

_MODEL_PARALLEL_SEED_OFFSET = 2718
_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL_STREAM
_CUDA_RNG_STATE_TRACKER = tracker
_set_cuda_rng_state = set_device_rng_state


@dataclass
class _Current:
    """What this process was told."""

    settings: Settings = field(default_factory=Settings)
    is_configured: bool = False
    has_mpu: bool = False
    """The tensor-parallel ranks are those of an object that `configure` was given; else those of the latest engine."""
    checkpointer: Checkpointer | None = None
    """Made when it is first used after a change."""

    def change(self, settings: Settings) -> None:
        self.settings = settings
        self.checkpointer = None

    def ready(self) -> Checkpointer:
        if self.checkpointer is None:
            self.checkpointer = self.settings.build()
        return self.checkpointer


_current = _Current()


# -- running ----------------------------------------------------------------------------------------------------------


def checkpoint(function: Callable[..., Output], *args: Any, **kwargs: Any) -> Output:
    """`function(*args, **kwargs)`, of which autograd keeps the inputs alone: backward runs it again.

    Arguments and results may be anything: None, numbers, containers of tensors inside containers. Dropout draws the same
    numbers the second time, autocast is as it was. Gradients are those of a plain call, bit for bit. With inputs in
    shards (`partition_activations`) all tensor-parallel ranks run the same parts.

    Args:
        function: a module or any callable; it is called again during backward, so it must not depend on what has changed
            by then.
        args: its arguments.
        kwargs: its keyword arguments, all of them.

    Raises:
        FileIoError: inputs rest on NVMe, and an earlier one could not be written.
        torch.utils.checkpoint.CheckpointError: during backward, when the second run saves other tensors than the first.
    """
    return _current.ready().run(function, args, kwargs)


non_reentrant_checkpoint = checkpoint


def reentrant_checkpoint(function: Callable[..., Output], *args: Any, **kwargs: Any) -> Output:
    """As `checkpoint`, in the re-entrant form: a backward inside of backward.

    At least one tensor among the arguments must take a gradient, and `torch.autograd.grad` does not work. For code that
    relies on it.
    """
    return _current.ready().run(function, args, kwargs, use_reentrant=True)


class CheckpointFunction:
    """The re-entrant form under its published name."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> tuple[Any, ...]:
        """Run `function(*args)`; its outputs are appended to `all_outputs` and returned as a tuple."""
        output = reentrant_checkpoint(function, *args)
        outputs = output if isinstance(output, tuple) else (output,)
        all_outputs.extend(outputs)
        return outputs


# -- settings ---------------------------------------------------------------------------------------------------------


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how inputs of checkpointed parts are kept. Callable any number of times; None keeps what there is.

    Args:
        mpu_: an object that tells the tensor-parallel ranks (`get_tensor_model_parallel_*` or `get_model_parallel_*`:
            `world_size`, `group`).
        deepspeed_config: a `DeepSpeedConfig`, dict, path or base64; its blocks `activation_checkpointing` and `aio` are
            taken over whole. Arguments win over it.
        partition_activations: key of that name.
        contiguous_checkpointing: `contiguous_memory_optimization`.
        num_checkpoints: `number_checkpoints`.
        checkpoint_in_cpu: `cpu_checkpointing`.
        synchronize: `synchronize_checkpoint_boundary`.
        profile: key of that name.

    Raises:
        ArgumentError: arguments that cannot be together.
        ConfigError: what is wrong with `deepspeed_config`.
    """
    settings = _current.settings
    if mpu_ is not None:
        settings = replace(settings, axis=tensor_axis_of(mpu_))
        _current.has_mpu = True
    if deepspeed_config is not None:
        settings = _of_config(settings, _parsed(deepspeed_config, mpu_, settings.axis.size))
    settings = settings.with_keys(
        {
            "partition_activations": partition_activations,
            "contiguous_memory_optimization": contiguous_checkpointing,
            "number_checkpoints": num_checkpoints,
            "cpu_checkpointing": checkpoint_in_cpu,
            "synchronize_checkpoint_boundary": synchronize,
            "profile": profile,
        }
    )
    _current.change(settings)
    _current.is_configured = True


def adopt(config: DeepSpeedConfig, axis: AxisGroup) -> None:
    """Take over what `configure` has not said: an engine's tensor-parallel ranks, and its block. Called by `initialize`."""
    settings = _current.settings if _current.has_mpu else replace(_current.settings, axis=axis)
    if not _current.is_configured and config.is_given("activation_checkpointing"):
        settings = _of_config(settings, config)
    _current.change(settings)


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _current.is_configured


def set_num_layers(nlayers: int) -> None:
    """Set `number_checkpoints`."""
    _current.change(_current.settings.with_keys({"number_checkpoints": nlayers}))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `partition_activations`."""
    _current.change(_current.settings.with_keys({"partition_activations": partition_activation}))


def reset() -> None:
    """Give buffers, files and what waits in them back, as far as no graph needs them. Settings stay."""
    _current.checkpointer = None


def forget() -> None:
    """Be as if this module had just been loaded, random streams included."""
    tracker.reset()
    _current.change(Settings())
    _current.is_configured = _current.has_mpu = False


def _parsed(config: Any, mpu: Any, tensor_ranks: int) -> DeepSpeedConfig:
    if isinstance(config, DeepSpeedConfig):
        return config
    if hasattr(mpu, "get_data_parallel_world_size"):
        return DeepSpeedConfig(config, mpu=mpu)
    ranks = comm.get_world_size() if comm.is_initialized() else 1
    return DeepSpeedConfig(config, dp_world_size=ranks // tensor_ranks)


def _of_config(settings: Settings, config: DeepSpeedConfig) -> Settings:
    return replace(settings, block=config.activation_checkpointing, aio=config.aio)


# -- random streams ---------------------------------------------------------------------------------------------------


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The named random streams of this process, whatever its device is."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator with `seed`, and begin the stream "model-parallel-rng".

    The stream's seed is `seed` + 2718 + tensor-parallel rank. Streams that there were are forgotten.
    """
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, _model_parallel_seed(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin the stream "model-parallel-rng" anew, as for `seed`; the device's generator goes on.

    Raises:
        ArgumentError: the stream does not exist.
    """
    _CUDA_RNG_STATE_TRACKER.reseed(_MODEL_PARALLEL_RNG_TRACKER_NAME, _model_parallel_seed(seed))


def _model_parallel_seed(seed: int) -> int:
    return seed + _MODEL_PARALLEL_SEED_OFFSET + _current.settings.axis.rank
