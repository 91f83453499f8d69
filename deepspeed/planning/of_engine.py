"""The plan of an engine that is about to be built, for its run log.

Called by `deepspeed.initialize`, which loads this room only then and by name: no type checker sees that call, so the rest of
the room may change, and this one function keeps its parameters. Does not live here: who reads it (`run_report`).
"""

from __future__ import annotations

from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.planning.ranks import Ranks
from deepspeed.planning.states import Optimizers, model_states

__all__ = ["terms_of_engine"]


def terms_of_engine(module: nn.Module, config: DeepSpeedConfig, world_size: int, device_type: str) -> dict[str, int]:
    """Bytes per rank of each term, activations left out; terms that rest elsewhere than on the device name their tier.

    Args:
        module: whole, on any device; its values are not read.
        config: of the engine, with an optimizer.
        world_size: ranks, all of them data-parallel.
        device_type: of the engine.
    """
    terms = model_states(module, config, Ranks(world_size), Optimizers(module), device_type=device_type).terms
    nbytes: dict[str, int] = {}
    for term in terms:
        name = term.name if term.tier == "device" else f"{term.name} ({term.tier})"
        nbytes[name] = nbytes.get(name, 0) + term.nbytes
    return nbytes
