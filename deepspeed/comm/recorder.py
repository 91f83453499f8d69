"""The communications log: what was sent, how often, how long it took, at what bandwidth.

Lives here: the log and its arithmetic. Does not live here: timing a call (`collectives`, which asks `RECORDER.enabled`
and nothing else while the log is off).

For n ranks, b bytes and t milliseconds the algorithm bandwidth is b / t. The bus bandwidth can be compared with a link's
(source: "Performance" in the documentation of nccl-tests):

    operation                                     b, the byte count in the log            bus bandwidth
    all_reduce                                    one rank's tensor: all have its size    (b / t) 2 (n - 1) / n
    all_gather, reduce_scatter, gather, scatter   what all ranks' parts have together     (b / t) (n - 1) / n
    all_to_all                                    what one rank sends                     (b / t) (n - 1) / n
    others                                        the message                             b / t

Bytes per millisecond times 8 / 10^6 are Gbit/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from deepspeed.common.logging import get_logger, log_dist
from deepspeed.common.memory import format_nbytes
from deepspeed.common.texts import aligned

__all__ = [
    "RECORDER",
    "Bandwidth",
    "CommsLogger",
    "bandwidth",
    "configure",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "reset_log",
    "table",
]

logger = get_logger(__name__)

Log = dict[str, dict[int, list[Any]]]
"""`{operation: {bytes: [count, [ms, ...], [algorithm Gbit/s, ...], [bus Gbit/s, ...]]}}`"""


_OF_PARTS = ("all_gather", "allgather", "reduce_scatter", "gather", "scatter", "all_to_all")
"""Beginnings of the operations of which each rank keeps, or has had, one part in n."""


class Bandwidth(NamedTuple):
    """Gbit/s of one call."""

    algorithm: float
    bus: float


def bandwidth(operation: str, nbytes: int, milliseconds: float, world_size: int) -> Bandwidth:
    """Return the bandwidths of one call by the formulas above; 0 for a call too short for the clock.

    Args:
        operation: name of the collective; the beginning decides the formula (`"all_gather_into_tensor"`).
        nbytes: of the message: b in the table above.
        milliseconds: how long the call took.
        world_size: ranks that took part.
    """
    if milliseconds < 1e-6:  # a nanosecond
        return Bandwidth(0.0, 0.0)
    share_sent = (world_size - 1) / world_size
    rate = nbytes / milliseconds * 8 / 1e6
    if "all_reduce" in operation:  # inference_all_reduce too
        return Bandwidth(rate, 2 * rate * share_sent)
    if operation.startswith(_OF_PARTS):
        return Bandwidth(rate, rate * share_sent)
    return Bandwidth(rate, rate)


class CommsLogger:
    """The log of one process, off until `configure(enabled=True)`.

    Attributes:
        enabled: record at all; `collectives` tests it once per call.
        prof_all: record every operation, else only `prof_ops` and calls with `prof=True`.
        prof_ops: names to record.
        verbose: also log one line per call.
        debug: append the caller's function to the name.
        comms_dict: the log (see `Log`).
        world_sizes: (name, bytes) of each entry -> sizes of the groups that its calls were made in.
    """

    enabled: bool
    prof_all: bool
    prof_ops: list[str]
    verbose: bool
    debug: bool
    comms_dict: Log
    world_sizes: dict[tuple[str, int], set[int]]

    def __init__(self) -> None:
        self.restore_defaults()

    def restore_defaults(self) -> None:
        """Forget every record and every setting."""
        self.enabled = False
        self.prof_all = True
        self.prof_ops = []
        self.verbose = False
        self.debug = False
        self.reset()

    def wants(self, name: str, prof: bool) -> bool:
        """Tell whether a call of this name is recorded, given the call's own `prof` argument."""
        return prof or self.prof_all or name in self.prof_ops

    def append(self, operation: str, name: str, milliseconds: float, nbytes: int, world_size: int) -> None:
        """Record one finished call under `name`; `operation` chooses the formula."""
        algorithm, bus = bandwidth(operation, nbytes, milliseconds, world_size)
        self.world_sizes.setdefault((name, nbytes), set()).add(world_size)
        entry = self.comms_dict.setdefault(name, {}).setdefault(nbytes, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], (milliseconds, algorithm, bus), strict=True):
            values.append(value)
        if self.verbose:
            log_dist(
                f"comm op: {name} | time (ms): {milliseconds:.2f} | msg size: {format_nbytes(nbytes)} | "
                f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f}"
            )

    def reset(self) -> None:
        """Forget every record."""
        self.comms_dict = {}
        self.world_sizes = {}

    def has_data(self) -> bool:
        """True when something was recorded."""
        return bool(self.comms_dict)

    def count(self) -> int:
        """Return the number of recorded calls."""
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def operations(self) -> list[str]:
        """Return the names recorded so far, in the order of their first call."""
        return list(self.comms_dict)

    def summary(self, least_ms: Mapping[tuple[str, int], float] | None = None) -> dict[str, Any]:
        """Return the log summed up.

        Args:
            least_ms: operation and bytes -> what the fastest rank needed for each of its calls, added up; what a call took
                beyond that was spent waiting for a straggler. None, or an entry that is not there, leaves these figures out.

        Returns:
            `{operation: {bytes: {count, total_latency_ms, avg_latency_ms, tput_avg_gbps, busbw_avg_gbps
            [, min_latency_ms, straggler_ms]}}}`; the last two are sums over the calls.
        """
        known = least_ms or {}
        return {
            name: {nbytes: _summed_up(entry, known.get((name, nbytes))) for nbytes, entry in sorted(sizes.items())}
            for name, sizes in self.comms_dict.items()
        }


def _summed_up(entry: list[Any], least_ms: float | None) -> dict[str, float]:
    count, milliseconds, algorithm, bus = entry
    total = sum(milliseconds)
    figures = {
        "count": count,
        "total_latency_ms": total,
        "avg_latency_ms": total / count,
        "tput_avg_gbps": sum(algorithm) / count,
        "busbw_avg_gbps": sum(bus) / count,
    }
    return figures if least_ms is None else {**figures, "min_latency_ms": least_ms, "straggler_ms": total - least_ms}


_COLUMNS = {
    "count": "Count",
    "total_latency_ms": "Total Latency(ms)",
    "avg_latency_ms": "Avg Latency(ms)",
    "tput_avg_gbps": "tput_avg (Gbps)",
    "busbw_avg_gbps": "busbw_avg (Gbps)",
    "min_latency_ms": "Min Latency(ms)",
    "straggler_ms": "Straggler(ms)",
}


def table(summary: dict[str, Any]) -> str:
    """Return a summary as text, one line per operation and message size."""
    rows = [(name, nbytes, figures) for name, sizes in summary.items() for nbytes, figures in sizes.items()]
    keys = [key for key in _COLUMNS if not rows or any(key in figures for _, _, figures in rows)]
    cells = [["Comm. Op", "Message Size", *(_COLUMNS[key] for key in keys)]]
    for name, nbytes, figures in rows:
        cells.append([name, format_nbytes(nbytes), *(_cell(figures.get(key)) for key in keys)])
    return "\n".join(aligned(cells, "lr" + "r" * len(keys)))


def _cell(figure: float | None) -> str:
    if figure is None:
        return "-"
    return str(figure) if isinstance(figure, int) else f"{figure:.2f}"


RECORDER = CommsLogger()
"""The log of this process."""


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set up the communications log of this process.

    Args:
        deepspeed_config: a `DeepSpeedConfig`, or a dict, whose `comms_logger` block is applied; None applies nothing.
        enabled: switch the log on or off. Arguments that are given win over the block.
        prof_all: record every operation.
        prof_ops: names to record when `prof_all` is False.
        verbose: log one line per call on rank 0.
        debug: append the caller's function to the names.
    """
    block = _block_of(deepspeed_config)
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    for name, value in {**block, **{key: value for key, value in given.items() if value is not None}}.items():
        setattr(RECORDER, name, value)


def _block_of(deepspeed_config: Any) -> dict[str, Any]:
    """Return the settings of a `comms_logger` block, of a model or a dict, or nothing."""
    is_dict = isinstance(deepspeed_config, dict)
    block = deepspeed_config.get("comms_logger") if is_dict else getattr(deepspeed_config, "comms_logger", None)
    if block is None:
        return {}
    names = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
    if isinstance(block, dict):
        return {name: block[name] for name in names if name in block}
    return {name: getattr(block, name) for name in names}


def reset_log() -> None:
    """Forget every record of this process."""
    RECORDER.reset()


def has_comm_data() -> bool:
    """True when this process recorded something."""
    return RECORDER.has_data()


def get_comm_operation_count() -> int:
    """Return how many calls this process recorded."""
    return RECORDER.count()


def get_logged_comm_ops() -> list[str]:
    """Return the names this process recorded."""
    return RECORDER.operations()
