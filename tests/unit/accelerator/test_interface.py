from __future__ import annotations

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.accelerator.cuda import CudaAccelerator
from deepspeed.accelerator.interface import TensorFactory
from deepspeed.accelerator.mps import MpsAccelerator
from deepspeed.accelerator.others import OtherAccelerator
from deepspeed.errors import AcceleratorError, ArgumentError

_DOCUMENTED = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name device set_device
current_device current_device_name device_count synchronize communication_backend_name is_available
random set_rng_state get_rng_state manual_seed manual_seed_all initial_seed default_generator
Stream stream current_stream default_stream Event
empty_cache memory_allocated max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached
reset_max_memory_cached memory_stats reset_peak_memory_stats memory_reserved max_memory_reserved total_memory
available_memory
is_bf16_supported is_fp16_supported is_fp64_supported supported_dtypes is_triton_supported prefer_triton_grouped_mm
range_push range_pop lazy_call on_accelerator
create_graph capture_to_graph replay_graph is_current_stream_capturing
BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor
pin_memory unpin_memory is_pinned pin_empty pin_empty_like pin_memory_alignment register_host_memory
unregister_host_memory
op_builder_dir create_op_builder get_op_builder build_extension
export_envs visible_devices_envs set_visible_devices_envs get_compile_backend set_compile_backend
"""


@pytest.mark.parametrize("name", _DOCUMENTED.split())
def test_every_documented_member_is_there(name: str) -> None:
    assert hasattr(DeepSpeedAccelerator, name)


def test_every_kind_of_device_can_be_made_without_such_a_device() -> None:
    made = [CpuAccelerator(), CudaAccelerator(), MpsAccelerator(), *map(OtherAccelerator, ("xpu", "hpu", "npu"))]
    assert [accelerator.device_name() for accelerator in made] == ["cpu", "cuda", "mps", "xpu", "hpu", "npu"]


def test_a_factory_reads_integers_as_sizes_and_the_rest_as_data() -> None:
    factory = TensorFactory(torch.int64, "cpu")
    assert factory(2, 3).shape == (2, 3)
    assert factory().numel() == 0
    assert torch.equal(factory([4, 5]), torch.tensor([4, 5]))
    assert factory(torch.tensor([1.9])).dtype == torch.int64


def test_a_device_without_graphs_says_so_instead_of_replaying_nothing() -> None:
    for use in (
        CpuAccelerator().create_graph,
        lambda: CpuAccelerator().capture_to_graph(None),
        lambda: CpuAccelerator().replay_graph(None),
    ):
        with pytest.raises(AcceleratorError, match="has no graphs"):
            use()
    assert not CpuAccelerator().is_current_stream_capturing()


def test_visible_devices_are_written_into_the_environment_of_children() -> None:
    child: dict[str, str] = {}
    CpuAccelerator().set_visible_devices_envs(child, [0, 2])
    assert child == {"CUDA_VISIBLE_DEVICES": "0,2"}


def test_the_compile_backend_can_be_chosen_among_those_of_torch() -> None:
    accelerator = CpuAccelerator()
    assert accelerator.get_compile_backend() == "inductor"
    accelerator.set_compile_backend("eager")
    assert accelerator.get_compile_backend() == "eager"
    with pytest.raises(ArgumentError, match=r"'nonsense' is unknown; torch has .*'inductor'"):
        accelerator.set_compile_backend("nonsense")


def test_build_extension_is_the_command_class_of_torch() -> None:
    assert CpuAccelerator().build_extension().__name__ == "BuildExtension"
