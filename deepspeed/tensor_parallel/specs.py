"""Rules of `tensor_parallel.partition_config` as objects, for code that builds them.

    config = AutoTPPresets.llama()
    config.layer_specs.insert(0, TPLayerSpec(["router"], PartitionType.SKIP))
    initialize(model=model, config={..., "tensor_parallel": {"autotp_size": 4, "partition_config": config.to_dict()}})

Lives here: the documented classes. Does not live here: what rules mean (`plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from deepspeed.config.parallel import PartitionConfig
from deepspeed.errors import ArgumentError
from deepspeed.tensor_parallel.plan import PRESETS

__all__ = ["AutoTPConfig", "AutoTPPresets", "PartitionType", "TPLayerSpec", "merge_autotp_configs"]


class PartitionType(Enum):
    """What is cut of a layer."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """One rule; the attributes are the keys of `layer_specs[...]`."""

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: tuple[Any, ...] | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As `layer_specs` takes it."""
        shape = None if self.shape is None else [list(each) if isinstance(each, tuple) else each for each in self.shape]
        return {**asdict(self), "partition_type": PartitionType(self.partition_type).value, "shape": shape}


@dataclass
class AutoTPConfig:
    """All rules; the attributes are the keys of `partition_config`, and `tp_size` may be left out."""

    enabled: bool = True
    tp_size: int | None = None
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As `tensor_parallel.partition_config` takes it."""
        return {**asdict(self), "layer_specs": [spec.to_dict() for spec in self.layer_specs]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> AutoTPConfig:
        """Inverse of `to_dict`; keys that are absent have their defaults.

        Raises:
            pydantic.ValidationError: a key or value is none of `partition_config`.
        """
        parsed = PartitionConfig.model_validate(dict(given))
        specs = [
            TPLayerSpec(
                list(spec.patterns),
                PartitionType(spec.partition_type),
                None
                if spec.shape is None
                else tuple(tuple(each) if isinstance(each, list) else each for each in spec.shape),
                spec.partition_dim,
                spec.model_types,
                spec.gather_output,
                spec.grad_allreduce,
            )
            for spec in parsed.layer_specs
        ]
        return cls(
            parsed.enabled,
            parsed.tp_size,
            specs,
            parsed.embedding_partition_dim,
            list(parsed.lm_head_patterns),
            parsed.use_default_specs,
            parsed.strict_mode,
        )


class AutoTPPresets:
    """The rules behind `preset_model`."""

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig:
        """Those of one family.

        Raises:
            ArgumentError: there is no such preset; the text lists them.
        """
        if model_type not in PRESETS:
            raise ArgumentError(f"there is no preset {model_type!r} of AutoTP; needed one of {', '.join(PRESETS)}.")
        specs = [
            TPLayerSpec([rule.pattern.pattern], PartitionType(rule.kind), rule.shape, rule.dim)
            for rule in PRESETS[model_type]
        ]
        return AutoTPConfig(layer_specs=specs, use_default_specs=False)

    @classmethod
    def llama(cls) -> AutoTPConfig:
        """Llama, Mistral, and what is built like them."""
        return cls.get_preset("llama")

    @classmethod
    def bloom(cls) -> AutoTPConfig:
        """Bloom."""
        return cls.get_preset("bloom")

    @classmethod
    def chatglm(cls) -> AutoTPConfig:
        """ChatGLM; its fused gate and up are two parts."""
        return cls.get_preset("chatglm")

    @classmethod
    def mixtral(cls) -> AutoTPConfig:
        """Mixtral's attention and experts."""
        return cls.get_preset("mixtral")

    @classmethod
    def deepseek_v2(cls) -> AutoTPConfig:
        """MLPs and shared experts of DeepSeek; latent attention stays whole."""
        return cls.get_preset("deepseek_v2")

    @classmethod
    def qwen2(cls) -> AutoTPConfig:
        """Qwen2."""
        return cls.get_preset("qwen2")

    @classmethod
    def phi3(cls) -> AutoTPConfig:
        """Phi-3."""
        return cls.get_preset("phi3")


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """Rules of both, those of `override` first; everything else is `override`'s."""
    specs = [*override.layer_specs, *base.layer_specs]
    tp_size = override.tp_size if override.tp_size is not None else base.tp_size
    return AutoTPConfig(**{**vars(override), "layer_specs": specs, "tp_size": tp_size})
