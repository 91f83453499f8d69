"""Blocks that make models smaller: `compression_training`, `weight_quantization`, `quantize_training`.

Lives here: keys and ranges. Does not live here: quantizing and pruning (`compression`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.model import EigenvalueConfig
from deepspeed.config.values import (
    NonNegativeWhole,
    Number,
    PositiveWhole,
    TextList,
    Whole,
)

__all__ = ["CompressionConfig", "QuantizeTrainingConfig", "WeightQuantizationConfig"]

_Ratio = Annotated[Number, Field(gt=0, lt=1)]


class WeightGroupParams(ConfigModel):
    """`...weight_quantization.different_groups.<group>.params`: bits over time."""

    start_bits: PositiveWhole
    """Bits at the start."""

    target_bits: PositiveWhole
    """Bits at the end."""

    quantization_period: PositiveWhole = 1
    """Steps before the first bit is dropped; the period doubles after each."""


class ActivationGroupParams(ConfigModel):
    """`...activation_quantization.different_groups.<group>.params`: bits."""

    bits: PositiveWhole
    """Bits of activations."""


class PruningGroupParams(ConfigModel):
    """`...pruning.different_groups.<group>.params`: what stays."""

    dense_ratio: _Ratio
    """Part of the elements that stay, between 0 and 1."""


class _Group(ConfigModel):
    modules: TextList = Field(default_factory=lambda: ["*"])
    """Names of modules, as key words or patterns; "*" is all."""

    related_modules: list[TextList] | None = None
    """For each of them, modules that must shrink with it."""


class WeightGroup(_Group):
    """`...weight_quantization.different_groups.<group>`: modules with one setting."""

    params: WeightGroupParams
    """Bits over time."""


class ActivationGroup(_Group):
    """`...activation_quantization.different_groups.<group>`: modules with one setting."""

    params: ActivationGroupParams
    """Bits."""


class PruningGroup(_Group):
    """`...pruning.different_groups.<group>`: modules with one setting."""

    params: PruningGroupParams
    """What stays."""


class Fp16MixedQuantizeConfig(ConfigModel):
    """`...shared_parameters.fp16_mixed_quantize`: blend of full and quantized weights."""

    enabled: bool = False
    """Blend them."""

    quantize_change_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.001
    """Change of the blend per step."""


class _Shared(ConfigModel):
    enabled: bool = False
    """The technique is on."""


class WeightShared(_Shared):
    """`compression_training.weight_quantization.shared_parameters`: for all groups."""

    enabled: bool = False
    """Quantize weights."""

    quantizer_kernel: bool = False
    """Use the native quantizer."""

    schedule_offset: NonNegativeWhole = 0
    """Step at which it starts."""

    quantize_groups: PositiveWhole = 1
    """Parts of a weight with a scale of their own."""

    quantize_verbose: bool = False
    """Log what is done."""

    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Whether ranges are centred at zero."""

    quantize_weight_in_forward: bool = False
    """Quantize in forward; false does it in the optimizer step and needs fp16."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How values are rounded."""

    fp16_mixed_quantize: Fp16MixedQuantizeConfig = Field(default_factory=Fp16MixedQuantizeConfig)
    """Blend of full and quantized weights."""


class ActivationShared(_Shared):
    """`compression_training.activation_quantization.shared_parameters`: for all groups."""

    enabled: bool = False
    """Quantize activations."""

    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Whether ranges are centred at zero."""

    range_calibration: Literal["dynamic", "static"] = "dynamic"
    """Measure ranges at each forward, or once."""

    schedule_offset: NonNegativeWhole = 1000
    """Step at which it starts."""


class SparseShared(_Shared):
    """`compression_training.sparse_pruning.shared_parameters`: for all groups."""

    enabled: bool = False
    """Set single weights to zero."""

    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    """How weights are chosen."""

    schedule_offset: NonNegativeWhole = 1000
    """Step at which it starts."""

    block_pattern: str = "4x1"
    """Blocks that go together (`snip_momentum`)."""

    dense_ratio: _Ratio = 0.1
    """Part of the weights that stay, between 0 and 1 (`snip_momentum`)."""

    schedule_offset_stride: PositiveWhole = 1
    """Steps between choices (`snip_momentum`)."""

    schedule_offset_end: NonNegativeWhole | None = None
    """Step at which it ends (`snip_momentum`). Left out: `schedule_offset`."""

    excluded_modules: TextList = Field(default_factory=list)
    """Modules left alone (`snip_momentum`)."""

    def check(self) -> Iterable[Refusal]:
        """The end is not before the start."""
        if self.schedule_offset_end is not None and self.schedule_offset_end < self.schedule_offset:
            yield Refusal("schedule_offset_end", f"needed at least schedule_offset, {self.schedule_offset}", "Raise it.")


class RowShared(_Shared):
    """`compression_training.<row or channel>_pruning.shared_parameters`: for all groups."""

    enabled: bool = False
    """Remove rows or channels."""

    method: Literal["l1", "topk"] = "l1"
    """How they are chosen."""

    schedule_offset: NonNegativeWhole = 1000
    """Step at which it starts."""


class HeadShared(_Shared):
    """`compression_training.head_pruning.shared_parameters`: for all groups."""

    enabled: bool = False
    """Remove attention heads."""

    method: Literal["topk", "l1"] = "topk"
    """How they are chosen."""

    schedule_offset: NonNegativeWhole = 1000
    """Step at which it starts."""

    num_heads: PositiveWhole | None = None
    """Heads per layer; needed when enabled."""

    def check(self) -> Iterable[Refusal]:
        """Heads must be counted."""
        if self.enabled and self.num_heads is None:
            yield Refusal("num_heads", "needed when head_pruning is enabled", "Give the heads per layer.")


class _Technique(ConfigModel):
    shared_parameters: _Shared
    """For all groups."""

    def check(self) -> Iterable[Refusal]:
        """Enabled, it needs groups to work on."""
        if self.is_enabled and not getattr(self, "different_groups", None):
            yield Refusal("different_groups", "needed at least one group when enabled", "Name the modules.")

    @property
    def is_enabled(self) -> bool:
        """Whether the technique is on."""
        return self.shared_parameters.enabled


class WeightQuantizationTechnique(_Technique):
    """`compression_training.weight_quantization`: train with quantized weights."""

    shared_parameters: WeightShared = Field(default_factory=WeightShared)
    """For all groups."""

    different_groups: dict[str, WeightGroup] = Field(default_factory=dict)
    """Modules by setting."""


class ActivationQuantizationTechnique(_Technique):
    """`compression_training.activation_quantization`: train with quantized activations."""

    shared_parameters: ActivationShared = Field(default_factory=ActivationShared)
    """For all groups."""

    different_groups: dict[str, ActivationGroup] = Field(default_factory=dict)
    """Modules by setting."""


class SparsePruningTechnique(_Technique):
    """`compression_training.sparse_pruning`: set single weights to zero."""

    shared_parameters: SparseShared = Field(default_factory=SparseShared)
    """For all groups."""

    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Modules by setting."""

    def check(self) -> Iterable[Refusal]:
        """`snip_momentum` works on all modules."""
        return () if self.shared_parameters.method == "snip_momentum" else super().check()


class RowPruningTechnique(_Technique):
    """`compression_training.row_pruning` and `.channel_pruning`: remove rows or channels."""

    shared_parameters: RowShared = Field(default_factory=RowShared)
    """For all groups."""

    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Modules by setting."""


class HeadPruningTechnique(_Technique):
    """`compression_training.head_pruning`: remove attention heads."""

    shared_parameters: HeadShared = Field(default_factory=HeadShared)
    """For all groups."""

    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Modules by setting."""


class LayerReductionConfig(ConfigModel):
    """`compression_training.layer_reduction`: start a shallow model from layers of a deep one."""

    enabled: bool = False
    """Do it."""

    keep_number_layer: PositiveWhole | None = None
    """Layers of the shallow model."""

    module_name_prefix: str | None = None
    """Name of the list of layers."""

    teacher_layer: list[NonNegativeWhole] | None = None
    """Layers of the deep model to take."""

    other_module_name: TextList | None = None
    """Further modules to copy."""


class CompressionConfig(ConfigModel):
    """`compression_training`: quantize, prune and shorten models while they train."""

    weight_quantization: WeightQuantizationTechnique = Field(default_factory=WeightQuantizationTechnique)
    """Quantized weights."""

    activation_quantization: ActivationQuantizationTechnique = Field(default_factory=ActivationQuantizationTechnique)
    """Quantized activations."""

    sparse_pruning: SparsePruningTechnique = Field(default_factory=SparsePruningTechnique)
    """Single weights set to zero."""

    row_pruning: RowPruningTechnique = Field(default_factory=RowPruningTechnique)
    """Rows removed."""

    head_pruning: HeadPruningTechnique = Field(default_factory=HeadPruningTechnique)
    """Attention heads removed."""

    channel_pruning: RowPruningTechnique = Field(default_factory=RowPruningTechnique)
    """Channels removed."""

    layer_reduction: LayerReductionConfig = Field(default_factory=LayerReductionConfig)
    """A shallow model from a deep one."""

    @property
    def is_enabled(self) -> bool:
        """Whether any technique is on."""
        techniques = [getattr(self, name) for name in type(self).model_fields if name != "layer_reduction"]
        return self.layer_reduction.enabled or any(technique.is_enabled for technique in techniques)


class QuantizedInitConfig(ConfigModel):
    """`weight_quantization.quantized_initialization` and the values of `.post_init_quant`: how weights are stored."""

    num_bits: Literal[4, 8] = 8
    """Bits per weight."""

    group_size: PositiveWhole = 64
    """Weights with a common scale."""

    group_dim: Whole = 0
    """Dimension along which groups lie."""

    symmetric: bool = True
    """Whether ranges are centred at zero."""


class WeightQuantizationConfig(ConfigModel):
    """`weight_quantization`: store the weights of a model for inference in few bits."""

    enabled: bool = True
    """Use this block."""

    num_bits: PositiveWhole = 8
    """Bits per weight; > 0."""

    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Whether ranges are centred at zero."""

    q_groups: PositiveWhole = 1
    """Parts of a weight with a scale of their own; > 0."""

    quantized_initialization: QuantizedInitConfig | None = None
    """Quantize inside `zero.Init`."""

    post_init_quant: dict[str, QuantizedInitConfig] = Field(default_factory=dict)
    """Part of a module's name -> how its weights are stored."""

    @classmethod
    def adapt(cls, given: dict[str, object]) -> Iterable[Refusal]:
        """An empty `quantized_initialization` means none."""
        if given.get("quantized_initialization") == {}:
            del given["quantized_initialization"]
        return ()


class QuantizeTrainingConfig(ConfigModel):
    """`quantize_training`: an old block; write `compression_training`. Its further keys are not read."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False
    """Quantize while training."""

    eigenvalue: EigenvalueConfig = Field(default_factory=EigenvalueConfig)
    """Eigenvalues that set the schedule."""
