from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint import CheckpointSource, Piece, open_checkpoint
from deepspeed.checkpoint.disk.manifest import CutEntry, find_cover_fault
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.description import Description
from deepspeed.checkpoint.save.node_cover import entries_for, join
from deepspeed.checkpoint.save.node_load import open_on_nodes
from deepspeed.checkpoint.save.node_merge import merge_nodes
from deepspeed.checkpoint.save.node_save import start_on_nodes
from deepspeed.checkpoint.save.nodes import Nodes, NodeShares, nodes_of
from deepspeed.checkpoint.save.writer import Content
from deepspeed.checkpoint.tools import main
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from tests.unit.checkpoint.faulty_storage import Refusing
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads
from tests.unit.checkpoint.tool_checkpoints import STATE

_TWO_BY_TWO = Nodes((0, 0, 1, 1), ("a", "b"))
_NUMEL = 12


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _content(rank: int, nodes: Nodes, value: float) -> Content:
    """A weight that all ranks hold alike, each node writing all of it, and one of which each rank holds its own part."""
    world_size = len(nodes.node_of)
    share = NodeShares(rank, nodes).of(range(world_size))
    assert share.part is not None
    size = _NUMEL // share.parts
    replicated = (torch.arange(float(_NUMEL)) + value)[share.part * size : (share.part + 1) * size]
    own = torch.full((3,), value + rank)
    pieces = [
        Piece("module/same", (_NUMEL,), share.part * size, replicated),
        Piece("master/own", (3 * world_size,), 3 * rank, own),
    ]
    client_state = {"value": value, "tensor": torch.tensor([value])} if rank == 0 else {"not": "this"}
    state = {**STATE, "global_steps": int(value), "dp_world_size": world_size}
    return Content(pieces, lambda: state, lambda: client_state, lambda: {"rank": rank})


def _save(
    root: Path,
    value: float,
    nodes: Nodes = _TWO_BY_TWO,
    tag: str = "t",
    storage: Callable[[int], Storage | None] = lambda rank: None,
) -> list[Any]:
    """Save on every rank, into a folder for each node; what each rank got."""

    def body(ranks: ThreadRanks) -> Path:
        folder = root / f"node{nodes.node_of[ranks.rank]}"
        content = _content(ranks.rank, nodes, value)
        return start_on_nodes(folder, tag, content, ranks, nodes=nodes, storage=storage(ranks.rank)).finish(ranks).folder

    return run_threads(len(nodes.node_of), body)


def _load(
    root: Path, nodes: Nodes = _TWO_BY_TWO, tag: str | None = None, body: Callable[..., Any] | None = None
) -> list[Any]:
    """Open on every rank; what `body(source, rank)` gives there, or the error."""

    def run(ranks: ThreadRanks) -> Any:
        source = open_on_nodes(root / f"node{nodes.node_of[ranks.rank]}", tag, ranks, nodes)
        return source if body is None or source is None else body(source, ranks.rank)

    return run_threads(len(nodes.node_of), run)


def _own_part(source: CheckpointSource, rank: int) -> list[Any]:
    """All that a rank needs to go on."""
    return [
        source.read("module/same").tolist(),
        source.read("master/own", 3 * rank, 3).tolist(),
        source.rank_state(rank),
        source.client_state()["value"],
        source.client_state()["tensor"].tolist(),
        source.state["global_steps"],
    ]


def _expected(rank: int, value: float) -> list[Any]:
    same = [number + value for number in range(_NUMEL)]
    return [same, [value + rank] * 3, {"rank": rank}, value, [value], int(value)]


def _is_value(found: list[Any], value: float) -> bool:
    return found == [_expected(rank, value) for rank in range(len(found))]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _raise_all(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_ranks_of_one_machine_are_one_node_whatever_order_they_were_placed_in() -> None:
    assert nodes_of([("a", 0), ("a", 1), ("b", 0), ("b", 1)]) == _TWO_BY_TWO
    assert nodes_of([("a", 0), ("b", 0), ("a", 1), ("b", 1)]) == Nodes((0, 1, 0, 1), ("a", "b"))
    assert nodes_of([("a", 0), ("a", 0), ("a", 0)]) == Nodes((0, 1, 2), ("a", "a", "a"))


def test_every_node_writes_all_that_its_ranks_hold() -> None:
    nodes = Nodes((0, 0, 1, 0), ("a", "b"))
    assert [NodeShares(rank, nodes).of([0, 1, 2, 3]) for rank in range(4)] == [(3, 0), (3, 1), (1, 0), (3, 2)]
    assert NodeShares(3, nodes).of([1, 2, 3]) == (2, 1)


_spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 10)), max_size=6)


@given(_spans, st.sets(st.integers(0, 3)))
def test_a_node_sees_every_element_once_and_its_own_where_it_has_it(
    spans: list[tuple[int, int, int]], ranks_here: set[int]
) -> None:
    numel = 20
    whole: list[Description] = [("w", [numel], "F32", 0, numel, None)]
    pieces: list[list[Description]] = [
        [("w", [numel], "F32", start, length, None) for rank, start, length in spans if rank == own] for own in range(4)
    ]
    pieces[3] += whole
    fragments = entries_for(join(pieces), frozenset(ranks_here))["w"].fragments
    assert find_cover_fault(numel, [(each.start, each.length) for each in fragments]) is None
    here = {n for rank, start, length in [*spans, (3, 0, numel)] if rank in ranks_here for n in range(start, start + length)}
    files_here = {f"rank_{rank:05d}.safetensors" for rank in ranks_here}
    for each in fragments:
        for element in range(each.start, each.start + each.length):
            assert (each.file in files_here) is (element in here)
        start_of_stored = each.start - each.offset
        assert each.key == ("w" if each.key == "w" else f"w@{start_of_stored}")


def test_an_element_that_nobody_writes_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="nobody holds elements 3 to 5"):
        join([[("w", [9], "F32", 0, 3, None)], [("w", [9], "F32", 5, 4, None)]])
    with pytest.raises(CheckpointError, match="All ranks must describe the same"):
        join([[("w", [9], "F32", 0, 9, None)], [("w", [9], "BF16", 0, 9, None)]])


def test_a_node_reads_the_copies_of_parts_that_it_has() -> None:
    copies = CutEntry(dim=0, parts=[[[0, 4]], [[0, 4]]]).model_dump()
    joined = join([[("w", [4], "F32", start, 4, copies)] for start in (0, 4)])
    entry = entries_for(joined, frozenset([1]))["w"]
    assert entry.stored_numel == 8
    assert [(each.start, each.length, each.file, each.key) for each in entry.fragments] == [
        (0, 4, "rank_00000.safetensors", "w@0"),
        (4, 4, "rank_00001.safetensors", "w@4"),
    ]
    with pytest.raises(CheckpointError, match="nobody holds elements 4 to 8 of 8"):
        join([[("w", [4], "F32", 0, 4, copies)]])


def test_every_node_has_its_own_files_and_what_its_ranks_need(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 7.0))
    described = ["client_state.json", "manifest.json"]
    assert _names(tmp_path / "node0" / "t") == [*described, "rank_00000.safetensors", "rank_00001.safetensors"]
    assert _names(tmp_path / "node1" / "t") == [*described, "rank_00002.safetensors", "rank_00003.safetensors"]
    assert _names(tmp_path / "node1") == ["latest", "t"]
    assert _is_value(_raise_all(_load(tmp_path, body=_own_part)), 7.0)


def test_ranks_placed_in_turns_save_and_load_too(tmp_path: Path) -> None:
    nodes = Nodes((0, 1, 0), ("a", "b"))
    _raise_all(_save(tmp_path, 7.0, nodes))
    assert _is_value(_raise_all(_load(tmp_path, nodes, body=_own_part)), 7.0)


def test_what_another_node_has_is_an_error_with_file_node_and_cure(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 7.0))
    found = _load(tmp_path, body=lambda source, rank: source.read("master/own"))
    for rank, error in enumerate(found):
        assert isinstance(error, CheckpointError)
        other = "rank_00002.safetensors, rank_00003.safetensors on node 1 (b)"
        assert (other if rank < 2 else "rank_00000.safetensors, rank_00001.safetensors on node 0 (a)") in str(error)
        assert "deepspeed-checkpoint merge" in str(error)


def test_the_folders_put_together_are_an_ordinary_checkpoint(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 7.0))
    merge_nodes([tmp_path / "node1" / "t", tmp_path / "node0" / "t"], tmp_path / "all", "t")
    source = open_checkpoint(tmp_path / "all")
    assert source.read("master/own").tolist() == [7.0] * 3 + [8.0] * 3 + [9.0] * 3 + [10.0] * 3
    assert [_own_part(source, rank) for rank in range(4)] == [_expected(rank, 7.0) for rank in range(4)]
    with pytest.raises(ArgumentError, match="nothing to put together"):
        merge_nodes([tmp_path / "all" / "t"], tmp_path / "again", "t")


def test_files_copied_beside_each_other_serve_every_rank(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 7.0))
    for file in ("rank_00000.safetensors", "rank_00001.safetensors"):
        (tmp_path / "node1" / "t" / file).write_bytes((tmp_path / "node0" / "t" / file).read_bytes())
    found = _load(tmp_path, body=lambda source, rank: source.read("master/own").numel())
    assert found[2:] == [12, 12]


def test_merging_without_a_nodes_folder_says_which(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 7.0))
    with pytest.raises(CheckpointError, match=r"rank_00002\.safetensors, rank_00003\.safetensors.*node 1 \(b\)"):
        merge_nodes([tmp_path / "node0" / "t"], tmp_path / "all", "t")
    _raise_all(_save(tmp_path / "other", 8.0))
    with pytest.raises(ArgumentError, match="is of another save"):
        merge_nodes([tmp_path / "node0" / "t", tmp_path / "other" / "node1" / "t"], tmp_path / "all", "t")
    assert not (tmp_path / "all").exists()


def test_damage_on_one_node_is_settled_on_all(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 7.0))
    path = tmp_path / "node1" / "t" / "rank_00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for error in _load(tmp_path):
        assert isinstance(error, CheckpointDamagedError)
        assert "rank_00003.safetensors differs" in str(error)


@pytest.mark.parametrize("operation", ["make_folder", "create", "sync_folder", "exchange"])
def test_a_refusal_on_one_node_leaves_the_old_checkpoint_on_all(operation: str, tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 1.0))
    faulty = Refusing(lambda name, path: name == operation)
    found = _save(tmp_path, 2.0, storage=lambda rank: faulty if rank == 2 else None)
    assert all(isinstance(error, CheckpointError) and "rank 2: " in str(error) for error in found)
    assert [_names(tmp_path / node) for node in ("node0", "node1")] == [["latest", "t"]] * 2
    assert _is_value(_raise_all(_load(tmp_path, body=_own_part)), 1.0)


def test_a_refused_rename_of_a_new_tag_leaves_no_tag_on_any_node(tmp_path: Path) -> None:
    faulty = Refusing(lambda name, path: name == "rename" and "writing" in path.name)
    found = _save(tmp_path, 1.0, storage=lambda rank: faulty if rank == 2 else None)
    assert all(isinstance(error, CheckpointError) for error in found)
    assert [_names(tmp_path / node) for node in ("node0", "node1")] == [[], []]


def test_a_kill_between_the_renames_loads_what_all_nodes_have(tmp_path: Path) -> None:
    """Node 0 has renamed and has the old folder aside; node 1 has not, and has the new one aside."""
    _raise_all(_save(tmp_path / "old", 1.0))
    _raise_all(_save(tmp_path / "new", 2.0))
    aside = ".t.writing-0123456789abcdef"
    for node, under_the_tag, beside in (("node0", "new", "old"), ("node1", "old", "new")):
        (tmp_path / "mixed" / node).mkdir(parents=True)
        (tmp_path / under_the_tag / node / "t").rename(tmp_path / "mixed" / node / "t")
        (tmp_path / beside / node / "t").rename(tmp_path / "mixed" / node / aside)
        (tmp_path / "mixed" / node / "latest").write_text("t")
    found = _raise_all(_load(tmp_path / "mixed", body=_own_part))
    assert _is_value(found, 1.0) or _is_value(found, 2.0)
    _raise_all(_save(tmp_path / "mixed", 3.0))
    assert _is_value(_raise_all(_load(tmp_path / "mixed", body=_own_part)), 3.0)
    assert [_names(tmp_path / "mixed" / node) for node in ("node0", "node1")] == [["latest", "t"]] * 2


def test_a_kill_before_the_other_node_has_renamed_a_new_tag_loads_the_tag_before(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 1.0, tag="one"))
    _raise_all(_save(tmp_path, 2.0, tag="two"))
    (tmp_path / "node1" / "two").rename(tmp_path / "node1" / "lost")
    (tmp_path / "node0" / "latest").write_text("two")
    (tmp_path / "node1" / "latest").write_text("one")
    assert _is_value(_raise_all(_load(tmp_path, body=_own_part)), 1.0)


def test_a_tag_that_is_not_on_every_node_is_an_error_that_tells_what_is_where(tmp_path: Path) -> None:
    _raise_all(_save(tmp_path, 1.0, tag="one"))
    (tmp_path / "node1" / "one").rename(tmp_path / "node1" / "two")
    for error in _load(tmp_path, tag="one"):
        assert isinstance(error, CheckpointNotFoundError)
        assert "node 0 (a): Tags there: 'one'" in str(error)
        assert "node 1 (b): Tags there: 'two'" in str(error)


def test_without_a_latest_on_any_node_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert _load(tmp_path) == [None] * 4


def test_a_checkpoint_on_a_disk_that_all_nodes_see_loads_too(tmp_path: Path) -> None:
    nodes = Nodes((0, 1), ("a", "b"))
    _raise_all(_save(tmp_path / "parts", 7.0, nodes))
    merge_nodes([tmp_path / "parts" / f"node{node}" / "t" for node in (0, 1)], tmp_path / "node0", "t")
    (tmp_path / "node1").symlink_to("node0")
    assert _is_value(_raise_all(_load(tmp_path, nodes, body=_own_part)), 7.0)


def test_the_command_merges_and_the_other_commands_know_a_nodes_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _raise_all(_save(tmp_path, 7.0))
    nodes = [str(tmp_path / "node0"), str(tmp_path / "node1")]
    assert main(["verify", nodes[0]]) == 0
    assert "not checked here: rank_00002.safetensors, rank_00003.safetensors" in capsys.readouterr().out
    assert main(["diff", *(f"{node}/t" for node in nodes), "--parameters-only"]) == 1
    assert "deepspeed-checkpoint merge" in capsys.readouterr().err
    assert main(["merge", *nodes, str(tmp_path / "all")]) == 0
    assert main(["verify", str(tmp_path / "all")]) == 0
    assert open_checkpoint(tmp_path / "all").manifest.node is None  # type: ignore[attr-defined]


def test_ranks_of_one_node_that_see_different_folders_are_told_so(tmp_path: Path) -> None:
    def body(ranks: ThreadRanks) -> object:
        folder = tmp_path / f"rank{ranks.rank}"
        content = _content(ranks.rank, _TWO_BY_TWO, 1.0)
        return start_on_nodes(folder, "t", content, ranks, nodes=_TWO_BY_TWO).finish(ranks)

    for error in run_threads(4, body):
        assert isinstance(error, CheckpointError)
        assert "which rank 2 made, is not there. All ranks of a node must see the same save_dir" in str(error)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
