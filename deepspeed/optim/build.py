"""From a config block, an object or a callable to an optimizer and a schedule: the one place that chooses.

    optimizer block  type, params -> class -> its arguments checked by name -> optimizer
    scheduler block  type, params -> class -> its arguments checked by name -> schedule
    client's object or callable   -> taken over, with the same care for parameter groups

Not here: what the types of this library accept in a config (`config.optimizer`, `config.scheduler`), the optimizers
(`deepspeed.ops`), the schedules (`schedules`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from deepspeed.common.wording import some
from deepspeed.config.faults import nearest
from deepspeed.errors import ArgumentError, ConfigError, DeepSpeedError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, ZenFlowCPUAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.optim import schedules
from deepspeed.optim.schedules import VALID_LR_SCHEDULES, torch_optimizer

Params = dict[str, Any]
Group = dict[str, Any]
Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]
Names = Mapping[Tensor, str]
Built = TypeVar("Built")

_FUSED_DEVICES = ("cpu", "cuda", "xpu")
_MOST_NAMES = 5


class TypedBlock(Protocol):
    """A config block that names a class and its keyword arguments."""

    @property
    def type(self) -> str:
        """Name of the class."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Its keyword arguments."""


@runtime_checkable
class LRSchedule(Protocol):
    """What the engine needs of a schedule; torch's own and ours have it."""

    def step(self) -> Any:
        """Go on by one applied optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Continue where `state_dict` was taken."""


def build_optimizer(
    block: TypedBlock,
    parameters: Parameters,
    *,
    on_host: bool = False,
    for_zenflow: bool = False,
    names: Names | None = None,
) -> Optimizer:
    """Build the optimizer that a config names.

    Args:
        block: its `type` (a type of this library in any case, or the exact name of a class in torch.optim) and `params`.
        parameters: parameters, named parameters, or parameter groups; see `parameter_groups`.
        on_host: parameters and state rest in host memory (optimizer offload): the CPU classes are taken.
        for_zenflow: `zenflow` is on: Adam and AdamW become `ZenFlowCPUAdam`, others are refused.
        names: names of parameters, for error texts.

    Raises:
        ConfigError: unknown type, unknown or unusable parameter; the text names the nearest one.
        ArgumentError: no parameters, or one in two groups.
        RuntimeError: `amsgrad` for a class that does not have it.
    """
    params = dict(block.params)
    if params.pop("max_grad_norm", 0):
        raise ConfigError(
            f"optimizer.params.max_grad_norm = {block.params['max_grad_norm']!r}: an optimizer does not clip here. "
            'Write the value at the top level as "gradient_clipping" and leave max_grad_norm out.'
        )
    groups = parameter_groups(parameters, names)
    by_lower = {name.lower(): name for name in _BUILDERS}
    name = by_lower.get(block.type.lower())
    if for_zenflow:
        return _zenflow_adam(name or block.type, params, groups)
    if name is not None:
        return _BUILDERS[name](name, params, groups, on_host)
    kind = _class_named(block.type, torch.optim, Optimizer, "optimizer", _BUILDERS)
    if kind is torch.optim.SGD:
        _prefer_fused(params, groups, _FUSED_DEVICES)
    return _construct(kind, (groups,), params, "optimizer")


def build_scheduler(block: TypedBlock, optimizer: object) -> LRSchedule:
    """Build the schedule that a config names.

    Args:
        block: its `type` (one of VALID_LR_SCHEDULES, or a class name in torch.optim.lr_scheduler) and `params`.
        optimizer: a torch optimizer, or an object that holds one as `.optimizer`.

    Raises:
        ConfigError: unknown type, unknown or unusable parameter; the text names the nearest one.
    """
    inner = torch_optimizer(optimizer)
    if block.type in VALID_LR_SCHEDULES:
        ours: type[schedules.Schedule] = getattr(schedules, block.type)
        return _construct(ours, (inner,), dict(block.params), "scheduler")
    kind = _class_named(block.type, lr_scheduler, lr_scheduler.LRScheduler, "scheduler", VALID_LR_SCHEDULES)
    return _construct(kind, (inner,), dict(block.params), "scheduler")


def client_optimizer(
    client: Optimizer | Callable[[Any], Optimizer], parameters: Parameters, *, names: Names | None = None
) -> Optimizer:
    """Take over the optimizer a user gave: an object, or a callable that makes one from the parameters.

    Groups without parameters are dropped from it.

    Raises:
        ArgumentError: it is neither, or the callable returned something else.
    """
    made: object = _without_accelerate(client)
    if not _is_optimizer(client) and callable(client):
        groups = parameter_groups(parameters, names)
        is_plain = len(groups) == 1 and set(groups[0]) == {"params"}
        made = client(groups[0]["params"] if is_plain else groups)
    if not _is_optimizer(made):
        raise ArgumentError(
            f"optimizer is, or made, a {type(made).__name__}; an object with param_groups and step() is needed, such as a "
            "torch.optim.Optimizer, or a callable that returns one from the parameters."
        )
    made.param_groups[:] = [group for group in made.param_groups if len(group["params"])]
    return made


def _without_accelerate(client: object) -> object:
    """What Accelerate has wrapped: with `ParallelismConfig(tp_size=...)` it prepares the optimizer before it calls us.

    Its wrapper counts accumulated micro-batches, which the engine does. Other wrappers change steps, and stay.
    """
    wraps = type(client).__module__.partition(".")[0] == "accelerate" and _is_optimizer(client)
    return client.optimizer if wraps else client  # type: ignore[attr-defined]


def client_scheduler(client: LRSchedule | Callable[[Any], LRSchedule], optimizer: object) -> LRSchedule:
    """Take over the schedule a user gave: an object, or a callable that makes one from the torch optimizer.

    Raises:
        ArgumentError: it is neither, or the callable returned something else.
    """
    made: object = client
    is_schedule = isinstance(client, LRSchedule) and not inspect.isclass(client)
    if not is_schedule and callable(client):
        made = client(torch_optimizer(optimizer))
    if not isinstance(made, LRSchedule):
        raise ArgumentError(
            f"lr_scheduler is, or made, a {type(made).__name__}; an object with step(), state_dict() and load_state_dict() "
            "is needed, or a callable that returns one from the optimizer."
        )
    return made


def parameter_groups(parameters: Parameters, names: Names | None = None) -> list[Group]:
    """`parameters` as a list of groups, each a dict with a non-empty list `params` and whatever else it came with.

    Groups without parameters are dropped; a parameter given twice within one group counts once.

    Args:
        parameters: parameters, (name, parameter) pairs, or groups of either.
        names: names of parameters, for error texts.

    Raises:
        ArgumentError: there is no parameter at all, one stands in two groups, or something else is among them.
    """
    if isinstance(parameters, Tensor | Mapping):
        raise ArgumentError(f"parameters is one {type(parameters).__name__}; a list of parameters or groups is needed.")
    entries = list(parameters)
    given: list[Group] = [dict(entry) for entry in entries if isinstance(entry, Mapping)]
    if len(given) != len(entries):
        given = [{"params": entries}]
    groups, owner, repeated = [], dict[Tensor, int](), []
    for index, group in enumerate(given):
        members = {_tensor(member): member for member in _members(group)}
        repeated += [(tensor, member) for tensor, member in members.items() if owner.setdefault(tensor, index) != index]
        if members:
            groups.append({**group, "params": list(members.values())})
    if repeated:
        shown = some([_name(tensor, member, names or {}) for tensor, member in repeated], _MOST_NAMES)
        raise ArgumentError(
            f"parameters in more than one group: {shown}. Each parameter needs exactly one group; remove it from the others."
        )
    if not groups:
        raise ArgumentError(
            "parameters is empty, so there is nothing to optimize. Pass parameters that require a gradient, "
            "or leave the optimizer out."
        )
    return groups


def _members(group: Group) -> list[Any]:
    params = group.get("params")
    if params is None:
        raise ArgumentError(f"a parameter group has the keys {sorted(group)}, but needs 'params'.")
    return [params] if isinstance(params, Tensor) else list(params)


def _tensor(member: object) -> Tensor:
    tensor = member[1] if isinstance(member, tuple) and len(member) == 2 else member
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"among the parameters is a {type(tensor).__name__}; tensors or (name, tensor) pairs are needed."
        )
    return tensor


def _name(tensor: Tensor, member: object, names: Names) -> str:
    known = member[0] if isinstance(member, tuple) else names.get(tensor)
    return repr(known) if known else f"one of shape {tuple(tensor.shape)}"


def _is_optimizer(candidate: object) -> TypeGuard[Optimizer]:
    return hasattr(candidate, "param_groups") and callable(getattr(candidate, "step", None))


def _adam(name: str, params: Params, groups: list[Group], on_host: bool) -> Optimizer:
    decoupled = bool(params.pop("adam_w_mode", True)) or name == "AdamW"
    if params.pop("torch_adam", False):
        return _torch_adam(decoupled, params, groups)
    if on_host:
        params.pop("set_grad_none", None)
        return _construct(DeepSpeedCPUAdam, (groups,), params, "optimizer", adamw_mode=decoupled)
    params.pop("fp32_optimizer_states", None)
    return _construct(FusedAdam, (groups,), params, "optimizer", adam_w_mode=decoupled)


def _zenflow_adam(name: str, params: Params, groups: list[Group]) -> Optimizer:
    if name not in ("Adam", "AdamW") or params.pop("torch_adam", False):
        raise ConfigError(
            f'optimizer.type = "{name}" with zero_optimization.zenflow, which has Adam and AdamW of this library alone. Use '
            "one of them, without torch_adam, or leave zenflow out."
        )
    decoupled = bool(params.pop("adam_w_mode", True)) or name == "AdamW"
    params.pop("set_grad_none", None)
    return _construct(ZenFlowCPUAdam, (groups,), params, "optimizer", adamw_mode=decoupled, overlap_step=False, threads=None)


def _torch_adam(decoupled: bool, params: Params, groups: list[Group]) -> Optimizer:
    if not params.pop("bias_correction", True):
        raise ConfigError(
            "optimizer.params.bias_correction = false: torch's Adam always corrects. Leave out one of torch_adam and it."
        )
    for ours in ("set_grad_none", "fp32_optimizer_states"):
        params.pop(ours, None)
    params.setdefault("weight_decay", 0.0)  # torch's AdamW would take 0.01
    _prefer_fused(params, groups, _FUSED_DEVICES)
    return _construct(torch.optim.AdamW if decoupled else torch.optim.Adam, (groups,), params, "optimizer")


def _prefer_fused(params: Params, groups: list[Group], devices: Iterable[str]) -> None:
    """Ask for torch's fused kernel where `params` leave the choice to torch, which would take several calls instead."""
    if params.keys() & {"foreach", "fused", "differentiable"}:
        return
    tensors = [_tensor(member) for group in groups for member in group["params"]]
    if all(tensor.is_floating_point() and tensor.device.type in devices for tensor in tensors):
        params["fused"] = True


def _adagrad(name: str, params: Params, groups: list[Group], on_host: bool) -> Optimizer:
    if on_host:
        return _construct(DeepSpeedCPUAdagrad, (groups,), params, "optimizer")
    params.pop("fp32_optimizer_states", None)
    _prefer_fused(params, groups, ("cpu",))
    return _construct(torch.optim.Adagrad, (groups,), params, "optimizer")


def _lion(name: str, params: Params, groups: list[Group], on_host: bool) -> Optimizer:
    if on_host:
        params.pop("set_grad_none", None)
        return _construct(DeepSpeedCPULion, (groups,), params, "optimizer")
    params.pop("fp32_optimizer_states", None)
    return _construct(FusedLion, (groups,), params, "optimizer")


def _lamb(name: str, params: Params, groups: list[Group], on_host: bool) -> Optimizer:
    params.pop("set_grad_none", None)
    return _construct(FusedLamb, (groups,), params, "optimizer")


_BUILDERS: Mapping[str, Callable[[str, Params, list[Group], bool], Optimizer]] = {
    "Adam": _adam,
    "AdamW": _adam,
    "Adagrad": _adagrad,
    "Lion": _lion,
    "Lamb": _lamb,
}


def _class_named(name: str, module: object, base: type[Built], block: str, ours: Iterable[str]) -> type[Built]:
    """The subclass of `base` that `module` has under `name`; ConfigError with the nearest name otherwise."""
    kinds = {
        key: kind
        for key, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and not key.startswith("_")
    }
    if name in kinds:
        return kinds[name]
    close = nearest(name, [*ours, *kinds])
    hint = f'Did you mean "{close}"?' if close else f"Known: {', '.join([*ours, *sorted(kinds)])}."
    raise ConfigError(f'{block}.type = "{name}": not a type of this library, nor a class of {module.__name__}. {hint}')  # type: ignore[attr-defined]


def _construct(kind: type[Built], given: tuple[object, ...], params: Params, block: str, **ours: object) -> Built:
    """Call `kind` with arguments from a config, turning what it refuses into ConfigError."""
    accepted = [name for name in inspect.signature(kind).parameters if name not in ours][len(given) :]
    unknown = [key for key in params if key not in accepted]
    if unknown:
        close = nearest(unknown[0], accepted)
        hint = f'Did you mean "{close}"?' if close else f"It takes {', '.join(accepted)}."
        raise ConfigError(f"{block}.params.{unknown[0]}: {kind.__name__} has no such parameter. {hint}")
    try:
        return kind(*given, **params, **ours)
    except DeepSpeedError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{block}.params for {kind.__name__}: {error}. Correct the value.") from error
