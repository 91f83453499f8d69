"""How long do saving and loading a checkpoint take?

No goal yet: the figures are for orientation. The model of `train_step` in bf16, one rank, after one step. `plain` is
`torch.save` of the model's and the optimizer's state dictionaries, and `torch.load` (with `weights_only`) and
`load_state_dict` of both; it holds full-precision weights only, and neither flushes to the disk nor checks what it reads,
as ours does (hashes, and `fsync` before the rename). Files lie in the benchmark's work folder; they are read back right
after writing, so from the page cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Measured
from benchmarks.harness.models import build_model, make_batches
from benchmarks.harness.trainers import PLAIN, Training, adamw, join, make_engine, rank

CASES = (
    Case(
        "checkpoint",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, PLAIN, ORIGINAL),
        figures=("save_s", "second_save_s", "load_s", "mib"),
        of=PLAIN,
        pairs=2,
        arguments={"dtype": "bf16", "model": {"positions": 2}},  # few tokens: the step before the save is not timed
    ),
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    folder = Path(arguments["scratch"]) / "checkpoint"
    folder.mkdir()
    join(contender)
    save, load = (_plain if contender == PLAIN else _engine)(arguments, folder)
    first = _seconds(lambda: save("first"))
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Measured(
        {
            "save_s": first,
            "mib": nbytes / 2**20,
            "second_save_s": _seconds(lambda: save("second")),
            "load_s": _seconds(lambda: load("second")),
        }
    )


def _engine(arguments: Mapping[str, Any], folder: Path) -> tuple[Callable[[str], object], Callable[[str], object]]:
    training = Training.of(arguments)
    model = build_model(arguments)
    batch = make_batches(model, training.rows, rank())[0]
    engine = make_engine(model, training)
    engine.backward(engine(batch))
    engine.step()
    return (
        lambda tag: engine.save_checkpoint(str(folder), tag=tag),
        lambda tag: engine.load_checkpoint(str(folder), tag=tag),
    )


def _plain(arguments: Mapping[str, Any], folder: Path) -> tuple[Callable[[str], object], Callable[[str], object]]:
    model = build_model(arguments)
    optimizer = adamw(model)
    model(make_batches(model, Training.of(arguments).rows, rank())[0]).backward()
    optimizer.step()

    def save(tag: str) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / tag)

    def load(tag: str) -> None:
        state = torch.load(folder / tag, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
