"""Weights out of a checkpoint of any layout, as files and state dicts for other programs.

    weights_table (which there are) -> shard_plan (which file) -> weights_source | tensor_weights -> weights_file, files
    consolidate: the commands zero_to_fp32 and zero_to_torch     full_state: a state dict     model_file: from a live model

What serves our own layout loads no torch, whose import would take longer than the work. Does not live here: other layouts
(`original.writing`).
"""

from __future__ import annotations
