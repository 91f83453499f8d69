from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import Piece, open_checkpoint
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.errors import ArgumentError, CheckpointError
from tests.support.checkpoints import write_checkpoint
from tests.unit.checkpoint.faulty_storage import FullDisk, NoExchange, Refusing, killed_at
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads, use_thread_ranks


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether writes reach the platter makes no difference to what a process sees; the order of it has its own test."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _save(folder: Path, tag: str = "t", value: float = 1.0, **options: Any) -> Path:
    pieces = [Piece.whole("module/w", torch.full((5,), value)), Piece.whole("master/w", torch.full((5,), value).double())]
    return write_checkpoint(folder, tag, pieces, {"step": int(value)}, {"mine": value}, rank=0, world_size=1, **options)


def _value(folder: Path, tag: str | None = None) -> float:
    """The value of a whole, consistent checkpoint."""
    reader = open_checkpoint(folder, tag)
    value = float(reader.read("module/w")[0])
    assert reader.read("module/w").tolist() == reader.read("master/w").tolist() == [value] * 5
    assert reader.state["step"] == reader.client_state()["mine"] == value
    return value


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _text_of_error(body: Callable[[], object]) -> str | None:
    try:
        body()
    except CheckpointError as error:
        return str(error)
    return None


def _save_on_ranks(
    folder: Path,
    world_size: int,
    pieces: Callable[[int], list[Piece]],
    storage: Callable[[int], Storage] | None = None,
    **options: Any,
) -> list[Any]:
    def body(ranks: ThreadRanks) -> Path:
        own = storage(ranks.rank) if storage else None
        return write_checkpoint(
            folder,
            "t",
            pieces(ranks.rank),
            {},
            {},
            rank=ranks.rank,
            world_size=world_size,
            group=ranks,
            storage=own,
            **options,
        )

    return run_threads(world_size, body)


def _thirds(rank: int) -> list[Piece]:
    return [Piece("w", (9,), 3 * rank, torch.arange(3.0) + 3 * rank)]


def test_a_checkpoint_holds_one_shard_per_writing_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)
    paths = _save_on_ranks(tmp_path, 4, lambda rank: _thirds(rank) if rank < 3 else [])
    assert paths == [tmp_path / "t"] * 4
    shards = [f"rank_0000{rank}.safetensors" for rank in range(3)]
    assert _names(tmp_path / "t") == ["client_state.json", "manifest.json", *shards]
    assert _names(tmp_path) == ["latest", "t"]
    assert open_checkpoint(tmp_path).read("w").tolist() == list(range(9))


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this order a power cut could leave a renamed folder with empty files."""
    done: list[str] = []
    replace = os.replace

    def record_rename(source: Path, target: Path) -> None:
        done.append(f"rename {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: done.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    monkeypatch.setattr(os, "replace", record_rename)
    _save(tmp_path)
    told = [re.sub(r"\.(\w+)\.writing-.*", r"\1 (aside)", line) for line in done]
    assert told == [
        "sync rank_00000.safetensors",
        "sync client_state.json",
        "sync manifest.json",
        "sync t (aside)",
        "rename t",
        f"sync {tmp_path.name}",
        "sync latest (aside)",
        "rename latest",
        f"sync {tmp_path.name}",
    ]


def test_latest_stays_where_it_is_when_so_asked(tmp_path: Path) -> None:
    _save(tmp_path, "one", 1.0)
    _save(tmp_path, "two", 2.0, save_latest=False)
    assert (tmp_path / "latest").read_text() == "one"
    assert _value(tmp_path, "two") == 2.0


def test_saving_over_a_tag_replaces_it(tmp_path: Path) -> None:
    _save(tmp_path, value=1.0)
    _save(tmp_path, value=2.0)
    assert _value(tmp_path) == 2.0
    assert _names(tmp_path) == ["latest", "t"]


def test_a_half_written_folder_of_another_program_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "t" / "optim").mkdir(parents=True)
    (tmp_path / "t" / "mp_rank_00_model_states.pt").write_bytes(b"half")
    _save(tmp_path)
    assert _value(tmp_path) == 1.0
    assert (tmp_path / "t" / "mp_rank_00_model_states.pt").read_bytes() == b"half"


def test_a_tag_may_be_a_path_and_its_left_overs_are_cleaned_there(tmp_path: Path) -> None:
    left_over = tmp_path / "epoch1" / ".step5.writing-0123456789abcdef"
    left_over.mkdir(parents=True)
    assert _save(tmp_path, "epoch1/step5") == tmp_path / "epoch1" / "step5"
    assert not left_over.exists()
    assert _value(tmp_path) == 1.0


def test_a_bad_tag_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"tag='\.\./t'"):
        _save(tmp_path / "saves", "../t")
    assert _names(tmp_path) == []


def test_a_tag_of_the_longest_kind_is_saved_over_even_where_names_cannot_be_exchanged(tmp_path: Path) -> None:
    tag = "x" * 226
    for value in (1.0, 2.0):
        _save(tmp_path, tag, value, storage=NoExchange())
    assert _value(tmp_path) == 2.0
    with pytest.raises(ArgumentError, match="too long"):
        _save(tmp_path, tag + "x")


def test_a_file_in_place_of_the_folder_is_settled_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"A file stands where a folder is needed. Remove it, or give"):
        _save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_only_the_slice_of_a_view_is_written(tmp_path: Path) -> None:
    flat = torch.arange(1_000_000.0)
    write_checkpoint(tmp_path, "t", [Piece.whole("w", flat[7:11])], {}, {}, rank=0, world_size=1)
    assert (tmp_path / "t" / "rank_00000.safetensors").stat().st_size < 300
    assert open_checkpoint(tmp_path).read("w").tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([(0, 3), (4, 5)], "hole: nobody holds elements 3 to 4 of 9"),
        ([(0, 3), (2, 7)], "overlap: elements 2 to 3 of 9 are given twice"),
        ([(0, 3), (3, 5)], "hole: nobody holds elements 8 to 9 of 9"),
        ([(0, 3), (3, 7)], "has 9 elements, but the fragments reach to element 10"),
        ([(0, 9), (0, 9)], "overlap: elements 0 to 9 of 9 are given twice"),
        ([(0, 0), (0, 0)], "hole: nobody holds elements 0 to 9 of 9"),
    ],
    ids=str,
)
def test_pieces_that_do_not_cover_a_tensor_once_are_refused_on_all_ranks(
    spans: list[tuple[int, int]], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_thread_ranks(monkeypatch)
    errors = _save_on_ranks(tmp_path, 2, lambda rank: [Piece("opt/w", (9,), spans[rank][0], torch.ones(spans[rank][1]))])
    assert all(type(error) is CheckpointError and "'opt/w'" in str(error) and fault in str(error) for error in errors)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("other", [torch.ones(3).bfloat16(), torch.ones(3)], ids=["dtype", "shape"])
def test_ranks_that_describe_a_tensor_differently_are_told_apart(
    other: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_thread_ranks(monkeypatch)
    shape = (6,) if other.dtype != torch.float32 else (2, 3)
    pieces = [[Piece("w", (6,), 0, torch.ones(3))], [Piece("w", shape, 3, other)]]
    for error in _save_on_ranks(tmp_path, 2, lambda rank: pieces[rank]):
        assert "'w' is" in str(error)
        assert "on rank 1, but F32 [6] on rank 0" in str(error)


def test_an_empty_tensor_may_be_given_by_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)
    assert _save_on_ranks(tmp_path, 2, lambda rank: [Piece.whole("w", torch.empty(0, 3))]) == [tmp_path / "t"] * 2
    reader = open_checkpoint(tmp_path)
    assert reader.shape("w") == (0, 3)
    assert reader.read("w").tolist() == []


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, dtype=torch.complex128), "dtype torch.complex128"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
    ids=["complex128", "sparse", "meta"],
)
def test_tensors_without_a_place_in_the_format_are_refused_by_name_and_rank(
    tensor: torch.Tensor, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_thread_ranks(monkeypatch)
    errors = _save_on_ranks(tmp_path, 2, lambda rank: [Piece.whole("module/odd", tensor)] if rank else [])
    assert all("rank 1: tensor 'module/odd'" in str(error) and reason in str(error) for error in errors)


def test_client_state_without_a_plain_form_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)

    def body(ranks: ThreadRanks) -> Any:
        client = {"a": {"hook": print}} if ranks.rank == 0 else {}
        return write_checkpoint(tmp_path, "t", [], {}, client, rank=ranks.rank, world_size=2, group=ranks)

    errors = run_threads(2, body)
    assert all(type(error) is CheckpointError and "client_state['a']['hook']" in str(error) for error in errors)


def test_a_generator_of_pieces_that_fails_fails_the_save_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_thread_ranks(monkeypatch)

    def pieces(rank: int) -> Iterator[Piece]:
        yield from _thirds(rank)
        if rank == 1:
            raise KeyError("exp_avg")

    errors = _save_on_ranks(tmp_path, 3, pieces)  # type: ignore[arg-type]
    assert {str(error) for error in errors} == {"rank 1: KeyError: 'exp_avg'"}


@pytest.mark.parametrize("full", [0, 1, 2])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all_and_the_old_checkpoint_stays(
    full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, value=7.0)
    use_thread_ranks(monkeypatch)
    errors = _save_on_ranks(tmp_path, 3, _thirds, lambda rank: FullDisk(50 if rank == full else 10_000))
    texts = {str(error) for error in errors}
    assert all(type(error) is CheckpointError for error in errors)
    assert len(texts) == 1
    assert f"rank {full}: could not write rank_0000{full}.safetensors" in texts.pop()
    assert _value(tmp_path) == 7.0
    assert _names(tmp_path) == ["latest", "t"]


@pytest.mark.parametrize("nbytes", range(0, 3000, 100))
def test_wherever_the_disk_fills_up_the_old_checkpoint_or_the_new_one_is_whole(nbytes: int, tmp_path: Path) -> None:
    _save(tmp_path, value=1.0)
    text = _text_of_error(lambda: _save(tmp_path, value=2.0, storage=FullDisk(nbytes)))
    assert text is None or "Free space" in text
    is_new = text is None or "The new checkpoint is whole" in text  # the disk may be full just for `latest`
    assert _value(tmp_path) == (2.0 if is_new else 1.0)
    assert _names(tmp_path / "t") == ["client_state.json", "manifest.json", "rank_00000.safetensors"]


@pytest.mark.parametrize(
    ("operation", "path", "expected"),
    [
        ("make_folder", "writing", 1.0),
        ("create", "rank_00000.safetensors", 1.0),
        ("create", "client_state.json", 1.0),
        ("create", "manifest.json", 1.0),
        ("sync_folder", "writing", 1.0),
        ("exchange", "writing", 1.0),
        ("sync_folder", "saves", 2.0),
        ("create", "latest", 2.0),
        ("rename", "latest", 2.0),
    ],
)
def test_a_refused_operation_is_an_error_that_leaves_one_whole_checkpoint(
    operation: str, path: str, expected: float, tmp_path: Path
) -> None:
    saves = tmp_path / "saves"
    _save(saves, value=1.0)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        _save(saves, value=2.0, storage=Refusing(lambda name, where: name == operation and path in where.name))
    assert ("The new checkpoint is whole" in str(caught.value)) == (expected == 2.0)
    assert _value(saves) == expected


def test_a_folder_that_another_rank_does_not_see_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)
    unseen = Refusing(lambda name, path: name == "create", errno.ENOENT)
    errors = _save_on_ranks(tmp_path, 3, _thirds, lambda rank: unseen if rank == 2 else Storage())
    assert all("rank 2: " in str(error) and "that all ranks see" in str(error) for error in errors)


def test_a_save_interrupted_at_the_commit_keeps_the_users_files(tmp_path: Path) -> None:
    class _Interrupted(Storage):
        def exchange(self, one: Path, other: Path) -> bool:
            super().exchange(one, other)
            raise KeyboardInterrupt

    _save(tmp_path, value=1.0)
    (tmp_path / "t" / "notes.txt").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path, value=2.0, storage=_Interrupted())
    assert _value(tmp_path) == 2.0
    assert (tmp_path / "t" / "notes.txt").read_text() == "mine"
    assert _names(tmp_path) == ["latest", "t"]


def _is_killed(body: Callable[[], object]) -> bool:
    """Run `body` in a forked process; whether that process was ended by its storage."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("base", [Storage, NoExchange], ids=["exchange", "two renames"])
@pytest.mark.parametrize("tag", ["t", "u"], ids=["same tag", "new tag"])
def test_killed_at_any_operation_the_next_load_finds_a_whole_checkpoint_and_the_next_save_works(
    tag: str, base: type[Storage], tmp_path: Path
) -> None:
    operation, killed = 0, True
    while killed:
        saves = tmp_path / f"{operation}"
        _save(saves, "t", 1.0)
        killed = _is_killed(lambda: _save(saves, tag, 2.0, storage=killed_at(operation, base)))  # noqa: B023
        named = (saves / "latest").read_text()
        value = _value(saves)
        assert (named, value) in {("t", 1.0), (tag, 2.0)}
        assert killed or value == 2.0
        _save(saves, tag, 3.0)
        assert _value(saves) == 3.0
        assert _names(saves) == sorted({"latest", "t", tag})
        operation += 1
    assert operation > 25  # so many operations has a save: it was killed before each of them
