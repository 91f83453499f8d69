"""State dicts of the whole model, and the file of its weights alone.

Does not live here: checkpoints (`saving`, `loading`). Called by users and clients as engine methods, on all ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from deepspeed.checkpoint.agreement import ranks_of, together
from deepspeed.checkpoint.export.model_file import write_model_file
from deepspeed.checkpoint.utils import forget_parts
from deepspeed.engine.cut_weights import CutWeights, expert_parts_together, parts_together
from deepspeed.engine.expert_weights import ExpertWeights
from deepspeed.engine.stage_weights import StageWeights
from deepspeed.engine.weights import some_names
from deepspeed.engine.whole_weights import WholeWeights
from deepspeed.errors import ArgumentError, CheckpointError
from deepspeed.zero.flat import place_of
from deepspeed.zero.gather import GatheredParameters

if TYPE_CHECKING:
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.engine.parts import EngineParts
    from deepspeed.zero.flat import FlatGroup


class WholeModelMembers:
    """Mixin of `DeepSpeedEngine`: the model's weights in one place."""

    module: nn.Module
    _parts: EngineParts
    _config: DeepSpeedConfig

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict, frozen parameters left out on request; of experts and parts the own ones."""
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
            UsageError: a newer engine has the parameters.
        """
        self._parts.require_owned()
        if custom_load_fn is not None:
            self._load_by(custom_load_fn, state_dict)
            return
        sharded = self._sharded_places()
        cuts = self._parts.cuts
        here = {name: cuts.part(name, value) for name, value in state_dict.items() if name not in sharded}
        found = self.module.load_state_dict(here, strict=strict and not sharded)
        missing = sorted(set(found.missing_keys) - (sharded.keys() & state_dict.keys()))
        if strict and (missing or found.unexpected_keys):
            raise CheckpointError(
                f"the state dict does not fit the model: it lacks {some_names(missing)} and has "
                f"{some_names(list(found.unexpected_keys))} that the model does not have. "
                "Pass strict=False to load what fits."
            )
        for name, (flat, position) in sharded.items():
            if name in state_dict:
                shape = flat.shapes[flat.layout.slots[position].index]
                value = cuts.part(name, state_dict[name])
                if value.shape != shape:
                    raise CheckpointError(
                        f"{name!r} has shape {tuple(shape)} in the model and {tuple(value.shape)} in the state "
                        "dict. Build the model with the sizes it was saved with."
                    )
                flat.write_parameter(position, value)
        self._masters_from_parameters()

    def _load_by(self, custom_load_fn: Callable[..., Any], state_dict: Mapping[str, Any]) -> None:
        """Let the caller's function copy weights; sharded parameters are whole meanwhile, and rank 0's values count."""
        with GatheredParameters(list(self.module.parameters()), modifier_rank=self._parts.mesh.zero_group.ranks[0]):
            custom_load_fn(src=state_dict, dst=self.module)
        self._masters_from_parameters()

    def _masters_from_parameters(self) -> None:
        if self._parts.optimizer is not None:
            self._parts.optimizer.master.adopt_all()

    def _sharded_places(self) -> dict[str, tuple[FlatGroup, int]]:
        """Every name of a sharded parameter (tied ones have several) -> where it lives."""
        places = {name: place_of(param) for name, param in self.module.named_parameters(remove_duplicate=False)}
        return {name: place for name, place in places.items() if place is not None and place[0].is_sharded}

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The model's weights as the model holds them, on the CPU, on the first rank; None on the others.

        Collective where parameters are sharded or experts are spread over ranks: they are brought there one after the other,
        and only the first rank keeps them.
        """
        is_first = self._parts.mesh.rank == 0
        state_dict = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        weights = self._weights_of(state_dict)
        kept = {name: value.to("cpu", copy=True) for name, value in weights.values() if is_first}
        if not is_first:
            return None
        whole = copy.copy(state_dict)  # with its class and its attribute `_metadata`
        forget_parts(whole)
        whole.update({name: kept[entry.names[0]] for entry in weights.entries for name in entry.names})
        whole.update(weights.others)
        return whole

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

        Collective: all ranks call it, and the file is there when it returns. Sharded parameters are gathered bucket by
        bucket and written at once, so no rank ever holds more than one bucket besides its shards.

        Args:
            save_dir: folder of the file; created where it lacks.
            save_filename: a safetensors file is written where it ends in `.safetensors`.
            exclude_frozen_parameters: leave out parameters that do not require gradients.

        Returns:
            True.

        Raises:
            ArgumentError: parameters are sharded and the config does not allow to gather them; nothing is written.
            CheckpointError: on all ranks alike, the file could not be written; an earlier one is intact.
        """
        zero = self._config.zero_optimization
        if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save:
            raise ArgumentError(
                "save_16bit_model() at ZeRO stage 3 brings the whole model together on the first rank's host, which "
                'stage3_gather_16bit_weights_on_model_save=false forbids: nothing was written. Set "zero_optimization": '
                '{"stage3_gather_16bit_weights_on_model_save": true}, or use save_checkpoint().'
            )
        state_dict = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        weights = self._weights_of(state_dict)
        values = weights.values()
        ranks = ranks_of(self._parts.mesh.rank, self._parts.mesh.world_size)

        def take_part() -> None:
            try:
                if ranks.rank == 0:
                    path = Path(save_dir, save_filename)
                    write_model_file(path, weights.entries, values, others=weights.others, metadata=weights.metadata)
            finally:
                for _ in values:  # a rank that does not write, or cannot, still has to gather with the others
                    pass

        together(ranks, take_part)
        return True

    save_fp16_model = save_16bit_model

    def _weights_of(self, state_dict: Mapping[str, Any]) -> WholeWeights | CutWeights | StageWeights | ExpertWeights:
        """What goes into the file of the whole model, from this rank's state dict. Collective."""
        self._parts.require_owned()
        parts, metadata = self._parts, getattr(state_dict, "_metadata", None)
        if parts.mesh.axis("expert").size == 1:
            return parts_together(WholeWeights(self.module, state_dict, parts.partition.sharded, metadata), parts)
        of_kinds: tuple[dict[str, Any], ...] = ({}, {}, {})
        for name, value in state_dict.items():
            of_kinds[parts.of_experts(name) + parts.cuts.is_along("expert", name)][name] = value
        dense, experts, stacked = (
            WholeWeights(self.module, own, [f for f in parts.partition.sharded if f.kind.is_expert == bool(kind)], metadata)
            for kind, own in enumerate(of_kinds)
        )
        axis = parts.mesh.axis("expert")
        stacks = CutWeights(stacked, parts.cuts, axis, parts.device, is_sent=axis.ranks[0] == 0)
        return ExpertWeights(parts_together(dense, parts), stacks, expert_parts_together(experts, parts), axis, parts.device)
