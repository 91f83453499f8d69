"""What does a layer of experts cost beyond its matrix products?

Forward and backward of 1,024 tokens per rank through 8 experts, 256-1024-256 with GELU, fp32, k 1 and 2, on one rank and
with the experts spread over two. Capacity factor 1.25, dropping, as a layer is usually set.

| contender | what it is |
|---|---|
| ours | `deepspeed.moe.layer.MoE` |
| original | the same of the original |
| loop | softmax, top-k, then a plain loop over experts with `index_add_`; nothing is dropped; one rank |
| products | the matrix products of torch alone: the same number of rows in equal parts, two linear layers per expert |
| fast products | the same as our layer multiplies (`deepspeed.ops.host_products`) |

    step_ms      median of the steps
    kept_mib     bytes held between forward and backward
    peak_mib     the most at once during forward and backward, gradients of the weights left out (8 x 2 MiB for everybody)

The last two are counted tensor by tensor (`harness.live_bytes`) after the steps were timed. The loss is linear in the
output: what a loss keeps and makes is not the layer's. With `output.square().mean()` each has 1 MiB more of the first
figure, and backward begins with 4 MiB of the loss. Goals, on one rank: at most 0.75 of the original's time, 0.85 of
the loop's, 1.2 of the products'; on two 0.75 of the original's; 0.6 of its memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.live_bytes import LiveBytes
from benchmarks.harness.trainers import rank

LOOP = "loop"
PRODUCTS = "products"
FAST_PRODUCTS = "fast products"
_WIDTH, _INNER, _EXPERTS, _TOKENS = 256, 1024, 8, 1024


def _case(k: int, ep_size: int) -> Case:
    alone = (Goal("step_ms", 0.85, of=LOOP), Goal("step_ms", 1.2, of=PRODUCTS))
    return Case(
        f"moe_layer k={k} ep_size={ep_size}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, *((LOOP, PRODUCTS, FAST_PRODUCTS) if ep_size == 1 else ()), ORIGINAL),
        figures=("step_ms", "kept_mib", "peak_mib"),
        of=ORIGINAL,
        ranks=ep_size,
        goals=(
            Goal("step_ms", 0.75, of=ORIGINAL),
            *(alone if ep_size == 1 else ()),
            Goal("kept_mib", 0.6, of=ORIGINAL),
            Goal("peak_mib", 0.6, of=ORIGINAL),
        ),
        arguments={"k": k, "ep_size": ep_size, "warm": 3, "steps": 15},
    )


CASES = tuple(_case(k, ep_size) for ep_size in (1, 2) for k in (1, 2))


def _expert() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_WIDTH, _INNER), nn.GELU(), nn.Linear(_INNER, _WIDTH))


class Loop(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.router = k, nn.Linear(_WIDTH, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(_expert() for _ in range(_EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens_TM = hidden.flatten(0, -2)
        probabilities_TE = self.router(tokens_TM).softmax(-1)
        weight_TK, expert_TK = probabilities_TE.topk(self.k, -1)
        output_TM = torch.zeros_like(tokens_TM)
        for number, expert in enumerate(self.experts):
            token, choice = (expert_TK == number).nonzero(as_tuple=True)
            output_TM.index_add_(0, token, expert(tokens_TM[token]) * weight_TK[token, choice, None])
        share_E = F.one_hot(expert_TK[:, 0], _EXPERTS).float().mean(0)
        return output_TM.view_as(hidden), (probabilities_TE.mean(0) * share_E).sum() * _EXPERTS, None


class Products(nn.Module):
    """Two linear layers per expert on equal stretches of rows that are there already."""

    def __init__(self, k: int, is_fast: bool) -> None:
        super().__init__()
        self.k, self.is_fast = k, is_fast
        self.up = nn.ModuleList(nn.Linear(_WIDTH, _INNER) for _ in range(_EXPERTS))
        self.down = nn.ModuleList(nn.Linear(_INNER, _WIDTH) for _ in range(_EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        rows = hidden.flatten(0, -2).repeat(self.k, 1).chunk(_EXPERTS)
        if self.is_fast:
            from deepspeed.ops.host_products import fast_products

            with fast_products(hidden.device):
                outputs = [down(up(part)) for up, down, part in zip(self.up, self.down, rows, strict=True)]
        else:
            outputs = [down(up(part)) for up, down, part in zip(self.up, self.down, rows, strict=True)]
        return torch.cat(outputs), hidden.new_zeros(()), None


def _layer(contender: str, k: int, ep_size: int) -> Any:
    torch.manual_seed(rank())
    if contender in (PRODUCTS, FAST_PRODUCTS):
        return Products(k, contender == FAST_PRODUCTS)
    if contender == LOOP:
        return Loop(k)
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo")
    layer = MoE(_WIDTH, _expert(), num_experts=_EXPERTS, ep_size=ep_size, k=k, capacity_factor=1.25)
    layer.set_deepspeed_parallelism()
    return layer


def _loss(layer: Any, hidden: Tensor, probe: Tensor) -> Tensor:
    """Linear in the output: it keeps nothing of it, and its backward makes the gradient alone."""
    output, l_aux, _ = layer(hidden)
    loss: Tensor = (output.view_as(probe) * probe).sum() + 0.01 * l_aux
    return loss


def _seconds(step: Callable[[], None], warm: int, steps: int) -> float:
    seconds = []
    for number in range(warm + steps):
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        step()
        if number >= warm:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    layer = _layer(contender, arguments["k"], arguments["ep_size"])
    hidden = torch.randn(4, _TOKENS // 4, _WIDTH, requires_grad=True)
    rows = _TOKENS * (arguments["k"] if contender in (PRODUCTS, FAST_PRODUCTS) else 1)
    probe = torch.randn(4, rows // 4, _WIDTH) / (rows * _WIDTH)

    def step() -> None:
        _loss(layer, hidden, probe).backward()
        for param in layer.parameters():
            param.grad = None

    seconds = _seconds(step, arguments["warm"], arguments["steps"])
    for param in layer.parameters():  # so that backward adds in place, and new memory is that of activations
        param.grad = torch.zeros_like(param)
    hidden.grad = torch.zeros_like(hidden)
    with LiveBytes() as live:
        loss = _loss(layer, hidden, probe)
        kept_nbytes = live.now_nbytes
        loss.backward()
    mib = 1 << 20
    return Measured({"step_ms": seconds * 1e3, "kept_mib": kept_nbytes / mib, "peak_mib": live.peak_nbytes / mib})
