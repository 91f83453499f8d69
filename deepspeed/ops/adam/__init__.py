"""Adam and AdamW: `FusedAdam` for the device the parameters are on, `DeepSpeedCPUAdam` for state kept on the host."""

from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.ops.adam.zenflow import ZenFlowCPUAdam, ZenFlowSelectiveAdamW, ZenFlowSelectiveAdamW_stage3

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"]
