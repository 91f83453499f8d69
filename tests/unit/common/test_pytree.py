from __future__ import annotations

import weakref
from collections import OrderedDict, namedtuple

import torch

from deepspeed.common.pytree import map_tensors, move_to_device, split_tensors, tensors

Pair = namedtuple("Pair", ["first", "second"])


class Opaque:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_every_tensor_is_mapped_and_every_container_keeps_its_type() -> None:
    one = torch.ones(2)
    tree = {"pair": Pair(one, [one, 3]), "ordered": OrderedDict(b=(one, None), a="text")}
    doubled = map_tensors(lambda t: t * 2, tree)
    assert type(doubled["pair"]) is Pair
    assert type(doubled["ordered"]) is OrderedDict
    assert list(doubled["ordered"]) == ["b", "a"]
    assert doubled["pair"].second[1] == 3
    assert doubled["ordered"]["b"][1] is None
    assert [t.tolist() for t in tensors(doubled)] == [[2.0, 2.0]] * 3
    assert one.tolist() == [1.0, 1.0]


def test_leaves_that_are_no_tensors_are_the_same_objects() -> None:
    opaque = Opaque(torch.ones(1))
    mapped = map_tensors(lambda t: t + 1, [opaque, torch.zeros(1)])
    assert mapped[0] is opaque
    assert opaque.tensor.item() == 1


def test_a_tree_without_tensors_is_returned_as_it_is() -> None:
    tree = {"a": [1, 2], "b": object()}
    assert map_tensors(lambda t: t, tree) is tree


def test_a_bare_tensor_is_a_tree() -> None:
    assert map_tensors(lambda t: t + 1, torch.zeros(())).item() == 1
    assert list(tensors("no tensor")) == []


def test_a_batch_moves_as_a_whole_and_stays_where_it_is_already() -> None:
    batch = {"ids": torch.arange(3), "name": "a", "mask": [torch.ones(2)]}
    moved = move_to_device(batch, "meta")
    assert {t.device.type for t in tensors(moved)} == {"meta"}
    assert moved["name"] == "a"
    assert move_to_device(batch, torch.device("cpu"))["ids"] is batch["ids"]


def test_tensors_can_be_taken_out_and_others_put_in_their_places() -> None:
    first, second = torch.ones(2), torch.zeros(3)
    tree = ([first, "text", (None, {"b": second})], {"n": 7})
    found, rebuild = split_tensors(tree)
    assert found[0] is first
    assert found[1] is second
    assert rebuild([second, first]) == ([second, "text", (None, {"b": first})], {"n": 7})


def test_a_tree_whose_tensors_were_taken_out_holds_none() -> None:
    tree = [torch.ones(2)]
    seen = weakref.ref(tree[0])
    rebuild = split_tensors(tree)[1]
    del tree
    assert seen() is None
    assert rebuild([torch.zeros(1)])[0].tolist() == [0.0]
