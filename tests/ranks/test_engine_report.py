"""What a run tells: monitors, timers, log lines, the communication log."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.moe.layer import MoE
from tests.support.engines import config, make_engine
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _monitored(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], list[str]]:
    """(mean loss per step as it should be, norms, log lines)."""
    records = Records()
    logging.getLogger("DeepSpeed").addHandler(records)
    model = build(Mlp, dtype=torch.float64)
    settings = config(
        3,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "csv"},
        tensorboard={"enabled": True, "output_path": folder, "job_name": "tb"},
        wall_clock_breakdown=True,
        memory_breakdown=True,
        dump_state=True,
        steps_per_print=2,
        comms_logger={"enabled": True},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "warmup_type": "linear"}},
    )
    engine = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    means, norms = [], []
    for step in make_batches(model, 4, 3, world_size):
        with torch.no_grad():
            means.append(sum(model(*batch).item() for micro in step for batch in micro) / (3 * world_size))
        for micro in step:
            engine.backward(engine(*micro[rank]))
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        norms.append(norm)
    assert comm.get_comm_operation_count() > 0
    engine.print_forward_breakdown(12.345)
    assert engine.get_compile_time() == []
    engine.destroy()
    return means, norms, records.lines


def _column(folder: Path, name: str) -> list[tuple[int, float]]:
    (file,) = folder.rglob(f"*{name}.csv")
    with file.open() as lines:
        return [(int(row[0]), float(row[1])) for row in list(csv.reader(lines))[1:]]


def test_monitors_get_the_mean_loss_of_all_micro_batches_and_ranks(tmp_path: Path) -> None:
    (means, norms, lines), (_, _, other_lines) = run_ranks(_monitored, 2, str(tmp_path))
    samples = [24, 48, 72, 96]  # 4 rows x 3 micro-batches x 2 ranks
    losses = _column(tmp_path / "csv", "train_loss")
    assert [s for s, _ in losses] == samples
    torch.testing.assert_close(torch.tensor([v for _, v in losses]), torch.tensor(means), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor([v for _, v in _column(tmp_path / "csv", "grad_norm")]), torch.tensor(norms))
    assert len(_column(tmp_path / "csv", "lr")) == 4
    for name in ("forward", "backward", "backward_inner", "backward_allreduce", "step"):
        assert all(ms >= 0 for _, ms in _column(tmp_path / "csv", f"elapsed_time_ms_{name}"))
    _check_tensorboard(tmp_path / "tb", means)
    _check_lines(lines)
    told = "time (ms) | forward: 12.35"
    assert (told in lines, told in other_lines) == (True, False)


def _check_tensorboard(folder: Path, means: list[float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    values = [event.value for event in events.Scalars("Train/Samples/train_loss")]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(means), rtol=1e-6, atol=0)


def _check_lines(lines: list[str]) -> None:
    printed = [line for line in lines if line.startswith("step=")]
    assert [line.split(",")[0] for line in printed] == ["step=2", "step=4"]
    assert all("loss=" in line and "grad_norm=" in line for line in printed)
    times = [line.splitlines() for line in lines if line.startswith("time of step ")]
    assert [table[0] for table in times] == ["time of step 2 on this rank", "time of step 4 on this rank"]
    names = ["forward", "backward", "backward_inner", "backward_allreduce", "step"]
    for _, *rows in times:
        assert [row.split()[0] for row in rows] == names
        assert len({len(row) for row in rows}) == 1  # columns end at one place
        assert all(row.split()[2] == "ms" and row.endswith("%") for row in rows)
    _check_memory([line for line in lines if line.startswith("memory | ")])
    assert any(line.startswith("dump_state: ") for line in lines)
    assert any("DeepSpeed info" in line for line in lines)


def _check_memory(lines: list[str]) -> None:
    header, *rows = lines
    assert header.split()[4:] == ["allocated", "peak", "reserved", "peak", "process", "host", "used", "host", "total"]
    assert len({len(line) for line in lines}) == 1  # columns end at one place
    assert all(row.count(" MiB") + row.count(" GiB") + row.count(" KiB") + row.count(" B") >= 7 for row in rows[:23])
    assert [row[9:25].rstrip() for row in rows[:4]] == [
        "before forward",
        "after forward",
        "before backward",
        "after backward",
    ]
    assert {"before step", "after step"} <= {row[9:25].rstrip() for row in rows}


def _quiet(rank: int, world_size: int) -> Any:
    records = Records()
    logging.getLogger("DeepSpeed").addHandler(records)
    model = build(Mlp)
    engine = make_engine(model, config(log_level="error"), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in make_batches(model, 3, 1, world_size):
        engine.backward(engine(*step[0][rank]))
        engine.step()
    return records.lines, deepspeed.logger.level


def test_nothing_is_printed_unless_asked() -> None:
    for lines, level in run_ranks(_quiet, 2):
        assert [line for line in lines if "DeepSpeed info" not in line] == []
        assert level == logging.ERROR


def _own_reports(rank: int, world_size: int, teller: int, folder: str) -> list[str]:
    """One rank alone asks for reports; the model has experts, whose figures are collective too."""
    records = Records()
    logging.getLogger("DeepSpeed").addHandler(records)
    own = {"steps_per_print": 1, "csv_monitor": {"enabled": True, "output_path": folder}} if rank == teller else {}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), WithExperts())
    engine = make_engine(model, config(**own), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 4)).sum())
        engine.step()
    engine.destroy()
    return [line for line in records.lines if line.startswith("step=")]


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(4, nn.Linear(4, 4), num_experts=2, k=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(hidden)[0]
        return output


@pytest.mark.parametrize("teller", [0, 1])
def test_the_first_rank_decides_which_steps_are_reported(tmp_path: Path, teller: int) -> None:
    first, other = run_ranks(_own_reports, 2, teller, str(tmp_path))
    assert len(first) == (2 if teller == 0 else 0)
    assert other == []
    assert len(list(tmp_path.rglob("*expert_1_tokens.csv"))) == (1 if teller == 0 else 0)
