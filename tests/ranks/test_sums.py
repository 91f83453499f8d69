"""Sums of tensors that layers wait for, through shared memory and through the back end, against the sum of all terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.comm import parts, sums
from deepspeed.comm.recorder import RECORDER
from deepspeed.errors import CommError
from tests.support.ranks import run_ranks

SHAPES = [(0,), (1,), (7,), (3, 5), (1100,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def _term(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**40), 2**40, shape, generator=generator)


def _summed(rank: int, world_size: int, is_shared: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(sum, largest) for each shape and dtype, blocks of 1 KiB."""
    sums._BLOCK_NBYTES = 1024
    if not is_shared:
        parts.SharedOrBackendParts.is_shared = lambda *_: False  # type: ignore[method-assign]
    found = []
    for shape in SHAPES:
        for dtype in DTYPES:
            total, largest = (_term(rank, shape, dtype) for _ in range(2))
            work = sums.start_all_reduce(total)
            torch.ones(8, 8) @ torch.ones(8, 8)
            work.wait()
            sums.all_reduce_now(largest, None, comm.ReduceOp.MAX)
            found.append((total, largest))
    return found


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_gets_the_sum_and_the_largest_with_the_same_bits(world_size: int, is_shared: bool) -> None:
    by_rank = run_ranks(_summed, world_size, is_shared)
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for (shape, dtype), *found in zip(kinds, *by_rank, strict=True):
        terms = torch.stack([_term(rank, shape, dtype) for rank in range(world_size)])
        wide = terms.double() if dtype.is_floating_point else terms
        # Each of the world_size - 1 additions rounds a partial sum, which is at most the sum of magnitudes.
        bound = 0.0 if dtype is torch.int64 else world_size * torch.finfo(dtype).eps
        for total, largest in found:
            assert torch.equal(total, found[0][0])
            assert torch.all((total.to(wide.dtype) - wide.sum(0)).abs() <= bound * wide.abs().sum(0))
            assert torch.equal(largest, terms.amax(0) if terms.numel() else terms[0])


def _interleaved(rank: int, world_size: int) -> list[float]:
    """Sums, gathers of the back end and sums of another group's kind, one after another, many times."""
    found = []
    for step in range(200):
        x = torch.full((300,), float(rank + step))
        sums.all_reduce_now(x)
        if step % 50 == 0:
            comm.barrier()
        found.append(float(x.sum()) / 300)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_sums_one_after_another_do_not_mix(world_size: int) -> None:
    expected = [sum(rank + step for rank in range(world_size)) for step in range(200)]
    assert run_ranks(_interleaved, world_size) == [expected] * world_size


def _sizes_differ(rank: int, world_size: int) -> str:
    sums.all_reduce_now(torch.ones(512))
    with pytest.raises(CommError) as raised:
        sums.all_reduce_now(torch.ones(100 + rank))
    return str(raised.value)


def test_tensors_of_other_sizes_are_refused_on_every_rank() -> None:
    for text in run_ranks(_sizes_differ, 2):
        assert "All ranks need tensors of the same sizes" in text


def _last_blocks_differ(rank: int, world_size: int) -> str:
    sums._BLOCK_NBYTES = 1024
    with pytest.raises(CommError) as raised:
        sums.all_reduce_now(torch.ones(256 + 100 + 50 * rank))
    return str(raised.value)


def _dtypes_differ(rank: int, world_size: int) -> str:
    with pytest.raises(CommError) as raised:
        sums.all_reduce_now(torch.ones(100, dtype=torch.float16 if rank else torch.bfloat16))
    return str(raised.value)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("function", [_last_blocks_differ, _dtypes_differ])
def test_what_differs_in_the_last_block_or_in_dtype_alone_is_refused_too(function: Any, world_size: int) -> None:
    for text in run_ranks(function, world_size):
        assert "All ranks need tensors of the same sizes and dtypes" in text


def _two_at_once(rank: int, world_size: int, numel: int) -> list[str]:
    """A second sum, of `numel` elements, before the first was waited for; then the first's wait."""
    work = sums.start_all_reduce(torch.ones(16))
    texts = []
    for go_on in (lambda: sums.start_all_reduce(torch.ones(numel)), work.wait):
        with pytest.raises(CommError) as raised:
            go_on()
        texts.append(str(raised.value))
    return texts


@pytest.mark.parametrize("numel", [16, 5000], ids=["the same memory", "memory that would grow"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_that_begins_before_the_last_one_is_over_is_refused(world_size: int, numel: int) -> None:
    for texts in run_ranks(_two_at_once, world_size, numel):
        assert all("was begun and is not over" in text for text in texts)


def _stopped_half_way(rank: int, world_size: int, is_kept: bool) -> list[float | str]:
    """Rank 0 raises between start and wait of the third sum, catches that, and goes on."""
    found: list[float | str] = []
    kept = []
    for step in range(5):
        x = torch.full((16,), 10.0 * step + rank)
        try:
            work = sums.start_all_reduce(x)
            kept.append(work) if is_kept else None
            if rank == 0 and step == 2:
                del work
                raise ValueError("between")
            work.wait()
            found.append(float(x[0]))
        except (ValueError, CommError) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_after_an_exception_between_start_and_wait_there_are_errors_and_no_wrong_sums(
    world_size: int, is_kept: bool
) -> None:
    right = [sum(10.0 * step + rank for rank in range(world_size)) for step in range(5)]
    first, *others = run_ranks(_stopped_half_way, world_size, is_kept)
    assert first == [*right[:2], "ValueError", "CommError", "CommError"]
    for found in others:  # of two ranks the other one had all terms of the third sum
        assert found[:2] == right[:2]
        assert found[2] in (right[2], "CommError")
        assert found[3:] == ["CommError"] * 2


def _recorded(rank: int, world_size: int) -> Any:
    sums.all_reduce_now(torch.ones(256))  # shared memory is agreed on
    comm.configure(enabled=True, prof_all=True, verbose=False)
    sums.all_reduce_now(torch.ones(256))
    return {name: {nbytes: entry[0] for nbytes, entry in sizes.items()} for name, sizes in RECORDER.comms_dict.items()}


def test_the_comms_log_has_it_as_an_all_reduce() -> None:
    assert run_ranks(_recorded, 2) == [{"all_reduce": {1024: 1}}] * 2


def _compiled(rank: int, world_size: int) -> list[float]:
    def scaled_sum(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        comm.all_reduce(y)
        sums.all_reduce_now(y)
        return y + 1

    torch.compile(scaled_sum, backend="eager")(torch.ones(2))  # the compiler is loaded, and the function traced
    comm.barrier()
    whole: list[float] = torch.compile(scaled_sum, backend="aot_eager")(torch.full((2,), float(rank + 1))).tolist()
    return whole


def test_collectives_inside_a_compiled_function_run_as_they_are() -> None:
    assert run_ranks(_compiled, 2) == [[13.0, 13.0]] * 2
