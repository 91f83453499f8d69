"""Slices of tensor-parallel ranks become the tensor that they were cut from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.checkpoint.original.reading.assembled import Pieces, Stored
from deepspeed.checkpoint.original.reading.tensor_parallel import TensorParallelRules
from deepspeed.checkpoint.original.stand_ins import SubparamShape
from deepspeed.errors import CheckpointDamagedError, CheckpointError


def slices_of(tensors: list[Tensor]) -> list[Stored]:
    return [Stored(tuple(t.shape), t.dtype, Pieces([t.reshape(-1)])) for t in tensors]


def join(info: dict[str, Any] | None, tensors: list[Tensor], name: str = "layer.weight") -> Tensor:
    whole = TensorParallelRules(info, len(tensors)).join(name, slices_of(tensors))
    values = torch.empty(whole.numel, dtype=whole.dtype)
    whole.values.read(0, values)
    return values.view(whole.shape)


@given(st.integers(1, 4), st.sampled_from([(8, 3), (12,), (4, 2, 3)]))
def test_what_matches_no_pattern_is_joined_along_the_first_dimension(degree: int, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape[0] * degree, *shape[1:])
    assert torch.equal(join({}, list(whole.chunk(degree))), whole)


@given(st.integers(1, 4))
def test_row_parallel_weights_are_joined_side_by_side(degree: int) -> None:
    whole = torch.randn(5, 3 * degree)
    info = {"parameter_with_row_parallelism_patterns": [r".*weight$"]}
    assert torch.equal(join(info, list(whole.chunk(degree, dim=1))), whole)


def test_patterns_are_matched_from_the_beginning_of_the_name() -> None:
    tensors = list(torch.randn(2, 4).chunk(2, dim=1))
    assert join({"parameter_with_row_parallelism_patterns": ["weight"]}, tensors).shape == (4, 2)


def test_replicated_ones_are_the_first_rank_s() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    for key in ("tp_replicated_parameter_patterns", "pipeline_replicated_parameter_patterns"):
        assert torch.equal(join({key: ["layer"]}, tensors), torch.ones(3))


def test_averaged_ones_are_the_mean() -> None:
    info = {"parameter_to_average_patterns": ["layer"]}
    assert torch.equal(join(info, [torch.tensor([1.0]), torch.tensor([4.0])]), torch.tensor([2.5]))


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    whole = torch.randn(8, 3)
    info = {"vocabulary_parameter_patterns": ["layer"], "original_vocab_size": 7, "padded_vocab_size": 8}
    assert torch.equal(join(info, list(whole.chunk(2))), whole[:7])


def test_two_sub_parameters_are_joined_each_by_itself() -> None:
    gate, up = torch.randn(4, 3), torch.randn(4, 3)
    tensors = [torch.cat([g, u]) for g, u in zip(gate.chunk(2), up.chunk(2), strict=True)]
    info = {"parameter_with_2_sub_params_cat_dim_0": ["layer"]}
    assert torch.equal(join(info, tensors), torch.cat([gate, up]))


@pytest.mark.parametrize("as_record", [True, False])
def test_sub_parameters_of_different_sizes_are_joined_each_by_itself(as_record: bool) -> None:
    query, key, value = torch.randn(8, 3), torch.randn(4, 3), torch.randn(4, 3)
    tensors = [torch.cat(parts) for parts in zip(*(t.chunk(2) for t in (query, key, value)), strict=True)]
    stated = {"patterns": ["layer"], "shape": ((8, 4, 4), 3), "partition_dim": 0}
    entry = SubparamShape(**stated) if as_record else stated  # type: ignore[arg-type]
    assert torch.equal(join({"parameter_with_sub_params": [entry]}, tensors), torch.cat([query, key, value]))


def test_sub_parameters_may_be_stated_in_another_view() -> None:
    experts = torch.randn(3, 4, 2)  # three experts, each cut along its rows; stored as (experts x rows, columns)
    tensors = [part.reshape(6, 2) for part in experts.chunk(2, dim=1)]
    info = {"parameter_with_sub_params": [{"patterns": ["layer"], "shape": (3, 4, 2), "partition_dim": 1}]}
    assert torch.equal(join(info, tensors), experts.reshape(12, 2))


def test_sub_parameters_that_do_not_fit_are_refused() -> None:
    info = {"parameter_with_sub_params": [{"patterns": ["layer"], "shape": ((8, 4), 3), "partition_dim": 0}]}
    with pytest.raises(CheckpointError, match=r"'layer\.weight'.*\(12, 3\)"):
        join(info, [torch.ones(4, 3)] * 2)


def test_a_single_slice_needs_no_rules() -> None:
    assert torch.equal(join(None, [torch.ones(2)]), torch.ones(2))


def test_slices_without_any_rules_are_refused() -> None:
    with pytest.raises(CheckpointError, match="universal_checkpoint_info"):
        join(None, [torch.ones(2)] * 2)


def test_kinds_that_cannot_be_put_together_are_refused() -> None:
    info = {"autotp_unsupported_parameter_patterns": {"layer": "odd"}}
    with pytest.raises(CheckpointError, match="autotp_unsupported"):
        join(info, [torch.ones(2)] * 2)


def _affine(shape: list[int], pieces: dict[int, list[dict[str, Any]]], shards: list[list[int]]) -> dict[str, Any]:
    ranks = {rank: {"shard_shape": shards[rank], "pieces": found} for rank, found in pieces.items()}
    return {"affine_map": {"version": 1, "params": {r"^layer\.weight$": {"logical_shape": shape, "ranks": ranks}}}}


def test_an_affine_map_says_where_every_element_belongs() -> None:
    whole = torch.arange(24.0).view(4, 6)
    columns = [whole[:, 0:2], whole[:, 2:6]]  # uneven, which no pattern can say
    pieces = {
        rank: [
            {"shape": list(part.shape), "source": [at, [6, 1]], "dest": [0, [part.shape[1], 1]], "locations": [rank]},
        ]
        for rank, (part, at) in enumerate(zip(columns, (0, 2), strict=True))
    }
    info = _affine([4, 6], pieces, [[4, 2], [4, 4]])
    assert torch.equal(join(info, [part.contiguous() for part in columns]), whole)
    rules = TensorParallelRules(info, 2)
    stored = rules.join("layer.weight", slices_of([part.contiguous() for part in columns]))
    out = torch.empty(5)
    stored.values.read(7, out)
    assert torch.equal(out, torch.arange(7.0, 12.0))


def test_a_replicated_piece_is_taken_once() -> None:
    piece = {"shape": [3], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1]}
    info = _affine([3], {0: [piece], 1: [piece]}, [[3], [3]])
    assert torch.equal(join(info, [torch.arange(3.0)] * 2), torch.arange(3.0))


def test_an_affine_map_that_the_slices_do_not_fit_is_damage() -> None:
    piece = {"shape": [2], "source": [0, [1]], "dest": [0, [1]], "locations": [0]}
    info = _affine([3], {0: [piece], 1: []}, [[2], [2]])
    with pytest.raises(CheckpointDamagedError, match="affine_map"):
        join(info, [torch.ones(2)] * 2)
    with pytest.raises(CheckpointError, match="version 2"):
        TensorParallelRules({"affine_map": {"version": 2, "params": {}}}, 2)
