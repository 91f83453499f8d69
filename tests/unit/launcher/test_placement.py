from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.hostfile import ResourceError
from deepspeed.launcher.placement import place_of_rank, place_ranks


def test_the_second_host_of_two_gets_the_documented_variables() -> None:
    places = place_ranks({"worker-0": [0, 1], "worker-1": [0, 1]}, 1)
    assert [place.environment("10.0.0.1", 29501) for place in places] == [
        {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": "4",
            "LOCAL_SIZE": "2",
            "CROSS_RANK": "1",
            "CROSS_SIZE": "2",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29501",
        }
        for rank, local_rank in (("2", "0"), ("3", "1"))
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_each_rank_of_the_job_runs_on_exactly_one_host(sizes: list[int]) -> None:
    info = {f"w{i}": list(range(size)) for i, size in enumerate(sizes)}
    places = [place for node in range(len(sizes)) for place in place_ranks(info, node)]
    assert [place.rank for place in places] == list(range(sum(sizes)))
    assert all(place.local_rank < place.local_size == sizes[place.node_rank] for place in places)
    assert {place.world_size for place in places} == {sum(sizes)}


@pytest.mark.parametrize(("node_rank", "text"), [(2, "give 0 to 1"), (-1, "give 0 to 1"), (1, "'b' has no slots")])
def test_a_host_that_is_not_there_or_has_no_slots_is_refused(node_rank: int, text: str) -> None:
    with pytest.raises(ResourceError, match=text):
        place_ranks({"a": [0], "b": []}, node_rank)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_the_place_of_each_rank_is_the_one_among_those_of_its_host(sizes: list[int]) -> None:
    world_info = {f"host{i}": list(range(size)) for i, size in enumerate(sizes)}
    places = [place for i in range(len(sizes)) for place in place_ranks(world_info, i)]
    assert [place_of_rank(world_info, rank) for rank in range(sum(sizes))] == places
    with pytest.raises(ResourceError, match=f"the job has {sum(sizes)} ranks"):
        place_of_rank(world_info, sum(sizes))
