"""What comes out of a checkpoint: the engine's side of a load, from any layout (`checkpoint.source.CheckpointSource`).

    every name and shape is checked first; then values are read, each rank only what it holds

Does not live here: saving (`saving`), state dicts of whole models (`whole_model`). Called by users as engine methods, on all
ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from deepspeed.checkpoint import CheckpointSource, open_checkpoint, resolve_tag
from deepspeed.checkpoint.agreement import ranks_of, together
from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.tags import hint_for
from deepspeed.checkpoint.renamed import under_tied_names
from deepspeed.checkpoint.save.node_load import open_on_nodes
from deepspeed.checkpoint.save.tiers import choose_load_dir, load_places
from deepspeed.checkpoint.source import OptimizerState
from deepspeed.common.logging import get_logger, warn_once
from deepspeed.engine.own_state import OwnState, fitting_own_state
from deepspeed.engine.random_state import set_random_state, start_alike
from deepspeed.engine.stage_facts import ModelNames, agreed, names_of_model
from deepspeed.engine.weights import extra_state, persistent_buffers, set_extra_state, some_names, unmanaged_parameters
from deepspeed.errors import CheckpointError
from deepspeed.offload.heap import give_back_freed
from deepspeed.zero.state_io import agree_on_scalars, load_state

if TYPE_CHECKING:
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.engine.cuts import Cuts
    from deepspeed.engine.parts import EngineParts
    from deepspeed.zero.optimizer import ZeroOptimizer

logger = get_logger(__name__)

_EXPERTS = ".deepspeed_experts."  # in the name of each of their parameters


class LoadingMembers:
    """Mixin of `DeepSpeedEngine`: loading."""

    module: nn.Module
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    loaded_checkpoint_dp_world_size: int | None
    _parts: EngineParts
    _config: DeepSpeedConfig
    _load_by: Callable[[Callable[..., Any], Mapping[str, Any]], None]

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Bring a checkpoint back, whatever number of ranks wrote it. Collective: all ranks call it.

        Args:
            load_dir: folder of all tags.
            tag: which one; the one `latest` names if left out.
            load_module_strict: names of the model and of the checkpoint must be the same.
            load_optimizer_states: also moments, counters of the optimizer and the loss scale.
            load_lr_scheduler_states: also the schedule.
            load_module_only: weights and buffers, nothing else.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead of copying the weights.

        Returns:
            (path of the checkpoint, client state), or (None, None) with a warning when there is no `latest` and no tag.

        Raises:
            CheckpointNotFoundError: no such tag; the text lists those there are.
            CheckpointDamagedError: a file differs from what was written; nothing was loaded.
            CheckpointError: names or shapes do not fit; or the last save had failed in the background. Nothing was loaded.
            UsageError: a newer engine has the parameters.
        """
        self._parts.require_owned()
        self._parts.checkpointing.saver.wait()
        began = time.monotonic()
        opened = self._open(Path(load_dir), None if tag is None else str(tag))
        if opened is None:
            hint = hint_for(load_dir)
            logger.warning("%s holds no file 'latest' and no tag was given: nothing was loaded. %s", load_dir, hint)
            return None, None
        load_dir, source = opened
        with torch.inference_mode(False), torch.no_grad():
            self._load(
                source,
                strict=load_module_strict,
                with_optimizer=load_optimizer_states and not load_module_only,
                with_schedule=load_lr_scheduler_states,
                only_module=load_module_only,
                custom_load_fn=custom_load_fn,
            )
        self._forget_open_window()
        give_back_freed(self._config.zero_optimization)
        self.loaded_checkpoint_dp_world_size = source.state["dp_world_size"]
        self._parts.report.log.checkpoint("load", source.tag, self.global_steps, began, None, is_async=False)
        return str(Path(load_dir, source.tag)), source.client_state()

    @staticmethod
    def load_moe_state_dict(
        checkpoint_path: str | os.PathLike[str],
        tag: str,
        state_dict: dict[str, Tensor],
        old_moe_load: bool = False,
        model: nn.Module | None = None,
        mpu: Any = None,
        num_experts: Any = 1,
        checkpoint_engine: Any = None,
    ) -> None:
        """Add the experts of a checkpoint, the original's or ours, to `state_dict`, under their numbers in the whole layer.

        Each rank reads for itself.

        Args:
            checkpoint_path: folder of all tags.
            tag: which one.
            state_dict: gets the experts.
            old_moe_load: accepted; the files say themselves how old they are.
            model: only experts that it holds on this rank; None: all.
            mpu: accepted; names are the same on all ranks.
            num_experts: accepted; the checkpoint says it.
            checkpoint_engine: accepted.

        Raises:
            CheckpointError: files are missing or damaged.
        """
        source = open_checkpoint(Path(checkpoint_path), tag)
        held = None if model is None else model.state_dict().keys()
        for name, stored in _weights_in(source).items():
            if _EXPERTS in name and (held is None or name in held):
                state_dict[name] = source.read(stored).view(source.shape(stored))

    def _load(
        self,
        source: CheckpointSource,
        *,
        strict: bool,
        with_optimizer: bool,
        with_schedule: bool,
        only_module: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> None:
        """See that everything fits, then load. What can be refused is refused before any value changes."""
        holders = self._parts.mesh.pipe_expert
        model = names_of_model(self._own_shapes(), self._parts.partition.group_names, holders)
        source = under_tied_names(source.with_members(model.members), self._parts.stage.tied_layers)

        def check() -> tuple[dict[str, str] | None, Callable[[], None] | None]:
            stored = None if custom_load_fn is not None else self._fitting(source, model, strict=strict)
            return stored, self._fitting_optimizer(source, model) if with_optimizer else None

        stored, optimizer_load = agreed(check, holders)
        rank_state = self._rank_state_in(source, only_module=only_module)
        is_as_saved = self._has_ranks_of(source)
        own = cast(OwnState, rank_state if is_as_saved else {})
        own = fitting_own_state(own, self._parts.of_experts, self._parts.mesh.axis("expert").size)
        if stored is None:
            assert custom_load_fn is not None  # else there are fitting weights
            self._load_by(custom_load_fn, self._state_dict_of(source))
        else:
            self._load_module(source, stored, own.get("buffers", {}))
        set_extra_state(self.module, {**source.state["extra_state"], **own.get("extra_state", {})})
        if optimizer_load is not None:
            optimizer_load()
            if source.state["loss_scaler"]:
                self._parts.loss_guard.scaler.load_state_dict(source.state["loss_scaler"])
        if not only_module:
            self._load_progress(source, rank_state, with_schedule)
            if not is_as_saved:
                start_alike(self._parts.partition.axes.tensor)

    def _has_ranks_of(self, source: CheckpointSource) -> bool:
        """Whether as many ranks wrote it along the axes whose ranks hold the same, or see the same data."""
        mesh, sizes = self._parts.mesh, _ranks_of_a_sample(source)
        is_shared_alike = sizes == (mesh.axis("sequence").size, mesh.axis("tensor").size)
        return is_shared_alike and source.state["dp_world_size"] == mesh.data_parallel.size

    def _stored_rank(self, source: CheckpointSource) -> int:
        """The rank of the job that saved which had this one's place in the data: it drew the same samples.

        Of the ranks that share a sample the one of the same place, where there was one, else the first.
        """
        mesh, (sequences, tensors) = self._parts.mesh, _ranks_of_a_sample(source)
        sequence, tensor = mesh.axis("sequence"), mesh.axis("tensor")
        if (sequences, tensors) == (sequence.size, tensor.size):
            return mesh.rank
        first = mesh.rank // (sequence.size * tensor.size) * sequences * tensors
        place = sequence.rank if sequence.rank < sequences else 0
        return first + place * tensors + (tensor.rank if tensors == tensor.size else 0)

    def _rank_state_in(self, source: CheckpointSource, *, only_module: bool) -> dict[str, Any]:
        """What this rank stored for itself, as far as it is needed."""
        has_own = next(persistent_buffers(self.module), None) is not None or extra_state(self.module)
        return {} if only_module and not has_own else source.rank_state(self._stored_rank(source))

    def _open(self, load_dir: Path, tag: str | None) -> tuple[Path, CheckpointSource] | None:
        """Find the checkpoint that is meant, on this node's disk, in the tiers, or in `load_dir`, and open it there."""
        rank, world_size = self._parts.mesh.rank, self._parts.mesh.world_size
        ranks, universal = ranks_of(rank, world_size), self._config.checkpoint.load_universal
        if self._parts.checkpointing.nodes is not None and not universal:
            source = open_on_nodes(load_dir, tag, ranks, self._parts.checkpointing.nodes)
            return None if source is None else (load_dir, source)
        places = load_places(self._config.nebula)
        if places:
            load_dir = Path(str(together(ranks, lambda: None, lambda _: str(choose_load_dir(load_dir, tag, places)))))
        found = resolve_tag(load_dir, tag, rank=rank, world_size=world_size, prefer_universal=universal)
        return None if found is None else (load_dir, open_checkpoint(load_dir, found, rank=rank, world_size=world_size))

    def _load_module(self, source: CheckpointSource, stored: Mapping[str, str], own_buffers: Mapping[str, Tensor]) -> None:
        """Read every value that the model and the checkpoint both have; `stored` as `_fitting` gives it."""
        cuts = self._parts.cuts
        for flat in self._parts.partition.flats:
            with flat.replacing():  # one after another: what a rank meets in one, all know before they enter the next
                for f in flat.own_fragments():
                    name = flat.members[f.index].name
                    if name in stored:
                        with flat.editing_master(f.buffer_start, f.buffer_start + f.numel, reads=False) as place:
                            cuts.read(source, stored[name], name, f.param_start, place)
                if not self._config.zero_optimization.load_from_fp32_weights:
                    flat.round_masters()
        for name, tensor in self._others():
            if name in own_buffers and name in stored:
                tensor.copy_(own_buffers[name])
            elif name in stored:
                values = torch.empty(tensor.numel(), dtype=source.dtype(stored[name]))
                tensor.copy_(cuts.read(source, stored[name], name, 0, values).view(tensor.shape))

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers that no flat group manages."""
        managed = {member.name for flat in self._parts.partition.flats for member in flat.members}
        yield from unmanaged_parameters(self.module, managed)
        yield from persistent_buffers(self.module)

    def _own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each weight and buffer of this rank's module, as a checkpoint holds it."""
        flats = self._parts.partition.flats
        shapes = {m.name: tuple(shape) for flat in flats for m, shape in zip(flat.members, flat.shapes, strict=True)}
        shapes.update((name, tuple(tensor.shape)) for name, tensor in self._others())
        return {name: self._parts.cuts.shape(name, shape) for name, shape in shapes.items()}

    def _fitting(self, source: CheckpointSource, model: ModelNames, *, strict: bool) -> dict[str, str]:
        """Name of each weight and buffer that this rank's module and the checkpoint both have -> the stored tensor."""
        shapes = self._own_shapes()
        stored = _weights_in(source)
        frozen_may_lack = not source.state["has_frozen_parameters"]
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        missing = sorted(n for n in shapes if n not in stored and not (frozen_may_lack and n in frozen))
        extra = sorted(n for n in stored if n not in model.tensors)
        if strict and (missing or extra):
            raise CheckpointError(
                f"checkpoint {source.folder} does not fit the model: it lacks {some_names(missing)} and has "
                f"{some_names(extra)} that the model does not have. Build the same model, or pass "
                "load_module_strict=False to load what fits."
            )
        fitting = {name: stored[name] for name in shapes if name in stored}
        for name, tensor in fitting.items():
            if shapes[name] != source.shape(tensor):
                raise CheckpointError(
                    f"{name!r} has shape {shapes[name]} in the model and {source.shape(tensor)} in checkpoint "
                    f"{source.folder}. Build the model with the sizes it was saved with."
                )
        return fitting

    def _fitting_optimizer(self, source: CheckpointSource, model: ModelNames) -> Callable[[], None] | None:
        """What loads the optimizer's state, all checks done; None where one of the two has none."""
        stored = source.state["optimizer"]
        if self.optimizer is None or stored is None:
            return None
        return _fitting_optimizer(self.optimizer, source, stored, model.members, self._parts.cuts)

    def _load_progress(self, source: CheckpointSource, rank_state: Mapping[str, Any], with_schedule: bool) -> None:
        """Counters, schedule, place in the data, random generators; `rank_state` is what this rank stored for itself."""
        state = source.state
        if with_schedule and self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.skipped_steps = state["skipped_steps"]
        self._parts.accumulation.restart(state["micro_steps"])
        if self.training_dataloader is not None and state["data"] is not None:
            self.training_dataloader.load_state_dict(state["data"])
            self.training_dataloader.load_rank_state_dict((rank_state or source.rank_state(0)).get("data", {}))
        set_random_state(rank_state)

    def _forget_open_window(self) -> None:
        """Gradients and losses from before the load belong to other weights."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._parts.accumulation.close_window()
        self._parts.loss_guard.reset()
        self._parts.report.close_window()

    def _state_dict_of(self, source: CheckpointSource) -> dict[str, Tensor]:
        return {n: source.read(stored).view(source.shape(stored)) for n, stored in _weights_in(source).items()}


def _family(class_name: str) -> str:
    """Optimizers whose state means the same: FusedAdam, DeepSpeedCPUAdam, ZenFlowCPUAdam, Adam and AdamW are one."""
    return class_name.removeprefix("Fused").removeprefix("DeepSpeedCPU").removeprefix("ZenFlowCPU").replace("AdamW", "Adam")


def _fitting_optimizer(
    optimizer: ZeroOptimizer,
    source: CheckpointSource,
    stored: OptimizerState,
    group_names: Sequence[Sequence[str]],
    cuts: Cuts,
) -> Callable[[], None]:
    """See `LoadingMembers._fitting_optimizer`; `cuts` says what is a part of the stored."""
    keys: dict[str, list[str]] = {}
    for tensor in source.names("optimizer/"):  # first: a layout that cannot name them says why
        parameter, key = names.split_optimizer_tensor(tensor)
        keys.setdefault(parameter, []).append(key)
    name = type(optimizer.optimizer).__name__
    if stored["name"] is not None and _family(stored["name"]) != _family(name):
        raise CheckpointError(
            f"checkpoint {source.folder} holds the state of {stored['name']}, which {name} cannot use. Build the "
            f"engine with {stored['name']}, or pass load_optimizer_states=False."
        )
    if len(stored["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"checkpoint {source.folder} has {len(stored['groups'])} parameter groups, the optimizer "
            f"{len(optimizer.param_groups)}. Build the optimizer with the same groups, or pass load_optimizer_states=False."
        )
    groups = [stored["groups"][number] for number in _group_numbers(stored["members"], group_names)]
    agreed = agree_on_scalars(optimizer.master, lambda name: keys.get(name, []), stored["scalars"])
    return lambda: load_state(
        optimizer.master,
        keys=lambda name: keys.get(name, []),
        dtype=lambda name, key: source.dtype(names.optimizer_tensor(name, key)),
        read=lambda name, key, start, out: cuts.read(source, names.optimizer_tensor(name, key), name, start, out),
        agreed=agreed,
        groups=groups,
    )


def _group_numbers(stored: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> list[int]:
    """For each of the optimizer's groups, the stored group whose hyperparameters it takes.

    A group takes those of the stored group with the same parameters. Where the groups were cut otherwise, order decides.
    """
    of_names = {frozenset(group): number for number, group in enumerate(stored) if group}
    found = [of_names.get(frozenset(group)) for group in own]
    if None not in found and len({*found}) == len(found):
        return [number for number in found if number is not None]
    if len(own) > 1 and any(stored):
        warn_once(
            "parameter groups differ",
            "the optimizer's parameter groups hold other parameters than those of the checkpoint: hyperparameters (lr, "
            "weight_decay, ...) are taken group by group, in order. Build the same groups to be sure of them.",
        )
    return list(range(len(own)))


def _ranks_of_a_sample(source: CheckpointSource) -> tuple[int, int]:
    """How many ranks of the job that saved shared a sample: along the sequence, and along layers."""
    sizes = source.state.get("mesh", {})
    return sizes.get("sequence", 1), sizes.get("tensor", 1)


def _weights_in(source: CheckpointSource) -> dict[str, str]:
    """Name of each weight or buffer -> the stored tensor of highest precision."""
    prefixes = (names.module_tensor(""), names.master_tensor(""))
    return {name.removeprefix(prefix): name for prefix in prefixes for name in source.names(prefix)}
