"""The LAMB optimizer: Adam's update, scaled per parameter by a trust ratio.

    u     = m_hat / (sqrt(v_hat) + eps) + weight_decay * p
    ratio = clip(|p| / |u|, min_coeff, max_coeff)        1 where either norm is 0
    p     = p - lr * ratio * u

The norms are those of a whole parameter, so this optimizer is not element-wise. It may step parts of parameters when
`sums` adds up their squares (`ops.sums`): all groups together, once per step, between the update and its scaling.

    host memory, up to fp32    -> two passes of `ops.host_step`, without memory for the update where state is fp32
    devices that Triton knows  -> kernels of `ops.device`; everything stays on the device, a step waits for nothing
    elsewhere, or fp64         -> torch's calls on lists, as little

Source: arXiv:1904.00962, algorithm 2, with phi(z) = z. The clip of the ratio is not in the paper.

Not here: masters and loss scale (the engine's business). Built by `optim.build`, and by clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.ops import device as device_kernels
from deepspeed.ops import host_step
from deepspeed.ops.host_step import Lamb
from deepspeed.ops.optimizer import Batch, Copies, Group, GroupOptimizer, HostWork, ParamsT
from deepspeed.ops.sums import OwnSums, ParameterSums


class FusedLamb(GroupOptimizer):
    """LAMB; state per parameter: `exp_avg`, `exp_avg_sq` and `step`.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, or to the moment itself with `eps_inside_sqrt`.
        eps_inside_sqrt: add `eps` before taking the root.
        weight_decay: share of the parameter in the update.
        max_grad_norm: scale a group's gradients down to this global L2 norm; 0 leaves them.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        amsgrad: not available.

    Raises:
        RuntimeError: `amsgrad` was asked for.
        ValueError: a hyperparameter is outside its range.
    """

    elementwise: ClassVar[bool] = False
    needs_parameter_sums: ClassVar[bool] = True
    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _settings: ClassVar[tuple[str, ...]] = (*GroupOptimizer._settings, "sums", "_coeffs")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise UsageError("FusedLamb was given amsgrad=True, which it does not have. Leave it out.")
        if not 0 <= min_coeff <= max_coeff:
            raise ArgumentError(
                f"FusedLamb: min_coeff={min_coeff!r}, max_coeff={max_coeff!r}, but 0 <= min_coeff <= max_coeff is needed."
            )
        defaults: Group = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults, fp32_states=True)  # norms and ratios would drown in 16 bits
        self.sums: ParameterSums = OwnSums()
        self._coeffs: list[Tensor] = []

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, in the order of the parameters that had a gradient. Waits for the device.

        Where ranks hold shards: of those parameters that this rank has a part of.
        """
        return [ratio for ratios in self._coeffs for ratio in ratios.tolist()]

    def host_rule(self, group: Group) -> Lamb:
        """See `GroupOptimizer`."""
        beta1, beta2 = group["betas"]
        return Lamb(
            float(group["lr"]),
            group["weight_decay"],
            beta1,
            beta2,
            group["eps"],
            is_eps_inside=bool(group["eps_inside_sqrt"]),
            is_corrected=bool(group["bias_correction"]),
        )

    def _step_groups(self) -> None:
        keys: list[Tensor] = []
        copies: Copies = []
        work: HostWork = []
        found: list[tuple[Group, Batch]] = []
        for group in self.param_groups:
            parts, is_rest = self._collect_host(group, keys, copies)
            if len(parts):
                work.append((group, parts))
            if is_rest:
                found += [(group, batch) for batch in self._batches(group)]
        self._step_all(work, keys, found, 1.0)
        for p, dense in copies:
            p.copy_(dense)

    def _run_on_host(self, work: HostWork, keys: Sequence[Tensor], factor: float) -> None:
        self._step_all(work, keys, [], factor)

    def _step_all(self, work: HostWork, keys: Sequence[Tensor], found: list[tuple[Group, Batch]], factor: float) -> None:
        """Step what lies in host memory (`work`, the parts of `keys`) and what torch's kernels step (`found`) together."""
        factors = self._clip(work, keys, found, factor)
        host = [(self.host_rule(group), parts, own) for (group, parts), own in zip(work, factors, strict=True)]
        host_squares_P2, kept = host_step.lamb_update(host)
        moved = [self._update(group, batch) for group, batch in found]
        updates, squares = [update for update, _ in moved], [sums_P2 for _, sums_P2 in moved]
        given = [*keys, *(p for _, batch in found for p in batch.given)]
        device = given[0].device if given else torch.device("cpu")
        partial_P2 = torch.cat([each.to(device, _wide(device)) for each in (host_squares_P2, *squares)])
        numels = [*(len(parts) for _, parts in work), *(len(batch.given) for _, batch in found)]
        sums = torch.split(self.sums.per_parameter(given, partial_P2), numels) if numels else ()
        if not numels:
            self.sums.per_parameter(given, partial_P2)  # the other ranks wait for this one
        ratios = [_ratios(group, own_P2.cpu()) for (group, _), own_P2 in zip(work, sums, strict=False)]
        host_step.lamb_apply(host, kept, [ratio for each in ratios for ratio in each.tolist()])
        self._coeffs = ratios + [
            self._apply(group, batch, update, own_P2.to(batch.device))
            for (group, batch), update, own_P2 in zip(found, updates, sums[len(work) :], strict=True)
        ]

    def _clip(self, work: HostWork, keys: Sequence[Tensor], found: list[tuple[Group, Batch]], factor: float) -> list[float]:
        """Scale each group's gradients down to its `max_grad_norm`: those of `found` in place, those of `work` by factors.

        One more meeting of ranks, where any group has a largest norm.

        Returns:
            For each entry of `work` the factor that its gradients need, `factor` included.
        """
        most = [group["max_grad_norm"] for group in self.param_groups]
        if not any(norm > 0 for norm in most):
            return [factor] * len(work)
        device = found[0][1].device if found else torch.device("cpu")
        squares_G = torch.zeros(len(most), dtype=_wide(device), device=device)
        places = {id(group): place for place, group in enumerate(self.param_groups)}
        for group, batch in found:
            grads = [grad for grad, key in zip(batch.grads, batch.given, strict=True) if self.sums.counts(key)]
            norms = torch.stack(torch._foreach_norm(grads)).to(squares_G) if grads else squares_G.new_zeros(1)
            squares_G[places[id(group)]].add_(norms.square().sum())
        own = iter(keys)
        for group, parts in work:
            grads = [grad for grad, key in zip(parts.grads, own, strict=False) if self.sums.counts(key)]
            squares = host_step.sum_of_squares(grads) * factor**2
            squares_G[places[id(group)]].add_(squares.to(squares_G))
        norms_G = self.sums.of_all(squares_G).sqrt()
        scales = {
            id(group): torch.clamp(group["max_grad_norm"] / (norm + 1e-6), max=1.0)
            for group, norm in zip(self.param_groups, norms_G, strict=True)
            if group["max_grad_norm"] > 0
        }
        for group, batch in found:
            if id(group) in scales:
                scale = scales[id(group)].to(batch.device, batch.grads[0].dtype)
                batch.grads = list(torch._foreach_mul(batch.grads, scale))
        return [factor * float(scales.get(id(group), 1.0)) for group, _ in work]

    @staticmethod
    def _update(group: Group, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """m_hat / (sqrt(v_hat) + eps) + decay for each parameter, the gradients taken into the moments; and `_squares`."""
        beta1, beta2 = group["betas"]
        torch._foreach_add_(batch.steps, 1)
        exp_avgs = [exp_avg for exp_avg, _ in batch.states]
        exp_avg_sqs = [exp_avg_sq for _, exp_avg_sq in batch.states]
        dtype = exp_avgs[0].dtype
        corrections = [_corrections(beta, batch.steps, dtype, bool(group["bias_correction"])) for beta in (beta1, beta2)]
        if device_kernels.can_run(batch.device, dtype):
            numbers = {"eps": group["eps"], "weight_decay": group["weight_decay"], "is_eps_inside": group["eps_inside_sqrt"]}
            tensors = (batch.params, batch.grads, exp_avgs, exp_avg_sqs, torch.stack(corrections, dim=1))
            return device_kernels.lamb_update(*tensors, beta1=beta1, beta2=beta2, **numbers)
        torch._foreach_lerp_(exp_avgs, batch.grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, batch.grads, batch.grads, 1 - beta2)
        update, denominators = exp_avgs, exp_avg_sqs
        if group["bias_correction"]:
            update = list(torch._foreach_div(exp_avgs, list(corrections[0].unbind())))
            denominators = list(torch._foreach_div(exp_avg_sqs, list(corrections[1].unbind())))
        eps = group["eps"]
        if group["eps_inside_sqrt"]:
            roots = torch._foreach_sqrt(torch._foreach_add(denominators, eps))
        else:
            roots = torch._foreach_add(torch._foreach_sqrt(denominators), eps)
        update = list(torch._foreach_div(update, roots))
        if group["weight_decay"]:
            torch._foreach_add_(update, batch.params, alpha=group["weight_decay"])
        return update, _squares(batch.params, update)

    @staticmethod
    def _apply(group: Group, batch: Batch, update: list[Tensor], sums_P2: Tensor) -> Tensor:
        """Step one batch and return its trust ratios, shape (parameters,); `sums_P2` are the squares of whole parameters."""
        ratios = _ratios(group, sums_P2).to(update[0].dtype)
        if device_kernels.can_run(batch.device, batch.params[0].dtype):
            device_kernels.lamb_apply(batch.params, update, ratios, group["lr"])
        else:
            torch._foreach_mul_(update, list(ratios.unbind()))
            torch._foreach_add_(batch.params, update, alpha=-group["lr"])
        batch.write_back()
        return ratios


def _ratios(group: Group, sums_P2: Tensor) -> Tensor:
    """Trust ratios, shape (parameters,), of the sums of squares of whole parameters and their updates."""
    weight_norms, update_norms = sums_P2.sqrt().unbind(1)
    usable = (weight_norms > 0) & (update_norms > 0)
    ratios = (weight_norms / update_norms).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where(usable, ratios, 1.0)


def _squares(params: list[Tensor], update: list[Tensor]) -> Tensor:
    """Sums of squares of each parameter and of its update, shape (parameters, 2)."""
    norms_P2 = torch.stack([torch.stack(torch._foreach_norm(each)) for each in (params, update)], dim=1)
    return norms_P2.to(_wide(norms_P2.device)).square()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _corrections(beta: float, steps: list[Tensor], dtype: torch.dtype, is_wanted: bool) -> Tensor:
    """1 - beta**step for each step, without the cancellation that would lose it in float32; 1 where it is not wanted."""
    if not is_wanted:
        return torch.ones(len(steps), dtype=dtype, device=steps[0].device)
    exponents = torch.stack(steps).to(dtype) * (math.log(beta) if beta else -math.inf)
    return torch.expm1(exponents).neg()
