"""From rules and structure to a placement of each layer; nothing of the model is changed.

    rules on a block's layers                   its structure known           not known
    -------------------------                   -----------------------       ---------------------------------
    none, search allowed                        cut at heads / evenly         stays whole
    all, none of them "whole"                   cut at heads / evenly         as the rules say, one by one
    some                                        refused                       as the rules say, one by one

Lives here: `plan_model`. Does not live here: rules (`plan`), blocks (`attention`, `search`), carrying out (`auto`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepspeed.common.logging import warn_once
from deepspeed.config.parallel import PartitionConfig, TensorParallelConfig
from deepspeed.errors import ArgumentError
from deepspeed.tensor_parallel.attention import Attention, UnclearError, attention_of
from deepspeed.tensor_parallel.experts import ExpertParts, expert_parts, find_stacked_experts
from deepspeed.tensor_parallel.heads import HeadShares, Parts, even_parts
from deepspeed.tensor_parallel.layers import ColumnLinear, CutLayer, RowLinear, VocabularyEmbedding, WidthEmbedding
from deepspeed.tensor_parallel.linears import in_features, input_dim, is_linear, out_features, output_dim, whole_shape
from deepspeed.tensor_parallel.plan import (
    Rule,
    first_match,
    rules_of_model,
    rules_of_preset,
    rules_of_rows,
    rules_of_specs,
    sections_of,
)
from deepspeed.tensor_parallel.search import Mlp, mlps_of

__all__ = ["Block", "Placement", "Planned", "plan_model"]


@dataclass(frozen=True)
class Placement:
    """What one layer becomes.

    Attributes:
        kind: its class.
        parts: spans of each rank.
        entry: what columns that may take the same input have in common.
        attributes: of the class.
    """

    kind: type[CutLayer]
    parts: Parts
    entry: str = ""
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Block:
    """Layers between which activations are parts.

    Attributes:
        name: of the module that runs them.
        columns: names of the layers that make parts.
        row: name of the layer that ends them.
        attention: where it is one.
        shares: its heads.
    """

    name: str
    columns: tuple[str, ...]
    row: str
    attention: Attention | None = None
    shares: HeadShares | None = None


@dataclass
class Planned:
    """The whole plan.

    Attributes:
        placements: by name of the layer.
        experts: by name of the module of stacked experts.
        blocks: in which layers lie.
        summed: names of modules that stay whole and see parts.
        whole: names of blocks that could have been cut, and why they are not.
        vocabulary_head: name of an output layer whose outputs stay parts.
    """

    placements: dict[str, Placement] = field(default_factory=dict)
    experts: dict[str, ExpertParts] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    vocabulary_head: str | None = None


def plan_model(model: nn.Module, config: TensorParallelConfig, ranks: int, *, leaves_experts: bool = False) -> Planned:
    """Decide. The same on all ranks.

    Args:
        model: whole.
        config: rules.
        ranks: that share each layer.
        leaves_experts: stacked experts stay whole on every rank, whatever rules say.

    Raises:
        ArgumentError: as for `apply_auto_tp`.
    """
    planner = _Planner(model, config, ranks, leaves_experts=leaves_experts)
    planner.check()
    planner.place_blocks()
    planner.place_experts()
    planner.place_rest()
    planner.place_vocabulary()
    for name, reason in planner.planned.whole.items():
        warn_once(("auto_tp", name), "tensor_parallel: %r stays whole on every rank: it %s", name, reason)
    if not planner.planned.placements and not planner.planned.experts:
        raise ArgumentError(planner.nothing_found())
    return planner.planned


class _Planner:
    def __init__(self, model: nn.Module, config: TensorParallelConfig, ranks: int, *, leaves_experts: bool) -> None:
        self.planned = Planned()
        self._model, self._config, self._ranks = model, config, ranks
        self._own = (
            config.partition_config if config.partition_config and config.partition_config.enabled else PartitionConfig()
        )
        self._grain = config.tensor_parallel.tp_grain_size
        self._modules = dict(model.named_modules())
        self._stacked, unfit = find_stacked_experts(self._modules)
        self.planned.whole.update({} if leaves_experts else unfit)
        self._leaves_experts = leaves_experts
        self._rules = self._all_rules()
        self._searches = self._own.use_default_specs and config.preset_model is None and not config.injection_policy_tuple

    def _all_rules(self) -> list[Rule]:
        model_type = getattr(getattr(self._model, "config", None), "model_type", None)
        rules = rules_of_specs(self._own, model_type)
        rules += rules_of_rows(_names_of_rows(self._config.injection_policy_tuple))
        if not self._own.use_default_specs:
            return rules
        if self._config.preset_model is not None:
            return [*rules, *rules_of_preset(self._config.preset_model)]
        plan = getattr(self._model, "_tp_plan", None)
        if isinstance(plan, dict) and plan:
            of_model, unknown = rules_of_model(plan)
            for style in sorted(set(unknown)):
                warn_once(
                    ("tp_plan", style), "tensor_parallel: the model's plan has layers of style %r: they stay whole", style
                )
            rules += of_model
        return rules

    # -- checks

    def check(self) -> None:
        """Refuse what cannot be followed."""
        config = self._config
        if config.replace_with_kernel_inject:
            raise ArgumentError(
                "tensor_parallel.replace_with_kernel_inject=True is for inference. Leave it out of a training config."
            )
        if config.vocab_parallel_ce_backend != "torch":
            raise ArgumentError(
                f"tensor_parallel.vocab_parallel_ce_backend={config.vocab_parallel_ce_backend!r}: Liger's kernel needs "
                'whole rows of logits, and each rank has a part of the vocabulary. Use "torch".'
            )
        if self._own.tp_size not in (None, self._ranks):
            raise ArgumentError(
                f"tensor_parallel.partition_config.tp_size={self._own.tp_size}, but {self._ranks} ranks share each layer "
                "(autotp_size). Leave it out."
            )
        for rule in self._rules:
            if rule.kind in ("column", "row") and rule.is_own:
                self._check_match(rule)

    def _check_match(self, rule: Rule) -> None:
        params = {
            name: param
            for name, param in self._model.named_parameters()
            if rule.pattern.search(name) or (param.dim() > 2 and rule.matches(name))
        }
        stacked = {name: tuple(param.shape) for name, param in params.items() if param.dim() > 2}
        for name, shape in stacked.items():
            self._check_stacked(rule, name, shape)
        matched = [name for name in self._modules if rule.matches(name)]
        for name in matched:
            if first_match(self._rules, name) is rule:
                self._check_layer(rule, name)
        if stacked or any(
            is_linear(each) or isinstance(each, nn.Embedding) for each in map(self._modules.get, matched) if each
        ):
            return
        if params:
            raise ArgumentError(
                f"{rule.source}: {rule.pattern.pattern!r} matches {_some(params)}, but not the weight of a linear layer or "
                "an embedding. Let the pattern match the weight; its bias goes with it."
            )
        raise ArgumentError(
            f"{rule.source}: {rule.pattern.pattern!r} matches no parameter of {type(self._model).__name__}, which has "
            f"{', '.join(name for name, _ in list(self._model.named_parameters())[:4])}, ... Correct the pattern, or "
            "leave it out."
        )

    def _check_stacked(self, rule: Rule, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a user's rule that a parameter of more than two dimensions cannot follow."""
        owner, _, key = name.rpartition(".")
        stacks = self._stacked.get(owner)
        if stacks is None:
            raise ArgumentError(
                f"{rule.source}: {name!r} has shape {shape}, and parameters of more than two dimensions are cut in modules "
                "of stacked experts alone: gate_up_proj or up_proj, and down_proj, with forward(tokens, experts of each, "
                f"weights). Let the pattern leave {owner!r} out."
            )
        needed = {stacks.first: "column", stacks.last: "row"}[key]
        if rule.kind != needed:
            raise ArgumentError(
                f"{rule.source}: partition_type={rule.kind!r} for {name!r} of stacked experts, where {stacks.first} makes "
                f"the parts and {stacks.last} sums them. Use partition_type={needed!r} for it."
            )
        if rule.shape is not None or rule.dim is not None or rule.gather_output:
            raise ArgumentError(
                f"{rule.source}: shape, partition_dim or gather_output for {name!r} of stacked experts, whose module says "
                "how gate and up lie in it. Leave them out."
            )

    def _check_layer(self, rule: Rule, name: str) -> None:
        """Refuse a user's rule that its layer cannot follow."""
        layer = self._modules[name]
        if not is_linear(layer):
            if isinstance(layer, nn.Linear):
                raise ArgumentError(
                    f"{rule.source}: {name!r} is of class {type(layer).__name__}, whose forward or weight is not that of "
                    "torch.nn.Linear, and is not cut. Cut plain layers inside of it, or use partition_type 'skip'."
                )
            return
        dim = output_dim(layer) if rule.kind == "column" else input_dim(layer)
        if rule.dim not in (None, dim):
            raise ArgumentError(
                f"{rule.source}.partition_dim={rule.dim} for {name!r}: partition_type {rule.kind!r} cuts dimension {dim} of "
                f"its weight of shape {whole_shape(layer)}. Write partition_dim={dim}, or leave it out."
            )

    def nothing_found(self) -> str:
        near = "".join(f"\n  {name}: it {reason}." for name, reason in list(self.planned.whole.items())[:5])
        return (
            f"tensor_parallel, {self._ranks} ranks, but no layer of {type(self._model).__name__} is cut: no rule matches, "
            f"it has no plan (tp_plan), and no block looks like attention or an MLP.{near}\n"
            "Say which layers are cut: tensor_parallel.partition_config.layer_specs = "
            '[{"patterns": [".*\\\\.fc1\\\\.weight$"], "partition_type": "column"}, '
            '{"patterns": [".*\\\\.fc2\\\\.weight$"], "partition_type": "row"}].'
        )

    # -- blocks

    def place_blocks(self) -> None:
        """Attention and MLPs."""
        self._leave_wrapped()
        for name in self._modules:
            if isinstance(self._modules[name], nn.MultiheadAttention) and self._searches:
                self.planned.whole[name] = "is torch.nn.MultiheadAttention, which reads its weights itself"
                continue
            self._place_attention(name)
            for mlp in mlps_of(self._model, name):
                if not self._modules.keys() >= set(mlp.members):
                    continue  # another block has the same layers, under names that come first
                if self._takes(mlp.members, f"the MLP {mlp.name!r}"):
                    self._place_mlp(mlp)

    def _leave_wrapped(self) -> None:
        """Blocks stay whole of which the model's plan would cut a layer that something was put around (an adapter)."""
        for name, module in self._modules.items():
            rule = first_match(self._rules, name)
            if rule is None or rule.is_own or not rule.needs_neighbours or not _is_wrapper(module):
                continue
            if any(self._is_cut_by_user(other) for other in self._modules if other.startswith(f"{name}.")):
                continue
            block, _, child = name.rpartition(".")
            linears = [each for each, layer in self._modules[block].named_children() if is_linear(layer)]
            kind = type(module).__name__
            reason = f"has {child!r} of class {kind}, no plain linear layer (layer_specs may cut what is in it)"
            self._leave(block, linears, reason)

    def _is_cut_by_user(self, name: str) -> bool:
        rule = first_match(self._rules, name)
        return rule is not None and rule.is_own and rule.kind in ("column", "row")

    def _place_attention(self, name: str) -> None:
        children = [child for child, module in self._modules[name].named_children() if is_linear(module)]
        rules = [first_match(self._rules, f"{name}.{child}" if name else child) for child in children]
        try:
            found = attention_of(self._model, name, sections=any(rule is not None and rule.shape for rule in rules))
            shares = None if found is None else found.shares(self._ranks)
        except UnclearError as reason:
            self._leave(name, children, str(reason), reason.cure)
            return
        if found is None or shares is None or not self._takes((*found.columns, found.row), f"the attention {name!r}"):
            return
        for column, parts in found.column_parts(shares).items():
            self._put(column, ColumnLinear, parts, entry=name, gather_output=False)
        self._put(found.row, RowLinear, shares.query_rows(found.head_dim), split_input=False)
        bias = found.position_bias()
        if bias is not None:
            self._put(bias, WidthEmbedding, shares.query_rows(1), gather_output=False)
        self.planned.summed.extend(found.norms)
        self.planned.blocks.append(Block(name, found.columns, found.row, found, shares))

    def _leave(self, name: str, children: Iterable[str], reason: str, cure: str | None = None) -> None:
        """Attention that is not understood stays whole, unless the user has said otherwise."""
        for child in children:
            full = f"{name}.{child}" if name else child
            rule = first_match(self._rules, full)
            if rule is not None and rule.is_own and rule.kind != "whole":
                raise ArgumentError(
                    f"{rule.source}: {full!r} cannot be cut: {name!r} {reason}. {f'{cure}, or use' if cure else 'Use'} "
                    "partition_type 'skip' for its layers."
                )
        self.planned.whole[name] = reason
        self._kept_whole(f"{name}.{child}" if name else child for child in children)

    def _kept_whole(self, names: Iterable[str]) -> None:
        for name in names:
            self._rules.insert(0, Rule(_exactly(name), "whole", "the structure of its block"))

    def _takes(self, members: tuple[str, ...], what: str) -> bool:
        """Whether a block is cut: see the picture."""
        if any(name in self.planned.placements for name in members):
            return False
        rules = [first_match(self._rules, name) for name in members]
        if all(rule is None for rule in rules):
            return self._searches
        if any(rule is None for rule in rules) and any(rule is not None and rule.source.endswith("tuple") for rule in rules):
            return True  # injection_policy_tuple names rows alone
        kinds = {name: None if rule is None else rule.kind for name, rule in zip(members, rules, strict=True)}
        *columns, row = kinds.values()
        if set(columns) == {"column"} and row == "row":
            return True
        if any(kind in ("column", "row") for kind in kinds.values()) and _is_half(columns, row):
            raise ArgumentError(
                f"tensor_parallel: of {what}, rules cut {_list(kinds, 'column', 'row')} and leave "
                f"{_list(kinds, None, 'whole')} whole. Its columns and its row go together: cut all of them, or none."
            )
        return False

    def _place_mlp(self, mlp: Mlp) -> None:
        row = self._modules[mlp.row]
        width = in_features(row)
        for name in mlp.columns:
            rule = first_match(self._rules, name)
            sections = (width,) * mlp.sections
            if rule is not None and rule.shape is not None:
                sections = sections_of(rule, name, out_features(self._modules[name])) or sections
            parts = even_parts(width, self._ranks, self._grain, sections)
            self._put(name, ColumnLinear, parts, entry=f"{mlp.name}:{mlp.columns[0]}", gather_output=False)
        self._put(mlp.row, RowLinear, even_parts(width, self._ranks, self._grain), split_input=False)
        self.planned.blocks.append(Block(mlp.name, mlp.columns, mlp.row))

    # -- experts

    def place_experts(self) -> None:
        """Stacked ones: their inner width is cut."""
        for name, stacks in self._stacked.items() if not self._leaves_experts else ():
            kinds = {f"{name}.{key}": self._kind_of_stack(f"{name}.{key}") for key in (stacks.first, stacks.last)}
            first, last = kinds.values()
            is_cut = self._searches if first is None and last is None else (first, last) == ("column", "row")
            if not is_cut and {first, last} & {"column", "row"}:
                raise ArgumentError(
                    f"tensor_parallel: of the experts {name!r}, rules cut {_list(kinds, 'column', 'row')} and leave "
                    f"{_list(kinds, None, 'whole')} whole. They go together: cut {stacks.first} as 'column' and "
                    f"{stacks.last} as 'row', or none."
                )
            if is_cut:
                self.planned.experts[name] = expert_parts(self._modules[name], stacks, self._ranks, self._grain)

    def _kind_of_stack(self, name: str) -> str | None:
        """What rules say of stacked weights, which have no `.weight` to their name."""
        rule = next((rule for rule in self._rules if rule.matches(name) or rule.pattern.search(name)), None)
        return None if rule is None else rule.kind

    # -- one by one

    def place_rest(self) -> None:
        """What rules say of layers outside known blocks."""
        unmatched = []
        for name, module in self._modules.items():
            is_embedding = isinstance(module, nn.Embedding)
            if name in self.planned.placements or not (is_embedding or is_linear(module)):
                self._sum_if_asked(name, module)
                continue
            rule = first_match(self._rules, name)
            if rule is None:
                unmatched += [] if is_embedding or self._is_head(name) else [name]
            elif rule.kind == "whole":
                self._sum_if_asked(name, module)
            elif is_embedding:
                self._place_embedding(name, module, rule)
            elif not self._is_head(name):
                self._place_linear(name, module, rule)
        self._refuse_halves()
        if self._own.strict_mode and (unmatched or self.planned.whole):
            names = [*unmatched, *self.planned.whole]
            raise ArgumentError(
                f"tensor_parallel.partition_config.strict_mode: no rule matches {', '.join(map(repr, names[:8]))}"
                f"{f' and {len(names) - 8} more' if len(names) > 8 else ''}. Add them to layer_specs, with partition_type "
                "'skip' for what stays whole."
            )

    def _refuse_halves(self) -> None:
        """Refuse a user's rules that make parts which nothing sums, or sum what nothing makes, outside of known blocks.

        Looked at in each item of a list of layers for itself. Where all is said is known when the model runs, not here: so
        this asks for one of each, and no more.
        """
        known = {name for block in self.planned.blocks for name in (*block.columns, block.row)}
        ends: dict[str, dict[str, str]] = {}
        for name, placement in self.planned.placements.items():
            rule = first_match(self._rules, name)
            if name in known or rule is None or not rule.is_own or not rule.needs_neighbours:
                continue
            if placement.kind in (ColumnLinear, RowLinear):
                ends.setdefault(self._item_of(name), {}).setdefault(rule.kind, name)
        for found in ends.values():
            for kind, other in (("column", "row"), ("row", "column")):
                if kind in found and other not in found:
                    rule = first_match(self._rules, found[kind])
                    assert rule is not None  # placed by it
                    alone = "gather_output: true" if kind == "column" else "partition_type 'skip'"
                    raise ArgumentError(
                        f"{rule.source}: {found[kind]!r} is a {kind}, and no layer beside it is a {other}: between the two "
                        f"activations are parts. Add a rule with partition_type {other!r} for the layer that "
                        f"{'takes its outputs' if kind == 'column' else 'makes its inputs'}, or use {alone} for this one."
                    )

    def _item_of(self, name: str) -> str:
        """The item of the outermost list of modules that a layer lies in, unless it is that item itself; else the model."""
        parts = name.split(".")
        for count in range(1, len(parts) - 1):
            if isinstance(self._modules[".".join(parts[:count])], nn.ModuleList):
                return ".".join(parts[: count + 1])
        return ""

    def _sum_if_asked(self, name: str, module: nn.Module) -> None:
        rule = first_match(self._rules, name) if any(True for _ in module.parameters(recurse=False)) else None
        if rule is not None and rule.sum_gradient and name not in self.planned.summed:
            parent = name.rpartition(".")[0]
            if not rule.is_own and parent not in {block.name for block in self.planned.blocks}:
                return  # its block stays whole
            self.planned.summed.append(name)

    def _place_linear(self, name: str, module: nn.Module, rule: Rule) -> None:
        entry = name.rpartition(".")[0]
        if rule.kind == "column":
            width = out_features(module)
            parts = even_parts(width, self._ranks, self._grain, sections_of(rule, name, width))
            self._put(name, ColumnLinear, parts, entry=f"{entry}:", gather_output=rule.gather_output)
        elif rule.kind == "row":
            width = in_features(module)
            parts = even_parts(width, self._ranks, self._grain, sections_of(rule, name, width))
            self._put(name, RowLinear, parts, split_input=rule.split_input)

    def _place_embedding(self, name: str, module: nn.Embedding, rule: Rule) -> None:
        dim = rule.dim if rule.dim is not None else self._own.embedding_partition_dim
        is_width = rule.kind == "width" or (rule.kind in ("column", "row", "embedding") and dim == 1)
        if module.max_norm is not None or module.sparse:
            raise ArgumentError(
                f"{rule.source}: embedding {name!r} has max_norm or sparse gradients, which need whole rows on every rank. "
                "Use partition_type 'skip' for it."
            )
        if is_width:
            self._put(name, WidthEmbedding, even_parts(module.embedding_dim, self._ranks), gather_output=True)
        else:
            self._put(name, VocabularyEmbedding, even_parts(module.num_embeddings, self._ranks))

    # -- the vocabulary

    def place_vocabulary(self) -> None:
        """The output layer, and the embedding that shares its weight."""
        heads = [name for name, module in self._modules.items() if is_linear(module) and self._is_head(name)]
        asked = self._config.vocab_parallel_lm_head
        if asked and not heads:
            raise ArgumentError(
                f"tensor_parallel.vocab_parallel_lm_head=True, but {type(self._model).__name__} has no linear layer named "
                f"{' or '.join(self._own.lm_head_patterns)}. Name it in partition_config.lm_head_patterns."
            )
        for name in heads:
            rule = first_match(self._rules, name)
            tied = list(self._tied(name))
            is_cut = rule is not None and rule.kind == "column" if asked is None else asked
            is_cut = is_cut or (asked is None and any(each in self.planned.placements for each in tied))
            if not is_cut:
                for each in tied:
                    self.planned.placements.pop(each, None)
                continue
            gathers = not asked
            if not gathers:
                self.planned.vocabulary_head = name
            width = out_features(self._modules[name])
            parts = even_parts(width, self._ranks)
            self._put(name, ColumnLinear, parts, entry=name, gather_output=gathers)
            for each in tied:
                kind = VocabularyEmbedding if isinstance(self._modules[each], nn.Embedding) else ColumnLinear
                attributes: dict[str, Any] = {} if kind is VocabularyEmbedding else {"gather_output": True}
                self._put(each, kind, parts, **attributes)

    def _tied(self, name: str) -> Iterator[str]:
        weight = self._modules[name].weight
        for other, module in self._modules.items():
            if (
                other != name
                and getattr(module, "weight", None) is weight
                and (is_linear(module) or isinstance(module, nn.Embedding))
            ):
                yield other

    def _is_head(self, name: str) -> bool:
        last = name.rpartition(".")[2]
        return any(pattern in (last, name) for pattern in self._own.lm_head_patterns)

    def _put(self, name: str, kind: type[CutLayer], parts: Parts, entry: str = "", **attributes: Any) -> None:
        self.planned.placements[name] = Placement(kind, parts, entry, tuple(attributes.items()))


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it stands where a linear layer was: one that computes something more, or that has such layers in it."""
    return not is_linear(module) and (isinstance(module, nn.Linear) or any(is_linear(each) for each in module.modules()))


def _some(names: Iterable[str]) -> str:
    first, *others = map(repr, names)
    return f"{first} and {len(others)} more" if others else first


def _names_of_rows(policy: Any) -> list[str]:
    """Names in `injection_policy_tuple`: strings, in tuples, or in a dictionary of a block's class to them."""
    if policy is None:
        return []
    if isinstance(policy, str):
        return [policy.removeprefix(".").replace(".", r"\.")]
    if not isinstance(policy, Iterable):
        raise ArgumentError(
            f"tensor_parallel.injection_policy_tuple has {policy!r}; needed names of layers whose outputs are summed over "
            'ranks. Write for example ("attention.output.dense", "output.dense").'
        )
    return [name for each in (policy.values() if isinstance(policy, dict) else policy) for name in _names_of_rows(each)]


def _is_half(columns: Sequence[str | None], row: str | None) -> bool:
    """Whether some are cut without the others, in a way that no gather or split makes up for."""
    return ("column" in columns) != (set(columns) == {"column"}) or (row == "row") != ("column" in columns)


def _list(kinds: Mapping[str, str | None], *wanted: str | None) -> str:
    return ", ".join(repr(name) for name, kind in kinds.items() if kind in wanted)


def _exactly(name: str) -> re.Pattern[str]:
    return re.compile(rf"^{re.escape(name)}\.weight$")
