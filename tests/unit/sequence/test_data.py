from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from deepspeed.sequence.data import PartsInTurn, UlyssesSPDataLoaderAdapter, own_part, pad_batch


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


class _Rows(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: value[0] + 10 * row for name, value in _batch().items()}


class _Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (_Rows()[row] for row in range(6))


def _of_one_rank(everyone: list[Any], mine: Any, group: Any) -> None:
    everyone[0] = mine


@pytest.mark.parametrize("dataset", [_Rows(), _Stream()], ids=["rows", "stream"])
def test_a_loader_made_anew_of_an_adapter_gives_parts_and_not_batches(
    dataset: Dataset[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.comm.all_gather_object", _of_one_rank)
    adapter = UlyssesSPDataLoaderAdapter(DataLoader(dataset, batch_size=2), 0, None, 1, "cpu")
    expected = [part["input_ids"].tolist() for part in adapter]
    assert len(expected) == 3
    for skipped in (0, 2):
        anew = skip_first_batches(adapter, skipped)
        for _ in range(2):
            found = list(anew)
            assert all("shift_labels" in part and "labels" not in part for part in found)
            assert [part["input_ids"].tolist() for part in found] == expected[skipped:]


def test_a_loader_made_anew_fetches_in_this_process() -> None:
    own = DataLoader(_Rows(), batch_size=2, num_workers=2, persistent_workers=True, timeout=5)
    adapter = UlyssesSPDataLoaderAdapter(own, 0, None, 1, "cpu")
    assert (adapter.num_workers, adapter.prefetch_factor, adapter.persistent_workers, adapter.timeout) == (0, None, False, 0)
    assert adapter.dataset is own.dataset
    assert adapter.batch_size == 2


def test_the_batch_sampler_of_an_adapter_tells_every_sampler_its_epoch() -> None:
    sampler = DistributedSampler(_Rows(), num_replicas=1, rank=0)
    adapter = UlyssesSPDataLoaderAdapter(DataLoader(_Rows(), batch_size=2, sampler=sampler), 0, None, 1, "cpu")
    assert adapter.sampler is sampler
    assert len(adapter.batch_sampler) == len(adapter) == 3
    adapter.dl.batch_sampler.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]
    adapter.batch_sampler.set_epoch(4)
    assert sampler.epoch == 4
    assert adapter.batch_sampler.batch_size == 2  # what it has besides
    no_batches = UlyssesSPDataLoaderAdapter(DataLoader(_Rows(), batch_size=None), 0, None, 1, "cpu")
    assert isinstance(no_batches.sampler, PartsInTurn)
