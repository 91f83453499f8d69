"""The random generators that training draws from, as plain values: the host's, the device's, and named streams.

Does not live here: the host's generators one by one (`data.generators`), streams (`activations.random_states`), when they
are taken and given back. Called by `engine.saving` and `engine.loading`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.activations.random_states import tracker
from deepspeed.data.generators import get_host_state, set_host_state
from deepspeed.topology.mesh import AxisGroup

__all__ = ["get_random_state", "set_random_state", "start_alike"]


def get_random_state() -> dict[str, Any]:
    """State of every generator of this process."""
    state = get_host_state()
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
    if streams := tracker.get_states():
        state["streams"] = streams
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Inverse of `get_random_state`; generators that `state` lacks stay as they are."""
    set_host_state(state)
    accelerator = get_accelerator()
    if "device" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["device"])
    if "streams" in state:
        tracker.set_states(state["streams"])


def start_alike(axis: AxisGroup) -> None:
    """Give torch's generators of all ranks of `axis` the first one's state. Collective over it.

    For tensor-parallel ranks, which must drop the same of activations that all of them hold.
    """
    if axis.size == 1:
        return
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    torch.set_rng_state(_of_first(torch.get_rng_state(), axis, device))
    if accelerator.device_name() != "cpu":
        accelerator.set_rng_state(_of_first(accelerator.get_rng_state(), axis, device))


def _of_first(state: torch.Tensor, axis: AxisGroup, device: str) -> torch.Tensor:
    sent = state.to(device)
    comm.broadcast(sent, src=axis.ranks[0], group=axis.group)
    return sent.cpu()
