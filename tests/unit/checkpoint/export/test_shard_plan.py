from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.export.shard_plan import Item, parse_nbytes, plan_shards
from deepspeed.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        ("7", 7),
        ("1B", 1),
        ("5GB", 5_000_000_000),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("1.5KB", 1500),
        ("2GiB", 2 << 30),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read_in_the_units_of_the_hub(text: Any, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "five", "5XB", "-5GB", 0, "0GB", "0.1B", 1.5, "1.5", None])
def test_what_is_no_size_is_refused_with_an_example(text: Any) -> None:
    with pytest.raises(ArgumentError, match=r"max_shard_size=.* is no size of a file.*'5GB'"):
        parse_nbytes(text)


def test_a_file_is_closed_before_the_weight_that_would_make_it_too_large() -> None:
    items = [Item("a", 3), Item("b", 3), Item("c", 9), Item("d", 2), Item("e", 4), Item("f", 1)]
    plan = plan_shards(items, 6, "pytorch_model.bin")
    assert list(plan.files.values()) == [["c"], ["a", "b"], ["d", "e"], ["f"]]
    assert next(iter(plan.files)) == "pytorch_model-00001-of-00004.bin"
    assert (plan.index_file, plan.total_nbytes) == ("pytorch_model.bin.index.json", 22)


def test_a_tied_weight_costs_nothing_and_goes_where_its_owner_is() -> None:
    items = [Item("emb", 5), Item("w", 5), Item("head", 5, shares_with="emb")]
    plan = plan_shards(items, 6, "pytorch_model.bin")
    assert list(plan.files.values()) == [["emb", "head"], ["w"]]
    assert plan.total_nbytes == 10
    assert json.loads(plan.index()) == {
        "metadata": {"total_size": 10},
        "weight_map": {
            "emb": "pytorch_model-00001-of-00002.bin",
            "head": "pytorch_model-00001-of-00002.bin",
            "w": "pytorch_model-00002-of-00002.bin",
        },
    }


def test_one_file_has_no_number_and_no_index() -> None:
    for items in ([], [Item("a", 100)]):
        plan = plan_shards(items, 6, "model.safetensors")
        assert plan.files == {"model.safetensors": [item.name for item in items]}
        assert plan.index_file is None


@given(sizes=st.lists(st.integers(0, 20), max_size=30), limit=st.integers(1, 30))
def test_every_weight_is_in_one_file_and_no_file_is_larger_than_it_must_be(sizes: list[int], limit: int) -> None:
    plan = plan_shards([Item(str(n), size) for n, size in enumerate(sizes)], limit, "m.bin")
    placed = [int(name) for names in plan.files.values() for name in names]
    assert sorted(placed) == list(range(len(sizes)))
    for names in plan.files.values():
        assert sum(sizes[int(name)] for name in names) <= limit or len(names) == 1
    assert plan.total_nbytes == sum(sizes)
