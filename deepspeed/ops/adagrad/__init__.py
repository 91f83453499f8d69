"""Adagrad with its state in host memory: `DeepSpeedCPUAdagrad`."""

from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
