from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.tools.comparing import TensorDifference, Values, compare_tensors, difference_of
from deepspeed.checkpoint.tools.output import dtype_text, nbytes_text, plain
from deepspeed.checkpoint.tools.state_diff import StateDifference, compare_states, compare_values
from tests.unit.checkpoint.tool_checkpoints import save


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _values(tensor: torch.Tensor) -> Values:
    flat = tensor.reshape(-1)
    return Values(tuple(tensor.shape), dtype_text(tensor.dtype), lambda start, length: flat[start : start + length].clone())


def _difference(a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    return difference_of("p", "weight", _values(a), _values(b))


def _compared(folder: Path) -> dict[tuple[str, str], TensorDifference]:
    found = compare_tensors(open_checkpoint(folder, "a"), open_checkpoint(folder, "b"))
    return {(each.name, each.what): each for each in found}


@given(st.lists(st.floats(width=32), max_size=20), st.lists(st.floats(width=32), max_size=20))
@settings(max_examples=60, deadline=None)
def test_equal_means_every_bit_and_nothing_else(one: list[float], other: list[float]) -> None:
    a, b = torch.tensor(one), torch.tensor(other)
    bits_agree = a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert (_difference(a, b).verdict == "equal") is bits_agree
    assert _difference(a, a).verdict == "equal"


def test_a_nan_against_a_number_is_a_difference_of_nan() -> None:
    found = _difference(torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 2.0]))
    assert (found.verdict, found.different_numel) == ("values", 1)
    assert math.isnan(found.largest_abs or 0.0)


def test_zero_and_minus_zero_differ_by_nothing_but_are_not_equal_to_the_last_bit() -> None:
    found = _difference(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.verdict, found.largest_abs, found.relative) == ("values", 0.0, 0.0)


def test_the_same_numbers_in_another_type_are_told_as_that() -> None:
    found = _difference(torch.tensor([1.5]), torch.tensor([1.5], dtype=torch.bfloat16))
    assert (found.verdict, found.is_difference, found.different_numel) == ("dtype", True, 0)


def test_integers_complex_numbers_and_booleans_compare_too() -> None:
    assert _difference(torch.tensor([1, 7]), torch.tensor([1, 5])).largest_abs == 2
    assert _difference(torch.tensor([1 + 1j]), torch.tensor([1 + 3j])).largest_abs == 2
    assert _difference(torch.tensor([True]), torch.tensor([False])).verdict == "values"


def test_blocks_do_not_change_the_answer() -> None:
    a = torch.zeros((1 << 20) + 5)
    b = a.clone()
    b[-1], b[3] = 2.0, 1.0
    found = _difference(a, b)
    assert (found.largest_abs, found.different_numel, found.relative) == (2.0, 2, math.inf)


def test_a_master_counts_more_than_the_rounded_weight(tmp_path: Path) -> None:
    save(tmp_path, "a", {"module/w": torch.zeros(2, 3)})
    save(tmp_path, "b")
    assert _compared(tmp_path)["w", "weight"].verdict == "equal"


def test_a_tied_weight_stored_twice_equals_the_one_stored_once(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", {"master/head": torch.arange(6.0).view(2, 3)}, shared_parameters={})
    assert _compared(tmp_path)["head", "weight"].verdict == "equal"


def test_what_only_one_has_and_other_shapes_are_named(tmp_path: Path) -> None:
    save(tmp_path, "a", {"master/mine": torch.zeros(1), "optimizer/w/exp_avg": torch.zeros(6)})
    save(tmp_path, "b", {"master/yours": torch.zeros(1)})
    found = _compared(tmp_path)
    assert found["mine", "weight"].verdict == "only in A"
    assert found["yours", "weight"].verdict == "only in B"
    assert found["w", "exp_avg"].verdict == "shape"


def test_a_counter_kept_as_number_equals_one_kept_as_tensor(tmp_path: Path) -> None:
    save(tmp_path, "a")
    optimizer = {"name": "AdamW", "groups": [{"lr": 0.1}], "members": [["w"]], "scalars": {}}
    save(tmp_path, "b", {"optimizer/w/step": torch.tensor([3.0])}, optimizer=optimizer)
    assert _compared(tmp_path)["w", "step"].verdict == "equal"


def test_how_it_was_written_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", zero_stage=3, ds_config={"bf16": {"enabled": False}}, lr_scheduler=None)
    a, b = open_checkpoint(tmp_path, "a"), open_checkpoint(tmp_path, "b")
    counts = {part.path: part.counts for part in compare_states(a, b, same_layout=True)}
    assert counts == {"state.zero_stage": False, "state.ds_config.bf16.enabled": False, "state.lr_scheduler": True}
    across = {part.path: part.counts for part in compare_states(a, b, same_layout=False)}
    assert across["state.lr_scheduler"] is False


def test_a_random_generator_is_one_line(tmp_path: Path) -> None:
    save(tmp_path, "a", rank_state={"python": (3, tuple(range(625)), None)})
    save(tmp_path, "b", rank_state={"python": (3, tuple(range(1, 626)), None)})
    a, b = open_checkpoint(tmp_path, "a"), open_checkpoint(tmp_path, "b")
    assert [part.path for part in compare_states(a, b, same_layout=True)] == ["rank_state[0].python"]


def test_what_only_one_sides_rank_kept_is_named(tmp_path: Path) -> None:
    save(tmp_path, "a", rank_state={"torch": torch.ones(2), "cuda": torch.ones(3), "nothing": None})
    save(tmp_path, "b", rank_state={"torch": torch.ones(2), "data": {"epoch": 1}})
    a, b = open_checkpoint(tmp_path, "a"), open_checkpoint(tmp_path, "b")
    assert compare_states(a, b, same_layout=True) == [
        StateDifference("rank_state[0].cuda", "...", None, counts=True),
        StateDifference("rank_state[0].data", None, "another value", counts=True),
    ]
    assert [part.counts for part in compare_states(a, b, same_layout=False)] == [False, False]


def test_nested_values_are_compared_place_by_place() -> None:
    a = {"x": [1, {"y": math.nan}], "t": torch.ones(2), "gone": 1}
    b = {"x": (1, {"y": math.nan}, 3), "t": torch.zeros(2), "new": None}
    assert [path for path, _, _ in compare_values(a, b, "s")] == ["s.x[2]", "s.t", "s.gone"]


def test_sizes_in_words() -> None:
    assert [nbytes_text(n) for n in (0, 999, 1000, 999_600, 1_500_000_000)] == ["0 B", "999 B", "1 kB", "1 MB", "1.5 GB"]


def test_what_json_lacks_becomes_text() -> None:
    assert plain({"a": {2, 1}, "b": math.inf, "c": torch.ones(2), "d": (1, None)}) == {
        "a": [1, 2],
        "b": "inf",
        "c": "tensor float32 [2]",
        "d": [1, None],
    }
