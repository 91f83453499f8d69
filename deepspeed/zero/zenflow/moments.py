"""State that changes hands: an element's moments when its column is chosen or dropped.

    important   own moments, `step` counts every update          rest   moments of the CPU optimizer, `step` counts windows

Adam divides its moments by 1 - beta**step. The two count differently, so a moment is carried over as what it stands for:
divided by the correction of the one side, multiplied by that of the other. Moments of elements that stay are not touched.

Lives here: arithmetic on the tensors of one slice. Called by `zero.zenflow.weights`.

Departs from ZenFlow (arXiv:2505.12242), which leaves open what becomes of moments when the choice changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["MOMENTS", "change_hands", "put_back"]

MOMENTS = ("exp_avg", "exp_avg_sq")


def put_back(rest: Mapping[str, Tensor], own: Mapping[str, Tensor], positions: Tensor) -> None:
    """Write the important elements' moments into the places that the slice's state keeps for them, as they are."""
    for key in MOMENTS:
        whole = rest[key].view(-1)
        whole.index_copy_(0, positions, own[key].to(whole.device, whole.dtype))


def change_hands(
    rest: Mapping[str, Tensor], own: Mapping[str, Tensor], before: Tensor, after: Tensor, group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Give dropped elements to the rest and take chosen ones from it.

    Args:
        rest: state of the slice: `step` and the moments of all its elements; written.
        own: state of the important elements; of `before`.
        before: their positions in the slice, int64, rising.
        after: positions of those that are important now.
        group: hyperparameters: `betas`, `bias_correction`.

    Returns:
        State of the elements `after`.
    """
    put_back(rest, own, before)
    numel = rest[MOMENTS[0]].numel()
    was, is_now = torch.zeros(numel, dtype=torch.bool), torch.zeros(numel, dtype=torch.bool)
    was[before], is_now[after] = True, True
    dropped, taken = before[~is_now[before]], after[~was[after]]
    for key, beta in zip(MOMENTS, group["betas"], strict=True):
        to_rest = _ratio(beta, float(own["step"]), float(rest["step"]), group)
        to_own = _ratio(beta, float(rest["step"]), float(own["step"]), group)
        whole = rest[key].view(-1)
        whole[dropped] *= to_rest
        whole[taken] *= to_own
    return {"step": own["step"], **{key: rest[key].view(-1)[after] for key in MOMENTS}}


def _ratio(beta: float, from_step: float, to_step: float, group: Mapping[str, Any]) -> float:
    """What turns a moment that was corrected for `from_step` into one that is corrected for `to_step`."""
    if not group["bias_correction"] or from_step == to_step or not from_step:
        return 1.0
    return float((1.0 - beta**to_step) / (1.0 - beta**from_step))
