"""What the optimizers of this package share: the walk over groups, the layout of state, and exact loading.

    step()               host memory, up to fp32 --> `ops.host_step`, all parameters of all groups in one call
                         elsewhere, or fp64     --> each group: `_step_group(group)` -> `_batches(group)` -> torch's kernels
    step_in_one_pass()   host memory: the engine's masters, with gradients as they are and the factor they need

The engine lends `group["params"]` one flat tensor at a time and takes it back after `step()`. So nothing here remembers a
parameter list: each step reads the groups afresh, and state is found by parameter, made at its first step.

Not here: the maths of one optimizer (its own folder), the loops in host memory (`ops.host_step`), and masters, clipping and
loss scale (the engine's business).

[Note: columns] What a step costs for each of thousands of small tensors is what Python does with it. So all of them are
looked at column by column, with loops of C (`map` of a C function) and never with a name looked up for each.

[Note: dynamo stays out] torch.optim.Optimizer wraps some methods in a decorator that imports torch._dynamo at first use:
seconds of processor time for the first optimizer of a process, compiled or not. Its only effect is that torch.compile skips
the method, so as long as nothing has loaded dynamo there is nothing to tell, and the method is called without the wrapper.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.ops import host_step
from deepspeed.ops.host_step import KERNEL_DTYPES, Parts, Rule, Update

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Group = dict[str, Any]
State = dict[str, Tensor]
HostWork = list[tuple[Group, Parts]]
"""Parts by group, as `_run_on_host` takes them."""

Copies = list[tuple[Tensor, Tensor]]
"""Tensors that are not contiguous, with the dense copies that are stepped instead."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_GRAD, _DTYPE, _LAYOUT, _IS_CPU = map(attrgetter, ("grad", "dtype", "layout", "is_cpu"))
_STEP = itemgetter("step")


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

    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none", "fp32_states", "state_dtype")
    """What a copy or a pickle keeps beside torch's own."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._settings}}

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

        Values are copied, except tensors that are this optimizer's state already (filled in place, for example). It may be
        the state of torch's optimizer of the same kind: what its groups lack keeps this optimizer's default.

        Raises:
            UsageError: a group asks for what this optimizer does not do.
        """
        self._refuse_foreign(state_dict["param_groups"])
        before = dict(self.state)
        _plain(Optimizer.load_state_dict)(self, state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
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

    def _refuse_foreign(self, groups: Sequence[Group]) -> None:
        for name in ("amsgrad", "maximize"):
            if any(group.get(name) for group in groups):
                raise UsageError(
                    f"{type(self).__name__}.load_state_dict() was given a group with {name}=True, which this optimizer does "
                    "not have. Load it into the torch optimizer that it comes from."
                )

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
        found: list[list[Update]] = [[] for _ in self.param_groups]
        for update in updates:
            found[places[id(update.param)]].append(update)
        pairs = [(group, own) for group, own in zip(self.param_groups, found, strict=True) if own]
        keys = [update.param for _, own in pairs for update in own]
        self._run_on_host([(group, self._parts(own)) for group, own in pairs], keys, factor)

    def host_rule(self, group: Group) -> Rule | None:
        """What the kernels of `ops.host_step` compute for `group`; None where this optimizer has no such kernel."""
        return None

    def _run_on_host(self, work: HostWork, keys: Sequence[Tensor], factor: float) -> None:
        """Step all parts of `work`, whose parameters (as `param_groups` holds them) are `keys`, in order."""
        host_step.step([(rule, parts, factor) for group, parts in work if (rule := self.host_rule(group)) is not None])

    def _parts(self, updates: Sequence[Update]) -> Parts:
        states = [self.state[update.param] for update in updates]
        for update, state in zip(updates, states, strict=True):
            if len(state) <= len(self.state_keys):  # there is `step` besides
                self._make_state(update.param, state)
        columns = self._columns(states)
        for key, column in zip(self.state_keys, columns, strict=True):
            for each in column:
                _check_strides(key, each)
        return Parts(
            [update.master for update in updates],
            [update.grad for update in updates],
            columns,
            [state["step"] for state in states],
            [update.values for update in updates],
            [update.clears_grad for update in updates],
        )

    def _columns(self, states: Sequence[State]) -> list[list[Tensor]]:
        return [list(map(itemgetter(key), states)) for key in self.state_keys]

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

    @staticmethod
    def _fits_host(params: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> bool:
        """Whether the kernels of `ops.host_step` take `params`, which with their states have `dtypes`."""
        return KERNEL_DTYPES.issuperset(dtypes) and all(map(_IS_CPU, params))

    def _runs_on_host(self, p: Tensor, state: State) -> bool:
        return self._fits_host([p], [p.dtype, *(state[key].dtype for key in self.state_keys)])

    def _collect_host(self, group: Group, keys: list[Tensor], copies: Copies) -> tuple[Parts, bool]:
        """What of `group` the kernels take, and whether something is left for `_step_group`.

        `keys` gets the parameters, `copies` what is to be copied back after the step. [Note: columns]
        """
        params, grads = _with_grad(group["params"])
        states: list[State] = list(map(self.state.__getitem__, params))
        if not all(states):
            states = [state for _, _, state in self._with_gradient(group)]
        columns = self._columns(states)
        dtypes = [set(map(_DTYPE, column)) for column in (params, *columns)]
        is_rest = not self._fits_host(params, set().union(*dtypes))
        if is_rest or set(map(_LAYOUT, grads)) != {torch.strided}:
            for p, grad in zip(params, grads, strict=True):
                self._check_placement(p, grad)
        if is_rest:
            taken = [n for n, p in enumerate(params) if self._runs_on_host(p, states[n])]
            params, grads = [params[n] for n in taken], [grads[n] for n in taken]
            states = [states[n] for n in taken]
            columns = self._columns(states)
            dtypes = [set(map(_DTYPE, column)) for column in (params, *columns)]
        for key, column in zip(self.state_keys, columns, strict=True):
            if not all(map(Tensor.is_contiguous, column)):
                for each in column:
                    _check_strides(key, each)
        keys += params
        if not all(map(Tensor.is_contiguous, params)):
            dense = [p if p.is_contiguous() else p.detach().contiguous() for p in params]
            copies += [(p, copy) for p, copy in zip(params, dense, strict=True) if p is not copy]
            params = dense
        of_grads = set(map(_DTYPE, grads))
        if not (KERNEL_DTYPES.issuperset(of_grads) and all(map(Tensor.is_contiguous, grads))):
            grads = [_dense(grad, grad.dtype if grad.dtype in KERNEL_DTYPES else torch.float32) for grad in grads]
            of_grads = set(map(_DTYPE, grads))
        steps = list(map(_STEP, states))
        common = [each.copy().pop() if len(each) == 1 else None for each in (dtypes[0], of_grads, *dtypes[1:])]
        return Parts(params, grads, columns, steps, common_dtypes=common), is_rest

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
            if len(parts):
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
        """Refuse what no step could serve."""
        name = type(self).__name__
        if p.is_complex():
            raise UsageError(f"{name} was given a complex parameter, {p.dtype}, but needs real ones: torch.view_as_real(p).")
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
            _check_strides(key, state[key])
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


def _with_grad(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those of `params` that have a gradient, and the gradients."""
    grads = list(map(_GRAD, params))
    if type(None) not in set(map(type, grads)):
        return params, grads
    kept = [n for n, grad in enumerate(grads) if grad is not None]
    return [params[n] for n in kept], [grads[n] for n in kept]


def _check_strides(key: str, state: Tensor) -> None:
    if not state.is_contiguous():
        raise UsageError(f"state {key!r} has strides {state.stride()}; state must be contiguous. Copy it before use.")


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` itself when it is contiguous and of `dtype`, else such a copy."""
    if tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def _check(name: str, defaults: Group) -> None:
    """Refuse hyperparameters outside their range."""
    for key in ("lr", "eps", "weight_decay"):
        value = defaults.get(key, 0.0)
        if not isinstance(value, int | float | Tensor) or not value >= 0:
            raise ArgumentError(f"{name}: {key}={value!r}, but a number of at least 0 is needed.")
    betas = defaults.get("betas", (0.0, 0.0))
    if not (isinstance(betas, Sequence) and len(betas) == 2 and all(_is_beta(beta) for beta in betas)):
        raise ArgumentError(f"{name}: betas={betas!r}, but two numbers in [0, 1) are needed, for example (0.9, 0.999).")
    if "betas" in defaults:
        defaults["betas"] = tuple(betas)


def _is_beta(beta: object) -> bool:
    return isinstance(beta, int | float) and 0 <= beta < 1
