"""What goes into a checkpoint: the engine's side of a save. The disk is the checkpoint room's.

    masters (or weights), frozen weights, buffers, optimizer tensors --> Pieces, shared out over the ranks
    counters, schedule, loss scale, hyperparameters, data position   --> state (`checkpoint.source.EngineState`)
    random generators, buffers that differ from the first rank's     --> rank_state, one per rank

A weight is stored once, in the highest precision there is: `master/<name>` where the model is 16-bit, else `module/<name>`.
Both load into any engine, 16-bit or not. Does not live here: loading (`loading`), whole models
(`whole_model`), writing at once or behind training (`checkpoint.save.background`).

Called by users as engine methods, on all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import JsonValue
from torch import Tensor, nn

from deepspeed.checkpoint import EngineState, Piece, decode_client_state, encode_client_state
from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.save.engines import CheckpointEngine
from deepspeed.checkpoint.save.write_share import Share
from deepspeed.checkpoint.save.writer import Content
from deepspeed.checkpoint.source import OptimizerState
from deepspeed.checkpoint.tag_agreement import compare_tags
from deepspeed.common.logging import warn_once
from deepspeed.config.secrets import without_secrets
from deepspeed.engine.own_state import OwnState, own_state
from deepspeed.engine.random_state import get_random_state
from deepspeed.engine.stage_facts import add_facts, facts_of_stage
from deepspeed.engine.weights import extra_state, persistent_buffers, shared_names, unmanaged_parameters
from deepspeed.errors import ArgumentError, CheckpointError
from deepspeed.sharding import even_range
from deepspeed.zero.master import BESIDE
from deepspeed.zero.state_io import join_scalars, scalars_of_slices, state_pieces, state_scalars

if TYPE_CHECKING:
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.engine.cuts import Cuts
    from deepspeed.engine.parts import EngineParts
    from deepspeed.zero.flat import FlatGroup
    from deepspeed.zero.optimizer import ZeroOptimizer


class SavingMembers:
    """Mixin of `DeepSpeedEngine`: saving."""

    module: nn.Module
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
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

        With `checkpoint.async_save` it returns when the model's own tensors have been copied; masters and optimizer state
        are copied while the next forward and backward run, and the copy is written while training goes on; see
        `wait_for_checkpoint`.

        Args:
            save_dir: folder of all tags.
            tag: name of this one; `global_step<N>` if left out.
            client_state: the caller's own values; plain data, NumPy and torch values (see the checkpoint reference).
            save_latest: let `latest` name it.
            exclude_frozen_parameters: leave out parameters that do not require gradients.

        Returns:
            True.

        Raises:
            CheckpointError: on all ranks alike; what was on disk before is intact. Also when the save before this one had
                failed in the background; then nothing of this one was done.
            UsageError: a newer engine has the parameters.
        """
        if not str(save_dir):
            raise ArgumentError("save_checkpoint(save_dir='') needs a folder. Give the one that holds all tags.")
        self._parts.require_owned()
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        if self._parts.accumulation.is_inside_window:
            warn_once(
                "save inside an accumulation window",
                "save_checkpoint() between two updates: gradients of the micro-batches since the last update are not saved, "
                "so a resumed run begins the next update anew. Save after a step() that updates.",
            )
        if self.optimizer is not None:
            self.optimizer.master.adopt_edits()
            self.optimizer.master.drain()
        own = own_state(self.module, self._parts.partition.axes, self._parts.cuts)
        content = Content(
            self._pieces(exclude_frozen_parameters),
            lambda: {**self._state(exclude_frozen_parameters)},
            lambda: _checked_client_state(client_state),
            lambda: _rank_state(self.training_dataloader, own()),
            lambda: [tag, self._own_scalars(), self._own_facts(exclude_frozen_parameters)],
            self._complete,
        )
        began = time.monotonic()
        started = self._parts.checkpointing.saver.save(Path(save_dir), tag, content, save_latest=save_latest)
        log, step = self._parts.report.log, self.global_steps
        log.checkpoint("save", tag, step, began, started.nbytes, is_async=started.is_held)
        return True

    def wait_for_checkpoint(self) -> None:
        """Block until no save goes on in the background. Call on all ranks; does nothing where none does.

        Raises:
            CheckpointError: on all ranks alike, the save failed; said once. What was on the disk before it is intact.
        """
        self._parts.checkpointing.saver.wait()

    @property
    def checkpoint_engine(self) -> CheckpointEngine:
        """What says where the bytes of checkpoints go; another may be assigned (see `checkpoint.save.engines`)."""
        return self._parts.checkpointing.engine

    @checkpoint_engine.setter
    def checkpoint_engine(self, value: CheckpointEngine) -> None:
        self._parts.checkpointing.replace_engine(value)

    def _pieces(self, exclude_frozen: bool) -> Iterator[Piece]:
        """This rank's share; without copies of what an earlier stage of a pipeline holds."""
        elsewhere = self._parts.stage.stored_elsewhere
        yield from self._managed_pieces(elsewhere, exclude_frozen=exclude_frozen)
        yield from self._other_pieces(elsewhere, exclude_frozen=exclude_frozen)

    def _managed_pieces(self, elsewhere: Set[str], *, exclude_frozen: bool) -> Iterator[Piece]:
        partition = self._parts.partition
        for flat in partition.flats:
            is_copy = any(member.name in elsewhere for member in flat.members)
            share = self._share(flat)
            if share.part is not None and not is_copy and not (exclude_frozen and not flat.kind.is_trained):
                yield from _flat_pieces(flat, self._parts.cuts, share.parts, share.part)
        if self.optimizer is not None:
            yield from self._state_pieces(self.optimizer, elsewhere)

    def _state_pieces(self, optimizer: ZeroOptimizer, elsewhere: Set[str]) -> Iterator[Piece]:
        for flat in self._parts.partition.trained:
            share = self._share(flat)
            if share.part is None:
                continue
            for piece in state_pieces(optimizer.master, share.parts, share.part, flat):
                if piece.member.name not in elsewhere:
                    name = names.optimizer_tensor(piece.member.name, piece.key)
                    is_private = not piece.key.startswith(BESIDE)
                    cuts, member = self._parts.cuts, piece.member.name
                    yield cuts.piece(name, member, piece.shape, piece.start, piece.values, is_private=is_private)

    def _share(self, flat: FlatGroup) -> Share:
        """How much of what ranks hold alike of `flat` this rank writes."""
        axes, shares = self._parts.partition.axes, self._parts.checkpointing.write_shares
        return shares.of(axes.of_kind(flat.kind).replica.ranks, () if flat.kind.is_part else axes.tensor.ranks)

    def _other_pieces(self, elsewhere: Set[str], *, exclude_frozen: bool) -> Iterator[Piece]:
        axes, shares, of_experts = self._parts.partition.axes, self._parts.checkpointing.write_shares, self._parts.of_experts
        cuts = self._parts.cuts
        managed = {member.name for flat in self._parts.partition.flats for member in flat.members}
        others = unmanaged_parameters(self.module, managed | elsewhere, exclude_frozen=exclude_frozen)
        for number, (name, param) in enumerate(others):
            data = (axes.experts if of_experts(name) else axes.dense).data
            share = shares.of(data.ranks, () if cuts.is_along("tensor", name) else axes.tensor.ranks)
            if number % share.parts == share.part:
                yield cuts.piece(names.module_tensor(name), name, param.shape, 0, param)
        for name, buffer in persistent_buffers(self.module):
            data = (axes.experts if of_experts(name) else axes.dense).data
            is_first = data.rank == 0 and (axes.tensor.rank == 0 or cuts.is_along("tensor", name))
            if is_first and name not in elsewhere:  # all of one rank: what two made of their batches is not one model
                yield cuts.piece(names.module_tensor(name), name, buffer.shape, 0, buffer)

    def _state(self, exclude_frozen: bool) -> EngineState:
        loader = self.training_dataloader
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self.micro_steps,
            "dp_world_size": self._parts.mesh.data_parallel.size,
            "mesh": {axis: size for axis, size in self._parts.mesh.sizes.items() if size > 1},
            "zero_stage": self._config.zero_optimization.stage,
            "ds_config": without_secrets(self._config.raw),
            "shared_parameters": shared_names(self.module),
            "frozen_parameters": [name for name, param in self.module.named_parameters() if not param.requires_grad],
            "has_frozen_parameters": not exclude_frozen,
            "buffers": [name for name, _ in persistent_buffers(self.module)],
            "extra_state": extra_state(self.module),
            "optimizer": self._optimizer_state(),
            "loss_scaler": self._parts.loss_guard.scaler.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "data": loader.state_dict() if loader is not None else None,
        }

    def _optimizer_state(self) -> OptimizerState | None:
        """Without the scalars where each rank knows some of them: `_complete` brings them together."""
        if self.optimizer is None:
            return None
        return {
            "name": type(self.optimizer.optimizer).__name__,
            "groups": [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups],
            "members": [list(names_of_group) for names_of_group in self._parts.partition.group_names],
            "scalars": {} if self._shares_scalars() else state_scalars(self.optimizer.master),
        }

    def _shares_scalars(self) -> bool:
        axes = self._parts.partition.axes
        is_spread = axes.dense.shard.size > 1 or axes.tensor.size > 1 or self._parts.mesh.pipe_expert.size > 1
        return self.optimizer is not None and is_spread

    def _own_facts(self, exclude_frozen: bool) -> JsonValue:
        """What rank 0 does not know of later stages of the pipeline and of others' experts; None: nothing to add."""
        mesh = self._parts.mesh
        is_copy = mesh.expert_zero_group.rank != 0 or mesh.axis("tensor").rank != 0
        if mesh.pipe_expert.rank == 0 or is_copy:
            return None
        is_others = self._parts.of_experts if mesh.axis("expert").rank > 0 else lambda name: True
        return facts_of_stage(self._state(exclude_frozen), is_others)

    def _own_scalars(self) -> list[JsonValue]:
        """Counters of the parameters that this rank holds a part of, slice by slice: the parameters, their counters.

        Of tensor-parallel ranks the first one's count, and for parameters of which it has nothing those of the next.
        """
        if self.optimizer is None or not self._shares_scalars():
            return []
        is_first, cuts = self._parts.partition.axes.tensor.rank == 0, self._parts.cuts
        of_slices = [
            ([name for name in of_slice if is_first or (cuts.is_along("tensor", name) and cuts.counts(name))], plain)
            for of_slice, plain in scalars_of_slices(self.optimizer.master)
        ]
        return [
            [cast("JsonValue", of_slice), encode_client_state(plain, f"optimizer state of {of_slice}")[0]]
            for of_slice, plain in of_slices
            if of_slice
        ]

    def _complete(self, state: JsonValue, shared: list[Any]) -> JsonValue:
        """On rank 0: compare the tags of all ranks, and put the optimizer's scalars of all into the encoded state."""
        compare_tags([tag for tag, *_ in shared], self._config.checkpoint.tag_validation)
        completed = cast("dict[str, Any]", state)
        for *_, facts in shared:
            if facts is not None:
                add_facts(completed, facts)
        if self._shares_scalars():
            of_slices = [
                (of_slice, decode_client_state(plain, _no_tensor)) for _, own, _ in shared for of_slice, plain in own
            ]
            completed["optimizer"]["scalars"] = encode_client_state(join_scalars(of_slices))[0]
        return completed


def _rank_state(loader: Any, own: OwnState) -> dict[str, Any]:
    """What differs by rank: random generators, what the order of the data was drawn from, what of the model is its own."""
    return {**get_random_state(), **({} if loader is None else {"data": loader.rank_state_dict()}), **own}


def _flat_pieces(flat: FlatGroup, cuts: Cuts, parts: int, part: int) -> Iterator[Piece]:
    """This rank's share of what the flat group holds in full precision."""
    is_wider = flat.kind.is_trained and flat.kind.master_dtype != flat.kind.param_dtype
    is_private = flat.masters is not None  # else the model's own weights, which the caller may write
    name_of = names.master_tensor if is_wider else names.module_tensor
    for f in flat.own_fragments(*even_range(flat.layout.shard_numel, parts, part)):
        member = flat.members[f.index]
        values = flat.deferred_master(f.buffer_start, f.buffer_start + f.numel)
        name, shape = name_of(member.name), flat.shapes[f.index]
        yield cuts.piece(name, member.name, shape, f.param_start, values, is_private=is_private)
    if part == flat.axis.rank == 0:
        for member, shape in zip(flat.members, flat.shapes, strict=True):
            if shape.numel() == 0:
                yield cuts.piece(name_of(member.name), member.name, shape, 0, flat.values.new_empty(shape))


def _checked_client_state(client_state: object) -> dict[str, Any]:
    if client_state is not None and not isinstance(client_state, Mapping):
        raise ArgumentError(
            f"client_state is a {type(client_state).__name__}; a dict is needed. Give your values under names, for example "
            'client_state={"value": ...}.'
        )
    return dict(client_state or {})


def _no_tensor(number: int) -> Tensor:
    raise CheckpointError(f"a counter of the optimizer is a tensor (number {number}) where a plain number is needed.")
