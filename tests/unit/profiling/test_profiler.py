from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.profiling import flops_profiler
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile, numbers
from deepspeed.profiling.flops_profiler.peaks import peak_flops_of

FLOPS = 2 * 4 * (8 * 16 + 16 * 4) + 4 * 16


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _profiled(model: nn.Module, **arguments: Any) -> FlopsProfiler:
    profiler = FlopsProfiler(model, **arguments)
    profiler.start_profile()
    model(torch.randn(4, 8)).sum().backward()
    profiler.stop_profile()
    return profiler


def test_a_model_profile_is_numbers_or_text() -> None:
    model = _model()
    assert get_model_profile(model, (4, 8), print_profile=False, as_string=False) == (FLOPS, 768, 212)
    assert get_model_profile(model, (4, 8), print_profile=False) == ("1.6 K", "768 MACs", "212")
    with_args = get_model_profile(
        model, args=[torch.randn(4, 8)], kwargs={}, print_profile=False, as_string=False, warm_up=0
    )
    assert with_args[0] == FLOPS
    assert model.training


def test_modules_in_different_modes_keep_them() -> None:
    model = _model()
    model[1].eval()
    get_model_profile(model, (4, 8), print_profile=False)
    assert [module.training for module in model] == [True, False, True]


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    def generate(self, x: Tensor) -> Tensor:
        return self(self(self(x)))  # type: ignore[no-any-return]


def test_generation_counts_every_pass() -> None:
    flops, macs, _ = get_model_profile(
        Generates(), args=[torch.randn(1, 8)], print_profile=False, as_string=False, mode="generate"
    )
    assert (flops, macs) == (3 * 128, 3 * 64)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs inputs"),
        ({"input_shape": (4, 8), "args": [torch.randn(4, 8)]}, "Give one of them"),
        ({"input_shape": (4, 8), "mode": "train"}, "generate"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        get_model_profile(_model(), **arguments)


def test_ignored_types_are_not_counted_nor_what_runs_inside_them() -> None:
    model = nn.Sequential(_model(), nn.Linear(4, 4, bias=False))
    flops, _, params = get_model_profile(model, (4, 8), print_profile=False, as_string=False, ignore_modules=[nn.Sequential])
    assert (flops, params) == (0, 228)
    inner = get_model_profile(model[0], (4, 8), print_profile=False, as_string=False, ignore_modules=[nn.ReLU])
    assert inner[0] == FLOPS - 64


def test_modules_answer_for_themselves_between_start_and_end() -> None:
    model = _model()
    profiler = _profiled(model)
    assert flops_profiler.get_module_flops(model[0]) == 2 * 4 * 8 * 16
    assert flops_profiler.get_module_macs(model) == profiler.get_total_macs() == 768
    assert 0 < flops_profiler.get_module_duration(model[0]) < profiler.get_total_duration()
    profiler.end_profile()
    assert profiler.get_total_flops() == FLOPS
    with pytest.raises(UsageError, match="start_profile"):
        flops_profiler.get_module_flops(model[0])


def test_reading_before_anything_was_counted_is_told() -> None:
    with pytest.raises(UsageError, match="start_profile"):
        FlopsProfiler(_model()).get_total_flops()


def test_a_reset_begins_from_zero_and_goes_on() -> None:
    model = _model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(4, 8))
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    model(torch.randn(4, 8))
    profiler.stop_profile()
    model(torch.randn(4, 8))
    assert profiler.get_total_flops() == FLOPS
    profiler.end_profile()


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        y: Tensor = self.layer(x)
        if fails:
            raise ValueError("as asked")
        return y


def test_a_forward_that_fails_leaves_the_places_right() -> None:
    model = nn.ModuleList([Fails()])
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(ValueError, match="as asked"):
        model[0](torch.randn(1, 8), fails=True)
    model[0](torch.randn(1, 8), fails=False)
    torch.randn(3, 3) @ torch.randn(3, 3)  # in no module
    profiler.end_profile()
    assert profiler.get_total_flops() == 2 * 128
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_report_has_the_tree_the_sums_and_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = _profiled(_model(), recompute_fwd_factor=1.0, peak_flops=1e12)
    profiler.print_model_profile(profile_step=7)
    text = capsys.readouterr().out
    assert "FLOPs profile of step 7" in text
    assert "(0): Linear(144 parameters 67.92%, 512 MACs 66.67%, 1.02 KFLOPs 64.00%" in text
    assert "in_features=8, out_features=16" in text
    assert "forward x (3 + 1)" in text
    assert "6.4 K" in text  # the estimate
    assert "share of the device's peak" in text
    profiler.print_model_aggregated_profile(top_modules=2)
    assert "MACs        Linear: 768 MACs, ReLU: 0 MACs" in capsys.readouterr().out
    profiler.end_profile()


def test_depth_details_and_file_are_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = _profiled(nn.Sequential(_model(), nn.Linear(4, 2)))
    path = tmp_path / "reports" / "flops.txt"
    profiler.print_model_profile(module_depth=1, output_file=str(path))
    text = path.read_text()
    assert capsys.readouterr().out == ""
    assert "depth 1:" in text
    assert "depth 2:" not in text
    assert "ReLU" not in text
    profiler.print_model_profile(detailed=False, output_file=str(path))
    assert "(0)" not in path.read_text()
    profiler.end_profile()


def test_a_compiled_model_is_counted_uncompiled() -> None:
    model = _model()
    model.compile(backend="eager")
    profiler = _profiled(model)
    profiler.end_profile()
    assert profiler.get_total_flops() == FLOPS


def test_numbers_read_as_they_are_published() -> None:
    assert [numbers.number_to_string(n) for n in (0, 999, 1000, 1234, 1.5e6, 0.002)] == [
        *("0 ", "999 ", "1 K", "1.23 K", "1.5 M", "2 m")
    ]
    assert numbers.flops_to_string(1e9, units="M", precision=3) == "1000 MFLOPS"
    assert numbers.macs_to_string(768) == "768 MACs"
    assert numbers.params_to_string(2.5e9) == numbers.params_to_string(2.5e9, units="B") == "2.5 B"
    assert numbers.params_to_string(244) == "244"
    assert numbers.bytes_to_string(123456) == "123.46 KB"
    assert numbers.duration_to_string(1.5e-6) == "1.5 us"
    with pytest.raises(ArgumentError, match="units='Z'"):
        numbers.number_to_string(1, units="Z")


def test_peaks_are_known_by_product_and_format() -> None:
    assert peak_flops_of("NVIDIA H200", 2) == pytest.approx(989.4e12)
    assert peak_flops_of("NVIDIA H200", 4) == pytest.approx(66.9e12)
    assert peak_flops_of("NVIDIA H200", 8) is None
    assert peak_flops_of("", 2) is None
