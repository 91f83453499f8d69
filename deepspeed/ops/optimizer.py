"""What the optimizers of this package share: the walk over groups, the layout of state, and exact loading.

    step() -> each group: `_step_group(group)` -> `_batches(group)` -> torch's kernels on lists of dense tensors

The engine lends `group["params"]` one flat tensor at a time and takes it back after `step()`. So nothing here remembers a
parameter list: each step reads the groups afresh, and state is found by parameter, made at its first step.

Not here: the maths of one optimizer (its own folder), and masters, clipping and loss scale (the engine's business).

[Note: dynamo stays out] torch.optim.Optimizer wraps some methods in a decorator that imports torch._dynamo at first use:
seconds of processor time for the first optimizer of a process, compiled or not. Its only effect is that torch.compile skips
the method, so as long as nothing has loaded dynamo there is nothing to tell, and the method is called without the wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.errors import ArgumentError, UsageError

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Group = dict[str, Any]
State = dict[str, Tensor]

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class GroupOptimizer(Optimizer):
    """Base of our optimizers: `step` walks the groups, a subclass updates one group from its tensors.

    Args:
        params: parameters, named parameters, or parameter groups.
        defaults: hyperparameters of a group that names none of its own.
        set_grad_none: `zero_grad()` drops gradients instead of filling them with zeros.
        fp32_states: keep state in float32 for 16-bit parameters. Otherwise state has the parameter's dtype. Either way the
            update is computed in at least float32, and parameter and state are rounded once, at its end.

    Raises:
        ValueError: a hyperparameter is outside its range.
    """

    elementwise: ClassVar[bool] = True
    """Whether an element's update depends on that element's own history alone (see `deepspeed.optim.elementwise`)."""

    state_keys: ClassVar[tuple[str, ...]] = ()
    """State tensors of the parameter's shape; all start at zero."""

    host_only: ClassVar[bool] = False
    """Whether a step refuses parameters outside host memory."""

    kernel_is_exact: ClassVar[bool] = False
    """Whether the kernel computes in fp32 on 16-bit tensors and rounds each result once. Others are given fp32 copies."""

    state_dtype: torch.dtype | None = None
    """Dtype of the state of 16-bit parameters, over the constructor's choice; None leaves it. Set before the first step."""

    def __init__(self, params: ParamsT, defaults: Group, *, set_grad_none: bool = True, fp32_states: bool = False) -> None:
        _check(type(self).__name__, defaults)
        self.set_grad_none = set_grad_none
        self.fp32_states = fp32_states
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add one parameter group, as in torch."""
        _plain(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; None takes the constructor's `set_grad_none`."""
        _plain(Optimizer.zero_grad)(self, self.set_grad_none if set_to_none is None else set_to_none)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; `closure` may compute the loss and gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_groups()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As in torch."""
        given: dict[str, Any] = _plain(Optimizer.state_dict)(self)
        return given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; state keeps this optimizer's own dtype instead of the parameter's.

        Values are copied, except tensors that are this optimizer's state already (filled in place, for example).
        """
        before = dict(self.state)
        _plain(Optimizer.load_state_dict)(self, state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            given = state_dict["state"].get(i, {})
            for key in given.keys() & set(self.state_keys):
                if given[key] is before.get(p, {}).get(key):
                    self.state[p][key] = given[key]
                    continue
                # The base class has rounded the value to the parameter's dtype: take the given one.
                self.state[p][key] = given[key].to(
                    device=p.device, dtype=self._state_dtype(p), copy=True, memory_format=torch.contiguous_format
                )
            if "step" in given:
                self.state[p]["step"] = torch.as_tensor(given["step"]).to(device=p.device, dtype=torch.float32, copy=True)

    def _step_groups(self) -> None:
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: Group) -> None:
        raise NotImplementedError

    def _with_gradient(self, group: Group) -> Iterator[tuple[Tensor, Tensor, State]]:
        """Each parameter of `group` that has a gradient, with that and its state."""
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = self.state[p]
            if not state:
                self._check_placement(p, grad)
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                for key in self.state_keys:
                    state[key] = torch.zeros(p.shape, dtype=self._state_dtype(p), device=p.device)
            yield p, grad, state

    def _check_placement(self, p: Tensor, grad: Tensor) -> None:
        """Refuse, at a parameter's first step, what no later step could serve."""
        name = type(self).__name__
        if grad.is_sparse:
            raise UsageError(
                f"{name} was given a sparse gradient of shape {tuple(grad.shape)}, but needs a dense one. "
                "Use Embedding(sparse=False), or torch.optim.SparseAdam or SGD."
            )
        if self.host_only and p.device.type != "cpu":
            raise UsageError(
                f"{name} was given a parameter on {p.device}, but steps in host memory. "
                "Move the model to the CPU, use the Fused class of the same optimizer, or offload the optimizer by config."
            )

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        if p.dtype not in _LOW_PRECISION:
            return p.dtype
        return self.state_dtype or (torch.float32 if self.fp32_states else p.dtype)

    def _batches(self, group: Group) -> list[Batch]:
        """The parameters of `group` that have a gradient: one `Batch` per device and dtype, in order of first appearance."""
        found: dict[tuple[torch.device, torch.dtype], Batch] = {}
        for p, grad, state in self._with_gradient(group):
            dtype = state[self.state_keys[0]].dtype
            batch = found.get((p.device, dtype))
            if batch is None:
                work = torch.float32 if dtype in _LOW_PRECISION and not self.kernel_is_exact else dtype
                batch = found[p.device, dtype] = Batch(p.device, work, self.state_keys)
            batch.add(p, grad, state)
        return list(found.values())


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of torch's Optimizer as it is to be called: [Note: dynamo stays out]."""
    is_loaded = "torch._dynamo" in sys.modules
    plain: Callable[..., Any] = method if is_loaded else getattr(method, "__wrapped__", method)
    return plain


class Batch:
    """Tensors of one kernel call: one device, one dtype, all dense in the same order of elements.

    The kernels walk memory, so a tensor of another dtype or stride is updated as a dense copy and written back.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, keys: tuple[str, ...]) -> None:
        self.device = device
        self.given: list[Tensor] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[list[Tensor]] = []
        self.steps: list[Tensor] = []
        self._dtype = dtype
        self._keys = keys
        self._copies: list[tuple[Tensor, Tensor]] = []

    def add(self, p: Tensor, grad: Tensor, state: State) -> None:
        """Take one parameter in, with the state under the batch's keys and `step`."""
        for key in self._keys:
            if not state[key].is_contiguous():
                raise UsageError(
                    f"state {key!r} has strides {state[key].stride()}; state must be contiguous. Copy it before use."
                )
        self.given.append(p)
        self.params.append(self._work(p))
        self.grads.append(_dense(grad, self._dtype))
        self.states.append([self._work(state[key]) for key in self._keys])
        self.steps.append(state["step"])

    def _work(self, tensor: Tensor) -> Tensor:
        work = _dense(tensor, self._dtype)
        if work is not tensor:
            self._copies.append((tensor, work))
        return work

    def write_back(self) -> None:
        """Copy updated dense copies into the tensors they were made of."""
        for tensor, work in self._copies:
            tensor.copy_(work)


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` itself when it is contiguous and of `dtype`, else such a copy."""
    if tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def _check(name: str, defaults: Group) -> None:
    """Refuse hyperparameters outside their range."""
    for key in ("lr", "eps", "weight_decay"):
        if not defaults.get(key, 0.0) >= 0:
            raise ArgumentError(f"{name}: {key}={defaults[key]!r}, but a number of at least 0 is needed.")
    betas = defaults.get("betas", (0.0, 0.0))
    if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ArgumentError(f"{name}: betas={betas!r}, but two numbers in [0, 1) are needed, for example (0.9, 0.999).")
