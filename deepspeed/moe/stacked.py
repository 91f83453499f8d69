"""Experts whose weights are stacked in one tensor per projection, as Hugging Face's library keeps them.

    gate_up_proj (E, 2I, M)    down_proj (E, M, I)        one module, forward(hidden, experts of each token, their weights)

    rows of expert 0 | rows of 1 | ...  --product with slab e--> --gate, activation--> --product with slab e--> same rows

Letters: `E` experts, `X` rows of all of them, `M` width of a token, `I` inner width. A slab is one
expert's part of a stacked tensor.

Lives here: telling such a module by its structure, and its arithmetic on rows that lie expert after expert. Does not live
here: which rows, and which ranks hold which slabs (`moe.auto_ep`, which calls this).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.host_products import fast_products

__all__ = [
    "NotStackedError",
    "Stacks",
    "grouped_product",
    "is_close",
    "looped_product",
    "run_experts",
    "stacks_of",
    "two_tokens",
]

_ALIGNMENT_NBYTES = 16  # of rows, for torch's grouped product
_BIAS = "_bias"


class NotStackedError(Exception):
    """A module is not what this room can spread; the text completes the sentence `<its name> `."""


@dataclass(frozen=True)
class Stacks:
    """How a module stacks its experts.

    Attributes:
        first: name of the stacked weights that take tokens.
        last: of those that give them back.
        num_experts: E.
        is_transposed: slabs are (in, out), not (out, in) as of `nn.Linear`.
        has_gate: `first` gives gate and value side by side.
        arguments: what the module's forward calls the tokens, the experts of each, and their weights.
        is_published: the module says all this itself, as those of Hugging Face's library do.
    """

    first: str
    last: str
    num_experts: int
    is_transposed: bool
    has_gate: bool
    arguments: tuple[str, str, str]
    is_published: bool


def stacks_of(module: nn.Module, first: str | None = None, last: str | None = None) -> Stacks:
    """Find how `module` stacks its experts.

    Args:
        module: parameters may be sharded by `zero.Init`.
        first: name of its first weights; None: `gate_up_proj` or `up_proj`.
        last: name of its last weights; None: `down_proj`.

    Raises:
        NotStackedError: it does not, or holds something beside that cannot be shared out.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        raise NotStackedError("holds one module per expert, and the block's own code chooses among them")
    shapes = {name: _shape(param) for name, param in module.named_parameters()}
    first = first or next((name for name in ("gate_up_proj", "up_proj") if name in shapes), "gate_up_proj")
    last = last or "down_proj"
    for name in (first, last):
        if len(shapes.get(name, ())) != 3:
            raise NotStackedError(f"has no three-dimensional parameter {name!r}")
    experts = shapes[first][0]
    _refuse_others(module, shapes, {first, last, first + _BIAS, last + _BIAS}, experts)
    if getattr(module, "_is_expert_parallel", False):
        raise NotStackedError("is spread over ranks by Hugging Face's own expert parallelism already")
    is_transposed, has_gate = _orientation(module, shapes[first], shapes[last])
    if not (has_gate and hasattr(module, "_apply_gate")) and not callable(getattr(module, "act_fn", None)):
        raise NotStackedError("has no activation `act_fn`")
    is_published = hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    return Stacks(first, last, experts, is_transposed, has_gate, _arguments(module), is_published)


def _shape(param: Tensor) -> tuple[int, ...]:
    """Of the whole parameter: one that is sharded publishes it so."""
    return tuple(getattr(param, "ds_shape", param.shape))


def _refuse_others(module: nn.Module, shapes: dict[str, tuple[int, ...]], known: set[str], experts: int) -> None:
    others = sorted(set(shapes) - known)
    if others:
        raise NotStackedError(f"has parameters that are not stacked weights or biases of its experts: {', '.join(others)}")
    if next(module.buffers(), None) is not None:
        raise NotStackedError("has buffers, of which nothing says how experts share them")
    uneven = sorted(name for name, shape in shapes.items() if shape[0] != experts)
    counted = getattr(module, "num_experts", experts)
    if uneven or counted != experts:
        raise NotStackedError(f"counts its experts in two ways: num_experts={counted}, first dimensions {shapes}")


def _orientation(module: nn.Module, first: tuple[int, ...], last: tuple[int, ...]) -> tuple[bool, bool]:
    """(is_transposed, has_gate), as the module says or as the shapes do."""
    (inner, width), (given, taken) = first[1:], last[1:]
    found = {
        (False, True): (inner, width) == (2 * taken, given),
        (False, False): (inner, width) == (taken, given),
        (True, True): (width, inner) == (2 * given, taken),
        (True, False): (width, inner) == (given, taken),
    }
    fitting = [kind for kind, fits in found.items() if fits]
    said = (getattr(module, "is_transposed", None), getattr(module, "has_gate", None))
    chosen = [kind for kind in fitting if all(want in (None, has) for want, has in zip(said, kind, strict=True))]
    if not chosen:
        raise NotStackedError(f"has weights that do not follow each other: {first} and {last}")
    if len(chosen) > 1:
        raise NotStackedError(
            "has weights (out, in) or (in, out), which shapes do not tell; set is_transposed on the module"
        )
    return chosen[0]


def _arguments(module: nn.Module) -> tuple[str, str, str]:
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    wants = (("",), ("ind", "idx", "expert"), ("weight", "score", "prob"))
    if len(names) != 3 or not all(any(part in name for part in of) for name, of in zip(names, wants, strict=True)):
        raise NotStackedError(
            f"has forward({', '.join(names)}); needed are the tokens, the experts of each (..index..), and their weights"
        )
    return names


def two_tokens(module: nn.Module, stacks: Stacks) -> tuple[Tensor, Tensor, Tensor]:
    """What forward of `module` takes, to try it: a token for the first expert, one for the last. No generator is touched."""
    weights = cast("Tensor", getattr(module, stacks.first))
    width = weights.shape[1 if stacks.is_transposed else 2]
    hidden_TM = torch.linspace(-1, 1, 2 * width, dtype=weights.dtype, device=weights.device).view(2, width)
    index_TK = torch.tensor([[0], [stacks.num_experts - 1]], device=weights.device)
    return hidden_TM, index_TK, torch.tensor([[0.5], [2.0]], dtype=weights.dtype, device=weights.device)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two outputs for such tokens are equal but for rounding: products of a few hundred terms, in their dtype."""
    bound = min(100 * torch.finfo(expected.dtype).eps, 0.1) * expected.norm().item()  # 100 of bfloat16 would be 0.78
    return found.shape == expected.shape and (found - expected).norm().item() <= bound


def run_experts(module: Any, stacks: Stacks, rows_XM: Tensor, rows_per_expert: Sequence[int], *, is_grouped: bool) -> Tensor:
    """Run each expert of `module` on its own stretch of rows.

    Args:
        module: holds the slabs of as many experts as there are stretches.
        stacks: of `module`.
        rows_XM: rows, expert after expert.
        rows_per_expert: they add up to X; an expert may have none.
        is_grouped: use torch's product of all slabs at once where the device has it.

    Returns:
        (X, M) in the same order, in the dtype of the weights, or autocast's.
    """
    inner_XI = _product(module, stacks.first, stacks, rows_XM, rows_per_expert, is_grouped=is_grouped)
    if not stacks.has_gate:
        inner_XI = module.act_fn(inner_XI)
    elif hasattr(module, "_apply_gate"):
        inner_XI = module._apply_gate(inner_XI)
    else:
        gate_XI, value_XI = inner_XI.chunk(2, dim=-1)
        inner_XI = module.act_fn(gate_XI) * value_XI
    rows_XM = _product(module, stacks.last, stacks, inner_XI, rows_per_expert, is_grouped=is_grouped)
    return cast("Tensor", module.post_expert_norm(rows_XM)) if getattr(module, "has_post_expert_norm", False) else rows_XM


def _product(
    module: nn.Module, name: str, stacks: Stacks, rows: Tensor, rows_per_expert: Sequence[int], *, is_grouped: bool
) -> Tensor:
    slabs, biases = getattr(module, name), getattr(module, name + _BIAS, None)
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else slabs.dtype
    slabs, rows = slabs.to(dtype), rows.to(dtype)
    slabs = slabs if stacks.is_transposed else slabs.transpose(-2, -1)
    product = grouped_product if is_grouped and _has_grouped_product(slabs) else looped_product
    result = product(rows, slabs, rows_per_expert)
    return result if biases is None else result + _per_row(biases.to(dtype), rows_per_expert)


def _has_grouped_product(slabs: Tensor) -> bool:
    """On the CPU the loop is as fast, and takes every dtype and size."""
    rows_are_aligned = all(size * slabs.element_size() % _ALIGNMENT_NBYTES == 0 for size in slabs.shape[1:])
    return (
        slabs.device.type == "cuda"
        and slabs.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and rows_are_aligned
        and get_accelerator().is_bf16_supported()
    )


def grouped_product(rows_XA: Tensor, slabs_EAB: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """Multiply each stretch of rows with its slab, in one operation of torch."""
    ends_E = torch.tensor(list(accumulate(rows_per_expert)), dtype=torch.int32, device=rows_XA.device)
    return F.grouped_mm(rows_XA.contiguous(), slabs_EAB, offs=ends_E)


def looped_product(rows_XA: Tensor, slabs_EAB: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """Multiply each stretch of rows with its slab, one after the other; an expert without rows gets a gradient of zeros."""
    stretches = rows_XA.split_with_sizes(list(rows_per_expert))
    with fast_products(rows_XA.device):
        return torch.cat([F.linear(rows, slab.t()) for rows, slab in zip(stretches, slabs_EAB.unbind(), strict=True)])


def _per_row(biases_EB: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    counts_E = torch.tensor(rows_per_expert, device=biases_EB.device)
    return biases_EB.repeat_interleave(counts_E, dim=0, output_size=sum(rows_per_expert))
