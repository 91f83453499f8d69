"""Profile one global step of an engine and tell of it: what the config block `flops_profiler` asks for.

    global step == profile_step     forward (pipelines: the layers of each chunk) and autograd run counted
    its update                      numbers of all ranks are put together; the first rank writes the report
    afterwards                      everything is off the engine

[Note: methods replaced] The methods of this one engine and its parts are replaced until that step is over, so that an engine
that nobody profiles, or that was profiled, has nothing to ask in each step.

All ranks count, whatever their own config says (`report.Cadence`): a rank's numbers are of its part of the model, and sums
need all of them. Does not live here: counting and the report (`profiling.flops_profiler`). Built by `build`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.common.logging import get_logger
from deepspeed.engine.replaced import ReplacedMethods
from deepspeed.engine.report import BACKWARD, FORWARD, STEP
from deepspeed.errors import ConfigError
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.profiling.flops_profiler.counter import load_what_counting_needs
from deepspeed.profiling.flops_profiler.peaks import peak_flops_of
from deepspeed.profiling.flops_profiler.summary import StepFacts
from deepspeed.run_log import ProfileRow
from deepspeed.zero.shard import whole_shape

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine

__all__ = ["ProfiledStep", "refuse_unwritable"]

logger = get_logger(__name__)

_TERA = 1e12
_MS_PER_SECOND = 1000.0


class ProfiledStep:
    """Of one engine.

    Args:
        engine: just made.
        step: the global step to profile: the one after so many updates.
        forwards: (object, name of its method) that compute in forward.

    Attributes:
        profiler: also `engine.flops_profiler`; its numbers can be read when the step is over.
    """

    def __init__(self, engine: DeepSpeedEngine, step: int, forwards: Sequence[tuple[Any, str]]) -> None:
        block = engine._config.flops_profiler
        peak = None if block.peak_tflops is None else block.peak_tflops * _TERA
        autocast = engine._parts.autocast_dtype if engine._config.torch_autocast.enabled else None
        if peak is None and autocast is not None:  # products are in it, whatever parameters are
            peak = peak_flops_of(get_accelerator().product_name(), autocast.itemsize)
        self.profiler = FlopsProfiler(engine.module, engine, block.recompute_fwd_factor, peak)
        self._engine = engine
        self._step = step
        self._forwards = list(forwards)
        self._methods = ReplacedMethods()
        self._micro_batches = 0
        self._is_begun = False
        self._missed = weakref.finalize(engine, _say_missed, step, engine.global_rank)
        if engine.optimizer is None:
            self._missed.detach()  # a reference model trains no step

    def start(self) -> None:
        """Wait for the step. [Note: methods replaced]"""
        load_what_counting_needs()  # here, so that no timer of the step has it
        for owner, name in self._forwards:
            self._methods.replace(owner, name, self._counted_forward)
        if self._engine._parts.reducer is not None:
            self._methods.replace(self._engine._parts.reducer, "drive", self._counted_backward)
        self._methods.replace(self._engine, "_report", self._ended)

    def stop(self) -> None:
        """Take everything off."""
        self._missed.detach()
        self._methods.restore()
        self.profiler.end_profile()

    def _is_now(self) -> bool:
        engine = self._engine
        if engine.global_steps != self._step or not engine.training or not torch.is_grad_enabled():
            return False
        if not self._is_begun:
            self._is_begun = True
            self.profiler.prepare()
        return True

    def _counted_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_now():
            return method(*args, **kwargs)
        self._micro_batches += 1
        with self.profiler.counting(in_model=method.__self__ is self._engine.module):  # type: ignore[attr-defined]
            return method(*args, **kwargs)

    def _counted_backward(self, method: Callable[..., Any], autograd: Callable[[], None]) -> Any:
        if not self._is_begun:
            return method(autograd)

        def counted() -> None:
            with self.profiler.counting(in_backward=True):
                autograd()

        return method(counted)

    def _ended(self, method: Callable[[], None]) -> None:
        if self._engine.global_steps > self._step:  # or a checkpoint of a later step was loaded
            facts = self._facts() if self._is_begun else None
            self.stop()
            if facts is None:
                _say_missed(self._step, self._engine.global_rank)
            else:
                self.profiler.step_facts = facts
                self._write()
                self._log(facts)
        method()

    def _write(self) -> None:
        if self._engine.global_rank > 0:
            return
        block = self._engine._config.flops_profiler
        told = (self._step, block.module_depth, block.top_modules, block.detailed)
        try:
            self.profiler.print_model_profile(*told, block.output_file)
        except OSError as error:  # a report is no reason to end a run
            logger.warning(
                "flops_profiler.output_file=%r cannot be written (%s), so the report is on standard output. Make room "
                "there, or name another file, before the next run.",
                block.output_file,
                error,
            )
            self.profiler.print_model_profile(*told)

    def _log(self, facts: StepFacts) -> None:
        log = self._engine._parts.report.log
        if not log.is_on:
            return
        rows = self.profiler.rows()
        whole = rows[0].seconds
        tree = [
            ProfileRow(
                row.path, row.depth, row.params, row.macs, row.flops, row.seconds, row.seconds / whole if whole else 0.0
            )
            for row in rows
        ]
        model_flops = facts.all_flops - facts.all_again_flops
        log.profile(self._step, tree, facts.all_flops, model_flops, self.profiler.peak_flops)

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def _facts(self) -> StepFacts:
        """Collective over all ranks."""
        parts, root, mesh = self._engine._parts, self.profiler.rows()[0], self._engine._parts.mesh
        stage = mesh.axis("pipe")
        own = [root.flops, root.backward_flops, root.again_flops, self._own_params()]
        sums = torch.zeros(stage.size, len(own), dtype=torch.int64, device=parts.device)
        sums[stage.rank] = torch.tensor(own, dtype=torch.int64)
        if mesh.world.size > 1:
            comm.all_reduce(sums, group=mesh.world.group)
        forward, backward, again, params = sums.sum(dim=0).tolist()
        seconds = {name: self._milliseconds(name) / _MS_PER_SECOND for name in (FORWARD, BACKWARD, STEP)}
        of_forward, of_backward = self.profiler.overhead_seconds
        return StepFacts(
            micro_batches=self._micro_batches,
            samples=parts.batch.train,
            forward_seconds=max(seconds[FORWARD] - of_forward, 0.0),
            backward_seconds=max(seconds[BACKWARD] - of_backward, 0.0),
            step_seconds=seconds[STEP],
            ranks=mesh.world.size,
            all_flops=forward + backward + again,
            all_again_flops=again,
            model_params=params,
            by_stage=tuple((int(f), int(b)) for f, b, *_ in sums.tolist()) if stage.size > 1 else (),
        )

    def _milliseconds(self, name: str) -> float:
        timers = self._engine._parts.report.timers
        return timers(name).elapsed(reset=False) if timers.has_timer(name) else 0.0

    def _own_params(self) -> int:
        """Elements of the whole model that this rank answers for: over all ranks each is counted once."""
        parts = self._engine._parts
        mesh, cuts = parts.mesh, parts.cuts
        is_first = mesh.zero_group.rank == 0 and mesh.axis("tensor").rank == 0
        is_first_with_experts = mesh.expert_zero_group.rank == 0 and mesh.axis("tensor").rank == 0
        total = 0
        for name, param in self._engine.module.named_parameters():
            if name in parts.stage.stored_elsewhere:
                continue
            is_of_rank = parts.of_experts(name) and not cuts.is_along("expert", name)
            if is_first_with_experts if is_of_rank else is_first:
                total += torch.Size(cuts.shape(name, whole_shape(param))).numel()
        return total


def refuse_unwritable(output_file: str | None) -> None:
    """Folders on the way to the report are made; found at the start, a fault costs no training.

    Raises:
        ConfigError: the file cannot be written.
    """
    if output_file is None:
        return
    path = Path(output_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cause = str(error)
    else:
        is_fit = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
        cause = "" if is_fit else "it is a folder" if path.is_dir() else "no permission to write"
    if cause:
        raise ConfigError(
            f"flops_profiler.output_file={output_file!r}: cannot be written ({cause}); needed a file in a folder that the "
            "first rank can write to. Name another one, or leave it out for standard output."
        )


def _say_missed(step: int, rank: int) -> None:
    if rank == 0:
        logger.warning(
            "flops_profiler.profile_step=%d: this engine never trained that step from its beginning to its end, so there is "
            "no profile. Name a step that the run will do; the first one is 0.",
            step,
        )
