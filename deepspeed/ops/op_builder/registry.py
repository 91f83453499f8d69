"""The table of operators.

Not here: what a builder does (`builder`). Read by `env_report`, by `accelerator.get_op_builder` and by clients.
"""

from __future__ import annotations

from deepspeed.ops.op_builder.builder import OpBuilder

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
    "QuantizerBuilder",
    "RandomLTDBuilder",
    "SparseAttnBuilder",
    "TransformerBuilder",
    "compatible_ops",
]


class AsyncIOBuilder(OpBuilder):
    """Asynchronous reads and writes of files, for offload to NVMe."""

    NAME = "async_io"
    BUILD_VAR = "DS_BUILD_AIO"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad for state kept on the host."""

    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    SERVED_BY = "deepspeed.ops.adagrad"


class CPUAdamBuilder(OpBuilder):
    """Adam for state kept on the host."""

    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    SERVED_BY = "deepspeed.ops.adam"


class CPULionBuilder(OpBuilder):
    """Lion for state kept on the host."""

    NAME = "cpu_lion"
    BUILD_VAR = "DS_BUILD_CPU_LION"
    SERVED_BY = "deepspeed.ops.lion"


class EvoformerAttnBuilder(OpBuilder):
    """Attention of the Evoformer."""

    NAME = "evoformer_attn"
    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN"


class FPQuantizerBuilder(OpBuilder):
    """Quantisation to short floating-point formats."""

    NAME = "fp_quantizer"
    BUILD_VAR = "DS_BUILD_FP_QUANTIZER"


class FusedAdamBuilder(OpBuilder):
    """Adam over many tensors at once, on their own device."""

    NAME = "fused_adam"
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    SERVED_BY = "deepspeed.ops.adam"


class FusedLambBuilder(OpBuilder):
    """LAMB on the device of the parameters."""

    NAME = "fused_lamb"
    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    SERVED_BY = "deepspeed.ops.lamb"


class FusedLionBuilder(OpBuilder):
    """Lion over many tensors at once, on their own device."""

    NAME = "fused_lion"
    BUILD_VAR = "DS_BUILD_FUSED_LION"
    SERVED_BY = "deepspeed.ops.lion"


class GDSBuilder(OpBuilder):
    """Reads and writes between NVMe and GPU memory."""

    NAME = "gds"
    BUILD_VAR = "DS_BUILD_GDS"


class InferenceBuilder(OpBuilder):
    """Fused transformer layers for inference."""

    NAME = "transformer_inference"
    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"


class QuantizerBuilder(OpBuilder):
    """Block quantisation to integers."""

    NAME = "quantizer"
    BUILD_VAR = "DS_BUILD_QUANTIZER"


class RandomLTDBuilder(OpBuilder):
    """Gathering and scattering of tokens for random layer-wise token dropping."""

    NAME = "random_ltd"
    BUILD_VAR = "DS_BUILD_RANDOM_LTD"


class SparseAttnBuilder(OpBuilder):
    """Block-sparse attention."""

    NAME = "sparse_attn"
    BUILD_VAR = "DS_BUILD_SPARSE_ATTN"


class TransformerBuilder(OpBuilder):
    """Fused transformer layers for training."""

    NAME = "transformer"
    BUILD_VAR = "DS_BUILD_TRANSFORMER"


_BUILDERS: tuple[type[OpBuilder], ...] = (
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
)

ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in _BUILDERS}
"""Every operator by name."""


def compatible_ops() -> dict[str, bool]:
    """Tell of every operator, by name, whether it can be used on this machine."""
    return {name: op.is_compatible() for name, op in ALL_OPS.items()}
