"""ZenFlow as an ordinary torch optimizer over whole parameters: what every distributed form of it must come to.

No line of the library is used here. Written element by element, with masks: nothing is gathered, nothing runs in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LONGEST_WINDOW = 32


@dataclass(frozen=True)
class Plan:
    """As the `zenflow` block, in updates. `interval` None is "auto"."""

    ratio: float = 0.3
    interval: int | None = 3
    choice_every: int = 6
    warm_up: int = 0
    overlap: bool = False
    auto_ratio: float = 0.99

    def block(self) -> dict[str, Any]:
        """The same in a config."""
        return {
            "topk_ratio": self.ratio,
            "select_strategy": "step",
            "select_interval": self.choice_every,
            "update_interval": self.interval or "auto",
            "overlap_step": self.overlap,
            "full_warm_up_rounds": self.warm_up,
            "auto_ratio": self.auto_ratio,
        }


class PlainZenFlow(torch.optim.Optimizer):
    """AdamW of the important columns at every step, of everything else at the end of each window.

    `journal` has one entry per step: F, then C, I, R, B as in `deepspeed.zero.zenflow.schedule`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        plan: Plan,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.plan = plan
        self.journal: list[str] = []
        self.own_steps = self.rest_steps = self.in_window = 0
        self.since_choice = -1
        self.pending: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self._params():
            if not self.state[p]:
                self.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq", "total")}
                self.state[p]["mask"] = torch.zeros_like(p, dtype=torch.bool)
        if len(self.journal) < self.plan.warm_up:
            self.own_steps += 1
            self.rest_steps += 1
            for p in self._params():
                self._adam(p, p, p.grad, torch.ones_like(p, dtype=torch.bool), self.own_steps)
            self.journal.append("F")
            return
        self.journal.append("I" if not self._choose_if_due() else "CI")
        self.own_steps += 1
        self.in_window += 1
        for p in self._params():
            state = self.state[p]
            self._adam(p, p, p.grad, state["mask"], self.own_steps)
            state["total"] += torch.where(state["mask"], 0.0, p.grad)
        self._end_window_if_over()

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _adam(self, into: Tensor, p: Tensor, gradient: Tensor, where: Tensor, steps: int) -> None:
        group, state = next(g for g in self.param_groups if any(p is q for q in g["params"])), self.state[p]
        (beta1, beta2), lr = group["betas"], group["lr"]
        m = beta1 * state["exp_avg"] + (1 - beta1) * gradient
        v = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
        denominator = v.sqrt() / math.sqrt(1 - beta2**steps) + group["eps"]
        new = p * (1 - lr * group["weight_decay"]) - lr / (1 - beta1**steps) * m / denominator
        state["exp_avg"] = torch.where(where, m, state["exp_avg"])
        state["exp_avg_sq"] = torch.where(where, v, state["exp_avg_sq"])
        into.copy_(torch.where(where, new, p))

    def _choose_if_due(self) -> bool:
        if self.in_window or 0 <= self.since_choice < self.plan.choice_every:
            self.since_choice += 1
            return False
        for p in self._params():
            before, after = self.state[p]["mask"], self._important(p)
            self.state[p]["mask"] = after
            if self.since_choice < 0:
                continue
            betas = self.param_groups[0]["betas"]
            for key, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=True):
                rest, own = 1 - beta**self.rest_steps, 1 - beta**self.own_steps
                moment = self.state[p][key]
                moment[before & ~after] *= rest / own
                moment[after & ~before] *= own / rest
        self.since_choice = 1
        return True

    def _important(self, p: Tensor) -> Tensor:
        if p.dim() < 2:
            return torch.ones_like(p, dtype=torch.bool)
        assert p.grad is not None
        squares = p.grad.reshape(p.shape[0], -1).double().square().sum(0)
        kept = max(1, math.floor(squares.numel() * self.plan.ratio + 0.5))
        mask = torch.zeros(squares.numel(), dtype=torch.bool)
        mask[sorted(range(squares.numel()), key=lambda column: -squares[column].item())[:kept]] = True
        return mask.expand(p.shape[0], -1).reshape(p.shape).clone()

    def _is_ripe(self) -> bool:
        matrices = [p for p in self._params() if p.dim() > 1]
        rest = torch.cat([self.state[p]["total"][~self.state[p]["mask"]] for p in matrices])
        important = torch.cat([p.grad[self.state[p]["mask"]] for p in matrices if p.grad is not None])
        rms = [x.double().square().mean().sqrt().item() for x in (rest, important)]
        return rms[0] >= self.plan.auto_ratio * rms[1]

    def _end_window_if_over(self) -> None:
        plan, is_due = self.plan, self.since_choice >= self.plan.choice_every
        if plan.interval is None:
            is_over = self._is_ripe() or is_due or self.in_window >= LONGEST_WINDOW
        else:
            is_over = self.in_window >= plan.interval
        if not is_over:
            return
        for p, value in self.pending.items():
            p.copy_(torch.where(self.state[p]["mask"], p, value))
        self.pending = {}
        self.rest_steps += 1
        is_behind = plan.overlap and not is_due
        for p in self._params():
            state = self.state[p]
            target = p.clone() if is_behind else p
            self._adam(target, p, state["total"] / self.in_window, ~state["mask"], self.rest_steps)
            state["total"] = torch.zeros_like(p)
            if is_behind:
                self.pending[p] = target
        self.journal[-1] += "B" if is_behind else "R"
        self.in_window = 0
