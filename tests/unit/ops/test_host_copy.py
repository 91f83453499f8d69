from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.ops.host_copy import copy_host, copy_host_twin
from deepspeed.ops.native import library


@pytest.mark.parametrize("copy", [copy_host, copy_host_twin])
@given(sizes=st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 80)), min_size=1, max_size=5))
def test_every_byte_arrives_and_none_beside_it_changes(copy, sizes: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    sources = [torch.randint(0, 256, (n + shift,), dtype=torch.uint8, generator=generator)[shift:] for n, shift in sizes]
    places = [torch.full((n + 2 * shift + 2,), 7, dtype=torch.uint8) for n, shift in sizes]
    copy([(place[s + 1 : s + 1 + n], source) for place, source, (n, s) in zip(places, sources, sizes, strict=True)])
    for place, source, (n, shift) in zip(places, sources, sizes, strict=True):
        assert torch.equal(place[shift + 1 : shift + 1 + n], source)
        assert place[: shift + 1].eq(7).all()
        assert place[shift + 1 + n :].eq(7).all()


def test_what_is_not_contiguous_arrives_in_its_order() -> None:
    turned, place = torch.arange(24.0).view(4, 6).t(), torch.empty(6, 4)
    copy_host([(place, turned)])
    assert torch.equal(place, turned)


def test_several_threads_may_copy_at_once_each_on_several_threads() -> None:
    sources = [torch.randn(3_000_000) for _ in range(3)]
    places = [torch.empty(3_000_000) for _ in range(3)]
    before, failed = torch.get_num_threads(), []

    def go(n: int) -> None:
        torch.set_num_threads(2)
        for _ in range(5):
            places[n].zero_()
            copy_host([(places[n], sources[n])])
            if not torch.equal(places[n], sources[n]):
                failed.append(n)

    threads = [threading.Thread(target=go, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    assert not failed


@pytest.mark.skipif(library() is None, reason="needs the native library, which this installation lacks")
def test_a_forked_process_copies_with_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    source, place = torch.randn(3_000_000), torch.empty(3_000_000)
    copy_host([(place, source)])
    place.zero_()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        copy_host([(place, source)])
        os._exit(0 if (place.numpy() == source.numpy()).all() else 1)  # torch's own threads do not survive a fork
    assert os.waitpid(child, 0)[1] == 0
    torch.set_num_threads(before)


def test_a_call_that_needs_more_threads_than_those_before_is_done_when_it_returns() -> None:
    before, failed = torch.get_num_threads(), []
    torch.set_num_threads(8)
    sources = [torch.full((span << 20,), float(span)) for span in (2, 5, 9)]  # spans of 4 MiB: 2, 5 and 9 threads could work
    places = [torch.empty_like(source) for source in sources]

    def go() -> None:  # a thread of its own begins without workers
        for place, source in zip(places, sources, strict=True):
            place.zero_()
            copy_host([(place, source)])
            if not torch.equal(place, source):
                failed.append(source.numel())

    for _ in range(20):
        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
    torch.set_num_threads(before)
    assert not failed
