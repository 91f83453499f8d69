"""Which operators this version has, under their documented names, and what serves each in this process.

Nothing is compiled at run time: native code was compiled when the package was installed (`ops.native`), and where that is
absent a torch twin serves. `env_report` prints the table; `accelerator.create_op_builder` looks classes up by name.
"""

from deepspeed.ops.op_builder.builder import NativeExtension, OpBuilder
from deepspeed.ops.op_builder.registry import (
    ALL_OPS,
    AsyncIOBuilder,
    CCLCommBuilder,
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
    NotImplementedBuilder,
    PinMemoryBuilder,
    QuantizerBuilder,
    RandomLTDBuilder,
    ShareMemCommBuilder,
    SparseAttnBuilder,
    TransformerBuilder,
    compatible_ops,
)

__all__ = [
    "ALL_OPS",
    "AsyncIOBuilder",
    "CCLCommBuilder",
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
    "NativeExtension",
    "NotImplementedBuilder",
    "OpBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
    "RandomLTDBuilder",
    "ShareMemCommBuilder",
    "SparseAttnBuilder",
    "TransformerBuilder",
    "compatible_ops",
]
