"""Which ranks of the original share an expert's shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.checkpoint.original.reading.experts import ExpertNames
from deepspeed.checkpoint.original.reading.slices import read_sharded


@pytest.mark.parametrize(
    ("is_data_first", "wanted"),
    [(False, [(0, [0, 2, 4]), (1, [1, 3, 5])]), (True, [(0, [0, 1, 2]), (1, [3, 4, 5])])],
)
def test_ranks_that_hold_the_same_experts_share_their_shards(
    is_data_first: bool, wanted: list[tuple[int, list[int]]]
) -> None:
    names = ExpertNames(is_data_first=is_data_first)
    assert names.ranks_sharing(6, 3) == wanted
    assert names.ranks_sharing(6, 6) == [(0, [0, 1, 2, 3, 4, 5])]


def _shard(value: float) -> dict[str, Any]:
    """Half of the one expert that a rank shares with another."""
    return {
        "partition_count": [2],
        "single_partition_of_fp32_groups": [torch.full((2,), value)],
        "base_optimizer_state": {
            "param_groups": [{"params": [0]}],
            "state": {0: {"exp_avg": torch.full((2,), 10 * value), "step": 1}},
        },
    }


@pytest.mark.parametrize(
    ("is_data_first", "first", "second"), [(False, [0, 0, 2, 2], [1, 1, 3, 3]), (True, [0, 0, 1, 1], [2, 2, 3, 3])]
)
def test_shards_of_experts_are_put_together_in_the_order_of_the_ranks(
    is_data_first: bool, first: list[int], second: list[int]
) -> None:
    prefix = "moe.experts.deepspeed_experts."
    names = ExpertNames.of([f"{prefix}0.w"], is_data_first=is_data_first)
    found = read_sharded({"param_shapes": [{f"{prefix}0.w": (4,)}]}, [_shard(float(rank)) for rank in range(4)], names)
    for number, values in enumerate((first, second)):
        whole = torch.empty(4)
        found.masters[f"{prefix}{number}.w"].values.read(0, whole)
        assert whole.tolist() == values
        found.optimizer[f"{prefix}{number}.w"]["exp_avg"].values.read(0, whole)
        assert whole.tolist() == [10 * value for value in values]
