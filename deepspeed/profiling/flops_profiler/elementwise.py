"""What everything but products costs, by one rule: each operation of a formula written out is one FLOP per element.

    an elementwise operator of torch (add, mul, exp, tanh, gelu, relu and its backward)      1 per element of its result
    a reduction (sum, mean, amax)                                                            1 per element it reads
    an operator that stands for several of these (softmax, a norm)                           their sum, see the table
    copies, views, casts, indexing, selection, comparison, random numbers, lookups           0
    results that are not floating point                                                      0

Which operators are elementwise torch says itself (`torch.Tag.pointwise`). What is in none of the tables costs 0 and is named
in the report, so that nothing is missed in silence.

Lives here: the tables. Called by `counter`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.profiling.flops_profiler.work import Formula, Work, first_tensor, numel_of

__all__ = ["elementwise_formula", "is_free"]

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def _per_result(cost: int) -> Formula:
    return lambda args, kwargs, result: Work(others=cost * numel_of(result))


def _per_input(cost: int) -> Formula:
    return lambda args, kwargs, result: Work(others=cost * numel_of(args[0]))


def _nothing(args: Args, kwargs: Kwargs, result: Any) -> Work:
    return Work()


def _norm(*, weight: int, cost: int) -> Formula:
    """`cost` per element, one more for a weight (argument number `weight`) and one for the bias behind it."""

    def formula(args: Args, kwargs: Kwargs, result: Any) -> Work:
        affine = sum(isinstance(each, Tensor) for each in args[weight : weight + 2])
        return Work(others=numel_of(args[0]) * (cost + affine))

    return formula


def _batch_norm(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """With statistics of the batch as any norm (5), else subtract and multiply (2)."""
    trains = bool(args[5]) if len(args) > 5 and isinstance(args[5], bool) else False
    return _norm(weight=1, cost=5 if trains else 2)(args, kwargs, result)


def _norm_backward(*, normal: int, of_input: int, mask: int) -> Formula:
    """`normal` for the normalised values, `of_input` for their gradient, 2 for the weight's, 1 for the bias's.

    Of a norm with a mean: dx = rstd (g w - mean(g w) - x' mean(g w x')), 8; without one, 6. Argument number `mask` says
    which are wanted; without it, all are.
    """

    def formula(args: Args, kwargs: Kwargs, result: Any) -> Work:
        wanted = args[mask] if len(args) > mask else kwargs.get("output_mask", (True, True, True))
        cost = sum(each for each, is_wanted in zip((of_input, 2, 1), wanted, strict=False) if is_wanted)
        return Work(others=numel_of(args[0]) * (normal + cost))

    return formula


def _window(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """Pooling: each element of the result reads a window, whose sizes are the second argument."""
    size = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
    dims = int(first_tensor(result).dim() - 2) if first_tensor(result) is not None else 0  # type: ignore[union-attr]
    area = math.prod(size) if len(size) > 1 else size[0] ** max(dims, 1)
    return Work(others=numel_of(result) * area)


def _bag(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """Rows of the table, one for each index, are added up."""
    return Work(others=numel_of(args[1]) * args[0].shape[-1])


def _of_targets(args: Args, kwargs: Kwargs, result: Any) -> Work:
    return Work(others=numel_of(args[1]))


_COSTS: dict[Formula, tuple[str, ...]] = {
    _per_input(1): (
        *("sum", "mean", "nansum", "prod", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin"),
        *("cumsum", "cumprod", "cummax", "cummin", "trace"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
        *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
        *("embedding_dense_backward", "nll_loss_backward", "nll_loss2d_backward"),
    ),
    _per_input(2): ("linalg_vector_norm", "norm"),  # square, sum
    _per_input(3): ("mse_loss", "smooth_l1_loss", "huber_loss"),  # subtract, square (or its like), sum
    _per_input(4): ("var", "std", "var_mean", "std_mean", "logsumexp"),  # mean, subtract, square, sum
    _per_result(1): ("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "polar", "complex"),
    _per_result(2): ("addcmul", "addcmul_", "addcdiv", "addcdiv_", "native_dropout"),
    _per_result(3): ("lerp", "lerp_", "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"),
    _per_result(4): ("_softmax_backward_data", "_log_softmax_backward_data", "upsample_linear1d"),
    _per_result(5): ("_softmax", "_safe_softmax", "_log_softmax"),  # max, subtract, exp, sum, divide (log: subtract)
    _per_result(8): ("upsample_bilinear2d", "_upsample_bilinear2d_aa"),  # four terms
    _per_result(13): ("_thnn_fused_lstm_cell",),
    _norm(weight=2, cost=5): ("native_layer_norm",),
    _norm(weight=1, cost=5): ("native_group_norm", "_batch_norm_with_update"),
    _norm(weight=1, cost=2): ("_native_batch_norm_legit_no_training", "_batch_norm_no_update"),
    _norm(weight=2, cost=3): ("_fused_rms_norm",),  # square, mean, multiply
    _batch_norm: ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"),
    _norm_backward(normal=2, of_input=8, mask=7): ("native_layer_norm_backward",),
    _norm_backward(normal=2, of_input=8, mask=9): ("native_group_norm_backward", "native_batch_norm_backward"),
    _norm_backward(normal=2, of_input=8, mask=99): ("cudnn_batch_norm_backward", "miopen_batch_norm_backward"),
    _norm_backward(normal=1, of_input=6, mask=5): ("_fused_rms_norm_backward",),
    _window: ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "max_pool2d"),
    _bag: ("_embedding_bag", "_embedding_bag_forward_only"),
    _of_targets: ("nll_loss_forward", "nll_loss2d_forward"),
}

_FREE = frozenset(
    (
        *("clone", "_to_copy", "copy", "copy_", "cat", "stack", "index", "index_select", "gather", "embedding", "take"),
        *("slice_backward", "select_backward", "unfold_backward", "index_put", "index_put_", "_index_put_impl_"),
        *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
        *(
            "repeat",
            "roll",
            "flip",
            "tril",
            "triu",
            "tril_",
            "triu_",
            "sort",
            "topk",
            "scatter",
            "scatter_",
            "pixel_shuffle",
        ),
        *("pixel_unshuffle", "channel_shuffle", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "bernoulli", "bernoulli_"),
        *("normal_", "uniform_", "random_", "exponential_", "multinomial", "lift_fresh", "lift", "_reshape_alias"),
        *("_unsafe_view", "alias", "fill", "fill_", "zero_", "masked_fill", "masked_fill_", "masked_select", "where"),
        *("index_fill", "index_fill_", "masked_scatter", "masked_scatter_", "masked_scatter_backward", "resize_", "set_"),
        *("_local_scalar_dense", "_efficientzerotensor", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
        *("record_stream", "detach", "detach_", "positive", "real", "imag", "view_as_real", "view_as_complex", "diag_embed"),
        *(
            "diagonal_backward",
            "_fused_sdp_choice",
            "one_hot",
            "expand_copy",
            "view_copy",
            "split_with_sizes_copy",
            "nonzero",
        ),
        *("bitwise_not", "_conj", "_neg_view", "isin", "col2im", "im2col", "max_unpool2d", "block_diag", "_chunk_cat"),
        *("frobenius", "_foreach_copy_", "_pin_memory", "is_pinned", "repeat_interleave", "as_strided_", "unsafe_split"),
    )
)
_FREE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "prim", "prims", "profiler")

_FORMULAS: dict[str, Formula] = {name: formula for formula, names in _COSTS.items() for name in names}


def elementwise_formula(func: Any) -> Formula | None:
    """The formula of an operator of torch that is no product; None where no table has it.

    Args:
        func: with its overload: `torch.ops.aten.add.Tensor`.
    """
    if is_free(func):
        return _nothing
    namespace, _, name = str(getattr(func, "_overloadpacket", func)).partition(".")
    if namespace == "aten" and name in _FORMULAS:
        return _FORMULAS[name]
    return _per_result(1) if torch.Tag.pointwise in getattr(func, "tags", ()) else None


def is_free(func: Any) -> bool:
    """Whether an operator only moves, makes or chooses values: a view, a copy, a collective, a fill, a random number."""
    schema = getattr(func, "_schema", None)
    namespace, _, name = str(getattr(func, "_overloadpacket", func)).partition(".")
    if schema is None:
        return False
    if namespace in _FREE_NAMESPACES or (namespace == "aten" and name in _FREE):
        return True
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return is_view or not takes_tensors
