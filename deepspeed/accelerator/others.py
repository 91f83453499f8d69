"""XPU, HPU, NPU, MLU and SDAA: a table of small differences, one class. (`mps` differs too much for the table.)

Source of the names: each vendor's torch plug-in, which mirrors `torch.cuda`. None of these devices is on the machines
this project is tested on; the tests hold the table and the passing-on, with a stand-in for the namespace.

Does not live here: what is passed on as it is (`namespaced`). Built by `select`.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed.accelerator.namespaced import NamespacedAccelerator
from deepspeed.common.exported import EXPORTED_PREFIXES

__all__ = ["OTHERS", "Differences", "OtherAccelerator"]


class Differences(NamedTuple):
    """How one kind of device departs from `torch.cuda`."""

    plugin: str | None
    """Module whose import adds the namespace; None when torch brings it."""
    backend: str
    """Its `torch.distributed` back end."""
    visible_devices: str
    """Variable that limits the devices a process sees."""
    is_ordered_by_data: bool = False
    """The runtime orders operators by data and waits for memory by itself."""
    has_fp64: bool = True
    has_triton: bool = False
    compile_backend: str = "inductor"


OTHERS: dict[str, Differences] = {
    "xpu": Differences(None, "xccl", "ZE_AFFINITY_MASK", has_triton=True),
    "hpu": Differences(
        "habana_frameworks.torch.core",
        "hccl",
        "HABANA_VISIBLE_MODULES",
        is_ordered_by_data=True,
        has_fp64=False,
        compile_backend="hpu_backend",
    ),
    "npu": Differences("torch_npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
    "mlu": Differences("torch_mlu", "cncl", "MLU_VISIBLE_DEVICES"),
    "sdaa": Differences("torch_sdaa", "tccl", "SDAA_VISIBLE_DEVICES"),
}


class OtherAccelerator(NamespacedAccelerator):
    """A device of the table."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._differences = OTHERS[name]
        self.plugin = self._differences.plugin
        self._communication_backend_name = self._differences.backend
        self._compile_backend = self._differences.compile_backend

    def resolves_data_dependency(self) -> bool:
        """See `Differences.is_ordered_by_data`."""
        return self._differences.is_ordered_by_data

    def handles_memory_backpressure(self) -> bool:
        """See `Differences.is_ordered_by_data`."""
        return self._differences.is_ordered_by_data

    def is_fp64_supported(self) -> bool:
        """See the table."""
        return self._differences.has_fp64

    def is_triton_supported(self) -> bool:
        """See the table."""
        return self._differences.has_triton

    def visible_devices_envs(self) -> list[str]:
        """Return the table's variable."""
        return [self._differences.visible_devices]

    def export_envs(self) -> list[str]:
        """Return the prefixes of its libraries."""
        return list(EXPORTED_PREFIXES.get(self._name, ()))
