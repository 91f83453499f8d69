"""A tree without its values: taken apart, described, and put together again."""

from __future__ import annotations

import collections
import sys
from typing import Any, NamedTuple

import pytest
import torch

from deepspeed.errors import PipelineError
from deepspeed.pipe.forms import Form, TensorForm, digest, room, take_apart


class Pair(NamedTuple):
    one: Any
    other: Any


TREES: list[Any] = [
    torch.ones(2, 3),
    (torch.ones(2), None, 3, "text", True),
    [{"a": torch.zeros(0, 4), "b": [torch.ones((), dtype=torch.bool)]}, ()],
    Pair(torch.ones(1, dtype=torch.bfloat16), {"n": 2.5}),
    collections.OrderedDict(x=torch.arange(3), y=None),
    (torch.float16, torch.device("cpu"), float("inf"), torch.ones(1)),
]


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    form, tensors = take_apart(tree)
    described = Form.from_bytes(form.to_bytes())
    assert described == form
    back = described.put_together(tensors)
    assert type(back) is type(tree)
    assert str(back) == str(tree)


@pytest.mark.parametrize("tree", TREES)
def test_room_has_the_shapes_and_dtypes(tree: Any) -> None:
    form, tensors = take_apart(tree)
    for empty, tensor in zip(room(form.tensors, torch.device("cpu")), tensors, strict=True):
        assert (empty.shape, empty.dtype) == (tensor.shape, tensor.dtype)


def test_forms_differ_by_shape_dtype_gradient_containers_and_plain_values() -> None:
    trees: list[Any] = [
        (torch.ones(2), 1), (torch.ones(3), 1), (torch.ones(2).double(), 1), (torch.ones(2, requires_grad=True), 1),
        [torch.ones(2), 1], (torch.ones(2), 2), (torch.ones(2), None),
    ]  # fmt: skip
    forms = [take_apart(tree)[0] for tree in trees]
    assert len({digest(form) for form in forms}) == len(forms)
    assert all((one == other) is (n == m) for n, one in enumerate(forms) for m, other in enumerate(forms))
    assert digest(forms[0], "training") != digest(forms[0], "evaluation")
    assert digest(take_apart((torch.zeros(2), 1))[0]) == digest(forms[0])


def test_a_form_reads_well_in_errors() -> None:
    form, _ = take_apart((torch.ones(2, 3, dtype=torch.bfloat16), None, 7))
    assert str(form) == "bfloat16[2, 3], None, 7"
    assert form.tensors == [TensorForm((2, 3), torch.bfloat16, False)]


class Odd:
    """Nothing that JSON knows."""


@pytest.mark.parametrize("tree", [(torch.ones(1), Odd()), {("x", 1): torch.ones(1)}, [b"bytes"]])
def test_what_cannot_be_described_is_refused_with_the_cure(tree: Any) -> None:
    form, _ = take_apart(tree)
    with pytest.raises(PipelineError, match="cannot be described to it"):
        form.to_bytes()


def test_a_class_that_this_rank_does_not_have_is_refused_and_nothing_is_imported() -> None:
    content = take_apart(Pair(1, 2))[0].to_bytes().replace(b"test_forms:Pair", b"test_forms:Pear")
    with pytest.raises(PipelineError, match="test_forms:Pear, which this rank does not have"):
        Form.from_bytes(content)
    with pytest.raises(PipelineError, match="antigravity:Pair, which this rank does not have"):
        Form.from_bytes(b'[["antigravity:Pair"], "", []]')
    assert "antigravity" not in sys.modules
