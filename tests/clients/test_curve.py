"""The rule that runs of clients are compared by does catch a difference."""

from __future__ import annotations

import pytest

from tests.support.clients import assert_same_curve


def test_curves_that_differ_are_told_apart() -> None:
    assert_same_curve([2.0, 1.0 + 5e-6], [2.0, 1.0])
    for got, expected in (([2.0, 1.0 + 2e-5], [2.0, 1.0]), ([2.0], [2.0, 1.0]), ([2.0, 2.0], [2.0, 2.0])):
        with pytest.raises(AssertionError):
            assert_same_curve(got, expected)
