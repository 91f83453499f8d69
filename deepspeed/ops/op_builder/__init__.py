"""Which operators this version has, under their documented names, and what serves each today.

Nothing is compiled at run time, and no native library exists yet: the optimizers are served by Python code over torch's own
kernels. `deepspeed.env_report` prints the table; `accelerator.create_op_builder` looks classes up by name.
"""

from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.registry import (
    ALL_OPS,
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    EvoformerAttnBuilder,
    FPQuantizerBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    GDSBuilder,
    InferenceBuilder,
    QuantizerBuilder,
    RandomLTDBuilder,
    SparseAttnBuilder,
    TransformerBuilder,
    compatible_ops,
)

__all__ = [
    "ALL_OPS",
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "EvoformerAttnBuilder",
    "FPQuantizerBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "OpBuilder",
    "QuantizerBuilder",
    "RandomLTDBuilder",
    "SparseAttnBuilder",
    "TransformerBuilder",
    "compatible_ops",
]
