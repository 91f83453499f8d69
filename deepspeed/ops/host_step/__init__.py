"""Optimizer steps in host memory, in one trip: unscale, clip, update, round the 16-bit weight, clear the gradient.

    gradient  fp32/bf16/fp16 --+
    parameter fp32/bf16/fp16 --+-- fp32 arithmetic, one pass --> parameter, states, rounded copy of the parameter
    states    fp32/bf16/fp16 --+

    rules     what is computed, and from which numbers              parts    the tensors of one call, all of a step together
    native    the kernels of csrc/optim, one call for any number of tensors, on `torch.get_num_threads()` threads
    twin      the same single operations in the same order on torch's calls, where the library is absent

Native and twin give the same bits, on every instruction set and for every number of threads: no fused multiply-add, one
rounding to nearest even at the end. (Of a NaN only that it is one is the same.)

Lives here: loops over elements. Does not live here: parameter groups and state (`ops.optimizer`), the factor and what is
skipped (`zero.optimizer`). Called by the optimizers of `ops` and by `zero.norm`.
"""

from __future__ import annotations

from deepspeed.ops.host_step.parts import KERNEL_DTYPES, Parts, Update
from deepspeed.ops.host_step.rules import Adagrad, Adam, Lamb, Lion, Rule, Sgd
from deepspeed.ops.host_step.run import lamb_apply, lamb_update, step
from deepspeed.ops.host_step.squares import sum_of_squares

__all__ = [
    "KERNEL_DTYPES",
    "Adagrad",
    "Adam",
    "Lamb",
    "Lion",
    "Parts",
    "Rule",
    "Sgd",
    "Update",
    "lamb_apply",
    "lamb_update",
    "step",
    "sum_of_squares",
]
