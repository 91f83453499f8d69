"""Which layers of a model are cut, and how: rules, from the user, a preset, or the model's own plan.

    partition_config.layer_specs     regular expressions on parameter names     --.
    injection_policy_tuple           names of rows; the rest of a block columns --+--> `Rule`s, the first match counts
    preset_model                     names of one family's layers               --+
    the model's tp_plan              "layers.*.mlp.up_proj": "colwise"          --'

What no rule matches is left to the search by structure (`search`), or stays whole. Pure: strings and numbers. Does not live
here: heads (`attention`), what follows from a rule for a module (`auto`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed.config.parallel import LayerSpecConfig, PartitionConfig
from deepspeed.errors import ArgumentError

__all__ = ["PRESETS", "Kind", "Rule", "first_match", "rules_of_model", "rules_of_preset", "rules_of_specs", "sections_of"]

Kind = Literal["column", "row", "vocabulary", "width", "embedding", "whole"]
"""Cut outputs; inputs; rows or columns of an embedding (or whichever the config says); nothing."""


@dataclass(frozen=True)
class Rule:
    """How layers are cut whose names match.

    Attributes:
        pattern: is looked for in `<module>.weight`.
        kind: what is cut.
        source: who says so, for messages.
        gather_output: of columns: put the outputs together again.
        split_input: of rows: the input is whole.
        sum_gradient: of what stays whole: its gradient is summed over ranks, which see parts of its input.
        shape: as in a layer spec.
        dim: as in a layer spec.
    """

    pattern: re.Pattern[str]
    kind: Kind
    source: str
    gather_output: bool = False
    split_input: bool = False
    sum_gradient: bool = False
    shape: tuple[Any, ...] | None = None
    dim: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether the user's config says so, not a preset or the model."""
        return self.source.startswith("tensor_parallel")

    @property
    def needs_neighbours(self) -> bool:
        """Whether layers beside must be cut, too: activations are parts between them."""
        return self.kind in ("column", "row") and not self.gather_output and not self.split_input

    def matches(self, module_name: str) -> bool:
        """Whether the rule is for the module of that name."""
        return self.pattern.search(f"{module_name}.weight") is not None


def first_match(rules: Iterable[Rule], module_name: str) -> Rule | None:
    """The rule that counts for a module."""
    return next((rule for rule in rules if rule.matches(module_name)), None)


def rules_of_specs(config: PartitionConfig, model_type: str | None) -> list[Rule]:
    """The user's own.

    Raises:
        ArgumentError: a pattern is no regular expression, or a key is set that has no meaning for its partition_type.
    """
    rules: list[Rule] = []
    for place, spec in enumerate(config.layer_specs):
        if spec.model_types and (model_type or "").lower() not in {each.lower() for each in spec.model_types}:
            continue
        where = f"tensor_parallel.partition_config.layer_specs[{place}]"
        _check_keys(spec, where)
        rules += (_rule_of_spec(spec, pattern, where) for pattern in spec.patterns)
    return rules


def _check_keys(spec: LayerSpecConfig, where: str) -> None:
    kind = spec.partition_type
    misplaced = {
        "gather_output": spec.gather_output and kind != "column",
        "grad_allreduce": spec.grad_allreduce and kind != "skip",
        "shape": spec.shape is not None and kind == "skip",
        "partition_dim": spec.partition_dim is not None and kind == "skip",
    }
    needed = {"gather_output": "column", "grad_allreduce": "skip"}
    for key, is_misplaced in misplaced.items():
        if is_misplaced:
            raise ArgumentError(
                f"{where}.{key}={getattr(spec, key)!r} has no meaning with partition_type={kind!r}. Leave it out, or use "
                f"partition_type={needed.get(key, 'column or row')!r}."
            )


def _rule_of_spec(spec: LayerSpecConfig, pattern: str, where: str) -> Rule:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ArgumentError(
            f"{where}.patterns: {pattern!r} is no regular expression ({error}). Write one, such as '.*\\.fc1\\.weight$'."
        ) from None
    kind: Kind = "whole" if spec.partition_type == "skip" else spec.partition_type
    shape = None if spec.shape is None else tuple(spec.shape)
    return Rule(
        compiled,
        kind,
        where,
        gather_output=spec.gather_output,
        sum_gradient=spec.grad_allreduce,
        shape=shape,
        dim=spec.partition_dim,
    )


def rules_of_rows(names: Iterable[str]) -> list[Rule]:
    """Those of `injection_policy_tuple`: names of layers whose outputs are summed over ranks."""
    return [Rule(_ending(name), "row", "tensor_parallel.injection_policy_tuple") for name in names]


# -- a model's own plan ----------------------------------------------------------------------------------------------------

_STYLES: Mapping[str, Mapping[str, Any]] = {
    "colwise": {"kind": "column"},
    "packed_colwise": {"kind": "column"},
    "colwise_gather_output": {"kind": "column", "gather_output": True},
    "colwise_rep": {"kind": "column", "gather_output": True},
    "rowwise": {"kind": "row"},
    "packed_rowwise": {"kind": "row"},
    "rowwise_split_input": {"kind": "row", "split_input": True},
    "rowwise_rep": {"kind": "row", "split_input": True},
    "embedding_rowwise": {"kind": "vocabulary"},
    "embedding_colwise": {"kind": "width"},
    "replicated_with_grad_allreduce": {"kind": "whole", "sum_gradient": True},
    "replicate": {"kind": "whole"},
}
"""What transformers calls ways of cutting. Those of modules of experts are absent: their weights have styles, too."""

_OF_EXPERTS = ("moe_", "ep_", "grouped_", "local")


def rules_of_model(plan: Mapping[str, str]) -> tuple[list[Rule], list[str]]:
    """(Rules of a plan such as transformers' `tp_plan`; styles in it that are not known).

    Keys are module names with `*` for a number; longer ones come first.
    """
    rules: list[Rule] = []
    unknown: list[str] = []
    for name, style in sorted(plan.items(), key=lambda item: -len(item[0])):
        if style in _STYLES:
            rules.append(Rule(_wildcard(name), source=f"the model's plan, {name!r}", **_STYLES[style]))
        elif not style.startswith(_OF_EXPERTS):
            unknown.append(style)
    return rules, unknown


def _wildcard(name: str) -> re.Pattern[str]:
    return re.compile(r"(^|\.)" + re.escape(name).replace(r"\*", r"[^.]+") + r"\.weight$")


# -- presets ---------------------------------------------------------------------------------------------------------------


def _ending(names: str) -> re.Pattern[str]:
    return re.compile(rf"(^|\.)({names})\.weight$")


def _family(source: str, columns: str, rows: str) -> tuple[Rule, ...]:
    return Rule(_ending(columns), "column", source), Rule(_ending(rows), "row", source)


_LLAMA = (
    r"self_attn\.(q|k|v)_proj|mlp\.(gate|up)_proj",
    r"self_attn\.o_proj|mlp\.down_proj",
)

PRESETS: dict[str, tuple[Rule, ...]] = {
    "llama": _family("preset_model='llama'", *_LLAMA),
    "qwen2": _family("preset_model='qwen2'", *_LLAMA),
    "mixtral": _family(
        "preset_model='mixtral'",
        r"self_attn\.(q|k|v)_proj|experts\.gate_up_proj|experts\.\d+\.(w1|w3)",
        r"self_attn\.o_proj|experts\.down_proj|experts\.\d+\.w2",
    ),
    "bloom": _family(
        "preset_model='bloom'",
        r"self_attention\.query_key_value|mlp\.dense_h_to_4h",
        r"self_attention\.dense|mlp\.dense_4h_to_h",
    ),
    "phi3": _family("preset_model='phi3'", r"self_attn\.qkv_proj|mlp\.gate_up_proj", r"self_attn\.o_proj|mlp\.down_proj"),
    "chatglm": (
        Rule(_ending(r"self_attention\.query_key_value"), "column", "preset_model='chatglm'"),
        Rule(_ending(r"mlp\.dense_h_to_4h"), "column", "preset_model='chatglm'", shape=(2, -1), dim=0),
        Rule(_ending(r"self_attention\.dense|mlp\.dense_4h_to_h"), "row", "preset_model='chatglm'"),
    ),
    "deepseek_v2": _family(
        "preset_model='deepseek_v2'", r"(mlp|shared_experts)\.(gate|up)_proj", r"(mlp|shared_experts)\.down_proj"
    ),
}
"""Rules of published families, by the names that the config takes."""


def rules_of_preset(name: str) -> tuple[Rule, ...]:
    """The rules of one family."""
    return PRESETS[name]


# -- shapes ----------------------------------------------------------------------------------------------------------------


def sections_of(rule: Rule, name: str, width: int) -> tuple[int, ...] | None:
    """Widths of the fused parts of a dimension of `width`, as `shape` says it; None where it is one.

    `[3, -1]` with `partition_dim` 0 are three equal parts, `[[q, k, v], -1]` three of those sizes.

    Raises:
        ArgumentError: they do not add up.
    """
    if rule.shape is None:
        return None
    entry = _entry(rule, name)
    if isinstance(entry, (list, tuple)):
        sizes = tuple(_filled(entry, width))
        if sum(sizes) != width or min(sizes) < 1:
            raise ArgumentError(
                f"{rule.source}.shape={list(rule.shape)} for {name!r}: parts {list(sizes)} add up to {sum(sizes)}, and the "
                f"dimension has {width}. Give sizes above 0 that add up to it."
            )
        return sizes
    if entry in (-1, 1, width):
        return None
    if entry < 1 or width % entry:
        raise ArgumentError(
            f"{rule.source}.shape={list(rule.shape)} for {name!r}: {entry} does not divide the {width} of the dimension. "
            "Give a number of equal parts, or a list of their sizes."
        )
    return (width // entry,) * entry


def _entry(rule: Rule, name: str) -> int | list[Any] | tuple[Any, ...]:
    shape = rule.shape
    assert shape is not None  # the caller's
    dim = rule.dim if rule.dim is not None else (0 if rule.kind == "column" else 1)
    if not 0 <= dim < len(shape):
        raise ArgumentError(
            f"{rule.source}: partition_dim={dim} for {name!r}, and shape={list(shape)} has {len(shape)} entries. Give one "
            "below that."
        )
    entry: int | list[Any] | tuple[Any, ...] = shape[dim]
    return entry


def _filled(sizes: Iterable[Any], width: int) -> Iterator[int]:
    """Sizes, with -1 for what the others leave."""
    given = list(sizes)
    rest = width - sum(size for size in given if size != -1)
    return (rest if size == -1 else size for size in given)
