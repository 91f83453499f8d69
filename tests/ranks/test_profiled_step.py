"""The step that the config block `flops_profiler` profiles: the numbers of one process, on every kind of engine."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import DeepSpeedError
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.profiling.flops_profiler import FlopsProfiler
from tests.support.engines import config, make_engine, zero
from tests.support.monitors import run_script
from tests.support.ranks import run_ranks

ROWS, WIDTH, LAYERS = 4, 8, 3
OF_LAYER = 2 * ROWS * WIDTH * WIDTH
FORWARD = LAYERS * OF_LAYER + LAYERS * ROWS * WIDTH
"""Products, and a tanh for each."""
BACKWARD = (2 * LAYERS - 1) * OF_LAYER + LAYERS * ROWS * WIDTH
"""No gradient of the first input is wanted."""
SGD = torch.optim.SGD


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]


def _block(**keys: Any) -> dict[str, Any]:
    return {"flops_profiler": {"enabled": True, **keys}}


def _steps(engine: Any, steps: int, micro_batches: int = 1) -> None:
    for _ in range(steps * micro_batches):
        engine.backward(engine(torch.ones(ROWS, WIDTH)).sum())
        engine.step()


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _stages(rank: int, world_size: int, folder: str) -> None:
    for stage in (0, 1, 2, 3):
        report = Path(folder, f"{stage}.txt")
        blocks = {**zero(stage), **_block(output_file=str(report))}
        if stage == 3:
            blocks["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        model = nn.Sequential(*_layers())
        engine = make_engine(model, config(2, ROWS, **blocks), optimizer=SGD(model.parameters(), lr=0.1))
        assert engine.wall_clock_breakdown()
        _steps(engine, 1, 2)
        hooks = _hooks(model)
        assert not report.exists()
        _steps(engine, 1, 2)
        profiler = engine.flops_profiler
        assert isinstance(profiler, FlopsProfiler)
        assert profiler.get_total_flops() == 2 * FORWARD, stage
        assert profiler.get_total_backward_flops() == 2 * BACKWARD, stage
        assert profiler.get_total_params() == LAYERS * WIDTH * WIDTH, stage
        facts = profiler.step_facts
        assert facts is not None
        assert facts.all_flops == world_size * 2 * (FORWARD + BACKWARD)
        assert (facts.model_params, facts.micro_batches, facts.ranks) == (LAYERS * WIDTH * WIDTH, 2, world_size)
        assert min(facts.forward_seconds, facts.backward_seconds, facts.step_seconds) > 0
        torch.distributed.barrier()
        assert "update time" in report.read_text()
        assert _hooks(model) == hooks  # nothing of it is left
        assert "forward" not in engine.__dict__
        assert "_report" not in engine.__dict__
        _steps(engine, 1, 2)
        assert profiler.get_total_flops() == 2 * FORWARD
        engine.destroy()


def test_every_zero_stage_counts_the_whole_model(tmp_path: Path) -> None:
    run_ranks(_stages, 2, str(tmp_path))


def _off(rank: int, world_size: int) -> None:
    model = nn.Sequential(*_layers())
    engine = make_engine(model, config(1, ROWS), optimizer=SGD(model.parameters(), lr=0.1))
    assert engine.flops_profiler is None
    assert not {"forward", "_report"} & engine.__dict__.keys()
    assert "drive" not in engine._parts.reducer.__dict__  # type: ignore[union-attr]


def test_switched_off_nothing_is_on_the_path() -> None:
    run_ranks(_off, 1)


def _first_rank_asks(rank: int, world_size: int, folder: str) -> int:
    blocks = _block(profile_step=0, output_file=f"{folder}/{rank}.txt", peak_tflops=1.0) if rank == 0 else {}
    model = nn.Sequential(*_layers())
    engine = make_engine(model, config(1, ROWS, **blocks), optimizer=SGD(model.parameters(), lr=0.1))
    _steps(engine, 1)
    assert engine.flops_profiler is not None
    return int(engine.flops_profiler.get_total_flops())


def test_the_first_rank_decides_and_writes(tmp_path: Path) -> None:
    assert run_ranks(_first_rank_asks, 2, str(tmp_path)) == [FORWARD, FORWARD]
    assert [path.name for path in tmp_path.iterdir()] == ["0.txt"]
    assert "MFU" in (tmp_path / "0.txt").read_text()


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _pipeline(rank: int, world_size: int, schedule: str) -> None:
    net = PipelineModule(layers=_layers(), num_stages=2, loss_fn=_square, partition_method="uniform")
    blocks = {**_block(output_file="/dev/null"), "pipeline": {"schedule": schedule}}
    settings = config(3, ROWS, zero_allow_untested_optimizer=True, **blocks)
    engine: Any = make_engine(net, settings, optimizer=SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        engine.train_batch(iter([(torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH))] * 3))
    facts = engine.flops_profiler.step_facts
    assert facts.all_flops == 3 * (FORWARD + BACKWARD)
    assert facts.model_params == LAYERS * WIDTH * WIDTH
    assert len(facts.by_stage) == 2
    assert facts.by_stage[rank] == (
        engine.flops_profiler.get_total_flops(),
        engine.flops_profiler.get_total_backward_flops(),
    )
    assert sum(forward for forward, _ in facts.by_stage) == 3 * FORWARD


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pipeline_is_told_by_stage(schedule: str) -> None:
    run_ranks(_pipeline, 2, schedule)


class WithExperts(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = nn.Linear(WIDTH, WIDTH, bias=False)
        self.moe = MoE(WIDTH, expert, num_experts=2, ep_size=ep_size, k=1, drop_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(x)[0]
        return y


def _experts(rank: int, world_size: int) -> tuple[int, int]:
    torch.manual_seed(rank)
    model = WithExperts(ep_size=2)
    engine = make_engine(
        model, config(1, ROWS, **_block(output_file="/dev/null")), optimizer=SGD(model.parameters(), lr=0.1)
    )
    for _ in range(2):
        engine.backward(engine(torch.randn(ROWS, WIDTH)).sum())
        engine.step()
    profiler = engine.flops_profiler
    assert profiler is not None
    assert profiler.step_facts is not None
    of_experts = sum(row.macs for row in profiler.rows() if row.path.endswith("deepspeed_experts"))
    return of_experts, profiler.step_facts.model_params


def test_experts_count_the_rows_that_they_get_and_the_model_has_them_all() -> None:
    results = run_ranks(_experts, 2)
    assert sum(macs for macs, _ in results) == 2 * ROWS * WIDTH * WIDTH  # every token of both ranks meets one expert
    assert {params for _, params in results} == {2 * WIDTH * WIDTH + 2 * WIDTH}  # two experts and the router


def _tensor_parts(rank: int, world_size: int) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.Tanh(), nn.Linear(16, WIDTH, bias=False))
    rules = {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": ["0\\.weight$"], "partition_type": "column"},
            {"patterns": ["2\\.weight$"], "partition_type": "row"},
        ],
    }
    block = {"autotp_size": 2, "partition_config": rules}
    settings = config(1, ROWS, **_block(output_file="/dev/null"), tensor_parallel=block)
    engine = make_engine(model, settings, optimizer=SGD(model.parameters(), lr=0.1))
    _steps(engine, 2)
    profiler = engine.flops_profiler
    assert profiler is not None
    assert profiler.step_facts is not None
    return profiler.get_total_macs(), profiler.get_total_params(), profiler.step_facts.model_params


def test_tensor_ranks_count_their_parts_and_the_model_is_whole() -> None:
    for macs, params, whole in run_ranks(_tensor_parts, 2):
        assert macs == ROWS * WIDTH * 16  # half of two layers
        assert params == WIDTH * 16
        assert whole == 2 * WIDTH * 16


class _Slow(nn.Module):
    """Takes its time in evaluations alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_layers())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            time.sleep(0.3)
        y: Tensor = self.layers(x)
        return y


def _evaluates_between(rank: int, world_size: int) -> float:
    model = _Slow()
    engine = make_engine(
        model, config(1, ROWS, **_block(output_file="/dev/null")), optimizer=SGD(model.parameters(), lr=0.1)
    )
    for _ in range(2):
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(ROWS, WIDTH))
        engine.train()
        _steps(engine, 1)
    assert engine.flops_profiler is not None
    assert engine.flops_profiler.step_facts is not None
    return engine.flops_profiler.step_facts.forward_seconds


def test_an_evaluation_between_two_updates_is_no_time_of_the_step() -> None:
    (forward_seconds,) = run_ranks(_evaluates_between, 1)
    assert 0 < forward_seconds < 0.3  # the evaluation alone would take that


def _modules_loaded_in_it(rank: int, world_size: int) -> list[str]:
    model = nn.Sequential(*_layers())
    engine = make_engine(
        model, config(1, ROWS, **_block(output_file="/dev/null")), optimizer=SGD(model.parameters(), lr=0.1)
    )
    _steps(engine, 1)
    before = set(sys.modules)
    loss = engine(torch.ones(ROWS, WIDTH)).sum()
    loaded = set(sys.modules) - before
    engine.backward(loss)
    engine.step()
    assert engine.flops_profiler is not None
    assert engine.flops_profiler.step_facts is not None
    return sorted(loaded)


def test_what_torch_loads_to_count_is_loaded_before_the_step() -> None:
    assert run_ranks(_modules_loaded_in_it, 1) == [[]]  # seconds of imports, which were told as the model's


def _unwritable(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    model = nn.Sequential(*_layers())
    settings = config(1, ROWS, **_block(output_file=f"{folder}/file/report.txt"))
    with pytest.raises(DeepSpeedError) as raised:
        make_engine(model, settings, optimizer=SGD(model.parameters(), lr=0.1))
    return type(raised.value).__name__, str(raised.value)


def test_a_report_that_cannot_be_written_is_an_error_on_all_ranks_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (kind, text), (other_kind, told) = run_ranks(_unwritable, 2, str(tmp_path))
    assert kind == other_kind == "ConfigError"
    assert "flops_profiler.output_file=" in text
    assert "leave it out for standard output" in text
    assert "rank 1: the report of flops_profiler could not start on rank 0" in told


def _report_lost(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    model = nn.Sequential(*_layers())
    report = Path(folder, "reports", "one.txt")
    engine = make_engine(
        model, config(1, ROWS, **_block(output_file=str(report))), optimizer=SGD(model.parameters(), lr=0.1)
    )
    report.mkdir()  # in its way, after the start
    with redirect_stdout(io.StringIO()) as printed:
        _steps(engine, 3)
    return engine.global_steps, printed.getvalue()


def test_a_report_whose_file_fails_later_is_printed_and_training_goes_on(tmp_path: Path) -> None:
    ((steps, printed),) = run_ranks(_report_lost, 1, str(tmp_path))
    assert steps == 3
    assert "FLOPs profile of step 1" in printed


def test_a_step_that_is_never_trained_is_told(tmp_path: Path) -> None:
    script = """
    import torch
    from tests.support.engines import config, make_engine

    model = torch.nn.Linear(2, 1)
    settings = config(flops_profiler={"enabled": True, "profile_step": 100})
    engine = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    engine.backward(engine(torch.ones(4, 2)).mean())
    engine.step()
    """
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("flops_profiler.profile_step=100: this engine never trained that step") == 1
