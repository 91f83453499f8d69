"""How long do the exchanges of Ulysses take on two ranks: the all-to-all alone, and an attention layer around it?

`ulysses all-to-all` brings one tensor of shape (1, 2048 tokens, 16 heads, 64) per rank to heads and back, without gradients:
`single_all_to_all` of each, which is not differentiable in the original. Goal: at most 0.8 of the original's time.
`ulysses q, k, v` is forward and backward with the three tensors of an attention around nothing: `DistributedAttention` whose
local attention returns the query. `ulysses layer` has torch's causal attention in it, which costs the same for both.

float32, gloo over loopback, one thread per rank. `cpu_ms` is the processor time of a rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured

_SIZE = 64

CASES = tuple(
    Case(
        f"ulysses {name}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, ORIGINAL),
        figures=("step_ms", "cpu_ms", "first_loss", "last_loss"),
        of=ORIGINAL,
        ranks=2,
        goals=(Goal("step_ms", goal, of=ORIGINAL),),
        pairs=3,
        side_pairs=1,
        loss_tolerance=1e-4,
        arguments={"what": what, "tokens": tokens, "heads": 16, "kv_heads": kv_heads, "warm": 2, "steps": steps},
    )
    for name, what, tokens, kv_heads, goal, steps in (
        ("all-to-all", "all-to-all", 2048, 16, 0.8, 20),
        ("q, k, v", "exchange", 2048, 16, 0.8, 12),
        ("q, k, v, 4 key heads", "exchange", 2048, 4, 0.8, 12),
        ("layer", "layer", 1024, 16, 1.0, 3),
    )
)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def _returned(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Gives key and value gradients without arithmetic worth the name."""
    used = key[:, :1, :1].sum() + value[:, :1, :1].sum()
    return query + used


def _step(arguments: Mapping[str, Any]) -> Callable[[], float]:
    from deepspeed.sequence.layer import DistributedAttention, single_all_to_all

    group = dist.new_group([0, 1])
    torch.manual_seed(dist.get_rank())
    tokens, heads, kv_heads = arguments["tokens"], arguments["heads"], arguments["kv_heads"]
    query, key, value = (torch.randn(1, tokens, count, _SIZE).requires_grad_() for count in (heads, kv_heads, kv_heads))
    weight = torch.randn(1, tokens, heads, _SIZE)

    def all_to_all() -> Tensor:
        whole = single_all_to_all(query, 2, 1, 0, group)
        return single_all_to_all(whole, 1, 2, 0, group)

    layer: Any = DistributedAttention(_causal if arguments["what"] == "layer" else _returned, group, 2, 1)

    def step() -> float:
        if arguments["what"] == "all-to-all":
            with torch.no_grad():
                return float(all_to_all().flatten()[:64].abs().sum())
        for each in (query, key, value):
            each.grad = None
        out = layer(query, key, value, 0)
        out.backward(weight)
        assert query.grad is not None
        return float(out.flatten()[:64].abs().sum() + query.grad.flatten()[:64].abs().sum())

    return step


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    import deepspeed

    deepspeed.init_distributed("gloo")
    step = _step(arguments)
    seconds, busy, losses = [], [], []
    for number in range(arguments["warm"] + arguments["steps"]):
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        losses.append(step())
        if number >= arguments["warm"]:
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
    figures = {"step_ms": statistics.median(seconds) * 1e3, "cpu_ms": statistics.median(busy) * 1e3}
    return Measured(figures, {"first": losses[0], "last": losses[-1]})
