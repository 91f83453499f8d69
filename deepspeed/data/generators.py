"""The random generators of this process that live on the host, as plain values: torch's, Python's, NumPy's.

Does not live here: generators of devices, and when a checkpoint takes them (`engine.random_state`). Called by it, and by
`sampler`, which draws an order a second time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def get_host_state() -> dict[str, Any]:
    """State of every host generator of this process. NumPy counts only when something imported it."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_host_state(state: Mapping[str, Any]) -> None:
    """Inverse of `get_host_state`; generators that `state` lacks stay as they are."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
