from __future__ import annotations

import io
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save, forget_parts, note_part

_Pair = namedtuple("_Pair", "first second")


def _saved_nbytes(item: object) -> int:
    buffer = io.BytesIO()
    torch.save(item, buffer)
    return buffer.tell()


def test_a_view_of_a_large_buffer_no_longer_drags_it_along() -> None:
    flat = torch.arange(100_000.0)
    item = {"w": flat[10:20].view(2, 5), "nested": [flat[0:1], (flat[5:6], "text", 3)]}
    cloned = clone_tensors_for_torch_save(item)
    assert _saved_nbytes(item) > 400_000
    assert _saved_nbytes(cloned) < 10_000
    assert torch.equal(cloned["w"], item["w"])
    assert cloned["nested"][1][1:] == ("text", 3)


def test_the_original_is_neither_changed_nor_shared() -> None:
    item = {"w": torch.ones(3, requires_grad=True)}
    cloned = clone_tensors_for_torch_save(item)
    cloned["w"].zero_()
    assert item["w"].tolist() == [1, 1, 1]
    assert item["w"].requires_grad
    assert not cloned["w"].requires_grad


def test_tied_weights_stay_one_tensor() -> None:
    weight = torch.randn(4, 4)
    cloned = clone_tensors_for_torch_save({"embed": weight.view(4, 4), "head": weight.detach(), "row": weight[0]})
    assert cloned["embed"].data_ptr() == cloned["head"].data_ptr()
    assert cloned["row"].data_ptr() != cloned["head"].data_ptr()


def test_containers_keep_their_classes() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    item = {
        "state": state,
        "pair": _Pair(torch.ones(1), None),
        "size": torch.Size([2, 3]),
        "default": defaultdict(list, {1: [torch.ones(1)]}),
    }
    cloned = clone_tensors_for_torch_save(item)
    assert isinstance(cloned["state"], OrderedDict)
    assert cloned["state"]._metadata == state._metadata
    assert isinstance(cloned["pair"], _Pair)
    assert cloned["size"] == torch.Size([2, 3])
    assert isinstance(cloned["size"], torch.Size)
    assert cloned["default"][2] == []


def test_empty_tensors_stay_apart() -> None:
    cloned = clone_tensors_for_torch_save([torch.empty(0, 2), torch.empty(0, 3)])
    assert [tuple(tensor.shape) for tensor in cloned] == [(0, 2), (0, 3)]


def test_the_device_is_the_one_asked_for() -> None:
    assert clone_tensors_for_torch_save([torch.ones(2)], device="meta")[0].device.type == "meta"


class _Part(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_part(destination, prefix, "rows 0 to 1 of 4")


def test_a_state_dict_of_parts_is_not_copied_as_if_it_were_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), _Part(2, 2), _Part(2, 2))
    state = model.state_dict()
    for given in (state, {"module": state}, [state]):
        with pytest.raises(ValueError, match=r"1 has rows 0 to 1 of 4 \(and 1 more modules\)\..*save_16bit_model"):
            clone_tensors_for_torch_save(given)
    assert clone_tensors_for_torch_save(nn.Linear(2, 2).state_dict()).keys() == {"weight", "bias"}
    forget_parts(state)
    assert clone_tensors_for_torch_save(state).keys() == state.keys()
    model.load_state_dict(model.state_dict())
    assert model.state_dict(destination={}).keys() == state.keys()  # one that takes no word
