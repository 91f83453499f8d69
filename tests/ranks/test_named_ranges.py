"""Names in traces: every phase, every gathered unit, every reduced bucket; nothing of it outside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from deepspeed.engine.traced_steps import TracedSteps, trace_name
from deepspeed.pipe import PipelineModule
from tests.support.engines import config, make_engine, zero
from tests.support.ranks import run_ranks

SGD = torch.optim.SGD
WIDTH = 8


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(4, WIDTH)).sum())
    engine.step()


def _patched(engine: Any) -> list[str]:
    """What of the engine's parts has methods of its own object."""
    parts = engine._parts
    owners: list[Any] = [engine, engine.module, parts.reducer, *parts.reducer.buckets]
    owners += [] if parts.coordinator is None else [parts.coordinator.pool]
    names = {"forward", "forward_chunk", "_update", "drive", "launch", "wait", "_start", "_arrive"}
    return sorted(name for owner in owners for name in names & vars(owner).keys())


def _stages(rank: int, world_size: int, stage: int) -> tuple[dict[str, int], list[str]]:
    """(how often each name of ours appears in a traced step, all names of an untraced one)."""
    keys = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 72}
    model = _model()
    engine = make_engine(model, config(**zero(stage, **keys)), optimizer=SGD(model.parameters(), lr=0.1))
    _step(engine)
    assert _patched(engine) == []
    with profile(activities=[ProfilerActivity.CPU]) as plain:
        _step(engine)
    with profile(activities=[ProfilerActivity.CPU]) as named, engine.named_ranges():
        assert "drive" in _patched(engine)
        _step(engine)
    assert _patched(engine) == []
    unnamed = {event.key for event in plain.key_averages()}
    return {event.key: event.count for event in named.key_averages() if event.key not in unnamed}, sorted(unnamed)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_phases_buckets_and_units_are_named_while_it_is_asked_for(stage: int) -> None:
    for named, unnamed in run_ranks(_stages, 2, stage):
        assert (named["forward"], named["backward"], named["step"]) == (1, 1, 1)
        starts = [name for name in named if name.startswith("reduce ") and not name.endswith(", wait")]
        reduced = [name for start in starts for name in re.findall("'([^']+)'", start)]
        assert sorted(reduced) == sorted(f"{layer}.0.{kind}" for layer in (0, 1, 2) for kind in ("weight", "bias"))
        assert all(named[f"{name}, wait"] >= 1 for name in starts)
        gathers = [name for name in named if name.startswith("gather ")]
        assert bool(gathers) == (stage == 3)
        if stage == 3:
            assert {f"gather {layer}{end}" for layer in (0, 1, 2) for end in ("", ", wait")} <= set(gathers)
        assert not [name for name in unnamed if name.startswith(("reduce ", "gather ")) or name in ("forward", "step")]


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _pipeline(rank: int, world_size: int, folder: str) -> list[int]:
    net = PipelineModule(layers=list(_model()), num_stages=2, loss_fn=_square, partition_method="uniform")
    settings = config(4, 4, zero_allow_untested_optimizer=True)
    engine: Any = make_engine(net, settings, optimizer=SGD(net.parameters(), lr=0.1))
    data = [(torch.ones(4, WIDTH), torch.ones(4, WIDTH))] * 4
    TracedSteps(engine, 2, 2, Path(folder)).start()
    for _ in range(3):
        engine.train_batch(iter(data))
    assert _patched(engine) == []
    names = [event.get("name") for event in json.loads(Path(folder, trace_name(rank)).read_text())["traceEvents"]]
    return [names.count(name) for name in ("forward", "backward", "receive", "step")]


def test_a_pipeline_names_each_micro_batch_and_what_it_waits_for(tmp_path: Path) -> None:
    for counts in run_ranks(_pipeline, 2, str(tmp_path)):
        assert counts == [4, 4, 4, 1]  # a stage receives activations or gradients


def _traced(rank: int, world_size: int, folder: str, first: int, last: int, steps: int) -> list[str]:
    model = _model()
    engine = make_engine(model, config(2, **zero(1)), optimizer=SGD(model.parameters(), lr=0.1))
    traced = TracedSteps(engine, first, last, Path(folder))
    traced.start()
    for _ in range(2 * steps):
        _step(engine)
    traced.stop()  # as at the end of the process
    assert _patched(engine) == []
    path = Path(folder, trace_name(rank))
    if not path.exists():
        return []
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]


@pytest.mark.parametrize(("first", "last", "traced"), [(1, 1, 1), (2, 3, 2), (3, 9, 2), (9, 9, 0)])
def test_the_steps_that_were_asked_for_are_in_the_file(tmp_path: Path, first: int, last: int, traced: int) -> None:
    for names in run_ranks(_traced, 2, str(tmp_path), first, last, 4):
        assert [names.count(name) for name in ("forward", "backward", "step")] == [2 * traced, 2 * traced, traced]
