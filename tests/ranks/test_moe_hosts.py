"""Experts over ranks of several hosts: rows go in two hops, and every number is that of one hop, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.moe import dispatch
from deepspeed.moe.layer import MoE
from deepspeed.topology import mesh
from deepspeed.topology.mesh import AxisGroup
from tests.support.ranks import run_ranks
from tests.support.sweeps import IS_SWEEP

WIDTH = 4


def _run(rank: int, hosts: str, experts: int, counts: list[int]) -> tuple[list[Tensor], tuple[tuple[int, ...], ...] | None]:
    """Output and gradients of a layer over ranks on these hosts, a letter each; and the parts of the axis, if it has two."""
    mesh.host_name = lambda: hosts[rank]  # type: ignore[attr-defined]
    torch.manual_seed(7)
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=experts, ep_size=len(hosts), k=2, drop_tokens=False)
    axis = AxisGroup(range(len(hosts)), rank, comm.get_world_group())
    layer.deepspeed_moe.set_expert_axis(axis)
    torch.manual_seed(rank)
    for param in layer.deepspeed_moe.experts.parameters():
        nn.init.normal_(param)
    hidden = torch.randn(counts[rank], WIDTH, requires_grad=True)
    layer.eval()
    output, l_aux, _ = layer(hidden)
    (output.square().sum() + l_aux).backward()
    found = [output, hidden.grad, *(param.grad for param in layer.parameters())]
    hops = axis.hops()
    parts = None if hops is None else (hops.inside.ranks, hops.across.ranks, hops.positions)
    return [each.detach() for each in found if each is not None], parts


def _compare(rank: int, world_size: int, hosts: str, experts: int, counts: list[int]) -> tuple[tuple[int, ...], ...] | None:
    sizes: list[int] = []
    exchanged = dispatch._exchanged

    def noted(rows: Tensor, leaving: list[int], arriving: list[int], group: comm.ProcessGroup) -> Tensor:
        sizes.append(len(leaving))
        return exchanged(rows, leaving, arriving, group)

    dispatch._exchanged = noted
    straight, parts = _run(rank, "a" * world_size, experts, counts)
    assert parts is None
    found, parts = _run(rank, hosts, experts, counts)
    small = dispatch.SMALL_MESSAGE_NBYTES
    dispatch.SMALL_MESSAGE_NBYTES = 1  # now messages are large
    large, _ = _run(rank, hosts, experts, counts)
    dispatch.SMALL_MESSAGE_NBYTES = small
    for each in (found, large):
        assert len(straight) == len(each) >= 5
        assert all(torch.equal(one, other) for one, other in zip(straight, each, strict=True))
    one_hop = [world_size] * 4  # there and back, forward and backward
    inside, across = (0, 0) if parts is None else (len(parts[0]), len(parts[1]))
    two_hops = [inside, across, across, inside] * 2
    assert sizes == one_hop + (one_hop if parts is None else two_hops) + one_hop
    return parts


@pytest.mark.parametrize(
    ("hosts", "of_first", "of_last"),
    [
        ("aabb", ((0, 1), (0, 2), (0, 1, 2, 3)), ((2, 3), (1, 3), (0, 1, 2, 3))),
        ("abab", ((0, 2), (0, 1), (0, 2, 1, 3)), ((1, 3), (2, 3), (0, 2, 1, 3))),
        *(
            [
                ("aaabbb", ((0, 1, 2), (0, 3), (0, 1, 2, 3, 4, 5)), ((3, 4, 5), (2, 5), (0, 1, 2, 3, 4, 5))),
                ("abcabc", ((0, 3), (0, 1, 2), (0, 3, 1, 4, 2, 5)), ((2, 5), (3, 4, 5), (0, 3, 1, 4, 2, 5))),
            ]
            if IS_SWEEP
            else []
        ),
    ],
)
@pytest.mark.parametrize("experts", [1, 3])
def test_two_hops_give_the_bits_of_one(
    hosts: str, of_first: tuple[tuple[int, ...], ...], of_last: tuple[tuple[int, ...], ...], experts: int
) -> None:
    counts = [5, 0, 7, 3, 1, 2][: len(hosts)]
    found = run_ranks(_compare, len(hosts), hosts, experts * len(hosts), counts)
    assert found[0] == of_first
    assert found[-1] == of_last


@pytest.mark.parametrize("hosts", ["aaab", "abcd"])
def test_hosts_with_uneven_or_single_ranks_take_one_hop(hosts: str) -> None:
    assert run_ranks(_compare, 4, hosts, 4, [2, 3, 1, 4]) == [None] * 4
