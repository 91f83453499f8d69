"""How much memory a checkpointed model needs for activations: the formula.

    segment i is given x_i bytes; autograd would save a_i bytes inside it

    without            forward ends with        a_0 + ... + a_n-1
    checkpointed       forward ends with        k_0 + ... + k_n-2 + x_n-1          k_i: what stays of x_i on the device
                       backward of segment i    k_0 + ... + k_i-1 + x_i + a_i      (it is computed again, then used up)

    k_i = x_i                 kept as it is
        = ceil(x_i / T)       `partition_activations` over T tensor-parallel ranks
        = 0                   moved to the host or to NVMe; up to `buffer_count` segments are on their way out or back

The latest segment's inputs stay whole where they are: backward begins with them. With one size for all segments the
largest term is the backward of the last segment, n * x + a: more segments of fewer layers lower a and raise n * x
(sublinear memory, arXiv:1604.06174; partition, arXiv:1910.02054 section 6.1).

Pure arithmetic. Called by whoever plans; `benchmarks/activation_checkpointing.py` and the tests hold measurements against
it. Not counted: parameters, gradients, what computes while it runs, what lies outside of segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.errors import ArgumentError

__all__ = ["ActivationNeeds", "SegmentBytes", "activation_needs"]


@dataclass(frozen=True)
class SegmentBytes:
    """One checkpointed part, or several equal ones in a list."""

    inputs_nbytes: int
    """Tensors that it is given, those excepted that something else keeps anyway: parameters, a mask that all segments
    share."""

    saved_nbytes: int
    """What autograd saves inside it, its inputs excepted."""


@dataclass(frozen=True)
class ActivationNeeds:
    """Bytes of one rank."""

    without_nbytes: int
    """On the device between forward and backward, without checkpointing."""

    kept_nbytes: int
    """The same, checkpointed."""

    peak_nbytes: int
    """The most on the device during backward."""

    away_nbytes: int
    """In host memory or in the file between forward and backward."""


def activation_needs(
    segments: Sequence[SegmentBytes], *, tensor_ranks: int = 1, is_moved: bool = False, segments_ahead: int = 0
) -> ActivationNeeds:
    """Apply the formula.

    Args:
        segments: in the order of forward; backward follows at once, once per forward.
        tensor_ranks: ranks that `partition_activations` shards over; 1 without it.
        is_moved: inputs rest in host memory or on NVMe.
        segments_ahead: segments whose inputs are on the device again, whole shards, before backward needs them.

    Raises:
        ArgumentError: a number is negative, or there are no ranks.
    """
    if tensor_ranks < 1 or segments_ahead < 0 or any(min(s.inputs_nbytes, s.saved_nbytes) < 0 for s in segments):
        raise ArgumentError(
            f"activation_needs(tensor_ranks={tensor_ranks}, segments_ahead={segments_ahead}) over {len(segments)} segments: "
            "bytes and segments are at least 0, ranks at least 1. Give such numbers."
        )
    shards = [-(-segment.inputs_nbytes // tensor_ranks) for segment in segments]
    stay = [0 if is_moved else nbytes for nbytes in shards]
    peak_nbytes = 0
    for i, segment in enumerate(segments):
        coming = sum(shards[max(0, i - segments_ahead) : i]) if is_moved else 0
        peak_nbytes = max(peak_nbytes, sum(stay[:i]) + coming + segment.inputs_nbytes + segment.saved_nbytes)
    last_nbytes = segments[-1].inputs_nbytes if segments else 0
    return ActivationNeeds(
        without_nbytes=sum(segment.inputs_nbytes + segment.saved_nbytes for segment in segments),
        kept_nbytes=sum(stay[:-1]) + last_nbytes,
        peak_nbytes=peak_nbytes,
        away_nbytes=sum(shards[:-1]) if is_moved else 0,
    )
