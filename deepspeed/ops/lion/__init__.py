"""Lion: `FusedLion` for the device the parameters are on, `DeepSpeedCPULion` for state kept on the host."""

from deepspeed.ops.lion.lion import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
