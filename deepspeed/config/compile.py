"""The block `compile`: passes over compiled graphs.

Lives here: keys and what they forbid each other. Does not live here: the passes (`compile`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import NonNegativeWhole

__all__ = ["CompileConfig"]


class CompileConfig(ConfigModel):
    """`compile`: what `engine.compile()` does beyond `torch.compile` (DeepCompile)."""

    deepcompile: bool = False
    """Schedule gathers, releases and offload in the compiled graph."""

    autoep_non_moe: bool = False
    """Compile only what surrounds expert-parallel layers."""

    free_activation: bool = False
    """Free large saved tensors as early as possible."""

    free_activation_threshold: NonNegativeWhole = 10_485_760
    """Bytes from which a saved tensor is large."""

    offload_activation: bool = False
    """Move saved tensors to the host by plan; excludes offloading parameters or optimizer state here."""

    offload_activation_pin_memory: bool = True
    """Use page-locked memory for that."""

    offload_opt_states: bool = False
    """Move optimizer state out during forward and backward; excludes `offload_parameters`."""

    offload_parameters: bool = False
    """Move parameters out by plan."""

    double_buffer: bool = True
    """Use two buffers for gathers."""

    symmetric_memory: bool = False
    """Gather through symmetric memory."""

    debug_log: bool = False
    """Write the graphs to files."""

    sync_before_reduce: bool = False
    """Wait for the device there, for finding bugs."""

    sync_after_reduce: bool = False
    """Wait for the device there, for finding bugs."""

    sync_before_allgather: bool = False
    """Wait for the device there, for finding bugs."""

    sync_after_allgather: bool = False
    """Wait for the device there, for finding bugs."""

    keep_int_input_tensors: bool = True
    """Keep integer inputs for profiling the graph again."""

    keep_all_input_tensors: bool = False
    """Keep all inputs for profiling the graph again."""

    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = None
    """Passes to run; `autotp` excludes the others."""

    disable: bool = False
    """Old key in files of clients. Accepted and not read: nothing compiles before `engine.compile()` is called."""

    backend: str = "inductor"
    """Old key in files of clients. Accepted and not read: `engine.compile()` takes the back end."""

    def check(self) -> Iterable[Refusal]:
        """Planned offload moves one kind of bytes; the tensor-parallel pass runs alone."""
        if self.offload_activation and (self.offload_parameters or self.offload_opt_states):
            needed = "needed neither offload_parameters nor offload_opt_states with it"
            yield Refusal("offload_activation", needed, "Choose one.")
        if self.offload_opt_states and self.offload_parameters:
            yield Refusal("offload_opt_states", "needed offload_parameters = false with it", "Choose one.")
        if self.passes and "autotp" in self.passes and len(set(self.passes)) > 1:
            yield Refusal("passes", "needed autotp alone", "Leave the others out.")
