"""What goes into a checkpoint and comes back out: the engine's side. The disk is the checkpoint room's.

    save   masters (or weights), frozen weights, buffers, optimizer tensors --> Pieces, shared out over the ranks
           counters, schedule, loss scale, hyperparameters, data position   --> state
           random generators                                                --> rank_state, one per rank
    load   every name and shape is checked first; then values are read, each rank only what it holds

A weight is stored once, in the highest precision there is: `master/<name>` where the model is 16-bit, else `module/<name>`.
Both load into any engine, 16-bit or not.

Called by users as engine methods, on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.checkpoint import CheckpointReader, Piece, check_tags, names, open_checkpoint, resolve_tag, write_checkpoint
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.common.logging import get_logger
from deepspeed.config.secrets import without_secrets
from deepspeed.engine.random_state import get_random_state, set_random_state
from deepspeed.errors import ArgumentError, CheckpointError
from deepspeed.sharding import even_range
from deepspeed.zero.flat import place_of
from deepspeed.zero.gather import GatheredParameters
from deepspeed.zero.state_io import load_state, state_pieces, state_scalars

if TYPE_CHECKING:
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.engine.parts import EngineParts
    from deepspeed.topology.mesh import AxisGroup
    from deepspeed.zero.flat import FlatGroup
    from deepspeed.zero.optimizer import ZeroOptimizer

logger = get_logger(__name__)

_NAMES_SHOWN = 5


class CheckpointMembers:
    """Mixin of `DeepSpeedEngine`: saving and loading."""

    module: nn.Module
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    loaded_checkpoint_dp_world_size: int | None
    _parts: EngineParts
    _config: DeepSpeedConfig

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a whole checkpoint. Collective: all ranks call it.

        Args:
            save_dir: folder of all tags.
            tag: name of this one; `global_step<N>` if left out.
            client_state: the caller's own values; plain data, NumPy and torch values (see the checkpoint reference).
            save_latest: let `latest` name it.
            exclude_frozen_parameters: leave out parameters that do not require gradients.

        Returns:
            True.

        Raises:
            CheckpointError: on all ranks alike; what was on disk before is intact.
        """
        if not str(save_dir):
            raise ArgumentError("save_checkpoint(save_dir='') needs a folder. Give the one that holds all tags.")
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        rank, world_size = self._parts.mesh.rank, self._parts.mesh.world_size
        check_tags(tag, self._config.checkpoint.tag_validation, rank=rank, world_size=world_size)
        write_checkpoint(
            save_dir,
            tag,
            self._pieces(exclude_frozen_parameters),
            self._state(exclude_frozen_parameters),
            dict(client_state or {}),
            rank=rank,
            world_size=world_size,
            rank_state=get_random_state(),
            save_latest=save_latest,
        )
        return True

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
            CheckpointError: names or shapes do not fit; nothing was loaded.
        """
        rank, world_size = self._parts.mesh.rank, self._parts.mesh.world_size
        found = resolve_tag(load_dir, tag, rank=rank, world_size=world_size)
        if found is None:
            logger.warning("%s holds no file 'latest' and no tag was given: nothing was loaded.", load_dir)
            return None, None
        reader = open_checkpoint(load_dir, found, rank=rank, world_size=world_size)
        if custom_load_fn is not None:
            self._load_by(custom_load_fn, self._state_dict_of(reader))
        else:
            self._load_module(reader, strict=load_module_strict)
        if not load_module_only:
            self._load_training(reader, load_optimizer_states, load_lr_scheduler_states)
        self._forget_open_window()
        self.loaded_checkpoint_dp_world_size = reader.state["dp_world_size"]
        return str(Path(load_dir, found)), reader.client_state()

    # -- saving -------------------------------------------------------------------------------------------------------

    def _pieces(self, exclude_frozen: bool) -> Iterator[Piece]:
        partition = self._parts.partition
        replica = partition.replica_axis
        managed = {member.name for flat in partition.flats for member in flat.members}
        for flat in partition.flats:
            if not (exclude_frozen and not flat.kind.is_trained):
                yield from _flat_pieces(flat, replica)
        if self.optimizer is not None:
            for piece in state_pieces(self.optimizer.master, replica.size, replica.rank):
                name = names.optimizer_tensor(piece.member.name, piece.key)
                yield Piece(name, tuple(piece.shape), piece.start, piece.values)
        data = self._parts.mesh.data_parallel
        for number, (name, tensor) in enumerate(self._others(managed, exclude_frozen)):
            if number % data.size == data.rank:
                yield Piece.whole(names.module_tensor(name), tensor)

    def _others(self, managed: set[str], exclude_frozen: bool) -> Iterator[tuple[str, Tensor]]:
        """Parameters that no optimizer holds, then persistent buffers."""
        for name, param in self.module.named_parameters():
            if name not in managed and (param.requires_grad or not exclude_frozen):
                yield name, param.detach()
        yield from _persistent_buffers(self.module)

    def _state(self, exclude_frozen: bool) -> dict[str, Any]:
        optimizer, loader = self.optimizer, self.training_dataloader
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self.micro_steps,
            "dp_world_size": self._parts.mesh.data_parallel.size,
            "zero_stage": self._config.zero_optimization.stage,
            "ds_config": without_secrets(self._config.raw),
            "shared_params": _shared_names(self.module),
            "has_frozen_parameters": not exclude_frozen,
            "optimizer": None if optimizer is None else _optimizer_state(optimizer, self._parts.partition.shard_axis),
            "loss_scaler": self._parts.loss_guard.scaler.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "data": loader.state_dict() if loader is not None else None,
        }

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load_module(self, reader: CheckpointReader, *, strict: bool) -> None:
        flats = self._parts.partition.flats
        managed = {member.name for flat in flats for member in flat.members}
        others = dict(self._others(managed, exclude_frozen=False))
        shapes = {m.name: tuple(shape) for flat in flats for m, shape in zip(flat.members, flat.shapes, strict=True)}
        shapes.update((name, tuple(tensor.shape)) for name, tensor in others.items())
        stored = self._fitting(reader, shapes, strict=strict)
        with torch.no_grad(), ExitStack() as stack:
            for flat in flats:
                stack.enter_context(flat.replacing())
                for f in flat.own_fragments():
                    name = flat.members[f.index].name
                    if name in stored:
                        values = reader.read(stored[name], f.param_start, f.numel)
                        flat.own_master(f.buffer_start, f.buffer_start + f.numel).copy_(values)
                if not self._config.zero_optimization.load_from_fp32_weights:
                    flat.round_masters()
            for name, tensor in others.items():
                if name in stored:
                    tensor.copy_(reader.read(stored[name]).view(tensor.shape))

    def _fitting(self, reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], *, strict: bool) -> dict[str, str]:
        """Name of each weight and buffer that the model and the checkpoint both have -> the stored tensor."""
        stored = _weights_in(reader)
        frozen_may_lack = not reader.state["has_frozen_parameters"]
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        missing = sorted(n for n in shapes if n not in stored and not (frozen_may_lack and n in frozen))
        extra = sorted(n for n in stored if n not in shapes)
        if strict and (missing or extra):
            raise CheckpointError(
                f"checkpoint {reader.folder} does not fit the model: it lacks {_some(missing)} and has {_some(extra)} that "
                "the model does not have. Build the same model, or pass load_module_strict=False to load what fits."
            )
        fitting = {name: stored[name] for name in shapes if name in stored}
        for name, tensor in fitting.items():
            if shapes[name] != reader.shape(tensor):
                raise CheckpointError(
                    f"{name!r} has shape {shapes[name]} in the model and {reader.shape(tensor)} in checkpoint "
                    f"{reader.folder}. Build the model with the sizes it was saved with."
                )
        return fitting

    def _masters_from_parameters(self) -> None:
        for flat in self._parts.partition.trained:
            flat.adopt_all()

    def _load_training(self, reader: CheckpointReader, with_optimizer: bool, with_schedule: bool) -> None:
        state = reader.state
        if with_optimizer and self.optimizer is not None and state["optimizer"] is not None:
            _load_optimizer(self.optimizer, reader)
            self._parts.loss_guard.scaler.load_state_dict(state["loss_scaler"])
        if with_schedule and self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.skipped_steps = state["skipped_steps"]
        self._parts.accumulation.restart(state["micro_steps"])
        if self.training_dataloader is not None and state["data"] is not None:
            self.training_dataloader.load_state_dict(state["data"])
        set_random_state(reader.rank_state(self._parts.mesh.rank))

    def _forget_open_window(self) -> None:
        """Gradients and losses from before the load belong to other weights."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._parts.accumulation.close_window()
        self._parts.loss_guard.reset()
        self._parts.report.close_window()

    def _state_dict_of(self, reader: CheckpointReader) -> dict[str, Tensor]:
        return {n: reader.read(stored).view(reader.shape(stored)) for n, stored in _weights_in(reader).items()}

    # -- whole models -------------------------------------------------------------------------------------------------

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict, frozen parameters left out on request."""
        into: dict[str, Any] = {} if destination is None else destination
        state_dict = self.module.state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state_dict.pop(prefix + name, None)
        return state_dict

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., Any] | None = None
    ) -> None:
        """Load weights into the module and its masters. All ranks call it, with the same weights.

        Raises:
            CheckpointError: `strict`, and names or shapes differ.
        """
        if custom_load_fn is not None:
            self._load_by(custom_load_fn, state_dict)
            return
        sharded = self._sharded_places()
        whole = {name: value for name, value in state_dict.items() if name not in sharded}
        found = self.module.load_state_dict(whole, strict=strict and not sharded)
        missing = sorted(set(found.missing_keys) - (sharded.keys() & state_dict.keys()))
        if strict and (missing or found.unexpected_keys):
            raise CheckpointError(
                f"the state dict does not fit the model: it lacks {_some(missing)} and has "
                f"{_some(list(found.unexpected_keys))} that the model does not have. Pass strict=False to load what fits."
            )
        for name, (flat, position) in sharded.items():
            if name in state_dict:
                shape = flat.shapes[flat.layout.slots[position].index]
                if state_dict[name].shape != shape:
                    raise CheckpointError(
                        f"{name!r} has shape {tuple(shape)} in the model and {tuple(state_dict[name].shape)} in the state "
                        "dict. Build the model with the sizes it was saved with."
                    )
                flat.write_parameter(position, state_dict[name])
        self._masters_from_parameters()

    def _load_by(self, custom_load_fn: Callable[..., Any], state_dict: Mapping[str, Any]) -> None:
        """Let the caller's function copy weights; sharded parameters are whole meanwhile, and rank 0's values count."""
        with GatheredParameters(list(self.module.parameters()), modifier_rank=self._parts.mesh.data_parallel.ranks[0]):
            custom_load_fn(src=state_dict, dst=self.module)
        self._masters_from_parameters()

    def _sharded_places(self) -> dict[str, tuple[FlatGroup, int]]:
        """Every name of a sharded parameter (tied ones have several) -> where it lives."""
        places = {name: place_of(param) for name, param in self.module.named_parameters(remove_duplicate=False)}
        return {name: place for name, place in places.items() if place is not None and place[0].is_sharded}

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The model's weights as the model holds them, on the CPU, on the first rank; None on the others.

        Collective where parameters are sharded: they are gathered unit by unit, and only the first rank keeps them.
        """
        is_first = self._parts.mesh.rank == 0
        gathered: dict[int, Tensor] = {}
        for flat in self._parts.partition.sharded:
            if flat.kind.is_trained or not exclude_frozen_parameters:
                for member, value in flat.gathered():
                    if is_first:
                        gathered[id(member.param)] = value.to("cpu", copy=True)
        if not is_first:
            return None
        whole = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        names_of = {name: id(param) for name, param in self.module.named_parameters(remove_duplicate=False)}
        for name, key in names_of.items():
            if name in whole and key in gathered:
                whole[name] = gathered[key]
        state_dict: dict[str, Tensor] = clone_tensors_for_torch_save(whole)
        return state_dict

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """As `_consolidated_16bit_state_dict`, for sharded parameters.

        Raises:
            ArgumentError: below stage 3.
        """
        stage = self._config.zero_optimization.stage
        if stage != 3:
            raise ArgumentError(
                f"_zero3_consolidated_16bit_state_dict() at ZeRO stage {stage}: parameters are whole below stage 3. Use "
                "_consolidated_16bit_state_dict(), or module.state_dict()."
            )
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's weights alone, as one file that plain PyTorch loads with `weights_only=True`.

        Collective: all ranks call it, and the file is there when it returns.

        Returns:
            True.

        Raises:
            ArgumentError: parameters are sharded and the config does not allow to gather them; nothing is written.
        """
        zero = self._config.zero_optimization
        if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save:
            raise ArgumentError(
                "save_16bit_model() at ZeRO stage 3 brings the whole model together on the first rank's host, which "
                'stage3_gather_16bit_weights_on_model_save=false forbids: nothing was written. Set "zero_optimization": '
                '{"stage3_gather_16bit_weights_on_model_save": true}, or use save_checkpoint().'
            )
        state_dict = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state_dict is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            aside = Path(save_dir, f".{save_filename}.writing")
            torch.save(state_dict, aside)
            aside.replace(Path(save_dir, save_filename))  # a kill leaves the old file or the new one
        comm.barrier()
        return True

    save_fp16_model = save_16bit_model


def _flat_pieces(flat: FlatGroup, replica: AxisGroup) -> Iterator[Piece]:
    """This rank's share of what the flat group holds in full precision."""
    name_of = names.master_tensor if flat.has_own_masters else names.module_tensor
    for f in flat.own_fragments(*even_range(flat.layout.shard_numel, replica.size, replica.rank)):
        member = flat.members[f.index]
        values = flat.own_master(f.buffer_start, f.buffer_start + f.numel)
        yield Piece(name_of(member.name), tuple(flat.shapes[f.index]), f.param_start, values)
    if replica.rank == flat.axis.rank == 0:
        for member, shape in zip(flat.members, flat.shapes, strict=True):
            if shape.numel() == 0:
                yield Piece.whole(name_of(member.name), flat.values.new_empty(shape))


def _optimizer_state(optimizer: ZeroOptimizer, axis: AxisGroup) -> dict[str, Any]:
    """Collective over the shard axis: each rank knows the counters of what it holds a part of."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    scalars = state_scalars(optimizer.master)
    if axis.size > 1:
        of_ranks: list[Any] = [None] * axis.size
        comm.all_gather_object(of_ranks, scalars, group=axis.group)
        scalars = {name: plain for each in of_ranks for name, plain in each.items()}
    return {"class": type(optimizer.optimizer).__name__, "groups": groups, "scalars": scalars}


def _family(class_name: str) -> str:
    """Optimizers whose state means the same: FusedAdam, DeepSpeedCPUAdam, Adam and AdamW are one family."""
    return class_name.removeprefix("Fused").removeprefix("DeepSpeedCPU").replace("AdamW", "Adam")


def _load_optimizer(optimizer: ZeroOptimizer, reader: CheckpointReader) -> None:
    stored, name = reader.state["optimizer"], type(optimizer.optimizer).__name__
    if _family(stored["class"]) != _family(name):
        raise CheckpointError(
            f"checkpoint {reader.folder} holds the state of {stored['class']}, which {name} cannot use. Build the "
            f"engine with {stored['class']}, or pass load_optimizer_states=False."
        )
    if len(stored["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"checkpoint {reader.folder} has {len(stored['groups'])} parameter groups, the optimizer "
            f"{len(optimizer.param_groups)}. Build the optimizer with the same groups, or pass load_optimizer_states=False."
        )
    keys: dict[str, list[str]] = {}
    for name in reader.names("optimizer/"):
        param_name, key = names.split_optimizer_tensor(name)
        keys.setdefault(param_name, []).append(key)
    load_state(
        optimizer.master,
        keys=lambda name: keys.get(name, []),
        read=lambda name, key, start, numel: reader.read(names.optimizer_tensor(name, key), start, numel),
        scalars=stored["scalars"],
        groups=stored["groups"],
    )


def _weights_in(reader: CheckpointReader) -> dict[str, str]:
    """Name of each weight or buffer -> the stored tensor of highest precision."""
    prefixes = (names.module_tensor(""), names.master_tensor(""))
    return {name.removeprefix(prefix): name for prefix in prefixes for name in reader.names(prefix)}


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    stored = set(module.state_dict(keep_vars=True))
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def _shared_names(module: nn.Module) -> dict[str, str]:
    """Second and later names of tied parameters -> their first name."""
    first = {id(p): name for name, p in module.named_parameters()}
    return {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False) if first[id(p)] != n}


def _some(found: list[str]) -> str:
    shown = ", ".join(map(repr, found[:_NAMES_SHOWN])) or "nothing"
    return shown + (f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else "")
