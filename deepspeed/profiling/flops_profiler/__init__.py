"""Counts what a model computes: parameters, multiply-accumulates, FLOPs and time, module by module.

    profiler (FlopsProfiler) --> counter (sees every operator) --> products, elementwise (formulas)
                                        '--> places (which module)
             '--> summary (sums over the tree) --> report (text)

The conventions, and why it is done so: docs/adr/0020. Used by the engine (`engine.profiled_step`) and by itself.
"""

from deepspeed.profiling.flops_profiler.numbers import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from deepspeed.profiling.flops_profiler.profiler import (
    FlopsProfiler,
    get_model_profile,
    get_module_duration,
    get_module_flops,
    get_module_macs,
)

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "get_module_duration",
    "get_module_flops",
    "get_module_macs",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
