"""The run log of real engines: one file per rank, at the steps that the first rank asks for, and at no other cost."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm.meter import METER
from deepspeed.errors import ArgumentError
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from tests.support.engines import config, make_engine, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks

SGD = torch.optim.SGD
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def _block(folder: str, **keys: Any) -> dict[str, Any]:
    return {"run_log": {"enabled": True, "output_path": folder, "job_name": "run", **keys}}


def _read(folder: Path | str, rank: int) -> list[dict[str, Any]]:
    path = Path(folder, "run", f"rank-{rank:05d}.jsonl")
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def _of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def _train(rank: int, world_size: int, folder: str, stage: int) -> tuple[list[float], list[float], float]:
    """(mean loss of each step, norms, rate of the end) of four steps, of which the second and fourth are reported."""
    model = build(Mlp, dtype=torch.float64)
    blocks = {**ADAM, **zero(stage), **_block(folder, every=2), "comet": {"enabled": False, "api_key": "secret"}}
    engine = make_engine(model, config(2, **blocks))
    losses, norms = [], []
    for number, step in enumerate(make_batches(model, 4, 2, world_size)):
        with torch.no_grad():
            engine.eval()
            own = [sum(engine(*batch).item() for batch in micro) for micro in step]  # every rank's batch: also a forward
            engine.train()
        losses.append(sum(own) / (2 * world_size))
        for micro in step:
            engine.backward(engine(*micro[rank]))
            engine.step()
        norms.append(engine.get_global_grad_norm())
        if number == 2:
            engine.save_checkpoint(f"{folder}/saved", tag="three")
    engine.load_checkpoint(f"{folder}/saved", tag="three")
    lr = engine.get_lr()[0]
    engine.destroy()
    assert not METER.is_on
    return losses, norms, lr  # type: ignore[return-value]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_leaves_its_records_and_the_first_those_of_the_run(tmp_path: Path, stage: int) -> None:
    (losses, norms, lr), _ = run_ranks(_train, 2, str(tmp_path), stage)
    first, other = _read(tmp_path, 0), _read(tmp_path, 1)
    kinds = ["start", "step", "rank_step", "checkpoint", "step", "rank_step", "checkpoint", "end"]
    assert [record["kind"] for record in first] == kinds
    assert [record["kind"] for record in other] == [kind for kind in kinds if kind != "step"]
    _check_start(first[0], other[0], stage)
    steps = _of(first, "step")
    assert [(each["step"], each["samples"], each["skipped"], each["lr"]) for each in steps] == [
        (2, 32, 0, [lr]),  # 4 rows, 2 micro-batches, 2 ranks
        (4, 64, 0, [lr]),
    ]
    assert [each["loss"] for each in steps] == pytest.approx([losses[1], losses[3]], rel=1e-6)
    assert [each["grad_norm"] for each in steps] == pytest.approx([norms[1], norms[3]])
    assert all(each["seconds"] > 0 and each["samples_per_second"] == pytest.approx(16 / each["seconds"]) for each in steps)
    assert all(each["flops_per_second"] is each["mfu"] is None for each in steps)
    for records in (first, other):
        _check_ranks(_of(records, "rank_step"), steps)
        save, load = _of(records, "checkpoint")
        assert (save["action"], save["tag"], save["step"], save["is_async"]) == ("save", "three", 3, False)
        assert save["nbytes"] > 0
        assert (load["action"], load["tag"], load["step"], load["nbytes"]) == ("load", "three", 3, None)
        assert min(save["seconds"], load["seconds"]) > 0
        assert (records[-1]["step"], records[-1]["cause"]) == (4, "done")


def _check_start(first: dict[str, Any], other: dict[str, Any], stage: int) -> None:
    assert (first["format"], first["rank"], other["rank"], first["world_size"], first["step"]) == (1, 0, 1, 2, 0)
    assert (first["model"], first["restarts"], first["peak_flops"]) == ("Mlp", 0, None)
    assert first["parameters"] == other["parameters"] == sum(p.numel() for p in build(Mlp).parameters())
    assert first["config"]["zero_optimization"]["stage"] == stage
    assert first["config"]["comet"]["api_key"] == "(hidden)"
    assert first["pid"] != other["pid"]
    assert sum(first["mesh"].values()) == 7  # six axes, one of them over both ranks
    weights = first["parameters"] * 4  # the plan counts the config's precision: fp32
    assert first["device"]
    assert 2**20 < first["host_bytes"] < 2**33  # Python and torch
    assert first["plan"]["optimizer state"] >= 2 * weights / (1 if stage == 0 else 2)


def _check_ranks(records: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    assert [record["step"] for record in records] == [2, 4]
    for record in records:
        assert set(record["phases"]) == {"forward", "backward", "backward_reduce", "step"}
        assert all(seconds > 0 for seconds in record["phases"].values())
        assert record["host_bytes"] > 2**20
        assert record["device_bytes"] is record["device_peak_bytes"] is None
        assert all(sums["count"] > 0 and sums["seconds"] > 0 for sums in record["comm"].values())
        assert record["waited_seconds"] > 0
    # Evaluations between updates are time of the step, but of no phase.
    assert sum(records[1]["phases"].values()) < steps[1]["seconds"]


def _late(rank: int, world_size: int, folder: str) -> None:
    model = build(Mlp)
    engine = make_engine(model, config(**_block(folder)), optimizer=SGD(model.parameters(), lr=0.1))
    for step in make_batches(model, 2, 1, world_size):
        if rank == 1:
            time.sleep(0.3)  # the straggler itself: not waiting for anything
        engine.backward(engine(*step[0][rank]))
        engine.step()
    engine.destroy()


def test_the_rank_that_waits_least_is_the_one_that_is_waited_for(tmp_path: Path) -> None:
    run_ranks(_late, 2, str(tmp_path))
    waited = [sum(record["waited_seconds"] for record in _of(_read(tmp_path, rank), "rank_step")) for rank in (0, 1)]
    assert waited[0] > 0.3  # of two sleeps of 0.3 s one at least is waited for
    assert waited[1] < waited[0] / 2


def _calls(rank: int, world_size: int, folder: str) -> tuple[list[int], list[float]]:
    """How many collectives a step makes, without a log and with one that has nothing to report; losses without and with."""
    counts, losses = [], []
    for blocks in ({}, _block(folder, every=1000)):
        model = build(Mlp)
        engine = make_engine(model, config(**blocks), optimizer=SGD(model.parameters(), lr=0.1))
        for number, step in enumerate(make_batches(model, 3, 1, world_size)):
            if number == 1:
                comm.configure(enabled=True)
                comm.reset_log()
            loss = engine(*step[0][rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        counts.append(comm.get_comm_operation_count())
        comm.configure(enabled=False)
        engine.destroy()
    return counts, losses


def test_steps_that_are_not_reported_make_no_call_for_the_log_and_losses_are_the_same(tmp_path: Path) -> None:
    for counts, losses in run_ranks(_calls, 2, str(tmp_path)):
        assert counts[0] == counts[1] > 0
        assert losses[:3] == losses[3:]


def _one_asks(rank: int, world_size: int, folder: str, asking: int) -> bool:
    model = build(Mlp)
    blocks = _block(folder) if rank == asking else {}
    engine = make_engine(model, config(**blocks), optimizer=SGD(model.parameters(), lr=0.1))
    for step in make_batches(model, 2, 1, world_size):
        engine.backward(engine(*step[0][rank]))
        engine.step()
    was_on = METER.is_on
    engine.destroy()
    return was_on


@pytest.mark.parametrize("asking", [0, 1])
def test_the_first_rank_decides_and_ranks_without_the_block_write_nothing(tmp_path: Path, asking: int) -> None:
    assert run_ranks(_one_asks, 2, str(tmp_path), asking) == [asking == 0, False]
    names = [path.name for path in tmp_path.rglob("*.jsonl")]
    assert names == (["rank-00000.jsonl"] if asking == 0 else [])
    if asking == 0:
        assert [record["step"] for record in _of(_read(tmp_path, 0), "step")] == [1, 2]


def _two_engines(rank: int, world_size: int, folder: str) -> None:
    """A teacher that is only asked, two students in turns, and one more once the first is done."""
    settings, model = config(**_block(folder)), build(Mlp)
    make_engine(build(Mlp), settings)
    batches = make_batches(model, 3, 1, world_size)
    engines = [make_engine(net, settings, optimizer=SGD(net.parameters(), lr=0.1)) for net in (model, build(Mlp))]
    for steps, engine in zip((3, 2), engines, strict=True):
        for step in batches[:steps]:
            engine.backward(engine(*step[0][rank]))
            engine.step()
    engines[0].destroy()
    third = build(Mlp)
    engines[0] = make_engine(third, settings, optimizer=SGD(third.parameters(), lr=0.1))
    engines[0].backward(engines[0](*batches[0][0][rank]))
    engines[0].step()
    for engine in engines:
        engine.destroy()


def test_engines_that_train_at_the_same_time_have_a_folder_each_and_a_reference_model_none(tmp_path: Path) -> None:
    run_ranks(_two_engines, 2, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["engine-2", "rank-00000.jsonl", "rank-00001.jsonl"]
    for rank in (0, 1):
        told = _read(tmp_path, rank)
        assert [each["kind"] for each in told if each["kind"] in ("start", "end")] == ["start", "end"] * 2
        assert [each["step"] for each in _of(told, "rank_step")] == [1, 2, 3, 1]
        beside = tmp_path / "run" / "engine-2" / f"rank-{rank:05d}.jsonl"
        kinds = [json.loads(line)["kind"] for line in beside.read_text().splitlines()]
        assert kinds == ["start", *(["step", "rank_step"] if rank == 0 else ["rank_step"]) * 2, "end"]


def _caught(rank: int, world_size: int, folder: str) -> None:
    model = build(Mlp)
    engine = make_engine(model, config(**_block(folder)), optimizer=SGD(model.parameters(), lr=0.1))
    step = make_batches(model, 1, 1, world_size)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(torch.ones(3, 1000), step[0][rank][1])
    engine.backward(engine(*step[0][rank]))
    engine.step()
    engine.destroy()


def test_training_goes_on_after_a_forward_that_raised(tmp_path: Path) -> None:
    run_ranks(_caught, 1, str(tmp_path))
    assert [record["step"] for record in _of(_read(tmp_path, 0), "rank_step")] == [1]


def _cannot_write(rank: int, world_size: int, folder: str) -> str:
    model = build(Mlp)
    place = folder if rank == 0 else f"{folder}/file"  # a file where rank 1 wants a folder
    with pytest.raises(ArgumentError) as raised:
        make_engine(model, config(**_block(place)), optimizer=SGD(model.parameters(), lr=0.1))
    return str(raised.value)


def test_a_file_that_one_rank_cannot_open_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in run_ranks(_cannot_write, 2, str(tmp_path)):
        assert "rank-00001.jsonl cannot be opened" in text


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _pipeline(rank: int, world_size: int, folder: str, schedule: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    chunks = 2 if schedule == "interleaved" else 1
    net = PipelineModule(layers=layers, num_stages=2, loss_fn=_square, partition_method="uniform", num_chunks=chunks)
    blocks = {**_block(folder), "pipeline": {"schedule": schedule}}
    settings = config(4, 4, zero_allow_untested_optimizer=True, **blocks)
    engine: Any = make_engine(net, settings, optimizer=SGD(net.parameters(), lr=0.1))
    data = [(torch.ones(4, 8), torch.ones(4, 8))] * 4
    for _ in range(3):
        engine.train_batch(iter(data))
        engine.eval_batch(iter(data))
    assert "_carry_out" not in engine.__dict__  # nothing of it is left
    engine.destroy()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_a_pipeline_leaves_a_drawing_of_one_batch(tmp_path: Path, schedule: str) -> None:
    run_ranks(_pipeline, 2, str(tmp_path), schedule)
    first, other = _read(tmp_path, 0), _read(tmp_path, 1)
    (drawn,) = _of(first, "schedule")
    assert _of(other, "schedule") == []
    assert (drawn["name"], drawn["stages"], drawn["micro_batches"]) == (schedule, 2, 4)
    assert [line.split()[:2] for line in drawn["text"].splitlines()] == [["stage", "0"], ["stage", "1"]]
    kinds = ["F", "B", "W"] if schedule == "zero_bubble" else ["F", "B"]
    chunks = 2 if schedule == "interleaved" else 1
    for stage in (0, 1):
        works = [work for work in drawn["works"] if work[0] == stage]
        assert sorted(work[3] for work in works) == sorted(kinds * 4 * chunks)
        assert all(before[2] <= after[1] for before, after in pairwise(works))  # one at a time
    ends = {(stage, kind, number): end for stage, _, end, kind, number in drawn["works"]}
    starts = {(stage, kind, number): start for stage, start, _, kind, number in reversed(drawn["works"])}
    assert min(starts.values()) == 0.0
    assert all(starts[1, "F", number] > 0 and starts[0, "B", number] >= starts[1, "B", number] for number in range(4))
    assert 0 < drawn["bubble"] < 1
    assert max(ends.values()) > 0
    steps = _of(first, "step")
    assert [each["step"] for each in steps] == [1, 2, 3]
    assert ["eval_loss" in each["more"] for each in steps] == [False, True, True]
    assert set(_of(other, "rank_step")[0]["phases"]) == {"forward", "backward", "step"}


class _WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(4, nn.Linear(4, 4), num_experts=2, k=1)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.moe(hidden)[0]
        return output


def _experts(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _WithExperts())
    engine = make_engine(model, config(**_block(folder)), optimizer=SGD(model.parameters(), lr=0.1))
    engine.backward(engine(torch.randn(8, 4)).sum())
    engine.step()
    engine.destroy()


def test_shares_of_the_experts_are_logged_by_layer(tmp_path: Path) -> None:
    run_ranks(_experts, 2, str(tmp_path))
    (record,) = _of(_read(tmp_path, 0), "experts")
    (shares,) = record["layers"].values()
    assert list(record["layers"]) == ["1.moe"]
    assert (len(shares), sum(shares)) == (2, pytest.approx(1.0))
    assert _of(_read(tmp_path, 1), "experts") == []


def _profiled(rank: int, world_size: int, folder: str) -> None:
    model = build(Mlp)
    profiler = {"enabled": True, "output_file": "/dev/null", "peak_tflops": 1e-6}
    engine = make_engine(model, config(**_block(folder), flops_profiler=profiler), optimizer=SGD(model.parameters(), lr=0.1))
    for step in make_batches(model, 3, 1, world_size):
        engine.backward(engine(*step[0][rank]))
        engine.step()
    engine.destroy()


def test_a_profiled_step_gives_the_tree_and_the_speed_of_later_steps(tmp_path: Path) -> None:
    run_ranks(_profiled, 2, str(tmp_path))
    first = _read(tmp_path, 0)
    (record,) = _of(first, "profile")
    assert record["step"] == 1
    root, *others = record["tree"]
    assert (root["name"], root["depth"], root["share"]) == ("", 0, 1.0)
    assert root["parameters"] == sum(p.numel() for p in build(Mlp).parameters())
    assert {row["depth"] for row in others} >= {1}
    assert root["flops"] > root["macs"] > 0
    before, profiled, after = _of(first, "step")
    assert before["mfu"] is None
    for step in (profiled, after):
        assert step["flops_per_second"] * step["seconds"] == pytest.approx(3 * 2 * root["flops"], rel=0.5)
        assert step["mfu"] == pytest.approx(step["flops_per_second"] / 2e6)  # two devices of 1 MFLOP/s; nothing recomputed
    assert _of(_read(tmp_path, 1), "profile") == []
    assert _read(tmp_path, 1)[0]["peak_flops"] == 1e6
