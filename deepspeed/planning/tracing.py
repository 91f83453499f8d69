"""Bytes of activations and temporaries of one micro-batch: a forward and backward over fake tensors, nothing allocated.

    fake parameters (the policy's dtypes), fake batch
        |  module, loss, backward           under a dispatch mode that notes every storage that is made
        v  living bytes, sampled when one is made ---> peak; between forward and backward ---> kept

A gradient is let go as soon as it is whole, as the engine moves it into its bucket. Blocks that repeat are traced as two
and as three of them (`[Note: repeated blocks]`), so that a deep model costs what a shallow one does.

[Note: repeated blocks] The largest `ModuleList` whose elements hold parameters of the same names and shapes. What it adds
per element is the difference of the two traces; the peak of n elements is that of two plus (n - 2) differences.

Called by `comparison`. Does not live here: model states (`states`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed.errors import ArgumentError
from deepspeed.precision.policy import DtypePolicy

__all__ = ["Activations", "Batch", "trace_activations"]

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""

_LEAST_TO_SHORTEN = 4


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    kept_nbytes: int
    """Held from forward to backward."""
    peak_nbytes: int
    """The most at any moment of forward and backward, gradients on their way to a bucket included."""

    def plus(self, times: int, other: Activations) -> Activations:
        """This, with `times` further blocks, of which `other` has one more."""
        kept = self.kept_nbytes + times * (other.kept_nbytes - self.kept_nbytes)
        return Activations(kept, self.peak_nbytes + times * (other.peak_nbytes - self.peak_nbytes))


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operators made and that still live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.peak_nbytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage())
        return result

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """These are counted elsewhere."""
        for each in tensors:
            storage = each.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

        def forget(_: Any) -> None:
            self.nbytes -= nbytes

        self._known[key] = weakref.ref(storage, forget)


def trace_activations(
    module: nn.Module, batch: Batch, policy: DtypePolicy, *, loss_of: Callable[[Any], Tensor] | None = None
) -> Activations:
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
    if blocks is None:
        return _trace(module, batch, policy, loss_of)
    name, count = blocks
    with _only(module, name, 2):
        two = _trace(module, batch, policy, loss_of)
    with _only(module, name, 3):
        three = _trace(module, batch, policy, loss_of)
    return two.plus(count - 2, three)


def _trace(module: nn.Module, batch: Batch, policy: DtypePolicy, loss_of: Callable[[Any], Tensor] | None) -> Activations:
    living = _Living()
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = {f"module.{name}": _fake(value, policy.param_for(value)) for name, value in module.named_parameters()}
        buffers = {f"module.{name}": _fake(value, value.dtype) for name, value in module.named_buffers()}
        args, kwargs = tree_map_only(Tensor, lambda t: _fake(t, _input_dtype(t, policy)), batch)
        given = [*params.values(), *buffers.values(), *(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))]
        for param in params.values():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        try:
            with living:
                living.ignore(iter(given))
                run = _Pass(module, policy.autocast, loss_of or _loss, living)
                kept: int = torch.func.functional_call(run, {**params, **buffers}, args, kwargs)
        except Exception as cause:  # whatever a model's forward raises
            raise ArgumentError(
                f"the activations of {type(module).__name__} cannot be traced without values: {cause} Leave the batch out: "
                "the plan then has all terms but the activations."
            ) from cause
    return Activations(kept, living.peak_nbytes)


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

    def forward(self, *args: Any, **kwargs: Any) -> int:
        """Bytes that lived between forward and backward."""
        with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
            loss = self._loss_of(self.module(*args, **kwargs))
        kept = self._living.nbytes
        loss.backward()  # type: ignore[no-untyped-call]
        return kept


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


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
    """Name and length of the list of blocks: see [Note: repeated blocks]."""
    found = [
        (sum(p.numel() for p in child.parameters()), name, len(child))
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) >= _LEAST_TO_SHORTEN and _are_alike(child)
    ]
    return max(found)[1:] if found else None


def _are_alike(blocks: nn.ModuleList) -> bool:
    first, *others = ([(n, p.shape, p.requires_grad) for n, p in b.named_parameters()] for b in blocks)
    return bool(first) and all(each == first for each in others)


@contextmanager
def _only(module: nn.Module, name: str, count: int) -> Iterator[None]:
    """The module with the first `count` blocks of a list, and a configuration that says so."""
    parent_name, _, child = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    whole: nn.ModuleList = getattr(parent, child)
    config: Any = getattr(module, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    setattr(parent, child, nn.ModuleList(list(whole)[:count]))
    if layers is not None:
        config.num_hidden_layers = count
    try:
        yield
    finally:
        setattr(parent, child, whole)
        if layers is not None:
            config.num_hidden_layers = layers
