"""Sums over whole parameters, for an optimizer that steps parts of them.

    rank 0: part of p0, p1     partial sums --+
    rank 1: part of p1, p2     partial sums --+--> sums of p0, p1, p2 on every rank --> rows of the own parts

An optimizer that needs nothing but such sums (norms) beyond element-wise arithmetic says `needs_parameter_sums = True` and
has an attribute `sums`, through which each `step()` brings them together: the same number of calls on every rank, also on
one without any part. The default is a whole parameter on this rank, which has its sums already.

Not here: the all-reduce (`zero.parameter_sums`, which `zero.master` puts in place). Called by `ops.lamb`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["OwnSums", "ParameterSums"]


class ParameterSums(Protocol):
    """How sums over parts become sums over wholes. Collective over the ranks that hold other parts."""

    def per_parameter(self, parts: Sequence[Tensor], partial_PK: Tensor) -> Tensor:
        """Add K sums of each parameter over all its parts.

        Args:
            parts: tensors that `param_groups` holds, P of them; P may be 0.
            partial_PK: their own sums, shape (P, K), fp64 (fp32 where the device has none).

        Returns:
            The whole parameters' sums, shape (P, K).
        """

    def counts(self, part: Tensor) -> bool:
        """Whether this rank's part counts in `of_all`: of ranks that hold the same, one's do."""

    def of_all(self, partial_K: Tensor) -> Tensor:
        """Add K sums over everything, shape (K,), over the ranks; every rank brings one, zero where it holds nothing."""


class OwnSums:
    """Every parameter is whole on this rank."""

    def per_parameter(self, parts: Sequence[Tensor], partial_PK: Tensor) -> Tensor:
        """See `ParameterSums`."""
        return partial_PK

    def counts(self, part: Tensor) -> bool:
        """See `ParameterSums`."""
        return True

    def of_all(self, partial_K: Tensor) -> Tensor:
        """See `ParameterSums`."""
        return partial_K
