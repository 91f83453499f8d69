"""Where does the time of our step go? Profiles rank 0 and prints one table.

    python benchmarks/profile_step.py --stage 2 [--dtype bf16] [--accumulation 4] [--chain 257] [--zero KEY=VALUE]

Three things are measured in one run of the model of `train_step` (or of `overhead`, with --chain), after a warm-up:

    time       the median step without a profiler, then steps under cProfile, summed by phase and by function
               (`harness/phases.py`). cProfile makes Python calls about three times as dear and leaves C alone, so shares of
               phases that are Python are overstated; the first line gives the true step.
    operators  dispatched by rank 0 in one step, and by forward and backward of the same model alone: the difference is ours.
               Among them host synchronisations (`_local_scalar_dense`) and the bytes that copies write.
    volume     what the communications log of rank 0 holds of one step: calls and bytes by operation.

Nothing else is compared, so it is no case of `run.py`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(_ROOT)  # instead of this folder, whose files must not pass for top-level modules

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from benchmarks.harness.cases import OURS, Case, Measured  # noqa: E402
from benchmarks.harness.models import build_model, make_batches  # noqa: E402
from benchmarks.harness.phases import Phases, by_function, table  # noqa: E402
from benchmarks.harness.ranks import Interpreters, run_case  # noqa: E402
from benchmarks.harness.trainers import FLOOR, Training, join, make_engine, make_trainer, rank  # noqa: E402

_WARM = 3
_BENCHMARK = "profile_step"
Step = Callable[[], None]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.copied_nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name in ("copy_", "_foreach_copy_"):
            targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.copied_nbytes += sum(target.nbytes for target in targets)
        return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, step: Step) -> _Operators:
        operators = cls()
        with operators:
            step()
        return operators


def _forward(engine: Any, batch: Tensor) -> Tensor:
    loss: Tensor = engine(batch)
    return loss


def _backward(engine: Any, loss: Tensor) -> None:
    engine.backward(loss)


def _step(engine: Any) -> None:
    engine.step()


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    training = Training.of(arguments)
    batches = make_batches(build_model(arguments), training.rows, rank())
    floor = make_trainer(FLOOR, build_model(arguments), training)
    join(contender)
    engine = make_engine(build_model(arguments), training)

    def one_step(micro_step: Callable[[Tensor, bool], object]) -> None:
        for index in range(training.accumulation):
            micro_step(batches[index % len(batches)], index == training.accumulation - 1)

    def micro_step(batch: Tensor, is_boundary: bool) -> None:
        loss = _forward(engine, training.cast(batch))
        _backward(engine, loss)
        _step(engine)

    def ours() -> None:
        one_step(micro_step)

    def alone() -> None:
        one_step(floor)

    for _ in range(_WARM):
        ours()
        alone()
    steps: int = arguments["steps"]
    step, floor_step = _Time.median(ours, steps), _Time.median(alone, steps)
    stats = _profiled(ours, steps, is_processor_time=arguments["is_processor_time"])
    volume = _logged(ours)
    operators, of_model = _Operators.of(ours), _Operators.of(alone)
    if rank() == 0:
        lines = [
            f"step {step} without a profiler; forward and backward alone {floor_step}",
            *table(Phases(stats).seconds(), by_function(stats, str(_ROOT)), steps, arguments["rows_shown"]),
            f"Python calls per step: {sum(each[1] for each in stats.values()) / steps:.0f}",
            *_operator_lines(operators, of_model),
            *volume,
        ]
        Path(arguments["out"]).write_text("\n".join(lines) + "\n")
    return Measured({"step_ms": step.wall_ms})


@dataclass(frozen=True)
class _Time:
    """Of one step; processor time is that of all threads, and hardly feels what else the machine does."""

    wall_ms: float
    processor_ms: float

    def __str__(self) -> str:
        return f"{self.wall_ms:.1f} ms ({self.processor_ms:.1f} ms of processor)"

    @classmethod
    def median(cls, step: Step, steps: int) -> _Time:
        times = []
        for _ in range(steps):
            began = time.perf_counter(), time.process_time()
            step()
            times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        wall, processor = zip(*times, strict=True)
        return cls(statistics.median(wall) * 1e3, statistics.median(processor) * 1e3)


def _profiled(step: Step, steps: int, *, is_processor_time: bool) -> Any:
    """What cProfile saw of `steps` steps: on rank 0; the others run the same without it and hold nobody up."""
    if rank() != 0:
        for _ in range(steps):
            step()
        return {}
    profile = cProfile.Profile(time.thread_time) if is_processor_time else cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    return pstats.Stats(profile).stats  # type: ignore[attr-defined]


def _logged(step: Step) -> list[str]:
    from deepspeed import comm
    from deepspeed.comm.recorder import RECORDER

    comm.configure(enabled=True, prof_all=True)
    comm.reset_log()
    step()
    lines = [
        f"moved per step: {operation} of {nbytes} bytes, {entry[0]} times"
        for operation, sizes in RECORDER.comms_dict.items()
        for nbytes, entry in sorted(sizes.items())
    ]
    comm.configure(enabled=False)
    return lines


def _operator_lines(ours: _Operators, of_model: _Operators) -> Iterator[str]:
    beyond = ours.calls - of_model.calls
    yield (
        f"operators per step: {ours.calls.total()}, by forward and backward alone {of_model.calls.total()}; "
        f"host synchronisations {ours.calls['_local_scalar_dense']}; "
        f"copies write {ours.copied_nbytes / 2**20:.1f} MiB, of which the model's {of_model.copied_nbytes / 2**20:.1f}"
    )
    yield "beyond the model: " + ", ".join(f"{name} {count}" for name, count in beyond.most_common(14))


def _zero_key(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


def main() -> None:
    """Profile what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=30, help="functions to show")
    parser.add_argument("--chain", type=int, help="layers of the model of `overhead`, instead of the GPT")
    parser.add_argument(
        "--processor-time", action="store_true", help="profile processor time: for a busy machine; hides waits"
    )
    parser.add_argument("--zero", type=_zero_key, action="append", default=[], help="KEY=VALUE of zero_optimization; repeat")
    parser.add_argument("--work", type=Path, default=_ROOT / "runs" / "bench", help="scratch")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        out = Path(folder) / "profile.txt"
        arguments = {
            **{key: getattr(options, key) for key in ("stage", "dtype", "accumulation", "steps")},
            **({"chain": options.chain, "rows": 4} if options.chain else {}),
            "zero": dict(options.zero),
            "rows_shown": options.rows,
            "is_processor_time": options.processor_time,
            "out": str(out),
        }
        case = Case("profile", _BENCHMARK, (OURS,), ("step_ms",), of=OURS, ranks=options.ranks, arguments=arguments)
        run = run_case(case, OURS, 0, Interpreters(options.work.absolute()))
        if run.error is not None:
            raise SystemExit(run.error)
        print(f"stage {options.stage} {options.dtype} accumulation {options.accumulation}, {options.ranks} ranks, rank 0")
        print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
        print(out.read_text(), end="")


if __name__ == "__main__":
    main()
