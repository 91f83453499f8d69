"""The passing-on is tested against a stand-in for a vendor's namespace, since no such device is here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.accelerator.cuda import CudaAccelerator
from deepspeed.accelerator.interface import TensorFactory
from deepspeed.accelerator.mps import MpsAccelerator
from deepspeed.accelerator.namespaced import NamespacedAccelerator
from deepspeed.accelerator.others import OTHERS, OtherAccelerator
from deepspeed.common.exported import EXPORTED_PREFIXES
from deepspeed.errors import AcceleratorError


class Namespace:
    """Answers like `torch.cuda` and remembers the calls."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *kwargs.items()))
            return self.answers[name]

        return answer


def _with(accelerator: NamespacedAccelerator, **answers: Any) -> Namespace:
    namespace = Namespace(**answers)
    accelerator._loaded = namespace
    return namespace


def test_questions_are_passed_on_to_the_namespace() -> None:
    accelerator = OtherAccelerator("xpu")
    namespace = _with(
        accelerator,
        current_device=1,
        device_count=4,
        set_device=None,
        synchronize=None,
        memory_allocated=10,
        memory_reserved=30,
        max_memory_allocated=20,
        max_memory_reserved=40,
        mem_get_info=(100, 200),
        get_device_properties=SimpleNamespace(total_memory=200),
        manual_seed=None,
        manual_seed_all=None,
        initial_seed=3,
        get_rng_state=torch.zeros(1, dtype=torch.uint8),
        set_rng_state=None,
        current_stream="stream",
        empty_cache=None,
        reset_peak_memory_stats=None,
        memory_stats={"a": 1},
    )
    assert (accelerator.current_device(), accelerator.device_count()) == (1, 4)
    assert accelerator.current_device_name() == "xpu:1"
    assert accelerator.device_name(3) == "xpu:3"
    assert (accelerator.memory_allocated(), accelerator.memory_reserved(2)) == (10, 30)
    assert (accelerator.max_memory_allocated(), accelerator.max_memory_reserved()) == (20, 40)
    assert accelerator.available_memory() == 100 + 30 - 10
    assert accelerator.total_memory() == 200
    assert accelerator.initial_seed() == 3
    assert accelerator.memory_stats() == {"a": 1}
    assert accelerator.default_stream() == "stream"  # this namespace names no default one
    accelerator.set_device(2)
    accelerator.synchronize(2)
    accelerator.manual_seed(5)
    accelerator.manual_seed_all(5)
    accelerator.set_rng_state(accelerator.get_rng_state())
    accelerator.empty_cache()
    accelerator.reset_max_memory_cached()
    for call in [("set_device", 2), ("synchronize", 2), ("manual_seed", 5), ("get_rng_state", 1), ("memory_reserved", 2)]:
        assert call in namespace.calls
    assert not accelerator.is_synchronized_device()


def test_constructors_come_from_the_namespace_or_are_made() -> None:
    accelerator = OtherAccelerator("xpu")
    namespace = _with(accelerator, LongTensor="made by the vendor")
    assert accelerator.LongTensor() == "made by the vendor"
    assert namespace.calls == [("LongTensor",)]
    assert isinstance(accelerator.HalfTensor, TensorFactory)


def test_lazy_calls_go_to_the_vendors_queue_or_run_at_once() -> None:
    accelerator, ran = OtherAccelerator("xpu"), []
    namespace = _with(accelerator, _lazy_call=None)
    accelerator.lazy_call(lambda: ran.append(1))
    assert not ran
    assert namespace.calls[0][0] == "_lazy_call"
    _with(accelerator)
    accelerator.lazy_call(lambda: ran.append(1))
    assert ran == [1]


def test_pinning_in_place_is_refused_where_the_vendor_cannot() -> None:
    accelerator = OtherAccelerator("xpu")
    _with(accelerator)
    with pytest.raises(AcceleratorError, match="make_copy=True"):
        accelerator.pin_memory(torch.ones(2), make_copy=False)


def test_a_missing_plugin_is_named_with_the_cure() -> None:
    accelerator = OtherAccelerator("npu")
    assert not accelerator.is_available()
    with pytest.raises(AcceleratorError, match=r"'npu' needs the Python package 'torch_npu'.*DS_ACCELERATOR"):
        accelerator.device_count()


def test_a_plugin_is_imported_when_the_device_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ModuleType("torch_npu")
    plugin.__spec__ = SimpleNamespace(name="torch_npu")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch_npu", plugin)
    monkeypatch.setattr(torch, "npu", Namespace(is_available=True, device_count=2), raising=False)
    accelerator = OtherAccelerator("npu")
    assert accelerator.is_available()
    assert accelerator.device_count() == 2


def test_a_torch_without_the_namespace_is_named_with_the_cure() -> None:
    class Nowhere(NamespacedAccelerator):
        pass

    with pytest.raises(AcceleratorError, match=r"has no torch\.nowhere"):
        Nowhere("nowhere").device_count()
    assert not Nowhere("nowhere").is_available()


@pytest.mark.parametrize("name", OTHERS)
def test_each_row_of_the_table_reaches_its_accelerator(name: str) -> None:
    accelerator, row = OtherAccelerator(name), OTHERS[name]
    assert accelerator.communication_backend_name() == row.backend
    assert accelerator.visible_devices_envs() == [row.visible_devices]
    assert accelerator.export_envs() == list(EXPORTED_PREFIXES.get(name, ()))
    assert accelerator.get_compile_backend() == row.compile_backend
    assert accelerator.is_fp64_supported() == row.has_fp64
    assert accelerator.is_triton_supported() == row.has_triton
    assert accelerator.resolves_data_dependency() == accelerator.handles_memory_backpressure() == row.is_ordered_by_data


def test_the_documented_variables_are_in_the_table() -> None:
    assert {name: row.visible_devices for name, row in OTHERS.items() if name != "sdaa"} == {
        "xpu": "ZE_AFFINITY_MASK",
        "hpu": "HABANA_VISIBLE_MODULES",
        "npu": "ASCEND_RT_VISIBLE_DEVICES",
        "mlu": "MLU_VISIBLE_DEVICES",
    }
    assert EXPORTED_PREFIXES["npu"] == ("ASCEND", "HCCL", "LD_LIBRARY", "PATH")
    assert EXPORTED_PREFIXES["mlu"] == ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH")


def test_cuda_exports_nccl_settings_and_meets_over_nccl() -> None:
    accelerator = CudaAccelerator()
    assert accelerator.export_envs() == ["NCCL"]
    assert accelerator.communication_backend_name() == "nccl"
    assert accelerator.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("capability", "fp16", "triton"), [((6, 1), False, False), ((7, 0), True, False), ((9, 0), True, True)]
)
def test_cuda_dtypes_follow_the_compute_capability(capability: tuple[int, int], fp16: bool, triton: bool) -> None:
    accelerator = CudaAccelerator()
    _with(accelerator, get_device_capability=capability)
    assert (accelerator.is_fp16_supported(), accelerator.is_triton_supported()) == (fp16, triton)


def test_cuda_locks_host_memory_in_place_and_reports_a_refusal() -> None:
    accelerator = CudaAccelerator()
    runtime = Namespace(cudaHostRegister=0)
    _with(accelerator, cudart=runtime)
    tensor = torch.ones(4)
    assert accelerator.register_host_memory(tensor)
    assert runtime.calls == [("cudaHostRegister", tensor.data_ptr(), 16, 0)]
    runtime.answers |= {"cudaHostRegister": 2, "cudaGetErrorString": "out of memory"}
    with pytest.raises(AcceleratorError, match="cudaHostRegister failed: out of memory"):
        accelerator.register_host_memory(tensor)
    with pytest.raises(AcceleratorError, match="only contiguous host memory"):
        accelerator.register_host_memory(torch.ones(4, 4).t())
    assert not accelerator.unregister_host_memory(tensor)  # not locked, as far as torch knows


def test_mps_has_one_device_one_queue_and_remembers_its_peak() -> None:
    accelerator = MpsAccelerator()
    namespace = _with(
        accelerator,
        current_allocated_memory=50,
        driver_allocated_memory=80,
        recommended_max_memory=1000,
        synchronize=None,
        device_count=1,
    )
    assert accelerator.current_device_name() == "mps:0"
    assert accelerator.memory_allocated() == 50
    namespace.answers["current_allocated_memory"] = 20
    assert (accelerator.memory_allocated(), accelerator.max_memory_allocated()) == (20, 50)
    assert accelerator.available_memory() == 980
    assert accelerator.max_memory_reserved() == 80
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == 20
    accelerator.synchronize(0)
    assert ("synchronize",) in namespace.calls
    assert not accelerator.is_fp64_supported()
    assert torch.float64 not in accelerator.supported_dtypes()
    with accelerator.stream(accelerator.Stream()), accelerator.device(0):
        accelerator.set_device(0)
