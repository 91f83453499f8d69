"""AutoEP: experts of a model that knows nothing of ranks, spread over them (`expert_parallel`).

    block of the model          before                          with autoep_size 4, on expert-parallel rank 1
      gate (the model's own)    logits -> experts, weights      the same
      experts                   gate_up_proj (8, 2I, M)         gate_up_proj (2, 2I, M): experts 2 and 3
                                down_proj    (8, M, I)          down_proj    (2, M, I)

    experts(hidden, experts of each token, weights):  sort rows by expert --all-to-all--> products --back--> weigh, add

Only the module of stacked experts changes: its class becomes a subclass that is also `SpreadExperts`, so names, hooks and
`isinstance` stay. Which experts a token sees, shared experts and the loss are the model's own.

Lives here: finding such modules, and their forward. Does not live here: arithmetic of one rank's experts (`moe.stacked`),
moving rows (`moe.dispatch`), storing the stacked tensors as one (`engine`). `deepspeed.initialize` calls `apply_auto_ep`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.utils import note_part
from deepspeed.common.logging import log_dist, warn_once
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.moe.dispatch import Exchange, Ways, from_rows, rows_of_experts, to_rows
from deepspeed.moe.experts import expert_group_name
from deepspeed.moe.gating import pairs_of
from deepspeed.moe.remaking import remaking
from deepspeed.moe.stacked import NotStackedError, Stacks, is_close, run_experts, stacks_of, two_tokens
from deepspeed.sharding import Cut
from deepspeed.topology import groups

if TYPE_CHECKING:
    from deepspeed.config.parallel import ExpertParallelConfig
    from deepspeed.topology.mesh import AxisGroup

__all__ = ["SpreadExperts", "apply_auto_ep"]


class SpreadExperts(nn.Module):
    """What a model's module of stacked experts becomes; made by `apply_auto_ep`.

    Attributes:
        num_experts: experts of the whole layer.
        ep_size: ranks that they are spread over.
        num_local_experts: experts of this rank, once `set_deepspeed_parallelism` was called.
    """

    is_deepspeed_moe_layer = True
    """What `has_moe_layers` and the engine ask; other libraries' modules have an `is_moe_layer` of another meaning."""

    num_experts: int
    ep_size: int
    num_local_experts: int
    stacks: Stacks
    _is_grouped: bool
    _axis: AxisGroup | None

    def adopt(self, stacks: Stacks, ep_size: int, *, is_grouped: bool) -> None:
        """Become what takes the place of `__init__`, which the model's own class has run."""
        self.num_experts = self.num_local_experts = stacks.num_experts
        self.ep_size, self.stacks, self._is_grouped, self._axis = ep_size, stacks, is_grouped, None

    @property
    def is_spread(self) -> bool:
        """Whether other ranks hold other experts of the layer."""
        return self.ep_size > 1

    @property
    def is_cut(self) -> bool:
        """Whether this rank's experts alone are left."""
        return self._axis is not None

    def mark(self) -> None:
        """Put the marks on the parameters; the engine does so again, because a deep copy of a model has lost them."""
        for param in self.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = expert_group_name(self.ep_size)  # type: ignore[attr-defined]

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Keep this rank's experts of those that are there; once. The current mesh has the expert axis.

        Args:
            use_data_before_expert_parallel_: the mesh says it already.

        Raises:
            UsageError: the ranks are others than those that the experts were spread over before.
        """
        if not self.is_spread:
            return
        axis = groups.get_current().axis("expert")
        axis.hops()  # all ranks are here now; the groups are made once for all layers
        if self._axis is not None:
            if (axis.rank, axis.size) != (self._axis.rank, self._axis.size):
                raise UsageError(
                    f"experts were spread over {self._axis.size} ranks before, this one being number {self._axis.rank}; now "
                    f"it is number {axis.rank} of {axis.size}. Build the model anew."
                )
            self._axis = axis
            return
        self._axis = axis
        self.num_local_experts = self.num_experts // self.ep_size
        first = self.first_expert
        for param in self.parameters():
            if param.shape[0] != self.num_experts:  # another layer has the same tensor, and has cut it
                continue
            param.data = param.detach()[first : first + self.num_local_experts].clone()

    @property
    def first_expert(self) -> int:
        """Number of this rank's first expert."""
        return 0 if self._axis is None else self._axis.rank * self.num_local_experts

    @property
    def cut_axis(self) -> str | None:
        """The axis whose ranks hold the parts that `cuts` describes; None before they do."""
        return "expert" if self.is_cut else None

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """Name of each parameter, and which of the whole layer's experts each rank holds: neighbours along dimension 0."""
        for name, param in self.named_parameters() if self.is_cut else ():
            slab = tuple(getattr(param, "ds_shape", param.shape))[1:]
            yield name, Cut.of_widths((self.num_experts, *slab), 0, [self.num_local_experts] * self.ep_size)

    def extra_repr(self) -> str:
        """Which experts are here."""
        return f"experts {self.first_expert} to {self.first_expert + self.num_local_experts - 1} of {self.num_experts}"

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return per token the weighted sum of what its experts made of it; all ranks of the expert axis must call it.

        Args:
            *args: hidden (..., M); the experts of each token, (T, K), `num_experts` for none; their weights, (T, K).
            **kwargs: the same by the names that the model's own module gives them.

        Raises:
            UsageError: experts are to be spread over ranks, and nobody said which.
        """
        given = {**dict(zip(self.stacks.arguments, args, strict=False)), **kwargs}
        hidden, index_TK, weight_TK = (given[name] for name in self.stacks.arguments)
        if self.is_spread and self._axis is None:
            raise UsageError("experts are to be spread over ranks, and it was not said which. Use deepspeed.initialize.")
        pairs = pairs_of(index_TK, self.num_experts)
        hidden_TM = hidden.reshape(-1, hidden.shape[-1])
        exchange = None
        if self._axis is None:
            rows_per_expert = rows_of_experts(pairs)
            ways = Ways(pairs, sum(rows_per_expert))
            rows = to_rows(hidden_TM, ways)
        else:
            exchange = Exchange(self._axis, pairs, self.num_local_experts)
            ways = Ways(pairs, exchange.leaving_rows, gradient_factor=self.ep_size)
            rows, rows_per_expert = exchange.there(to_rows(hidden_TM, ways)), exchange.rows_per_expert
        with remaking() as remade:
            if exchange is None:
                rows = remade.taken(rows, hidden_TM, ways.token_R)
            rows = run_experts(self, self.stacks, rows, rows_per_expert, is_grouped=self._is_grouped)
        if exchange is not None:
            rows = exchange.back(rows)
        weight_KT = weight_TK.T
        output_TM = from_rows(rows.to(torch.promote_types(rows.dtype, weight_KT.dtype)), weight_KT, ways)
        return output_TM.to(hidden.dtype).view(*hidden.shape[:-1], output_TM.shape[-1])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As torch's, with a word about what is not here."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_cut:
            note_part(destination, prefix, self.extra_repr())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take this rank's experts out of tensors of the whole layer."""
        for name, cut in self.cuts():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and tuple(value.shape) == cut.shape:
                state_dict[prefix + name] = value[self.first_expert : self.first_expert + self.num_local_experts]
        super()._load_from_state_dict(state_dict, prefix, *args)


@cache
def _spread_class(own: type[Any]) -> type[Any]:
    """A subclass that goes by the same name, so that what looks for modules by class name finds them."""
    return type(own.__name__, (SpreadExperts, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


# -- finding ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """What modules are looked for. None: whatever is there.

    Attributes:
        block: regular expression, found anywhere in the name of a block.
        experts: attribute of the block.
        router: attribute of the block that must be there too.
        first: attribute of the experts: weights that take tokens.
        last: attribute of the experts: weights that give them back.
        num_experts: of every layer.
    """

    block: str | None = None
    experts: str | None = None
    router: str | None = None
    first: str | None = None
    last: str | None = None
    num_experts: int | None = None


_DECODER = Search(block=r"(^|\.)layers\.\d+\.mlp$", experts="experts", router="gate")

PRESETS: dict[str, Search] = {
    "mixtral": replace(_DECODER, block=r"(^|\.)layers\.\d+\.(mlp|block_sparse_moe)$"),
    "qwen3_moe": _DECODER,
    "qwen3_5_moe": _DECODER,
    "deepseek_v2": _DECODER,
    "deepseek_v3": _DECODER,
    "minimax_m3": _DECODER,
}
"""Where families of models keep their experts, in transformers 5."""


def apply_auto_ep(model: nn.Module, config: ExpertParallelConfig) -> None:
    """Make the stacked experts of `model` ready to be spread over ranks. Call before `place_experts`; nothing is sent.

    Args:
        model: with all experts, equal on all ranks or not; the first ranks' values will count.
        config: nothing is done unless it is enabled.

    Raises:
        ArgumentError: there are no such experts, or `autoep_size` does not divide their number; also modules that were
            spread with another one before.
        UsageError: a module computes something else than its structure says.
    """
    if not config.enabled:
        return
    search = _search(model, config)
    found, unfit = _candidates(model, search)
    if not found:
        raise ArgumentError(_nothing_found(model, search, unfit))
    for name, reason in unfit.items():
        warn_once(("auto_ep", name), "expert_parallel: %r stays whole on every rank: it %s", name, reason)
    for name, (module, stacks) in found.items():
        if stacks.num_experts % config.autoep_size:
            raise ArgumentError(
                f"expert_parallel.autoep_size={config.autoep_size} with {stacks.num_experts} experts in {name!r}: each rank "
                "holds the same number, at least 1. Choose a size that divides the number of experts."
            )
        _refuse_other_size(name, module, config.autoep_size)
    if config.gate_up_impl == "fused" and not any(stacks.has_gate for _, stacks in found.values()):
        raise ArgumentError(
            f'expert_parallel.gate_up_impl="fused", but experts such as {next(iter(found))!r} have one first projection and '
            "no gate beside it. Leave it out."
        )
    for name, (module, stacks) in found.items():
        if isinstance(module, SpreadExperts):
            module.ep_size = config.autoep_size
            module.mark()
        else:
            _convert(name, module, stacks, config)
    log_dist(f"expert_parallel: {len(found)} layers of experts, each spread over {config.autoep_size} ranks")


def _search(model: nn.Module, config: ExpertParallelConfig) -> Search:
    """The preset, with what is written beside it."""
    preset = PRESETS[config.preset_model] if config.preset_model is not None else Search()
    written = {
        "block": config.moe_layer_pattern,
        "experts": config.expert_pattern,
        "router": config.router_pattern,
        "first": config.expert_w1,
        "last": config.expert_w2,
        "num_experts": _counted(model, config.num_experts_attr),
    }
    return replace(preset, **cast("dict[str, Any]", {key: value for key, value in written.items() if value is not None}))


def _counted(model: nn.Module, attribute: str | None) -> int | None:
    if attribute is None:
        return None
    count = getattr(getattr(model, "config", None), attribute, None)
    if not isinstance(count, int):
        raise ArgumentError(
            f"expert_parallel.num_experts_attr={attribute!r}: model.config.{attribute} is {count!r}, a number is needed. "
            "Leave the key out: the number is read from the weights."
        )
    return count


def _candidates(model: nn.Module, search: Search) -> tuple[dict[str, tuple[nn.Module, Stacks]], dict[str, str]]:
    """(Modules that can be spread, by name; those that look like it and cannot, with the reason)."""
    found: dict[str, tuple[nn.Module, Stacks]] = {}
    unfit: dict[str, str] = {}
    for name, attribute, module in _children_of_blocks(model, search):
        try:
            found[name] = (module, _stacks(module, search))
        except NotStackedError as error:
            if attribute == (search.experts or "experts"):
                unfit[name] = str(error)
    return found, unfit


def _children_of_blocks(model: nn.Module, search: Search) -> Iterator[tuple[str, str, nn.Module]]:
    """(Name, attribute, module) of what may be experts."""
    for block_name, block in model.named_modules():
        is_wanted = search.block is None or re.search(search.block, block_name)
        if not is_wanted or (search.router is not None and search.router not in dict(block.named_children())):
            continue
        for attribute, module in block.named_children():
            if search.experts in (None, attribute):
                yield (f"{block_name}.{attribute}" if block_name else attribute), attribute, module


def _stacks(module: nn.Module, search: Search) -> Stacks:
    if isinstance(module, SpreadExperts):
        return module.stacks
    stacks = stacks_of(module, search.first, search.last)
    if search.num_experts not in (None, stacks.num_experts):
        raise NotStackedError(f"has {stacks.num_experts} experts, where the model's config says {search.num_experts}")
    return stacks


def _nothing_found(model: nn.Module, search: Search, unfit: dict[str, str]) -> str:
    wanted = ", ".join(f"{key}={value!r}" for key, value in vars(search).items() if value is not None)
    near = "".join(f"\n  {name}: {reason}." for name, reason in list(unfit.items())[:5])
    return (
        f"expert_parallel.enabled, but {type(model).__name__} has no module of stacked experts"
        f"{f' ({wanted})' if wanted else ''}: one with weights of all experts in three-dimensional parameters and "
        f"forward(tokens, experts of each, weights), as transformers 5 builds them.{near}\n"
        "Leave preset_model and the patterns out, or correct them; put other experts into deepspeed.moe.layer.MoE."
    )


def _refuse_other_size(name: str, module: nn.Module, ep_size: int) -> None:
    if isinstance(module, SpreadExperts) and module.is_cut and module.ep_size != ep_size:
        raise ArgumentError(
            f"expert_parallel.autoep_size={ep_size}, but the experts of {name!r} were spread over {module.ep_size} ranks by "
            "an earlier deepspeed.initialize. Build the model anew, or give the same size."
        )


def _convert(name: str, module: nn.Module, stacks: Stacks, config: ExpertParallelConfig) -> None:
    own = type(module)
    sample = None if stacks.is_published else _sample(name, module, stacks)
    expected = None if sample is None else module(*sample)
    module.__class__ = _spread_class(cast("Any", own))
    made = cast("SpreadExperts", module)
    made.adopt(stacks, ep_size=1, is_grouped=config.use_grouped_mm)
    if sample is not None and not is_close(made(*sample), cast("Tensor", expected)):
        module.__class__ = own
        raise UsageError(
            f"expert_parallel: {own.__name__} ({name!r}) has weights like stacked experts, but computes something else than "
            f"act_fn of {stacks.first!r} (times the other half, if there are two), {stacks.last!r} and the weighted sum. "
            "Give it what Hugging Face's experts have (has_gate, is_transposed, _apply_gate), or leave its block out by "
            "moe_layer_pattern."
        )
    made.ep_size = config.autoep_size
    made.mark()


def _sample(name: str, module: nn.Module, stacks: Stacks) -> tuple[Tensor, Tensor, Tensor]:
    weights = cast("Tensor", getattr(module, stacks.first))
    if weights.is_meta or not weights.numel():
        raise UsageError(
            f"expert_parallel: {type(module).__name__} ({name!r}) does not say how it computes, and its weights are not "
            "here to try it. Build the model outside deepspeed.zero.Init and with values."
        )
    return two_tokens(module, stacks)
