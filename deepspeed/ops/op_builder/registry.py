"""The table of operators.

Not here: what a builder does (`builder`). Read by `env_report`, by `accelerator.get_op_builder` and by clients.
"""

from __future__ import annotations

from deepspeed.ops.op_builder.builder import OpBuilder

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
    "NotImplementedBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
    "RandomLTDBuilder",
    "ShareMemCommBuilder",
    "SparseAttnBuilder",
    "TransformerBuilder",
    "compatible_ops",
]


class AsyncIOBuilder(OpBuilder):
    """Asynchronous reads and writes of files, for offload to NVMe."""

    NAME = "async_io"
    BUILD_VAR = "DS_BUILD_AIO"
    SERVED_BY = "deepspeed.ops.aio"
    FOLDER = "io"


class CCLCommBuilder(OpBuilder):
    """Collectives of oneCCL on the host."""

    NAME = "deepspeed_ccl_comm"
    BUILD_VAR = "DS_BUILD_CCL_COMM"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad for state kept on the host."""

    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    SERVED_BY = "deepspeed.ops.adagrad"
    FOLDER = "optim"
    TWIN_COST = "5 times as long"


class CPUAdamBuilder(OpBuilder):
    """Adam for state kept on the host."""

    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    SERVED_BY = "deepspeed.ops.adam"
    FOLDER = "optim"
    TWIN_COST = "5 times as long"


class CPULionBuilder(OpBuilder):
    """Lion for state kept on the host."""

    NAME = "cpu_lion"
    BUILD_VAR = "DS_BUILD_CPU_LION"
    SERVED_BY = "deepspeed.ops.lion"
    FOLDER = "optim"
    TWIN_COST = "5 times as long"


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
    """LAMB on the device of the parameters; native code where that is the host."""

    NAME = "fused_lamb"
    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    SERVED_BY = "deepspeed.ops.lamb"
    FOLDER = "optim"
    TWIN_COST = "7 times as long"


class FusedLionBuilder(OpBuilder):
    """Lion over many tensors at once, on their own device."""

    NAME = "fused_lion"
    BUILD_VAR = "DS_BUILD_FUSED_LION"
    SERVED_BY = "deepspeed.ops.lion"


class GDSBuilder(OpBuilder):
    """Reads and writes between NVMe and GPU memory."""

    NAME = "gds"
    BUILD_VAR = "DS_BUILD_GDS"

    def reason(self) -> str:
        """Say what takes its place."""
        return (
            "not built yet in this version (aio_handle of async_io takes tensors on a GPU too, and moves them through "
            "page-locked host memory)"
        )


class InferenceBuilder(OpBuilder):
    """Fused transformer layers for inference."""

    NAME = "transformer_inference"
    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"


class NotImplementedBuilder(OpBuilder):
    """What stands for an operator that an accelerator lacks."""

    NAME = "deepspeed_not_implemented"
    BUILD_VAR = "DS_BUILD_NOT_IMPLEMENTED"


class PinMemoryBuilder(OpBuilder):
    """Host memory that the system does not move or write out."""

    NAME = "pin_memory"
    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    SERVED_BY = "deepspeed.accelerator"


class QuantizerBuilder(OpBuilder):
    """Block quantisation to integers."""

    NAME = "quantizer"
    BUILD_VAR = "DS_BUILD_QUANTIZER"
    SERVED_BY = "deepspeed.ops.quantizer"
    FOLDER = "quant"
    TWIN_COST = "9 times as long"


class RandomLTDBuilder(OpBuilder):
    """Gathering and scattering of tokens for random layer-wise token dropping."""

    NAME = "random_ltd"
    BUILD_VAR = "DS_BUILD_RANDOM_LTD"


class ShareMemCommBuilder(OpBuilder):
    """Collectives among ranks of one host through shared memory."""

    NAME = "deepspeed_shm_comm"
    BUILD_VAR = "DS_BUILD_SHM_COMM"
    SERVED_BY = "deepspeed.comm.shared_memory"


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
)

ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in _BUILDERS}
"""Every operator by name."""


def compatible_ops() -> dict[str, bool]:
    """Tell of every operator, by name, whether it can be used on this machine."""
    return {name: op.is_compatible() for name, op in ALL_OPS.items()}
