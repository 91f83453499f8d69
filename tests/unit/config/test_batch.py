"""The batch triangle."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.batch import BatchSizes, resolve_batch
from deepspeed.errors import BatchSizeError, ConfigError

SIZE = st.integers(1, 64)


@given(micro=SIZE, accumulation=SIZE, ranks=SIZE)
def test_any_two_sizes_give_the_third(micro: int, accumulation: int, ranks: int) -> None:
    whole = BatchSizes(micro * accumulation * ranks, micro, accumulation)
    assert resolve_batch(whole.train, micro, None, ranks) == whole
    assert resolve_batch(whole.train, None, accumulation, ranks) == whole
    assert resolve_batch(None, micro, accumulation, ranks) == whole
    assert resolve_batch(whole.train, micro, accumulation, ranks) == whole


@given(micro=SIZE, ranks=SIZE)
def test_one_size_alone_means_one_accumulation_step(micro: int, ranks: int) -> None:
    assert resolve_batch(None, micro, None, ranks) == BatchSizes(micro * ranks, micro, 1)
    assert resolve_batch(micro * ranks, None, None, ranks) == BatchSizes(micro * ranks, micro, 1)


@given(
    train=st.none() | st.integers(1, 200),
    micro=st.none() | st.integers(1, 20),
    accumulation=st.none() | st.integers(1, 20),
    ranks=st.integers(1, 20),
)
def test_the_result_multiplies_out_and_keeps_what_was_given(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    try:
        sizes = resolve_batch(train, micro, accumulation, ranks)
    except BatchSizeError as error:
        text = str(error)
    else:
        text = ""
    if text:
        assert "Check batch related parameters" in text
        assert f"{ranks} data-parallel rank" in text
        return
    assert sizes.train == sizes.micro * sizes.accumulation * ranks
    assert all(a in (None, b) for a, b in zip((train, micro, accumulation), sizes, strict=True))


@given(
    train=st.integers(1, 200),
    micro=st.none() | st.integers(1, 20),
    accumulation=st.none() | st.integers(1, 20),
    ranks=st.integers(1, 20),
)
def test_the_sizes_that_the_error_proposes_work(train: int, micro: int | None, accumulation: int | None, ranks: int) -> None:
    try:
        resolve_batch(train, micro, accumulation, ranks)
    except BatchSizeError as error:
        text = str(error).partition("These would work: ")[2]
    else:
        return
    for proposed in re.findall(r"\d+", text.partition(", or ")[0]):
        resolve_batch(int(proposed), micro, accumulation, ranks)
    for proposed in re.findall(r"gradient_accumulation_steps (\d+)", text):
        resolve_batch(train, micro, int(proposed), ranks)
    for proposed in re.findall(r"train_micro_batch_size_per_gpu (\d+)", text):
        resolve_batch(train, int(proposed), accumulation, ranks)
    for proposed in re.findall(r"(\d+) data-parallel", text):
        resolve_batch(train, micro, accumulation, int(proposed))


@pytest.mark.parametrize(
    "sizes", [(0, None, None, 1), (None, 0, None, 1), (4, None, -1, 1), (4, 4, 1, 0), (-8, None, None, 1)]
)
def test_a_size_below_one_is_refused(sizes: tuple[int | None, int | None, int | None, int]) -> None:
    with pytest.raises(BatchSizeError, match="needed 1 or more"):
        resolve_batch(*sizes)


def test_accumulation_alone_is_refused() -> None:
    with pytest.raises(BatchSizeError, match="neither train_batch_size nor train_micro_batch_size_per_gpu"):
        resolve_batch(None, None, 4, 2)


def test_the_error_is_what_clients_catch() -> None:
    with pytest.raises(AssertionError, match="Check batch related parameters"):
        resolve_batch(7, 2, 2, 2)
    assert issubclass(BatchSizeError, ConfigError)


def test_one_process_is_told_how_to_start_more() -> None:
    with pytest.raises(BatchSizeError, match=r"4 data-parallel ranks \(deepspeed --num_gpus 4 train.py\)"):
        resolve_batch(8, 2, 1, 1)


def test_the_error_names_ranks_and_sizes_that_work() -> None:
    with pytest.raises(BatchSizeError) as error:
        resolve_batch(8, 2, 4, 2)
    assert "2 x 4 x 2 = 16" in str(error.value)
    assert "train_batch_size 16" in str(error.value)
    assert "gradient_accumulation_steps 2" in str(error.value)
    assert "1 data-parallel rank" in str(error.value)
