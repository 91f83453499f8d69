from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

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
