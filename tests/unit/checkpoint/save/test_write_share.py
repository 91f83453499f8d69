from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.save.nodes import Nodes, NodeShares
from deepspeed.checkpoint.save.write_share import WriteShares, own_place


@given(places=st.lists(st.sampled_from("abc"), min_size=1, max_size=9), units=st.booleans())
def test_each_part_has_one_writer_and_each_place_has_one(places: list[str], units: bool) -> None:
    ranks = range(len(places))
    table = dict(enumerate(places)) if units else None
    shares = [WriteShares(rank, table).of(ranks) for rank in ranks]
    writers = [rank for rank in ranks if shares[rank].part is not None]
    assert [shares[rank].part for rank in writers] == list(range(shares[0].parts))
    assert len({share.parts for share in shares}) == 1
    assert [places[rank] for rank in writers] == (list(dict.fromkeys(places)) if units else places)


def test_only_the_ranks_that_hold_the_same_share_it() -> None:
    places = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert WriteShares(2, places).of((0, 2)) == (2, 1)
    assert WriteShares(3, places).of((2, 3)) == (1, None)


def test_a_process_knows_its_machine_and_its_socket(tmp_path: Path) -> None:
    machine = own_place("MACHINE")
    assert machine
    assert own_place("SOCKET", tmp_path) == f"{machine} socket 0"
    for cpu in range(512):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("1\n")
    assert own_place("SOCKET", tmp_path) == f"{machine} socket 1"


@given(first=st.integers(1, 4), second=st.integers(1, 4), places=st.lists(st.sampled_from("abc"), min_size=16, max_size=16))
def test_what_two_axes_hold_alike_has_one_writer_for_each_share(first: int, second: int, places: list[str]) -> None:
    ranks = range(first * second)  # the second axis is the faster one
    for table in (None, dict(enumerate(places))):
        shares = []
        for rank in ranks:
            own = WriteShares(rank, table)
            column = [other for other in ranks if other % second == rank % second]
            shares.append(own.of(column, [other for other in ranks if other // second == rank // second]))
        writers = [share for share in shares if share.part is not None]
        assert len(writers) == (len(ranks) if table is None else len(set(places[: len(ranks)])))
        assert sorted(share.part for share in writers if share.part is not None) == list(range(writers[0].parts))
        assert {share.parts for share in writers} == {writers[0].parts}


@given(first=st.integers(1, 3), second=st.integers(1, 3), nodes=st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_with_a_disk_per_node_the_ranks_of_each_node_share_all_of_it(first: int, second: int, nodes: list[int]) -> None:
    ranks = range(first * second)
    told = Nodes(tuple(nodes[: len(ranks)]), ("a", "b", "c"))
    for node in set(told.node_of):
        here = [rank for rank in ranks if told.node_of[rank] == node]
        shares = [
            NodeShares(rank, told).of(
                [other for other in ranks if other % second == rank % second],
                [other for other in ranks if other // second == rank // second],
            )
            for rank in here
        ]
        assert shares == [(len(here), place) for place in range(len(here))]
