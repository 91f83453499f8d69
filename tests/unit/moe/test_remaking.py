from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError
from deepspeed.moe.layer import MoE
from deepspeed.moe.remaking import remaking

WIDTH, INNER, ROWS = 6, 10, 8


class Gated(nn.Module):
    """As of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return down


class Through(nn.Module):
    """Two matrices with `inner` between them."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(WIDTH, INNER), inner, nn.Linear(INNER, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        down: Tensor = self.down(self.inner(self.up(rows)))
        return down


def _scaled_in_place(x: Tensor) -> Tensor:
    return F.gelu(x).mul_(2)


def _in_place(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def _square_of_relu(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _checkpointed(x: Tensor) -> Tensor:
    made: Tensor = checkpoint(F.gelu, x, use_reentrant=False)
    return made


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: Through(nn.GELU()),
    "gelu by tanh": lambda: Through(nn.GELU("tanh")),
    "silu": lambda: Through(nn.SiLU()),
    "mish": lambda: Through(nn.Mish()),
    "square": lambda: Through(_square_of_relu),
    "gated": Gated,
    "relu": lambda: Through(nn.ReLU()),
    "tanh": lambda: Through(nn.Tanh()),
    "dropout": lambda: Through(nn.Sequential(nn.GELU(), nn.Dropout(0.5))),
    "changed in place": lambda: Through(_scaled_in_place),
    "in place": lambda: Through(_in_place),
    "checkpoint inside": lambda: Through(_checkpointed),
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), Through(nn.GELU())),
    "one matrix": lambda: nn.Linear(WIDTH, WIDTH),
}


def _run(expert: nn.Module, is_on: bool, within: Callable[..., Any] | None = None) -> list[Tensor]:
    """Output and gradients of rows taken from tokens, in two stretches."""
    torch.manual_seed(0)
    hidden, token = torch.randn(ROWS, WIDTH, requires_grad=True), torch.arange(ROWS).flip(0)

    def forward(hidden: Tensor) -> Tensor:
        rows = hidden.index_select(0, token)
        if not is_on:
            return torch.cat([expert(part) for part in rows.split_with_sizes([3, 5])])
        with remaking() as remade:
            rows = remade.taken(rows, hidden, token)
            return torch.cat([expert(part) for part in rows.split_with_sizes([3, 5])])

    output = forward(hidden) if within is None else within(forward, hidden)
    return [output, *torch.autograd.grad(output.sin().sum(), [hidden, *expert.parameters()])]


def _checkpoint_around(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Any:
    return checkpoint(forward, hidden, use_reentrant=False)


def _on_cpu(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return forward(hidden)


def _bf16(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return forward(hidden).float()


@pytest.mark.parametrize("within", [None, _checkpoint_around, _on_cpu, _bf16])
@pytest.mark.parametrize("kind", EXPERTS)
def test_every_expert_has_the_same_bits(kind: str, within: Callable[..., Any] | None) -> None:
    torch.manual_seed(1)
    expert = EXPERTS[kind]()
    for one, other in zip(_run(expert, True, within), _run(expert, False, within), strict=True):
        assert torch.equal(one, other)


def _saved_numels(expert: nn.Module, is_on: bool) -> int:
    """Elements of different memory that graphs keep, parameters left out."""
    kept: dict[int, Tensor] = {}
    params = {param.untyped_storage().data_ptr() for param in expert.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in params:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _run(expert, is_on)
    return sum(
        tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values() if tensor.is_floating_point()
    )


# Of each row: its token and its inner products alone. Output of `sin` and the sum's are the same in both.
@pytest.mark.parametrize(
    ("kind", "less"), [("gelu", INNER), ("silu", INNER), ("gated", 2 * INNER), ("square", INNER), ("tanh", 0)]
)
def test_results_of_known_functions_are_not_kept(kind: str, less: int) -> None:
    """The tokens are kept in place of the rows, which are as many here."""
    expert = EXPERTS[kind]()
    assert _saved_numels(expert, False) - _saved_numels(expert, True) == ROWS * less


def test_tensors_that_were_changed_since_are_told() -> None:
    expert = Through(nn.GELU())
    hidden, token = torch.randn(ROWS, WIDTH), torch.arange(ROWS)
    with remaking() as remade:
        output = expert(remade.taken(hidden.index_select(0, token), hidden, token))
    hidden += 1
    with pytest.raises(UsageError, match="modified by an inplace operation"):
        output.sum().backward()


def test_what_no_graph_keeps_may_be_changed() -> None:
    """A value that is made outside of the graph, as straight-through estimators do."""

    def inner(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = F.gelu(x)
        return x.add_(1) * factor

    expert = Through(inner)
    for one, other in zip(_run(expert, True), _run(expert, False), strict=True):
        assert torch.equal(one, other)


def test_hooks_and_gradients_of_what_is_made_again_work() -> None:
    seen: list[Tensor] = []

    def inner(x: Tensor) -> Tensor:
        made = F.gelu(x)
        made.retain_grad()
        made.register_hook(lambda gradient: gradient * 2)
        seen.append(made)
        return made

    found = []
    for is_on in (True, False):
        torch.manual_seed(2)
        found.append([*_run(Through(inner), is_on), *(made.grad for made in seen[-2:])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_gradients_are_the_same() -> None:
    found = []
    for is_on in (True, False):
        torch.manual_seed(3)
        expert, rows = Gated(), torch.randn(ROWS, WIDTH, requires_grad=True)
        if is_on:
            with remaking():
                output = expert(rows)
        else:
            output = expert(rows)
        (first,) = torch.autograd.grad(output.sin().sum(), rows, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [rows, *expert.parameters()]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_functional_transforms_and_blocks_without_hooks_go_on() -> None:
    expert, rows = Through(nn.GELU()), torch.randn(ROWS, WIDTH)

    def loss(rows: Tensor) -> Tensor:
        with remaking():
            made: Tensor = expert(rows).sum()
            return made

    assert torch.func.grad(loss)(rows).shape == rows.shape
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss(rows.requires_grad_()).backward()
    with torch.no_grad():
        assert not loss(rows).requires_grad


def _watch(alive: list[weakref.ref[Tensor]], output: object) -> None:
    if isinstance(output, Tensor):
        alive.append(weakref.ref(output))


@pytest.mark.parametrize("kind", ["gelu", "tanh", "gated"])
def test_a_graph_that_is_dropped_is_freed_at_once(kind: str) -> None:
    layer = MoE(WIDTH, EXPERTS[kind](), num_experts=2, k=2)
    alive: list[weakref.ref[Tensor]] = []
    for module in layer.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, inputs, output: _watch(alive, output))
    gc.collect()
    gc.disable()
    try:
        output, l_aux, _ = layer(torch.randn(ROWS, WIDTH, requires_grad=True))
        assert any(each() is not None for each in alive)
        layer.deepspeed_moe.l_aux = None
        del output, l_aux
        assert [each() for each in alive] == [None] * len(alive)
    finally:
        gc.enable()
