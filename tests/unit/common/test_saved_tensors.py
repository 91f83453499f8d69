"""What hooks on saved tensors owe to autograd."""

from __future__ import annotations

import pytest
import torch

from deepspeed.common.saved_tensors import outer_hooks, unchanged
from deepspeed.errors import UsageError


def test_hooks_in_force_are_found() -> None:
    assert outer_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor), lambda packed: packed[1]):
        hooks = outer_hooks()
        assert hooks is not None
        packed = hooks[0](torch.ones(2))
        assert packed[0] == "packed"
        assert hooks[1](packed) is packed[1]
    assert outer_hooks() is None


def test_a_tensor_that_was_changed_in_place_is_refused() -> None:
    tensor = torch.ones(2)
    version = tensor._version
    assert unchanged(tensor, version) is tensor
    tensor.add_(1)
    with pytest.raises(UsageError, match=r"shape \(2,\) is at version 1, not 0.*clone the tensor"):
        unchanged(tensor, version)
