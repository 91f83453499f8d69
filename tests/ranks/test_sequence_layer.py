"""Ulysses around a plain attention, and its all-to-all alone: the values and gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepspeed import comm
from deepspeed.comm.algorithms import parts_exchanger
from deepspeed.comm.parts import BackendParts, part_nbytes
from deepspeed.errors import ArgumentError, CommError
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.data import UlyssesSPDataLoaderAdapter
from deepspeed.sequence.exchange import even_part
from deepspeed.sequence.layer import (
    DistributedAttention,
    register_all_to_all_group,
    single_all_to_all,
    uneven_heads_all2all,
)
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.sequence.state import (
    SequenceParallelUnit,
    get_sequence_data_parallel_world_size,
    get_sequence_parallel_rank,
    initialize_sequence_parallel,
)
from deepspeed.topology import groups
from deepspeed.topology.mesh import ParallelMesh
from tests.support.ranks import RanksFailed, run_ranks

ROUNDING = 1e-12


def _attention(query: Any, key: Any, value: Any, factor: float = 1.0, *, merged: bool = False) -> torch.Tensor:
    """Causal, over (batch, tokens, heads, size)."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    out = out.transpose(1, 2) * factor
    return out.flatten(-2) if merged else out


def _layer(rank: int, world_size: int, cases: list[tuple[int, int, int, bool, int]]) -> None:
    for heads, kv_heads, length, varies, value_size in cases:
        torch.manual_seed(heads)
        shapes = ((heads, 4), (kv_heads, 4), (kv_heads, value_size))
        whole = [torch.randn(2, length, *shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        weight = torch.randn(2, length, heads, value_size, dtype=torch.float64)
        expected = _attention(*whole, 2.0)
        (expected * weight).sum().backward()
        tokens = even_part(length, rank, world_size)
        own = slice(tokens.start, tokens.stop)
        parts = [each.detach()[:, own].clone().requires_grad_() for each in whole]
        layer = DistributedAttention(_attention, None, seq_length_is_variable=varies)
        for merged in (False, True):
            out = layer(*parts, 0, None, 2.0, merged=merged).view(2, len(tokens), heads, value_size)
            torch.testing.assert_close(out, expected[:, own], rtol=0, atol=ROUNDING)
        (out * weight[:, own]).sum().backward()
        for part, each in zip(parts, whole, strict=True):
            assert part.grad is not None
            assert each.grad is not None
            torch.testing.assert_close(part.grad, each.grad[:, own], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, [(3, 1, 5, False, 4)]),
        (2, [(4, 2, 8, False, 4), (5, 5, 7, True, 4), (12, 3, 6, False, 6), (4, 1, 8, False, 4)]),
        (3, [(6, 2, 9, False, 4), (6, 3, 7, True, 2)]),
        (4, [(8, 2, 8, False, 4), (4, 1, 10, True, 4)]),
    ],
)
def test_attention_over_parts_is_attention_over_the_whole(
    world_size: int, cases: list[tuple[int, int, int, bool, int]]
) -> None:
    run_ranks(_layer, world_size, cases)


def _tokens_first(rank: int, world_size: int) -> None:
    """Tokens in dimension 0, a rotary embedding of the first of the head size, and no gradients wanted of keys."""
    whole = torch.randn(8, 2, 4, 6, dtype=torch.float64)
    angle = torch.randn(8, 1, 1, 4, dtype=torch.float64)
    own = slice(4 * rank, 4 * rank + 4)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pair = torch.cat([-x[..., 2:4], x[..., :2]], -1)
        return torch.cat([x[..., :4] * angle.cos() + pair * angle.sin(), x[..., 4:]], -1)

    def local(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _attention(*(each.transpose(0, 1) for each in (query, key, value))).transpose(0, 1)

    expected = local(turned(whole), turned(whole), whole)[own]
    part = whole[own]
    layer = DistributedAttention(local, comm.get_world_group())
    layer = copy.deepcopy(layer)
    assert layer.spg is comm.get_world_group()
    for shaped in (angle, angle.transpose(0, 1)):
        out = layer(part.clone().requires_grad_(), part, part, 1, (shaped.cos(), shaped.sin()))
        torch.testing.assert_close(out, expected, rtol=0, atol=ROUNDING)
        out.sum().backward()
    with pytest.raises(ArgumentError, match="8 tokens of the whole sequence"):
        layer(part, part, part, 1, (angle[:4].cos(), angle[:4].sin()))


def test_tokens_may_come_first_and_be_rotated() -> None:
    run_ranks(_tokens_first, 2)


def _all_to_all(rank: int, world_size: int) -> None:
    assert isinstance(register_all_to_all_group(None), str)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        whole = torch.arange(2 * 12 * 6 * 3).view(2, 12, 6, 3).to(dtype)
        heads, tokens = even_part(6, rank, world_size), even_part(12, rank, world_size)
        mine, theirs = whole[:, tokens.start : tokens.stop], whole[:, :, heads.start : heads.stop]
        assert torch.equal(single_all_to_all(mine, 2, 0, 0, None), theirs)
        assert torch.equal(single_all_to_all(theirs, 1, 2, 0, None), mine)
        first = single_all_to_all(mine.transpose(0, 1), 2, 0, 1, None)
        assert torch.equal(first, theirs.transpose(0, 1))
    odd = torch.randn(2, 11, 5, 3)
    heads, tokens = even_part(5, rank, world_size), even_part(11, rank, world_size)
    mine, theirs = odd[:, tokens.start : tokens.stop], odd[:, :, heads.start : heads.stop]
    assert torch.equal(uneven_heads_all2all(mine, 2, 1, 0, None, 5), theirs)
    assert torch.equal(single_all_to_all(theirs, 1, 2, 0, None, num_kv_heads=5), mine)
    with pytest.raises(ArgumentError, match="uneven_heads_all2all"):
        single_all_to_all(mine, 2, 1, 0, None)
    with pytest.raises(ArgumentError, match="needed a 4-D tensor"):
        single_all_to_all(mine[0], 2, 1, 0, None)
    large = torch.randn(2, 64, 6, 32)  # memory grows
    back = single_all_to_all(single_all_to_all(large, 2, 1, 0, None), 1, 2, 0, None)
    assert torch.equal(back, large)


def test_one_tensor_goes_to_heads_and_back() -> None:
    for world_size in (2, 3):
        run_ranks(_all_to_all, world_size)


def _backends(rank: int, world_size: int) -> None:
    shapes = [(2, 3), (5,)]
    leaving = [[torch.full((2, 3), 10.0 * rank + peer)[:, ::1], torch.arange(10)[::2] + peer] for peer in range(world_size)]
    nbytes = part_nbytes(shapes, [4, 8])
    assert nbytes == 24 + 40 + 128
    group = comm.get_world_group()
    ways = (parts_exchanger(group), BackendParts(lambda: group, rank))
    assert ways[0] is parts_exchanger(group)
    for way in ways:
        for _ in range(3):
            arrived = list(way.exchange(leaving, [shapes] * world_size, nbytes))
            assert [peer for peer, _ in arrived] == [rank, *(peer for peer in range(world_size) if peer != rank)]
            for peer, (floats, integers) in arrived:
                assert torch.equal(floats, torch.full((2, 3), 10.0 * peer + rank))
                assert torch.equal(integers, torch.arange(10)[::2] + rank)


def test_shared_memory_and_the_back_end_bring_the_same() -> None:
    run_ranks(_backends, 3)


def _other_length(rank: int, world_size: int) -> None:
    single_all_to_all(torch.zeros(1, 4, 2, 8), 2, 1, 0, None)
    single_all_to_all(torch.zeros(1, 3 + rank, 2, 8), 2, 1, 0, None)


def test_ranks_with_other_lengths_are_told() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_other_length, 2)
    assert "parts of the same length and heads, or lengths that are said to vary" in str(failed.value)
    assert CommError.__name__ in str(failed.value)


def _losses(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 2, 9, dtype=torch.float64).requires_grad_()
    target = torch.randint(9, (6, 2))
    target[:4] = -100  # no token of the first rank counts
    own = slice(3 * rank, 3 * rank + 3)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    expected.backward()
    part = logits.detach()[own].clone().requires_grad_()
    loss = F.cross_entropy(part.flatten(0, 1), target[own].flatten())
    mean = mean_over_sequence(loss, (target[own] != -100).sum(), comm.get_world_group())
    torch.testing.assert_close(mean, expected, rtol=0, atol=ROUNDING)
    mean.backward()
    assert part.grad is not None
    assert logits.grad is not None
    wanted = logits.grad[own] if rank else torch.zeros_like(part)
    torch.testing.assert_close(part.grad / world_size, wanted, rtol=0, atol=ROUNDING)  # the engine averages over ranks
    part.grad = None
    whole = vocab_sequence_parallel_cross_entropy(part, target[own], comm.get_world_group())
    torch.testing.assert_close(whole.sum() / (target != -100).sum(), expected, rtol=0, atol=ROUNDING)
    (whole.sum() / (target != -100).sum()).backward()
    torch.testing.assert_close(part.grad / world_size, wanted, rtol=0, atol=ROUNDING)


def test_losses_of_parts_are_the_loss_of_the_whole() -> None:
    run_ranks(_losses, 2)


def _sixteen_bit_losses(rank: int, world_size: int) -> None:
    counts = (70001, 7003)  # more tokens than fp16 has numbers, and sums that it has not
    for dtype in (torch.float16, torch.bfloat16):
        loss = torch.tensor((11.0, 9.0)[rank], dtype=dtype).requires_grad_()
        mean = mean_over_sequence(loss, counts[rank], comm.get_world_group())
        assert mean.dtype is torch.float32
        assert mean.item() == pytest.approx((11.0 * counts[0] + 9.0 * counts[1]) / sum(counts), rel=1e-6)
        mean.backward()
        assert loss.grad is not None
        assert loss.grad.item() == pytest.approx(2 * counts[rank] / sum(counts), rel=torch.finfo(dtype).eps)


def test_a_16_bit_loss_is_weighed_in_fp32() -> None:
    run_ranks(_sixteen_bit_losses, 2)


def _state(rank: int, world_size: int) -> None:
    initialize_sequence_parallel(2)
    mesh = groups.get_current()
    initialize_sequence_parallel(2)
    assert groups.get_current() is mesh
    unit = SequenceParallelUnit(mesh)
    assert (get_sequence_parallel_rank(), get_sequence_data_parallel_world_size()) == (rank % 2, 4)
    assert (unit.get_sequence_parallel_rank(), unit.get_data_parallel_rank()) == (rank % 2, rank // 2)
    assert (unit.get_model_parallel_world_size(), unit.get_sequence_data_parallel_rank()) == (1, rank)
    assert ParallelMesh.from_mpu(unit).sizes == mesh.sizes
    with pytest.raises(ArgumentError, match="sequence=3"):
        initialize_sequence_parallel(3)


def test_the_unit_says_what_the_mesh_says() -> None:
    run_ranks(_state, 4)


def _loader(rank: int, world_size: int) -> None:
    def batch(number: int, length: int = 6) -> dict[str, Any]:
        ids = torch.arange(length).view(1, length) + 100 * number
        return {"input_ids": ids, "labels": ids, "position_ids": ids % 100, "number": number}

    mine = [batch(rank), batch(2 + rank, 8)]
    adapter = UlyssesSPDataLoaderAdapter(mine, rank, comm.get_world_group(), world_size, "cpu")
    for _ in range(2):  # again in the next epoch
        parts = list(adapter)
        assert [part["number"] for part in parts] == [0, 1, 2, 3]
        assert parts[1]["input_ids"].tolist() == [[100, 101, 102]] if rank == 0 else [[103, 104, 105]]
        assert parts[3]["shift_labels"].tolist() == ([[301, 302, 303, 304]] if rank == 0 else [[305, 306, 307, -100]])
    assert len(adapter) == 4
    odd = UlyssesSPDataLoaderAdapter([batch(rank, 6 + rank)], rank, comm.get_world_group(), world_size, "cpu")
    with pytest.raises(ValueError, match=r"7 tokens over 2 sequence-parallel ranks does not divide.*pad_to_multiple_of=2"):
        next(odd)
    fewer = UlyssesSPDataLoaderAdapter(mine[rank:], rank, comm.get_world_group(), world_size, "cpu")
    assert len(list(fewer)) == 2, "all end with the first"
    uneven = UlyssesSPDataLoaderAdapter([batch(rank, 7)], rank, comm.get_world_group(), world_size, "cpu", uneven=True)
    assert [part["input_ids"].shape[1] for part in uneven] == [3 + rank] * 2


def test_every_rank_gets_its_part_of_every_ranks_batches() -> None:
    run_ranks(_loader, 2)
