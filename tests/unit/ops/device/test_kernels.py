"""The kernels in Triton's interpreter on CPU tensors, and through its compiler for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import device
from deepspeed.ops.device import table
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

REPOSITORY = Path(__file__).parents[4]
NUMELS = (1, 5000, 2048, 0, 3)  # blocks are of 2048 elements
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton, which comes with torch for GPUs and is for Linux",
)


def _interpret(folder: Path, *calls: tuple[str, tuple[Any, ...], dict[str, Any]]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The result of each call, and its arguments as it left them."""
    torch.save(list(calls), folder / "calls")
    argv = [sys.executable, "-m", "tests.unit.ops.device.interpreted", str(folder / "calls"), str(folder / "results")]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(argv, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: list[tuple[Any, tuple[Any, ...]]] = torch.load(folder / "results", weights_only=False)
    return found


def _tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(numel).to(dtype) for numel in NUMELS]


def _root(values: Tensor) -> Tensor:
    """Square roots, rounded correctly; torch's own on the CPU are a last place off in some elements."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def _lasts(dtype: torch.dtype) -> float:
    """What a stored value may be off by, as a share of it: the interpreter cuts bf16 off instead of rounding it."""
    return 2.0**-7 if dtype is torch.bfloat16 else 0.0


@needs_triton
def test_lion_is_the_single_operations_of_its_definition(tmp_path: Path) -> None:
    cases = [
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ]
    given = [tuple(_tensors(dtype) for dtype in dtypes) for dtypes in cases]
    given[0][1][1][7] = float("nan")  # it stays visible in the momentum
    numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    results = _interpret(tmp_path, *(("lion_step", tensors, numbers) for tensors in given))
    for dtypes, before, (_, after) in zip(cases, given, results, strict=True):
        floats = [[each.float() for each in role] for role in before]
        for p, g, m, stepped, _, moved in zip(*floats, *after, strict=True):
            wanted = p * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(m + (1 - 0.9) * (g - m))
            torch.testing.assert_close(stepped, wanted.to(dtypes[0]), rtol=_lasts(dtypes[0]), atol=0)
            torch.testing.assert_close(moved, (m + (1 - 0.99) * (g - m)).to(dtypes[2]), rtol=0, atol=0, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("is_eps_inside", [False, True])
def test_lamb_is_the_single_operations_of_its_definition(tmp_path: Path, is_eps_inside: bool) -> None:
    params, grads, exp_avgs = (_tensors(torch.float32) for _ in range(3))
    exp_avg_sqs = [each.square() for each in _tensors(torch.float32)]
    corrections = torch.rand(len(NUMELS), 2) + 0.1
    numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1, "is_eps_inside": is_eps_inside}
    calls = ("lamb_update", (params, grads, exp_avgs, exp_avg_sqs, corrections), numbers)
    ((updates, sums), (_, _, firsts, seconds, _)), *_ = _interpret(tmp_path, calls)
    for t, (p, g, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        m = exp_avg + (1 - 0.9) * (g - exp_avg)
        v = exp_avg_sq * 0.999 + (1 - 0.999) * g * g
        # tensors, because torch divides by a number as it multiplies by its inverse
        first, second = (value / torch.full_like(value, corrections[t, n]) for n, value in enumerate((m, v)))
        root = _root(second + 1e-6) if is_eps_inside else _root(second) + 1e-6
        assert torch.equal(firsts[t], m)
        assert torch.equal(seconds[t], v)
        assert torch.equal(updates[t], first / root + 0.1 * p)
        # A block's squares are added in fp32, 11 levels of a tree: 11 roundings, plus that of each square.
        for column, values in enumerate((p, updates[t])):
            torch.testing.assert_close(sums[t, column], values.double().square().sum(), rtol=12 * 2.0**-24, atol=0)

    ratios = torch.rand(len(NUMELS)) + 0.5
    ((_, (stepped, *_)),) = _interpret(tmp_path, ("lamb_apply", (params, updates, ratios, 0.01), {}))
    for t, p in enumerate(params):
        assert torch.equal(stepped[t], p - 0.01 * (ratios[t] * updates[t]))


@needs_triton
def test_the_classes_step_with_the_kernels_as_they_do_with_torchs_calls(tmp_path: Path) -> None:
    kinds: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
        ("lion", FusedLion, {"lr": 1e-2, "weight_decay": 0.1}),
        ("lamb", FusedLamb, {"lr": 1e-2, "weight_decay": 0.1}),
        ("lamb", FusedLamb, {"lr": 1e-2, "bias_correction": False, "eps_inside_sqrt": True, "max_grad_norm": 1.0}),
    ]
    shapes = ((3, 700), (5,), (), (2048,))
    starts = [torch.randn(shape) for shape in shapes]
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    calls = [("optimizer_steps", (kind, starts, grads), numbers) for kind, _, numbers in kinds]
    for (_, optimizer_class, numbers), (states, _) in zip(kinds, _interpret(tmp_path, *calls), strict=True):
        parameters = [torch.nn.Parameter(start.double()) for start in starts]  # fp64: torch's calls
        optimizer = optimizer_class(parameters, **numbers)
        for of_step in grads:
            for parameter, grad in zip(parameters, of_step, strict=True):
                parameter.grad = grad.double()
            optimizer.step()
        for parameter, state in zip(parameters, states, strict=True):
            assert state["step"] == 3
            # Each step rounds some twenty times, to 2^-24 of values of about 1. Lion's sign could turn over at 0: it does
            # not with these numbers.
            for key, value in [("param", parameter.detach()), ("exp_avg", optimizer.state[parameter]["exp_avg"])]:
                torch.testing.assert_close(state[key].double(), value, rtol=0, atol=3 * 20 * 2.0**-24)


COMPILE = """
import json, sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from deepspeed.ops.device import kernels
table = {"addresses": "*i64", "numels": "*i64", "owners": "*i32", "firsts": "*i32"}
def made(kernel, types, constants, capability):
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else {**table, **types}.get(name, "fp32") for name in names}
    source = ASTSource(fn=kernel, signature=types, constexprs={(names.index(n),): v for n, v in constants.items()})
    return len(compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])
found = {}
for capability in (80, 90):
    for kind in (tl.float32, tl.bfloat16):
        lion = {"P": kind, "G": kind, "M": tl.float32, "BLOCK": 2048}
        found[f"lion {capability} {kind}"] = made(kernels.lion_kernel, {}, lion, capability)
    lamb = {"EPS_INSIDE": False, "P": tl.float32, "G": tl.bfloat16, "S": tl.float32, "BLOCK": 2048}
    pointers = {"corrections": "*fp32", "partial": "*fp32", "ratios": "*fp32", "sums": "*fp64"}
    found[f"update {capability}"] = made(kernels.lamb_update_kernel, pointers, lamb, capability)
    found[f"sums {capability}"] = made(kernels.lamb_sums_kernel, pointers, {"BLOCK": 256}, capability)
    found[f"apply {capability}"] = made(kernels.lamb_apply_kernel, pointers, {"P": tl.float32, "BLOCK": 2048}, capability)
print(json.dumps(found))
"""


@needs_triton
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 10
    assert all(size > 1000 for size in sizes.values())


def test_a_table_gives_each_block_its_tensor() -> None:
    tensors = [torch.zeros(numel) for numel in NUMELS]
    others = [torch.zeros(numel) for numel in NUMELS]
    made = table.table_of(tensors, others)
    assert made.owners.tolist() == [0, 1, 1, 1, 2, 4]
    assert made.firsts.tolist() == [0, 1, 4, 5, 5, 6]
    assert made.numels.tolist() == list(NUMELS)
    assert made.addresses.tolist() == [[a.data_ptr(), b.data_ptr()] for a, b in zip(tensors, others, strict=True)]
    assert table.table_of(tensors, others) is made  # tensors that stayed are described once
    assert table.table_of([torch.zeros(1), *tensors[1:]], others) is not made


def test_the_kernels_are_for_devices_that_triton_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert not device.can_run(torch.device("cpu"), torch.float32)
    assert not device.can_run(cuda, torch.float32)  # the CPU accelerator of the tests
    monkeypatch.setattr(type(get_accelerator()), "is_triton_supported", lambda _self: True)
    monkeypatch.setattr(table, "_has_triton", lambda: True)
    assert device.can_run(cuda, torch.float32)
    assert device.can_run(cuda, torch.bfloat16)
    assert not device.can_run(cuda, torch.float64)
    monkeypatch.setattr(table, "_has_triton", lambda: False)
    assert not device.can_run(cuda, torch.float32)
