"""What lives during one micro-batch: a forward and backward over fake tensors, nothing allocated.

    fake parameters (the policy's dtypes), fake batch
        |  module, loss, backward           under a dispatch mode that notes every storage that is made or let go
        v  hooks on modules, outputs and parameters say where that happens ---> a `Timeline`

A gradient is let go as soon as it is whole; who walks through the timeline counts it where the engine keeps it. Of blocks
that repeat three are traced (`timeline`, [Note: the middle block]): the largest `ModuleList` or `Sequential` whose elements
hold parameters of the same names and shapes. Where three do not look like blocks in a row, the whole model is traced.

Called by `of_module`. Does not live here: model states (`states`), what a setting makes of a timeline (`passes`).
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed.comm.volume import sent_by, summed_by
from deepspeed.errors import ArgumentError
from deepspeed.planning.timeline import BACKWARD, TRACED_BLOCKS, Mark, Recorded, Timeline, repeated, timeline_of
from deepspeed.precision.policy import DtypePolicy

__all__ = ["Batch", "CarryOut", "trace_carried_out", "trace_pass"]

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""

CarryOut = Callable[..., None]
"""Called as `carry_out(mark, *args, **kwargs)`: does all that is to be traced, and marks where something begins."""

_LEAST_TO_SHORTEN = 4


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operators make and let go, between marks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = [Recorded(Mark("start"))]
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        now = self.recorded[-1]
        now.sent_nbytes += sent_by(func, args)
        now.summed_nbytes = max(now.summed_nbytes, summed_by(func, args))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage())
        return result

    def mark(self, mark: Mark) -> None:
        """A stretch begins."""
        self.recorded.append(Recorded(mark))

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """These are counted elsewhere."""
        for each in tensors:
            storage = each.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes, origin = storage._cdata, storage.nbytes(), len(self.recorded) - 1
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        self.recorded[-1].changes.append((nbytes, origin))

        def forget(_: Any) -> None:
            self.recorded[-1].changes.append((-nbytes, origin))

        self._known[key] = weakref.ref(storage, forget)


def trace_pass(
    module: nn.Module, batch: Batch, policy: DtypePolicy, *, loss_of: Callable[[Any], Tensor] | None = None
) -> Timeline:
    """Trace one micro-batch.

    Args:
        module: in the mode (training or not) that counts; its values are not read, and it is left as it is.
        batch: tensors on any device, of which only shapes and dtypes matter.
        policy: the formats of the run: parameters, floating inputs and autocast.
        loss_of: the loss, from what forward returns; None: its `loss`, its first item, or itself summed.

    Raises:
        ArgumentError: forward or backward needs values, not only shapes; the text has what failed.
    """
    blocks = _repeated(module)
    if blocks is not None:
        name, count = blocks
        with _only(module, name, TRACED_BLOCKS):
            found = repeated(_trace(module, batch, policy, loss_of), name, count)
        if found is not None:
            return found
    return timeline_of(_trace(module, batch, policy, loss_of))


def trace_carried_out(module: nn.Module, batch: Batch, policy: DtypePolicy, carry_out: CarryOut) -> Timeline:
    """Trace something else than one forward and backward; the rest as for `trace_pass`, but for autocast, which is its own.

    Args:
        module: whose parameters are there.
        batch: arguments of `carry_out`.
        policy: as for `trace_pass`.
        carry_out: see `CarryOut`.

    Raises:
        ArgumentError: as for `trace_pass`.
    """
    return timeline_of(_trace(module, batch, policy, carry_out=carry_out))


def _trace(
    module: nn.Module,
    batch: Batch,
    policy: DtypePolicy,
    loss_of: Callable[[Any], Tensor] | None = None,
    carry_out: CarryOut | None = None,
) -> list[Recorded]:
    living = _Living()
    with ExitStack() as stack:
        stack.enter_context(_fake_tensor_mode())
        params = {f"module.{name}": _fake(value, policy.param_for(value)) for name, value in module.named_parameters()}
        buffers = {f"module.{name}": _fake(value, value.dtype) for name, value in module.named_buffers()}
        args, kwargs = tree_map_only(Tensor, lambda t: _fake(t, _input_dtype(t, policy)), batch)
        given = [*params.values(), *buffers.values(), *(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))]
        for name, param in params.items():
            if param.requires_grad:
                hook = partial(_drop_gradient, living, name.removeprefix("module."))
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        try:
            with living, _marking(module, living):
                living.ignore(iter(given))
                run: nn.Module = _Pass(module, policy.autocast, loss_of or _loss, living)
                run = run if carry_out is None else _Carried(module, partial(carry_out, living.mark))
                torch.func.functional_call(run, {**params, **buffers}, args, kwargs)
        except Exception as cause:  # whatever a model's forward raises
            raise ArgumentError(
                f"the activations of {type(module).__name__} cannot be traced without values: {cause} Leave the batch out: "
                "the plan then has all terms but the activations."
            ) from cause
        return living.recorded


def _fake_tensor_mode() -> AbstractContextManager[object]:
    """Loaded here: it takes as long as half of torch, and a bare number of parameters is planned without it."""
    module: Any = importlib.import_module("torch._subclasses.fake_tensor")
    mode: AbstractContextManager[object] = module.FakeTensorMode(allow_non_fake_inputs=True)
    return mode


class _Pass(nn.Module):
    """Forward and backward as the forward of another module: what is recomputed in backward meets the same parameters."""

    def __init__(
        self, module: nn.Module, autocast: torch.dtype | None, loss_of: Callable[[Any], Tensor], living: _Living
    ) -> None:
        super().__init__()
        self.module = module
        self._autocast = autocast
        self._loss_of = loss_of
        self._living = living

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Once forward, once backward."""
        with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
            loss = self._loss_of(self.module(*args, **kwargs))
        self._living.mark(BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]


class _Carried(nn.Module):
    """The same for what the caller carries out."""

    def __init__(self, module: nn.Module, carry_out: Callable[..., None]) -> None:
        super().__init__()
        self.module = module
        self._carry_out = carry_out

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Once."""
        self._carry_out(*args, **kwargs)


@contextmanager
def _marking(module: nn.Module, living: _Living) -> Iterator[None]:
    """Marks from every module with parameters, its own or below it."""
    handles = []
    for name, child in module.named_modules():
        if next(child.parameters(), None) is not None:
            handles.append(child.register_forward_pre_hook(_Enter(living, name), prepend=True))
            handles.append(child.register_forward_hook(_Leave(living, name), always_call=True))  # recomputation stops early
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Enter:
    def __init__(self, living: _Living, name: str) -> None:
        self._living = living
        self._mark = Mark("enter", name)

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._living.mark(self._mark)


class _Leave:
    def __init__(self, living: _Living, name: str) -> None:
        self._living = living
        self._mark = Mark("leave", name)
        self._back = Mark("back", name)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._living.mark(self._mark)
        for each in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(each, Tensor) and each.requires_grad and each.grad_fn is not None:
                each.register_hook(self._on_back)  # type: ignore[no-untyped-call]

    def _on_back(self, grad: Tensor) -> None:
        self._living.mark(self._back)


def _drop_gradient(living: _Living, name: str, param: Tensor) -> None:
    param.grad = None
    living.mark(Mark("gradient", name))


def _fake(value: Tensor, dtype: torch.dtype) -> Tensor:
    """As large as `value`, on the CPU, without memory; called inside the fake mode."""
    made = torch.empty(value.shape, dtype=dtype, device="cpu")
    return made.requires_grad_(value.requires_grad and value.is_leaf)


def _input_dtype(value: Tensor, policy: DtypePolicy) -> torch.dtype:
    return policy.param if policy.param is not None and value.is_floating_point() else value.dtype


def _loss(result: Any) -> Tensor:
    """What most models mean by their loss."""
    found = getattr(result, "loss", None)
    if found is None and isinstance(result, Mapping):
        found = result.get("loss")
    if found is None:
        found = next(each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad)
    loss: Tensor = found if found.dim() == 0 else found.float().sum()
    return loss


def _repeated(module: nn.Module) -> tuple[str, int] | None:
    """Name and length of the list of blocks."""
    found = [
        (sum(p.numel() for p in child.parameters()), name, len(child))
        for name, child in module.named_modules()
        if type(child) in (nn.ModuleList, nn.Sequential) and name and _are_alike(cast("nn.Sequential", child))
    ]
    return max(found)[1:] if found else None


def _are_alike(blocks: nn.Sequential | nn.ModuleList) -> bool:
    if len(blocks) <= TRACED_BLOCKS:
        return False
    first, *others = ([(n, p.shape, p.requires_grad) for n, p in b.named_parameters()] for b in blocks)
    return bool(first) and all(each == first for each in others)


@contextmanager
def _only(module: nn.Module, name: str, count: int) -> Iterator[None]:
    """The module with the first `count` blocks of a list, and a configuration that says so."""
    parent_name, _, child = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    whole: nn.ModuleList | nn.Sequential = getattr(parent, child)
    config: Any = getattr(module, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    setattr(parent, child, whole[:count])
    if layers is not None:
        config.num_hidden_layers = count
    try:
        yield
    finally:
        setattr(parent, child, whole)
        if layers is not None:
            config.num_hidden_layers = layers
