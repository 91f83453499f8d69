"""AutoTP: cut a model that knows nothing of ranks over the tensor axis, in place.

    model, config --> rules (`plan`) --.
    attention, MLPs (`attention`,      +--> `Placement` of each layer --> layers become parts (`layers`, `experts`)
      `search`)                      --'    (which class, which spans)    blocks are told their heads (`attention.adapt`)
                                                                          dropout of parts (`randomness`)
                                                                          the loss over a cut vocabulary (`cross_entropy`)

Lives here: `apply_auto_tp`, in that order; `planning` decides, without touching the model. Called by
`deepspeed.initialize`, on all ranks of the axis, before states are built and experts are placed.
"""

from __future__ import annotations

import math

from torch import nn

from deepspeed import comm
from deepspeed.common.logging import log_dist
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sharding.cut import Cut
from deepspeed.tensor_parallel.attention import adapt
from deepspeed.tensor_parallel.cross_entropy import use_vocab_parallel_loss
from deepspeed.tensor_parallel.entry import Entry, OverlappedEntry
from deepspeed.tensor_parallel.experts import become_experts
from deepspeed.tensor_parallel.heads import Parts
from deepspeed.tensor_parallel.layers import ColumnLinear, CutLayer, RowLinear, become, sum_gradients
from deepspeed.tensor_parallel.planning import Block, Planned, plan_model
from deepspeed.tensor_parallel.randomness import OwnStream, has_dropout
from deepspeed.tensor_parallel.token_parts import hold_token_parts
from deepspeed.topology.mesh import AxisGroup

__all__ = ["apply_auto_tp", "cut_without_values"]


def apply_auto_tp(model: nn.Module, config: TensorParallelConfig, axis: AxisGroup, *, leaves_experts: bool = False) -> None:
    """Cut the layers of `model` over the ranks of `axis`; they all call it. Over one rank nothing is done.

    The first rank's weights count. Afterwards each rank holds parts: modules that do say so (`cut_axis`, `cuts()`), and
    optimizers must be made from the parameters as they then are. Call once for a model.

    Args:
        model: whole, on any device.
        config: rules, and what becomes of the output layer.
        axis: whose ranks share each layer: `mesh.axis("tensor")`.
        leaves_experts: stacked experts stay whole on these ranks: `expert_parallel` spreads them over others.

    Raises:
        ArgumentError: there is nothing to cut, or the rules cannot be followed; the text says what would do.
        UsageError: the model was cut before, or its parameters are sharded already.
    """
    if axis.size == 1:
        return
    _refuse_unfit(model)
    planned = plan_model(model, config, axis.size, leaves_experts=leaves_experts)
    _make_alike(model, axis)
    _Conversion(model, config, axis).run(planned)
    log_dist(
        f"tensor_parallel: {len(planned.placements) + len(planned.experts)} layers of {type(model).__name__} cut over "
        f"{axis.size} ranks" + (f"; {len(planned.whole)} blocks stay whole" if planned.whole else "")
    )


def cut_without_values(
    model: nn.Module, config: TensorParallelConfig, axis: AxisGroup, *, leaves_experts: bool = False
) -> None:
    """Cut a model on the meta device as `apply_auto_tp` would, for who looks at shapes alone. Nothing is sent.

    Raises:
        ArgumentError: as for `apply_auto_tp`.
    """
    _Conversion(model, config, axis).run(plan_model(model, config, axis.size, leaves_experts=leaves_experts))


def _refuse_unfit(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, CutLayer):
            raise UsageError(f"tensor_parallel: {name!r} was cut by an earlier deepspeed.initialize. Build the model anew.")
    for name, param in model.named_parameters():
        if param.is_meta:
            raise UsageError(
                f"tensor_parallel: parameter {name!r} is on the meta device, and parts are taken from values. Give it "
                "values first: build it without torch.device('meta'), or model.to_empty(device=...) and load_state_dict()."
            )
        shape = getattr(param, "ds_shape", None)
        if shape is not None and param.numel() != math.prod(shape):
            raise UsageError(
                f"tensor_parallel: parameter {name!r} is sharded by deepspeed.zero.Init, and parts are taken from the "
                "whole. Build the model outside zero.Init; ZeRO shards the parts afterwards."
            )


def _make_alike(model: nn.Module, axis: AxisGroup) -> None:
    """Give all ranks the first one's weights: parts must be of one whole."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.numel():
            sent = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            comm.broadcast(sent, src=axis.ranks[0], group=axis.group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)


class _Conversion:
    """Carries a plan out."""

    def __init__(self, model: nn.Module, config: TensorParallelConfig, axis: AxisGroup) -> None:
        self._model, self._axis = model, axis
        self._holds_token_parts = config.sequence_parallel
        self._entry_kind: type[Entry] = OverlappedEntry if config.tp_overlap_comm else Entry
        self._shapes = {id(param): tuple(param.shape) for param in model.parameters()}
        self._entries: dict[str, Entry] = {}
        self._groups: dict[tuple[int, ...], AxisGroup] = {}

    def run(self, planned: Planned) -> None:
        for block in planned.blocks:
            self._adapt(block)
        for name, placement in planned.placements.items():
            layer = self._model.get_submodule(name)
            attributes = dict(placement.attributes)
            if placement.kind is ColumnLinear:
                attributes["entry"] = self._entry(placement.entry or name)
            become(
                layer,
                placement.kind,
                self._axis,
                placement.parts,
                self._shapes,
                self._sharers(placement.parts),
                **attributes,
            )
        for name, parts in planned.experts.items():
            become_experts(name, self._model.get_submodule(name), parts, self._axis)
        for name in planned.summed:
            sum_gradients(self._model.get_submodule(name), self._axis)
        for name in (*planned.placements, *planned.experts):
            self._check_ties(name)
        if self._holds_token_parts:
            hold_token_parts(self._model, planned.blocks, self._axis)
        if planned.vocabulary_head is not None:
            use_vocab_parallel_loss(self._model, planned.vocabulary_head, self._axis)

    def _adapt(self, block: Block) -> None:
        module = self._model.get_submodule(block.name)
        if block.attention is not None and block.shares is not None:
            adapt(block.attention, block.shares, self._axis.rank)
        if has_dropout(module):
            columns = [self._model.get_submodule(name) for name in block.columns]
            OwnStream(self._axis.rank).attach(module, columns, self._model.get_submodule(block.row))

    def _entry(self, name: str) -> Entry:
        return self._entries.setdefault(name, self._entry_kind(self._axis))

    def _sharers(self, parts: Parts) -> AxisGroup | None:
        """The ranks with copies of what this one holds. Collective over them, at their first time."""
        extent = max((span.stop for spans in parts for span in spans), default=0)
        cut = Cut((extent,), 0, parts)
        if not cut.has_copies():
            return None
        places = cut.sharers(self._axis.rank)
        if len(places) == 1:
            return None
        ranks = tuple(self._axis.ranks[place] for place in places)
        if ranks == self._axis.ranks:
            return self._axis
        if ranks not in self._groups:
            group = comm.kept_group(ranks, is_local=True)
            self._groups[ranks] = AxisGroup(ranks, self._axis.ranks[self._axis.rank], group)
        return self._groups[ranks]

    def _check_ties(self, name: str) -> None:
        """A layer that shares a parameter that was cut must have been cut, too."""
        cut = self._model.get_submodule(name)
        own = {
            id(param)
            for key, param in cut.named_parameters(recurse=False)
            if key != "bias" or not isinstance(cut, RowLinear)
        }
        for other_name, other in self._model.named_modules(remove_duplicate=False):
            for key, param in other.named_parameters(recurse=False):
                if id(param) in own and not isinstance(other, CutLayer):
                    raise ArgumentError(
                        f"tensor_parallel: {name!r} is cut and shares {key!r} with {other_name!r}, which is not. Leave "
                        "both whole (partition_type 'skip'), or cut both."
                    )
