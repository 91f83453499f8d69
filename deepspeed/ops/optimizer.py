"""What the optimizers of this package share: the walk over groups, the layout of state, and exact loading.

    step()               host memory, up to fp32 --> `ops.host_step`, all parameters of all groups in one call
                         elsewhere, or fp64     --> each group: `_step_group(group)` -> `_batches(group)` -> torch's kernels
    step_in_one_pass()   host memory: the engine's masters, with gradients as they are and the factor they need

The engine lends `group["params"]` one flat tensor at a time and takes it back after `step()`. So nothing here remembers a
parameter list: each step reads the groups afresh, and state is found by parameter, made at its first step.

Not here: the maths of one optimizer (its own folder), the loops in host memory (`ops.host_step`), and masters, clipping and
loss scale (the engine's business).

[Note: dynamo stays out] torch.optim.Optimizer wraps some methods in a decorator that imports torch._dynamo at first use:
seconds of processor time for the first optimizer of a process, compiled or not. Its only effect is that torch.compile skips
the method, so as long as nothing has loaded dynamo there is nothing to tell, and the method is called without the wrapper.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.ops import host_step
from deepspeed.ops.host_step import KERNEL_DTYPES, Part, Rule, Update

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Group = dict[str, Any]
State = dict[str, Tensor]
HostWork = list[tuple[Group, list[Part]]]
"""Parts by group, as `_run_on_host` takes them."""

Copies = list[tuple[Tensor, Tensor]]
"""Tensors that are not contiguous, with the dense copies that are stepped instead."""

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

    # -- in host memory -----------------------------------------------------------------------------------------------

    def can_step_in_one_pass(self, device: torch.device, *dtypes: torch.dtype) -> bool:
        """Whether `step_in_one_pass` takes masters on `device`, where masters, gradients and values have `dtypes`.

        Not where somebody watches `step()` (a hook, a subclass with a step of its own): one pass does not call it.
        """
        return (
            device.type == "cpu"
            and self.host_rule(self.defaults) is not None
            and KERNEL_DTYPES.issuperset(dtypes)
            and not self._is_step_watched()
        )

    @torch.no_grad()
    def step_in_one_pass(self, updates: Sequence[Update], factor: float) -> None:
        """Update masters with gradients times `factor`, in one trip to memory: the engine's way, where it can.

        Nobody's `.grad` is looked at. State is that of `update.param`, made at its first update in that parameter's shape.
        Collective over the ranks that hold other parts where `needs_parameter_sums`.

        Args:
            updates: at most one for each parameter that `param_groups` holds; for dtypes that `can_step_in_one_pass` takes.
            factor: what unscales, averages and clips.
        """
        places = self._group_of()
        parts: list[list[Part]] = [[] for _ in self.param_groups]
        keys: list[list[Tensor]] = [[] for _ in self.param_groups]
        for update in updates:
            place = places[id(update.param)]
            parts[place].append(self._part(update))
            keys[place].append(update.param)
        work = [(group, own) for group, own in zip(self.param_groups, parts, strict=True) if own]
        self._run_on_host(work, [key for own in keys for key in own], factor)

    def host_rule(self, group: Group) -> Rule | None:
        """What the kernels of `ops.host_step` compute for `group`; None where this optimizer has no such kernel."""
        return None

    def _run_on_host(self, work: HostWork, keys: Sequence[Tensor], factor: float) -> None:
        """Step all parts of `work`, whose parameters (as `param_groups` holds them) are `keys`, in order."""
        host_step.step([(rule, parts, factor) for group, parts in work if (rule := self.host_rule(group)) is not None])

    def _part(self, update: Update) -> Part:
        param, master, grad, values, clears_grad = update
        state = self.state[param]
        if len(state) <= len(self.state_keys):  # there is `step` besides
            self._make_state(param, state)
        return Part(master, grad, self._states(state), state["step"], values, clears_grad)

    def _states(self, state: State) -> tuple[Tensor, ...]:
        states = tuple([state[key] for key in self.state_keys])
        for key, each in zip(self.state_keys, states, strict=True):
            if not each.is_contiguous():
                raise UsageError(f"state {key!r} has strides {each.stride()}; state must be contiguous. Copy it before use.")
        return states

    def _group_of(self) -> dict[int, int]:
        """id(parameter) -> number of its group; looked up anew when a group has another list, or one of another length."""
        lists = [group["params"] for group in self.param_groups]
        signature = [(id(each), len(each)) for each in lists]
        known: tuple[list[tuple[int, int]], list[Any], dict[int, int]] | None = self.__dict__.get("_known_groups")
        if known is None or known[0] != signature:
            places = {id(p): number for number, each in enumerate(lists) for p in each}
            known = self.__dict__["_known_groups"] = (signature, lists, places)  # holds the lists: an id stays theirs
        return known[2]

    def _is_step_watched(self) -> bool:
        hooks = (
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        return any(hooks) or inspect.unwrap(type(self).step) is not inspect.unwrap(GroupOptimizer.step)

    def _runs_on_host(self, p: Tensor, state: State) -> bool:
        """Whether the kernels of `ops.host_step` take `p`, an optimizer with a rule provided."""
        return (
            p.device.type == "cpu"
            and p.dtype in KERNEL_DTYPES
            and KERNEL_DTYPES.issuperset([state[key].dtype for key in self.state_keys])
        )

    def _collect_host(
        self, group: Group, keys: list[Tensor], copies: list[tuple[Tensor, Tensor]]
    ) -> tuple[list[Part], bool]:
        """What of `group` the kernels take, and whether something is left for `_step_group`.

        `keys` gets the parameters, `copies` what is to be copied back after the step.
        """
        parts: list[Part] = []
        is_rest = False
        for p, grad, state in self._with_gradient(group):
            if not self._runs_on_host(p, state):
                is_rest = True
                continue
            dense = p
            if not p.is_contiguous():
                dense = p.detach().contiguous()
                copies.append((p, dense))
            dense_grad = _dense(grad, grad.dtype if grad.dtype in KERNEL_DTYPES else torch.float32)
            parts.append(Part(dense, dense_grad, self._states(state), state["step"]))
            keys.append(p)
        return parts, is_rest

    # -- elsewhere ----------------------------------------------------------------------------------------------------

    def _step_groups(self) -> None:
        rest = self.param_groups if self.host_rule(self.defaults) is None else self._step_on_host()
        for group in rest:
            self._step_group(group)

    def _step_on_host(self) -> list[Group]:
        """Step what the kernels take, all groups in one call; the groups in which something is left."""
        keys: list[Tensor] = []
        copies: Copies = []
        work: HostWork = []
        rest = []
        for group in self.param_groups:
            parts, is_rest = self._collect_host(group, keys, copies)
            if parts:
                work.append((group, parts))
            if is_rest:
                rest.append(group)
        if work:
            self._run_on_host(work, keys, 1.0)
        for p, dense in copies:
            p.copy_(dense)
        return rest

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
                self._make_state(p, state)
            yield p, grad, state

    def _make_state(self, p: Tensor, state: State) -> None:
        """Add what `state` lacks: zeros in the shape of `p`, and no step taken."""
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        for key in self.state_keys:
            if key not in state:
                state[key] = torch.zeros(p.shape, dtype=self._state_dtype(p), device=p.device)

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
        """What `group` has for torch's kernels: one `Batch` per device and dtype, in order of first appearance."""
        found: dict[tuple[torch.device, torch.dtype], Batch] = {}
        has_rule = self.host_rule(group) is not None
        for p, grad, state in self._with_gradient(group):
            if has_rule and self._runs_on_host(p, state):
                continue
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
