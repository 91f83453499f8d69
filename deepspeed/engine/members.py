"""Documented engine members that only answer or delegate: places, counters, rates, batch sizes, loaders.

They are the surface that clients of the original rely on; the story of a step is in `engine.engine`.

Does not live here: questions about the config (`config_access`), saving and loading (`saving`, `loading`, `whole_model`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from deepspeed.comm.world import get_local_rank
from deepspeed.common.logging import log_dist
from deepspeed.config.batch import BatchSizes
from deepspeed.config.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.engine.experts import moe_layers
from deepspeed.engine.loader import build_loader
from deepspeed.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    from deepspeed.common.timing import NullTimers, ThroughputTimer, Timers
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.data import DeepSpeedDataLoader
    from deepspeed.engine.parts import EngineParts
    from deepspeed.monitor import MonitorMaster
    from deepspeed.profiling.flops_profiler import FlopsProfiler
    from deepspeed.zero.optimizer import ZeroOptimizer


class CompatibleMembers:
    """Mixin of `DeepSpeedEngine`."""

    _parts: EngineParts
    _config: DeepSpeedConfig
    optimizer: ZeroOptimizer | None

    # -- where am I ---------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was given, a plain dict."""
        return self._config.raw

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._parts.device

    @property
    def global_rank(self) -> int:
        """Rank in the world."""
        return self._parts.mesh.rank

    @property
    def local_rank(self) -> int:
        """Rank on this host."""
        return get_local_rank()

    @property
    def world_size(self) -> int:
        """Ranks in the world."""
        return self._parts.mesh.world_size

    @property
    def dp_world_size(self) -> int:
        """Ranks that see different data."""
        return self._parts.mesh.data_parallel.size

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks over which ZeRO shards: data-parallel times sequence-parallel."""
        return self.dp_world_size * self._parts.mesh.axis("sequence").size

    @property
    def mp_world_size(self) -> int:
        """Ranks that hold different parts of one copy of the model."""
        return self._parts.mesh.axis("tensor").size * self._parts.mesh.axis("pipe").size

    @property
    def data_parallel_group(self) -> Any:
        """The process group of `dp_world_size`, None when it is 1."""
        return self._parts.mesh.data_parallel.group

    def get_data_parallel_rank(self) -> int:
        """Rank within `data_parallel_group`."""
        return self._parts.mesh.data_parallel.rank

    def get_model_parallel_rank(self) -> int:
        """Rank among those that hold different parts of the model."""
        return self._parts.mesh.axis("tensor").rank

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> Any:
        """The group that splits sequences, None when nothing does."""
        return self._parts.mesh.axis("sequence").group

    @property
    def mpu(self) -> Any:
        """The `mpu` that was given to `initialize`, or None."""
        return self._parts.mpu

    @property
    def has_moe_layers(self) -> bool:
        """Whether the module has layers of experts (`deepspeed.moe`); in a pipeline, whether this stage has."""
        return bool(self.num_experts)

    @property
    def num_experts(self) -> tuple[int, ...]:
        """Experts of each such layer, those on other ranks included."""
        return tuple(int(layer.num_experts) for _, layer in moe_layers(self._parts.module))

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The torch optimizer inside `optimizer`."""
        return self._parts.basic_optimizer

    @property
    def client_optimizer(self) -> Any:
        """What was passed as `optimizer`."""
        return self._parts.client_optimizer

    @property
    def client_lr_scheduler(self) -> Any:
        """What was passed as `lr_scheduler`."""
        return self._parts.client_lr_scheduler

    @property
    def monitor(self) -> MonitorMaster:
        """The monitors."""
        return self._parts.report.monitor

    @property
    def timers(self) -> Timers | NullTimers:
        """Timers of `wall_clock_breakdown`."""
        return self._parts.report.timers

    @property
    def tput_timer(self) -> ThroughputTimer:
        """Samples per second."""
        return self._parts.report.throughput

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds per timer since its last reset; empty without `wall_clock_breakdown`."""
        shown = self.timers.get_timers() if self._config.wall_clock_breakdown else {}
        return {name: timer.elapsed(reset=False) for name, timer in shown.items()}

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Log the milliseconds of a forward on rank 0. There are no expert layers yet whose part could be told apart."""
        log_dist(f"time (ms) | forward: {fwd_time:.2f}")

    def get_compile_time(self) -> list[Any]:
        """Times of the passes over compiled graphs (`compile.deepcompile`, not built yet); `engine.compile()` makes none."""
        return []

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients travel."""
        return self._parts.communication_data_type

    # -- counters -----------------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """`step()` calls so far, boundary or not."""
        return self._parts.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._parts.accumulation.micro_steps = value

    # -- rates and norms ----------------------------------------------------------------------------------------------

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self._groups()]

    def get_mom(self) -> list[Any] | None:
        """Momentum (or betas) of each parameter group, None where the optimizer has neither."""
        found = [group.get("betas", group.get("momentum")) for group in self._groups()]
        return found if found and all(each is not None for each in found) else None

    def get_type(self) -> list[Any]:
        """`type` entry of each parameter group, where a client set one."""
        return [group.get("type") for group in self._groups()]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's mean gradient before clipping; None before the first step."""
        return None if self.optimizer is None else self.optimizer.global_norm

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """Settings of the dynamic loss scale, None where it is static."""
        fp16 = self._config.fp16
        if fp16.loss_scale != 0:
            return None
        return {
            "init_scale": 2.0**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    # -- batch sizes --------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per global step over all ranks."""
        return self._parts.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        return self._parts.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per global step."""
        return self._parts.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes: global batch, micro-batch, accumulation steps."""
        return self._parts.batch.train, self._parts.batch.micro, self._parts.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps.

        Raises:
            ArgumentError: not a multiple of micro-batch x data-parallel ranks.
        """
        unit = self._parts.batch.micro * self.dp_world_size
        if train_batch_size < unit or train_batch_size % unit:
            lower = max(train_batch_size // unit, 1) * unit
            raise ArgumentError(
                f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch {self._parts.batch.micro} x "
                f"{self.dp_world_size} data-parallel ranks = {unit}. Use {lower} or {lower + unit}."
            )
        self._set_batch(BatchSizes(train_batch_size, self._parts.batch.micro, train_batch_size // unit))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward; accumulation stays, the global batch follows.

        Raises:
            ArgumentError: below 1.
        """
        if micro_batch_size < 1:
            raise ArgumentError(f"set_train_micro_batch_size({micro_batch_size}): needs at least 1 sample per forward.")
        steps = self._parts.batch.accumulation
        self._set_batch(BatchSizes(micro_batch_size * steps * self.dp_world_size, micro_batch_size, steps))

    def _set_batch(self, batch: BatchSizes) -> None:
        self._parts.batch = batch
        self._parts.accumulation.change_steps(batch.accumulation)
        self._parts.report.throughput.batch_size = batch.train

    # -- data ---------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of micro-batches for this rank; see `engine.loader`."""
        return build_loader(
            dataset,
            self._config,
            self._parts.mesh,
            batch_size=self._parts.batch.micro if batch_size is None else batch_size,
            is_training=route == "train",
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn or self._parts.collate_fn,
            workers=num_local_io_workers,
            throughput=self.tput_timer,
        )

    def set_data_post_process_func(self, post_process: Any) -> None:
        """Run `post_process(batch, sampler_state)` on every batch of the engine's loader.

        Raises:
            ConfigError: the engine has no loader.
        """
        loader = getattr(self, "training_dataloader", None)
        if loader is None:
            raise ConfigError("set_data_post_process_func() needs a loader. Give initialize() training_data.")
        loader.post_process_func = post_process

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state to host memory until `reload_states`: see `ZeroOptimizer.offload_states`.

        Raises:
            ArgumentError: no optimizer, another device, or an unknown kind.
        """
        if self.optimizer is None:
            raise ArgumentError("engine.offload_states() on an engine without an optimizer: there is no training state.")
        self.empty_partition_cache()
        self.optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved."""
        if self.optimizer is not None:
            self.optimizer.reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Release gathered parameters (ZeRO stage 3). Not inside a forward or backward."""
        if self._parts.coordinator is not None:
            self._parts.coordinator.release_all()

    random_ltd_scheduler = None
    flops_profiler: FlopsProfiler | None = None
    """Counts at `flops_profiler.profile_step`; None where the config does not ask for it."""
    loaded_checkpoint_dp_world_size: int | None = None
