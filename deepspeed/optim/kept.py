"""How many tensors of a parameter's size an optimizer of a configuration keeps, where its name tells. Pure: no torch.

    AdamW, options that change nothing of it    2
    anything else                               unknown here: it is built and asked (`state_tensors`)

A test asks every one of these optimizers, with each of these options. Called by `planning.formula`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["kept_tensors"]

_KEPT = {"Adam": 2, "AdamW": 2, "Adagrad": 1, "Lamb": 2, "Lion": 1}
_OF_NO_CONSEQUENCE = frozenset(
    (
        "adam_w_mode",
        "betas",
        "bias_correction",
        "eps",
        "eps_inside_sqrt",
        "fp32_optimizer_states",
        "lr",
        "max_coeff",
        "min_coeff",
        "set_grad_none",
        "weight_decay",
    )
)


def kept_tensors(name: str, params: Mapping[str, Any]) -> int | None:
    """Tensors per parameter; each has the format in which the parameter is stepped, if that is fp32.

    Args:
        name: of the optimizer, as a checked configuration has it.
        params: its options, checked likewise.

    Returns:
        None where the name and the options do not tell.
    """
    others = (value for key, value in params.items() if key not in _OF_NO_CONSEQUENCE)
    return None if any(others) else _KEPT.get(name)
