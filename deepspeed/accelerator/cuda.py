"""NVIDIA and AMD devices, both under `torch.cuda`.

Lives here: what these devices have beyond the shared shape: NVTX ranges, graphs, Triton, locking of existing host memory.

Does not live here: what is passed on as it is (`namespaced`). Built by `select`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from deepspeed.accelerator.namespaced import NamespacedAccelerator
from deepspeed.common.exported import EXPORTED_PREFIXES
from deepspeed.errors import AcceleratorError

__all__ = ["CudaAccelerator"]


class CudaAccelerator(NamespacedAccelerator):
    """CUDA, or ROCm under the same names. Ranks meet over NCCL (RCCL)."""

    _communication_backend_name = "nccl"

    def __init__(self) -> None:
        super().__init__("cuda")

    def is_fp16_supported(self) -> bool:
        """True from compute capability 7.0 (Volta) on, and on ROCm; older devices lack fast float16 arithmetic."""
        return torch.version.hip is not None or self._torch.get_device_capability()[0] >= 7

    def is_triton_supported(self) -> bool:
        """True from compute capability 8.0 (Ampere) on, and on ROCm."""
        return torch.version.hip is not None or self._torch.get_device_capability()[0] >= 8

    def register_host_memory(self, tensor: torch.Tensor) -> bool:
        """Lock the pages under a contiguous host tensor (cudaHostRegister)."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise AcceleratorError(
                f"only contiguous host memory can be locked; this tensor is on {tensor.device} "
                f"with strides {tensor.stride()}. "
                "Use pin_memory(tensor, make_copy=True)."
            )
        self._check(self._torch.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0), "cudaHostRegister")
        return True

    def unregister_host_memory(self, tensor: torch.Tensor) -> bool:
        """Unlock the pages under a tensor (cudaHostUnregister)."""
        if not self.is_pinned(tensor):
            return False
        self._check(self._torch.cudart().cudaHostUnregister(tensor.data_ptr()), "cudaHostUnregister")
        return True

    def _check(self, result: Any, call: str) -> None:
        """Turn a CUDA runtime status into an error that names the call."""
        if int(result) != 0:
            raise AcceleratorError(f"{call} failed: {self._torch.cudart().cudaGetErrorString(result)}")

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open an NVTX range; torch's binding has no domains or categories."""
        self._torch.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Close the NVTX range opened last."""
        self._torch.nvtx.range_pop()

    def create_graph(self) -> Any:
        """Return an empty CUDA graph."""
        return self._torch.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that records work into `graph`."""
        return self._torch.graph(graph, pool=pool, stream=stream)  # type: ignore[no-any-return]

    def replay_graph(self, graph: Any) -> None:
        """Run the recorded work."""
        graph.replay()

    def is_current_stream_capturing(self) -> bool:
        """True while work is being recorded."""
        return bool(self._torch.is_current_stream_capturing())

    def export_envs(self) -> list[str]:
        """Return the NCCL settings' prefix."""
        return list(EXPORTED_PREFIXES["cuda"])
