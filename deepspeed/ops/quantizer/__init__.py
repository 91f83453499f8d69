"""Quantisation to small integers, block by block: `quantize_blocks`, `dequantize_blocks`, and `ds_quantizer`."""

from __future__ import annotations

from deepspeed.ops.quantizer.blocks import QuantizedBlocks, dequantize_blocks, quantize_blocks
from deepspeed.ops.quantizer.rounding import ds_quantizer

__all__ = ["QuantizedBlocks", "dequantize_blocks", "ds_quantizer", "quantize_blocks"]
