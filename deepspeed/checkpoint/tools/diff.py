"""`deepspeed-checkpoint diff A B`: where two checkpoints differ, per parameter and in their state.

Does not live here: the comparison (`comparing`, `state_diff`). Called by `main`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from rich.console import RenderableType

from deepspeed.checkpoint.disk.layouts import layout_of
from deepspeed.checkpoint.tools.comparing import WEIGHT, TensorDifference, compare_tensors
from deepspeed.checkpoint.tools.output import DAMAGED, FINE, Report, line, plain, table
from deepspeed.checkpoint.tools.places import Place, open_place
from deepspeed.checkpoint.tools.state_diff import StateDifference, compare_states

__all__ = ["diff_checkpoints"]

_ROWS_SHOWN = 200


def diff_checkpoints(
    place_a: Place,
    place_b: Place,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    list_equal: bool = False,
    with_state: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compare two checkpoints of any layouts.

    Args:
        place_a: the first.
        place_b: the second.
        atol: absolute difference of values that is allowed.
        rtol: allowed difference of values, as a part of the largest absolute value in A.
        list_equal: also list what is equal.
        with_state: compare what is not a tensor of a parameter, too.
        progress: told the parameter that is compared now.

    Raises:
        CheckpointError, CheckpointDamagedError: one cannot be opened or read.
    """
    a, b = open_place(place_a), open_place(place_b)
    same_layout = layout_of(place_a.folder) == layout_of(place_b.folder)
    tensors = []
    for tensor in compare_tensors(a, b, atol=atol, rtol=rtol):
        progress(f"{tensor.name} {tensor.what}")
        tensors.append(tensor)
    states = compare_states(a, b, same_layout=same_layout) if with_state else []
    is_same = not any(tensor.is_difference for tensor in tensors) and not any(state.counts for state in states)
    listed = [tensor for tensor in tensors if list_equal or tensor.verdict != "equal"]
    record = {
        "a": str(place_a.folder),
        "b": str(place_b.folder),
        "is_same": is_same,
        "verdicts": dict(Counter(tensor.verdict for tensor in tensors)),
        "tensors": [asdict(tensor) for tensor in listed],
        "state": [state._asdict() for state in states],
    }
    shown = [
        line(f"A  {place_a.folder}"),
        line(f"B  {place_b.folder}"),
        *_tensor_part(tensors, listed),
        *(_state_part(states) if with_state else []),
    ]
    text = "The same." if is_same else "They differ."
    return Report(record, [*shown, line(text, "bold green" if is_same else "bold red")], FINE if is_same else DAMAGED)


def _tensor_part(tensors: list[TensorDifference], listed: list[TensorDifference]) -> list[RenderableType]:
    shown: list[RenderableType] = []
    if listed:
        columns = ("parameter", "what", "verdict", "stored as", "largest diff", "relative", "elements")
        rows = [
            (
                tensor.name,
                tensor.what,
                tensor.verdict,
                _stored_as(tensor),
                _number(tensor.largest_abs),
                _number(tensor.relative),
                f"{tensor.different_numel:,}",
            )
            for tensor in listed[:_ROWS_SHOWN]
        ]
        shown.append(table("Parameters", columns, rows, right=("largest diff", "relative", "elements")))
        shown += _rest(len(listed))
    for what, of_what in (("weights and buffers", True), ("entries of the optimizer", False)):
        kinds = Counter(tensor.verdict for tensor in tensors if (tensor.what == WEIGHT) is of_what)
        if kinds:
            total, equal = sum(kinds.values()), kinds.pop("equal", 0)
            others = "".join(f"; {verdict}: {number}" for verdict, number in kinds.items())
            shown.append(line(f"{equal} of {total} {what} are equal to the last bit{others}"))
    return shown


def _state_part(states: list[StateDifference]) -> list[RenderableType]:
    if not states:
        return [line("The states are equal: counters, schedule, hyperparameters, loss scale, data, client state.")]
    rows = [
        (state.path, _value(state.a), _value(state.b), "" if state.counts else "does not count")
        for state in sorted(states, key=lambda state: not state.counts)[:_ROWS_SHOWN]
    ]
    return [table("State", ("place", "A", "B", ""), rows), *_rest(len(states))]


def _rest(number: int) -> list[RenderableType]:
    more = number - _ROWS_SHOWN
    return [line(f"... and {more} more; --json lists all")] if more > 0 else []


def _stored_as(tensor: TensorDifference) -> str:
    """Type and shape; of A and of B where they differ."""
    sides = [
        "-" if shape is None else f"{dtype} {'x'.join(map(str, shape))}".strip()
        for dtype, shape in ((tensor.dtype_a, tensor.shape_a), (tensor.dtype_b, tensor.shape_b))
    ]
    return " | ".join(dict.fromkeys(sides))


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _value(value: object) -> str:
    text = "-" if value is None else str(plain(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
