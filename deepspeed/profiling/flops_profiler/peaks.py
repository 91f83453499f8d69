"""How many FLOPs per second a device can do: for the share of it that a step reaches (MFU).

Dense products (no structured sparsity), from the vendors' data sheets: in 16-bit formats with fp32 sums, and in fp32 as
torch computes by default (no TF32).

    V100 SXM2           NVIDIA V100 datasheet (2020)          125         15.7   TFLOP/s
    A100                NVIDIA A100 datasheet (2021)          312         19.5
    H100 SXM, H200      NVIDIA H100, H200 datasheets          989.4       66.9
    H100 PCIe           NVIDIA H100 datasheet (2023)          756         51.2
    L4, L40S            NVIDIA datasheets (2023)              121, 362    30.3, 91.6
    MI300X              AMD datasheet (2023)                  1307.4      163.4

A device that is not here, and any CPU, has no peak unless one is given (`flops_profiler.peak_tflops`, `peak_flops=`).

Pure. Called by `profiler`.
"""

from __future__ import annotations

__all__ = ["peak_flops_of"]

_TERA = 1e12

_PEAKS: dict[str, tuple[float, float]] = {
    "Tesla V100-SXM2-16GB": (125.0, 15.7),
    "Tesla V100-SXM2-32GB": (125.0, 15.7),
    "NVIDIA A100-SXM4-40GB": (312.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (312.0, 19.5),
    "NVIDIA A100-PCIE-40GB": (312.0, 19.5),
    "NVIDIA A100 80GB PCIe": (312.0, 19.5),
    "NVIDIA H100 80GB HBM3": (989.4, 66.9),
    "NVIDIA H100 PCIe": (756.0, 51.2),
    "NVIDIA H200": (989.4, 66.9),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA L40S": (362.0, 91.6),
    "AMD Instinct MI300X": (1307.4, 163.4),
}
"""The product's name as its driver tells it -> (16-bit, fp32) TFLOP/s."""


def peak_flops_of(product: str, element_nbytes: int) -> float | None:
    """FLOPs per second of a device's products.

    Args:
        product: its name, as the driver tells it ("NVIDIA H200").
        element_nbytes: of the numbers that are multiplied: 2 or 4.

    Returns:
        None for an unknown device or another format.
    """
    of_16_bit, of_32_bit = _PEAKS.get(product, (None, None))
    tera = {2: of_16_bit, 4: of_32_bit}.get(element_nbytes)
    return None if tera is None else tera * _TERA
