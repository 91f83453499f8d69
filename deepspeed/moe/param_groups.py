"""Which parameters are experts', and optimizer groups that keep them apart.

    {"name": "all", "params": [dense..., experts...], "lr": 0.1}
        -> [{"name": "all", "params": [dense...], "lr": 0.1},
            {"name": "ep_size_2", "params": [experts...], "lr": 0.1, "moe": True}]

Lives here: reading the marks that `moe.experts` sets. The engine keeps experts apart by itself; clients that make the
optimizer call this as the original's guide says, and may leave it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from deepspeed.errors import ArgumentError

__all__ = [
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

ParamGroup = dict[str, Any]

MAX_GROUP_NUMEL = 178956971
"""Elements of one group of experts unless the caller says otherwise; the published default."""


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to an expert: the marks say that it is not averaged over all data-parallel ranks."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and the number of experts of the last of them (0 without)."""
    layers = (module for module in m.modules() if getattr(module, "is_deepspeed_moe_layer", False))
    counts: list[int] = [vars(layer)["num_experts"] for layer in layers]
    return bool(counts), counts[-1] if counts else 0


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (parameters of no expert, parameters of experts), each in order."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """Return (gradients of no expert, gradients of experts); parameters without a gradient are left out."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def is_moe_param_group(param_group: ParamGroup) -> bool:
    """Whether an optimizer group holds experts alone, as the functions here make them."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroup | Sequence[ParamGroup], max_group_size: float | None = MAX_GROUP_NUMEL
) -> list[ParamGroup]:
    """Give experts optimizer groups of their own, which keep the options of the group that they come from.

    Args:
        param_groups: one group or several; they are left as they are.
        max_group_size: elements of one group of experts, above which it is split; None: no limit. A larger parameter is a
            group alone.

    Returns:
        The given groups without their experts, in order, empty ones included; then the groups of experts, each with
        `moe=True` and `name` the name of its expert-parallel ranks. Groups that have `moe=True` already stay whole.

    Raises:
        ArgumentError: something given is not a dictionary with `params`.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in given:
        if not isinstance(group, dict) or "params" not in group:
            raise ArgumentError(
                f"split_params_into_different_moe_groups_for_optimizer got {type(group).__name__} as a group; it needs "
                'optimizer groups, for example {"params": list(model.parameters()), "name": "parameters"}.'
            )
    kept: list[ParamGroup] = []
    of_experts: list[ParamGroup] = []
    for group in given:
        if is_moe_param_group(group):
            of_experts.append(group)
            continue
        params: list[nn.Parameter] = [group["params"]] if isinstance(group["params"], nn.Parameter) else group["params"]
        shared, experts = split_params_into_shared_and_expert_params(params)
        kept.append({**group, "params": shared})
        by_name: dict[str | None, list[nn.Parameter]] = {}
        for param in experts:
            by_name.setdefault(getattr(param, "group_name", None), []).append(param)
        for name, members in by_name.items():
            of_experts += [{**group, "params": part, "name": name, "moe": True} for part in _parts(members, max_group_size)]
    return kept + of_experts


def configure_moe_param_groups(model_parameters: Sequence[nn.Parameter] | Sequence[ParamGroup]) -> list[ParamGroup]:
    """Optimizer groups of what a client gave: parameters, or groups of them; experts get groups of their own.

    Raises:
        ArgumentError: the sequence mixes parameters and groups.
    """
    given = list(model_parameters)
    if all(isinstance(each, Tensor) for each in given):
        return split_params_into_different_moe_groups_for_optimizer({"params": given, "name": "dense-params"})
    return split_params_into_different_moe_groups_for_optimizer(cast("list[ParamGroup]", given))


def _parts(params: list[nn.Parameter], max_numel: float | None) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    numel = 0
    for param in params:
        if part and max_numel is not None and numel + param.numel() > max_numel:
            yield part
            part, numel = [], 0
        part.append(param)
        numel += param.numel()
    if part:
        yield part
