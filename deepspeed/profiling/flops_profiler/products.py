"""What products cost: matrices, convolutions, attention, recurrent layers. Exact, from shapes.

    (m, k) @ (k, n)                  m k n        a bias is where the sum begins: it costs nothing
    convolution, groups included     batch x places of the output x weight.numel() (transposed: places of the input)
    its backward                     once that for the input, once for the weight
    attention, per head              S_q S_k d for the scores, S_q S_k d_v for the values; causal or not
    its backward in one kernel       four such products, and the scores again

[Note: causal] Masks take nothing off. That is how published figures are made (Megatron-LM, arXiv:2104.04473, appendix;
PaLM, arXiv:2204.02311, appendix B), and it does not depend on which kernel torch chooses.

[Note: torch's own formulas] `torch.utils.flop_counter.flop_registry` is asked for every operator that has no formula here,
so a formula that a user registers there for an operator of his own counts. Here are those that it lacks (attention on CPUs,
matrix times vector, recurrent layers, fused layers of `torch.nn`) and those that differ: backward of grouped convolutions,
where it multiplies by the groups, and of attention, where it does not tell what is computed again.

Lives here: the table `PRODUCTS`. Called by `counter`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from deepspeed.profiling.flops_profiler.work import Formula, Work

__all__ = ["PRODUCTS", "product_formula"]

_SCORE = 6
"""FLOPs of a score beside its products: scale, and softmax as in `elementwise` (5)."""
_SCORE_BACKWARD = 5
"""Softmax's backward (4) and the scale."""
_SCORE_AGAIN = 3
"""Scale, subtract, exponentiate: a score from its product and the kept sum of its row."""

_LSTM_UNIT = 13
"""Of one unit in one time step: 4 sums, 4 gates, c = f c + i g (3), tanh(c), o tanh(c)."""

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def product_formula(packet: Any) -> Formula | None:
    """The formula of an operator (without overload); None: it is no product."""
    own = PRODUCTS.get(packet)
    if own is not None or packet not in flop_registry:
        return own
    of_torch = flop_registry[packet]

    def formula(args: Args, kwargs: Kwargs, result: Any) -> Work:
        flops = int(of_torch(*args, **kwargs, out_val=result))
        return Work(flops // 2, flops % 2)

    return formula


def _matrix_vector(args: Args, kwargs: Kwargs, result: Any) -> Work:
    return Work(args[0].numel())


def _add_matrix_vector(args: Args, kwargs: Kwargs, result: Any) -> Work:
    return Work(args[1].numel())


def _linear(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """`(x, weight, ...)`: x (..., in), weight (out, in)."""
    return Work(args[0].numel() * args[1].shape[0])


def _grouped(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """`(a, b, offsets)`: each row of `a` meets the one matrix of its group; two flat ones share the summed dimension."""
    a, b = args[0], args[1]
    if a.dim() == 3 and b.dim() == 3:
        return Work(a.numel() * b.shape[-1])
    rows = a.shape[-2]
    return Work(rows * a.shape[-1] * b.shape[-1])


def _trilinear(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """Per element of the common shape: two factors for the third, and a sum."""
    tensors, expanded = args[:3], args[3:6]
    shapes = []
    for tensor, dims in zip(tensors, expanded, strict=True):
        shape = list(tensor.shape)
        for dim in dims:
            shape.insert(dim, 1)
        shapes.append(shape)
    numel = math.prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return Work(numel, numel)


def _convolution_backward(args: Args, kwargs: Kwargs, result: Any) -> Work:
    gradient, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    places = (x if transposed else gradient).shape[2:]
    macs = x.shape[0] * math.prod(places) * weight.numel()
    return Work(macs * (bool(wanted[0]) + bool(wanted[1])), gradient.numel() if wanted[2] else 0)


def _attention(query: Tensor, key: Tensor, value: Tensor, has_mask: bool = False) -> Work:
    """Query (..., S_q, d), key (..., S_k, d), value (..., S_k, d_v); key heads may be fewer. [Note: causal]"""
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return Work(scores * (query.shape[-1] + value.shape[-1]), scores * (_SCORE + has_mask))


def _attention_backward(query: Tensor, key: Tensor, value: Tensor) -> Work:
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    macs = 2 * scores * (query.shape[-1] + value.shape[-1])
    return Work(macs, scores * _SCORE_BACKWARD, again=(scores * query.shape[-1], scores * _SCORE_AGAIN))


def _fused_attention(args: Args, kwargs: Kwargs, result: Any) -> Work:
    mask = kwargs.get("attn_mask", kwargs.get("attn_bias", args[3] if len(args) > 3 else None))
    query, key, value = args[:3]
    return _attention(query, key, value, has_mask=isinstance(mask, Tensor))


def _fused_attention_backward(args: Args, kwargs: Kwargs, result: Any) -> Work:
    query, key, value = args[1:4]
    return _attention_backward(query, key, value)


def _lstm_layer(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """`(input, w_ih, w_hh, ...)`: input (T, B, in), one layer in one direction; weights hold the gates below each other."""
    steps = args[0].numel() // args[0].shape[-1]
    return Work(steps * (args[1].numel() + args[2].numel()), steps * args[2].shape[1] * _LSTM_UNIT)


def _lstm_layer_backward(args: Args, kwargs: Kwargs, result: Any) -> Work:
    return _lstm_layer(args, kwargs, result).times(2)


def _multi_head(query: Tensor, key: Tensor, heads: int, in_weight: Tensor, out_weight: Tensor) -> Work:
    """A whole layer of attention: query (B, S_q, M), key (B, S_k, M), in_weight (3 M, M)."""
    width = query.shape[-1]
    scores = query.numel() // width * heads * key.shape[1]
    projections = (query.numel() + 2 * key.numel()) * (in_weight.shape[0] // 3) + query.numel() * out_weight.shape[0]
    return Work(projections + 2 * scores * (width // heads), scores * _SCORE)


def _native_attention(args: Args, kwargs: Kwargs, result: Any) -> Work:
    return _multi_head(args[0], args[1], args[4], args[5], args[7])


def _native_encoder_layer(args: Args, kwargs: Kwargs, result: Any) -> Work:
    """`(src, embed_dim, heads, qkv_w, qkv_b, proj_w, proj_b, gelu, norm_first, eps, norms x 4, w1, b1, w2, b2, ...)`."""
    src, first, second = args[0], args[14], args[16]
    attention = _multi_head(src, src, args[2], args[3], args[5])
    rows = src.numel() // src.shape[-1]
    # Two norms of 7, two residuals, one activation per inner unit.
    others = src.numel() * (7 + 7 + 2) + rows * first.shape[0]
    return Work(attention.macs + rows * (first.numel() + second.numel()), attention.others + others)


_BY_NAME: dict[Formula, tuple[str, ...]] = {
    _matrix_vector: ("aten.mv", "aten.dot", "aten.vdot"),
    _add_matrix_vector: ("aten.addmv",),
    _linear: ("mkldnn._linear_pointwise", "aten.mkldnn_linear"),
    _grouped: ("aten._grouped_mm", "aten._scaled_grouped_mm"),
    _trilinear: ("aten._trilinear",),
    _convolution_backward: ("aten.convolution_backward",),
    _fused_attention: (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
    _fused_attention_backward: (
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "aten._scaled_dot_product_flash_attention_backward",
        "aten._scaled_dot_product_efficient_attention_backward",
        "aten._scaled_dot_product_cudnn_attention_backward",
        "aten._scaled_dot_product_fused_attention_overrideable_backward",
    ),
    _lstm_layer: ("aten.mkldnn_rnn_layer",),
    _lstm_layer_backward: ("aten.mkldnn_rnn_layer_backward",),
    _native_attention: ("aten._native_multi_head_attention",),
    _native_encoder_layer: ("aten._transformer_encoder_layer_fwd",),
}


def _table() -> dict[Any, Formula]:
    """Formulas by operator; an operator that this torch lacks is left out."""
    table: dict[Any, Formula] = {}
    for formula, names in _BY_NAME.items():
        for name in names:
            namespace, _, operator = name.partition(".")
            packet = getattr(cast("Any", getattr(torch.ops, namespace)), operator, None)
            if packet is not None:
                table[packet] = formula
    return table


PRODUCTS = _table()
"""Operator -> its formula."""
