"""A plan as a list of terms, and its totals. Pure: no torch.

    term          nbytes   tier     moment
    weights       ...      device   always
    activations   ...      device   pass        while forward and backward run
    scratch       ...      device   update      while the optimizer steps

    peak of a tier = always + max(pass, update)

Called by the rest of the room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["TIERS", "ModelStates", "Moment", "Moved", "RankPlan", "Term", "Tier"]

Tier = Literal["device", "host", "nvme"]
Moment = Literal["always", "pass", "update"]
TIERS: tuple[Tier, ...] = ("device", "host", "nvme")


@dataclass(frozen=True)
class Term:
    """One thing that a rank holds."""

    name: str
    nbytes: int
    tier: Tier = "device"
    moment: Moment = "always"
    lower: str = ""
    """The setting that would lower it; empty: none would."""


class Moved(NamedTuple):
    """What travels among the ranks that hold the same weights: others for experts than for what every rank holds."""

    weight_nbytes: int
    """Of trained weights, whole, in the format in which they are gathered."""

    gradient_nbytes: int
    """Of their gradients, whole, in the format in which they travel."""

    ranks: int


@dataclass(frozen=True)
class ModelStates:
    """Terms of the model's states, and what traffic is counted from."""

    terms: tuple[Term, ...]
    moved: tuple[Moved, ...]
    stays_gathered: bool
    """At stage 3: what forward gathered is there in backward."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds under one setting, and sends per optimizer step."""

    label: str
    """The setting, such as `stage 2, offload_optimizer=cpu`."""

    terms: tuple[Term, ...]
    sent_nbytes: int = 0
    """Bytes that a rank sends per optimizer step."""

    def nbytes(self, tier: Tier, moments: Iterable[Moment] = ("always", "pass", "update")) -> int:
        """Bytes of the terms of one tier at some moments, added up."""
        return sum(term.nbytes for term in self.terms if term.tier == tier and term.moment in tuple(moments))

    def peak_nbytes(self, tier: Tier = "device") -> int:
        """The most that one tier holds at any moment of a step."""
        during = max(self.nbytes(tier, [moment]) for moment in ("pass", "update"))
        return self.nbytes(tier, ["always"]) + during

    def fits(self, device_nbytes: float) -> bool:
        """Whether a device of this size holds it."""
        return self.peak_nbytes("device") <= device_nbytes

    def advice(self) -> tuple[str, ...]:
        """Settings that lower the device's terms, the largest term first, each once."""
        by_size = sorted((term for term in self.terms if term.tier == "device" and term.lower), key=lambda t: -t.nbytes)
        return tuple(dict.fromkeys(f"{term.name}: {term.lower}" for term in by_size if term.nbytes))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        peaks = {f"{tier}_peak_nbytes": self.peak_nbytes(tier) for tier in TIERS}
        return {
            "label": self.label,
            **peaks,
            "sent_nbytes": self.sent_nbytes,
            "terms": [asdict(each) for each in self.terms],
        }
