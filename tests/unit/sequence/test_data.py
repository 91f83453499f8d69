from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.sequence.data import UlyssesSPDataLoaderAdapter, own_part, pad_batch


def _batch(length: int = 6, **more: Any) -> dict[str, Any]:
    ids = torch.arange(2 * length).view(2, length)
    return {"input_ids": ids, "labels": ids + 100, "position_ids": torch.arange(length).expand(2, length), **more}


def test_parts_together_are_the_batch_with_labels_shifted_over_the_whole() -> None:
    whole = _batch(7, name="a")
    parts = [own_part(whole, rank, 3) for rank in range(3)]
    assert [part["input_ids"].shape[1] for part in parts] == [2, 2, 3]
    for key in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([part[key] for part in parts], 1), whole[key])
    labels = torch.cat([part["shift_labels"] for part in parts], 1)
    assert torch.equal(labels[:, :-1], whole["labels"][:, 1:])
    assert labels[:, -1].tolist() == [-100, -100]
    assert all(part["name"] == "a" and "labels" not in part for part in parts)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {key: value for key, value in _batch().items() if key != "position_ids"},
            r"lacks \['position_ids'\].*torch\.arange",
        ),
        (_batch(pixels=torch.zeros(2, 3)), r"'pixels': \(2, 3\).*input_ids of \(2, 6\)"),
        (_batch(scalar=torch.zeros(())), r"'scalar'"),
        (_batch(1), "1 tokens over 2 sequence-parallel ranks"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        own_part(batch, 0, 2)


def test_padding_counts_nowhere_and_positions_count_on() -> None:
    padded = pad_batch(_batch(5, attention_mask=torch.ones(2, 5), note=[1]), 4, {"input_ids": 9})
    assert padded["input_ids"][:, 5:].tolist() == [[9] * 3] * 2
    assert padded["labels"][:, 5:].tolist() == [[-100] * 3] * 2
    assert padded["position_ids"][0].tolist() == list(range(8))
    assert padded["attention_mask"].sum() == 10
    assert padded["note"] == [1]
    whole = _batch(8)
    assert pad_batch(whole, 4)["input_ids"] is whole["input_ids"]


class _Loader(list[Any]):
    dataset = "its dataset"


def test_over_one_rank_the_adapter_only_shifts_labels() -> None:
    adapter = UlyssesSPDataLoaderAdapter(_Loader([_batch(), _batch()]), 0, None, 1, "cpu")
    assert len(adapter) == 2
    assert adapter.dataset == "its dataset"
    with pytest.raises(AttributeError):
        _ = adapter.something_else
