"""What routers did, for monitors, and a warning when experts starve.

    every router    tokens of each expert, dropped, entropy, tokens --one all-reduce--> of all data-parallel ranks
                                                                          |--> monitor: Train/Samples/moe/<layer>/...
                                                                          '--> window: an expert without any token? warn

Asked on steps that are reported alone: it waits for the device. Figures are those of the step's last micro-batch.

Does not live here: routing (`moe.gating`, whose `RoutingFacts` each router keeps), writers (`monitor`). `engine.report`
calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.common.logging import warn_once
from deepspeed.topology.mesh import AxisGroup

__all__ = ["ExpertReport"]

_WINDOW_REPORTS = 20
_ENOUGH_TOKENS = 20  # per expert: of fewer, chance may leave one without any
_NAMES_SHOWN = 8


class ExpertReport:
    """The routers of a model.

    Args:
        module: the model.
        axis: ranks whose tokens are added up.
        window_reports: an expert without tokens in so many reports is warned of, once per layer.
    """

    def __init__(self, module: nn.Module, axis: AxisGroup, window_reports: int = _WINDOW_REPORTS) -> None:
        found: list[tuple[str, Any]] = [(name, each) for name, each in module.named_modules() if hasattr(each, "last_facts")]
        self._routers = [(name.removesuffix(".gate").removesuffix(".deepspeed_moe"), router) for name, router in found]
        self._axis = axis
        self._window_reports = window_reports
        self._reports = 0
        self._windows: dict[str, list[float]] = {}
        self.tokens: dict[str, list[float]] = {}
        """Layer -> tokens of each of its experts, of the last report."""

    def values(self) -> dict[str, float]:
        """Figures by name, over all ranks. Collective over the axis; nothing without routers."""
        if not self._routers:
            return {}
        parts = [_figures(router) for _, router in self._routers]
        total = torch.cat(parts)
        if self._axis.size > 1:
            comm.all_reduce(total, group=self._axis.group)
        named: dict[str, float] = {}
        self._reports += 1
        of_routers = torch.split(total, [part.numel() for part in parts])
        for (name, _), figures in zip(self._routers, of_routers, strict=True):
            *routed, kept, entropy, tokens = figures.tolist()
            self.tokens[name] = routed
            named.update({f"moe/{name}/expert_{number}_tokens": count for number, count in enumerate(routed)})
            named[f"moe/{name}/dropped_share"] = (sum(routed) - kept) / max(1.0, sum(routed))
            named[f"moe/{name}/entropy"] = entropy / max(1.0, tokens)
            before = self._windows.get(name, [0.0] * len(routed))
            self._windows[name] = [one + other for one, other in zip(before, routed, strict=True)]
        if self._reports >= self._window_reports:
            self._look_for_starved()
        return named

    def _look_for_starved(self) -> None:
        for name, counts in self._windows.items():
            starved = [number for number, count in enumerate(counts) if not count]
            if starved and sum(counts) >= _ENOUGH_TOKENS * len(counts):
                shown = ", ".join(map(str, starved[:_NAMES_SHOWN])) + (", ..." if len(starved) > _NAMES_SHOWN else "")
                warn_once(
                    ("starved experts", name),
                    f"experts {shown} of layer {name!r} ({len(starved)} of {len(counts)}) got none of {sum(counts):.0f} "
                    f"tokens in the last {self._reports} reported steps: the router has collapsed, and they learn nothing. "
                    "Add l_aux to the loss with a larger factor (0.01 is usual), use noisy_gate_policy, or lower the "
                    "learning rate.",
                )
        self._reports = 0
        self._windows.clear()


def _figures(router: Any) -> Tensor:
    """Tokens of each expert, kept ones of all, summed entropy, tokens of this rank, float64; zeros before it ran."""
    facts = router.last_facts
    if facts is None:
        return torch.zeros(router.wg.out_features + 3, dtype=torch.float64, device=router.wg.weight.device)
    tokens = facts.probabilities_TE.shape[0]
    entropy = facts.entropy().double() * tokens
    ends = torch.stack([facts.kept_E.sum().double(), entropy, entropy.new_tensor(float(tokens))])
    return torch.cat([facts.routed_E.double(), ends])
