"""The random generators that training draws from, as plain values: torch's on host and device, Python's, NumPy's.

Does not live here: when it is taken and given back. Called by `engine.saving` and `engine.loading`.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator


def get_random_state() -> dict[str, Any]:
    """State of every generator of this process. NumPy counts only when something imported it."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of `get_random_state`; generators that `state` lacks stay as they are."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    accelerator = get_accelerator()
    if "device" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["device"])
