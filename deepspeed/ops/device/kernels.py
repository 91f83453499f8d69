"""The kernels. Each program does one block of one tensor, which it finds in the table (`table`); arithmetic is fp32.

Numbers that are differences (rest1 = 1 - beta1) are computed in double by the caller.

Values are converted to fp32 right after each load, also those that are fp32: the interpreter, in which the tests run
these kernels on CPU tensors, computes wrong with 16-bit floats.

This module imports Triton; only `lion` and `lamb` import it, once there is a device for it.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["lamb_apply_kernel", "lamb_sums_kernel", "lamb_update_kernel", "lion_kernel"]


@triton.jit
def _place(addresses, numels, owners, firsts, ROLES: tl.constexpr, BLOCK: tl.constexpr):
    """This program's tensor, row of addresses, and offsets with the mask of those inside it."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start = (program - tl.load(firsts + tensor)).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    return tensor, addresses + tensor * ROLES, offsets, offsets < tl.load(numels + tensor)


@triton.jit
def lion_kernel(
    addresses, numels, owners, firsts, rate, keep, rest1, rest2,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step parameters, gradients and momenta (roles 0 to 2) of dtypes P, G, M; `keep` is 1 - rate * decay."""
    _, row, offsets, mask = _place(addresses, numels, owners, firsts, 3, BLOCK)
    params = tl.load(row).to(tl.pointer_type(P)) + offsets
    momenta = tl.load(row + 2).to(tl.pointer_type(M)) + offsets
    p = tl.load(params, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(tl.load(row + 1).to(tl.pointer_type(G)) + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(momenta, mask=mask, other=0.0).to(tl.float32)
    mixed = m + rest1 * (g - m)
    sign = tl.where(mixed > 0.0, 1.0, tl.where(mixed < 0.0, -1.0, 0.0))  # of NaN 0, as torch.sign
    tl.store(params, (p * keep - rate * sign).to(P), mask=mask)
    tl.store(momenta, (m + rest2 * (g - m)).to(M), mask=mask)


@triton.jit
def lamb_update_kernel(
    addresses, numels, owners, firsts, corrections, partial, rest1, beta2, rest2, eps, decay,
    EPS_INSIDE: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the moments and write the update; parameter, gradient, both moments, fp32 update (roles 0 to 4).

    `corrections` (tensors, 2) divide the moments. `partial` (programs, 2) gets sums of squares of parameter and update.
    """
    tensor, row, offsets, mask = _place(addresses, numels, owners, firsts, 5, BLOCK)
    p = tl.load(tl.load(row).to(tl.pointer_type(P)) + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(tl.load(row + 1).to(tl.pointer_type(G)) + offsets, mask=mask, other=0.0).to(tl.float32)
    firsts_of = tl.load(row + 2).to(tl.pointer_type(S)) + offsets
    seconds_of = tl.load(row + 3).to(tl.pointer_type(S)) + offsets
    m = tl.load(firsts_of, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(seconds_of, mask=mask, other=0.0).to(tl.float32)
    m = m + rest1 * (g - m)
    v = v * beta2 + rest2 * g * g
    tl.store(firsts_of, m.to(S), mask=mask)
    tl.store(seconds_of, v.to(S), mask=mask)
    first = m / tl.load(corrections + 2 * tensor)
    second = v / tl.load(corrections + 2 * tensor + 1)
    root = tl.sqrt(second + eps) if EPS_INSIDE else tl.sqrt(second) + eps
    update = tl.where(mask, first / root + decay * p, 0.0)
    tl.store(tl.load(row + 4).to(tl.pointer_type(tl.float32)) + offsets, update, mask=mask)
    place = partial + 2 * tl.program_id(0)
    tl.store(place, tl.sum(p * p, axis=0))
    tl.store(place + 1, tl.sum(update * update, axis=0))


@triton.jit
def lamb_sums_kernel(partial, firsts, sums, BLOCK: tl.constexpr):
    """Add up the rows of `partial` of each tensor, one program each, in one order: `sums` (tensors, 2), fp64."""
    tensor = tl.program_id(0)
    start = tl.load(firsts + tensor)
    stop = tl.load(firsts + tensor + 1)
    of_params = tl.zeros((BLOCK,), tl.float64)
    of_updates = tl.zeros((BLOCK,), tl.float64)
    for row in range(start, stop, BLOCK):
        rows = row + tl.arange(0, BLOCK)
        of_params += tl.load(partial + 2 * rows, mask=rows < stop, other=0.0).to(tl.float64)
        of_updates += tl.load(partial + 2 * rows + 1, mask=rows < stop, other=0.0).to(tl.float64)
    tl.store(sums + 2 * tensor, tl.sum(of_params, axis=0))
    tl.store(sums + 2 * tensor + 1, tl.sum(of_updates, axis=0))


@triton.jit
def lamb_apply_kernel(
    addresses, numels, owners, firsts, ratios, rate, P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Take `rate` * ratio * update (role 1, fp32) from the parameter (role 0); `ratios` fp32, one for each tensor."""
    tensor, row, offsets, mask = _place(addresses, numels, owners, firsts, 2, BLOCK)
    params = tl.load(row).to(tl.pointer_type(P)) + offsets
    p = tl.load(params, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + offsets, mask=mask, other=0.0)
    tl.store(params, (p - rate * (tl.load(ratios + tensor) * update)).to(P), mask=mask)
