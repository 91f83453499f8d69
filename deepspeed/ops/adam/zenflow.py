"""The two optimizers of ZenFlow: one for the important elements, one for the rest that may step behind training.

    ZenFlowSelectiveAdamW    parameter, gradient --gather--> | chosen elements | --one kernel--> scatter
                             moments exist for the chosen elements alone

    ZenFlowCPUAdam           step() --> a thread steps; wait() --> the parameters hold the result

Not here: what is chosen, and when each of them steps (`deepspeed.zero.zenflow`, which uses both).

Source: ZenFlow (arXiv:2505.12242).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.common.worker import Worker
from deepspeed.errors import ArgumentError
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.ops.optimizer import ParamsT

__all__ = ["ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"]


class ZenFlowCPUAdam(DeepSpeedCPUAdam):
    """`DeepSpeedCPUAdam` whose step can run behind the caller.

    With `overlap_step` a call of `step()` returns at once; parameters, gradients and state belong to the step until
    `wait()`. It uses rates and other hyperparameters as they were when it was called.

    Args:
        model_params: as are all but the last two, those of `DeepSpeedCPUAdam`.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay of the parameters.
        amsgrad: not available.
        adamw_mode: AdamW; False is Adam with L2.
        fp32_optimizer_states: keep moments in float32 for 16-bit parameters.
        overlap_step: step in a thread.
        threads: torch threads of that thread; None: as many as the caller has.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        overlap_step: bool = False,
        threads: int | None = None,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode, fp32_optimizer_states
        )
        self.overlap_step = overlap_step
        self._worker = Worker("zenflow step", threads)

    def _step_groups(self) -> None:
        self.wait()
        if self.overlap_step:
            self._worker.submit(self._as_it_is().step)
        else:
            super()._step_groups()

    def _as_it_is(self) -> DeepSpeedCPUAdam:
        """The same parameters, state and hyperparameters; a later change of a rate does not reach it."""
        groups = [{**group, "params": list(group["params"])} for group in self.param_groups]
        present = DeepSpeedCPUAdam(groups, adamw_mode=self.adam_w_mode, fp32_optimizer_states=self.fp32_states)
        present.state, present.state_dtype = self.state, self.state_dtype
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                setattr(present, name, getattr(self, name))
        return present

    def wait(self) -> None:
        """Block until the step that runs is done; raise its error."""
        self._worker.join()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._worker.close()


class ZenFlowSelectiveAdamW(FusedAdam):
    """AdamW of the chosen columns of matrices; other parameters are updated as a whole.

    A column is an index of dimension 1 (of the flattened rest, for more than two dimensions). A parameter of which nothing
    was chosen yet is updated as a whole. State has the shape of what is updated: (chosen elements,).

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay of the chosen elements.
        amsgrad: not available.
        bias_correction: divide the moments by 1 - beta**step.
        adam_w_mode: False adds the decay to the gradient (Adam with L2).
        offload: keep moments in host memory, and update there.
        bucket_size: most elements gathered at a time, one parameter's at least.
        device: where moments lie and the update runs without `offload`; None: where the parameter is.

    Raises:
        RuntimeError: `amsgrad` was asked for.
        ValueError: a hyperparameter is outside its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        offload: bool = False,
        bucket_size: float = 5e8,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adam_w_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
        if not bucket_size >= 1:
            raise ArgumentError(f"{type(self).__name__}: bucket_size={bucket_size!r}, but at least 1 element is needed.")
        self.offload = offload
        self.bucket_size = int(bucket_size)
        self._device = device
        self._chosen: dict[Tensor, Tensor] = {}

    def select(self, param: Tensor, columns: Tensor) -> None:
        """Update these columns of `param` from now on; moments of columns that stay are kept, those of others start anew.

        Raises:
            ArgumentError: `param` is no matrix, or there is no such column.
        """
        if param.dim() < 2:
            raise ArgumentError(
                f"select() was given a parameter of shape {tuple(param.shape)}: columns need two dimensions. Others are "
                "updated as a whole without it."
            )
        width = param.numel() // max(1, param.shape[0])
        self._refuse_outside(columns, width, "columns")
        rows = torch.arange(param.shape[0], device=columns.device)
        self._choose(param, (rows[:, None] * width + columns.long().sort().values).view(-1))

    def positions(self, param: Tensor) -> Tensor | None:
        """What is updated of `param`: positions in the flattened parameter, rising; None: all of it."""
        return self._chosen.get(param)

    def adopt(self, param: Tensor, positions: Tensor, state: dict[str, Tensor]) -> None:
        """Update these elements of the flattened `param` from now on, with this state of theirs; it becomes the optimizer's.

        Args:
            param: one of the groups'.
            positions: int64, rising.
            state: `step`, and the moments of the elements, 1-D.
        """
        device = torch.device("cpu") if self.offload else self._device or param.device
        self._chosen[param] = positions
        self.state[param] = {key: value.to(device) for key, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with what is chosen under "chosen", by number of the parameter."""
        params = [p for group in self.param_groups for p in group["params"]]
        chosen = {number: self._chosen[p] for number, p in enumerate(params) if p in self._chosen}
        return {**super().state_dict(), "chosen": chosen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        chosen = state_dict.get("chosen", {})
        self._chosen = {
            params[number]: positions.to(params[number].device, copy=True) for number, positions in chosen.items()
        }

    def _refuse_outside(self, chosen: Tensor, limit: int, what: str) -> None:
        if chosen.dim() != 1 or (chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < limit):
            raise ArgumentError(
                f"select() was given {what} of shape {tuple(chosen.shape)}; a 1-D tensor of numbers from 0 to {limit - 1} "
                "is needed. Leave the others out."
            )

    def _choose(self, param: Tensor, positions: Tensor) -> None:
        state = self.state.get(param)
        if state:
            before = self._chosen.get(param)
            for key in self.state_keys:
                whole = state[key].new_zeros(param.numel())
                kept = state[key].reshape(-1)
                if before is None:
                    whole.copy_(kept)
                else:
                    whole[before.to(whole.device)] = kept
                state[key] = whole[positions.to(whole.device)]
        self._chosen[param] = positions

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the chosen elements of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_on({p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None})
        return loss

    @torch.no_grad()
    def step_on(self, gradients: Mapping[Tensor, Tensor], factor: float = 1.0) -> None:
        """Update the chosen elements with gradients that are not `param.grad`.

        Args:
            gradients: parameter -> its gradient, as many elements in any shape, of any float dtype, on any device.
            factor: what each gathered element is multiplied by, in the parameter's precision.
        """
        groups = self.param_groups
        try:
            for group in groups:
                for bucket in self._buckets([p for p in group["params"] if p in gradients]):
                    self._step_bucket(group, {p: self._gather(p, gradients[p], factor) for p in bucket})
        finally:
            self.param_groups = groups

    def _buckets(self, params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        numel = 0
        for p in params:
            positions = self._chosen.get(p)
            of_p = p.numel() if positions is None else positions.numel()
            if bucket and numel + of_p > self.bucket_size:
                yield bucket
                bucket, numel = [], 0
            bucket.append(p)
            numel += of_p
        if bucket:
            yield bucket

    def _step_bucket(self, group: dict[str, Any], gathered: Mapping[Tensor, nn.Parameter]) -> None:
        self.param_groups = [{**group, "params": list(gathered.values())}]
        for p, elements in gathered.items():
            self.state[elements] = self.state[p]
        try:
            FusedAdam.step(self)
        finally:
            for elements in gathered.values():
                del self.state[elements]
        for p, elements in gathered.items():
            self._scatter(p, elements)

    def _gather(self, p: Tensor, grad: Tensor, factor: float) -> nn.Parameter:
        positions = self._chosen.get(p)
        device = torch.device("cpu") if self.offload else self._device or p.device

        def of(tensor: Tensor) -> Tensor:
            flat = tensor.detach().reshape(-1)
            chosen = flat.clone() if positions is None else flat.index_select(0, positions.to(flat.device))
            return chosen.to(device, p.dtype)

        elements = nn.Parameter(of(p))
        elements.grad = of(grad).mul_(factor) if factor != 1.0 else of(grad)
        return elements

    def _scatter(self, p: Tensor, elements: Tensor) -> None:
        positions, values = self._chosen.get(p), elements.detach().to(p.device)
        if positions is None:
            p.copy_(values.view(p.shape))
        elif p.is_contiguous():
            p.view(-1).index_copy_(0, positions, values)
        else:
            flat = p.reshape(-1)
            p.copy_(flat.index_copy_(0, positions, values).view(p.shape))


class ZenFlowSelectiveAdamW_stage3(ZenFlowSelectiveAdamW):
    """The same for 1-D shards of parameters: elements are chosen by their position in the shard."""

    def select(self, param: Tensor, positions: Tensor) -> None:
        """Update these elements of the flattened `param` from now on; moments of those that stay are kept.

        Raises:
            ArgumentError: there is no such position.
        """
        self._refuse_outside(positions, param.numel(), "positions")
        self._choose(param, positions.long().sort().values)
