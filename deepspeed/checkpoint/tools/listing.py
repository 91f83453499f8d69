"""`deepspeed-checkpoint ls DIR`: the tags of a folder, and what interrupted saves left there.

Does not live here: what is inside a tag (`contents`). Called by `main`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from deepspeed.checkpoint.disk.folders import set_aside
from deepspeed.checkpoint.disk.layouts import Layout
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.disk.tags import find_tag, hint_for
from deepspeed.checkpoint.tools.facts import Facts, files_in, look_at
from deepspeed.checkpoint.tools.output import DAMAGED, FINE, Report, line, nbytes_text, table
from deepspeed.checkpoint.tools.places import Place, all_tags, latest_files
from deepspeed.errors import ArgumentError

__all__ = ["list_checkpoints"]

_TO_SECONDS = len("2026-01-31T12:00:00")


def list_checkpoints(load_dir: Path) -> Report:
    """Look at every tag of a folder.

    Raises:
        ArgumentError: there is no such folder.
    """
    if not load_dir.is_dir():
        raise ArgumentError(f"{load_dir} is no folder. Give the folder that holds the tags.")
    named_by = latest_files(load_dir)
    tags = [look_at(Place(load_dir, tag, find_tag(load_dir, tag))) for tag in all_tags(load_dir)]
    found = {facts.tag for facts in tags}
    dangling = {file: tag for file, tag in named_by.items() if tag not in found}
    left_overs = _left_overs(load_dir)
    record = {
        "folder": str(load_dir),
        "latest": named_by,
        "tags": [{**asdict(facts), "named_by": _namers(facts.tag, named_by)} for facts in tags],
        "left_overs": left_overs,
        "dangling": dangling,
    }
    is_fine = not dangling and not any(facts.fault for facts in tags)
    return Report(record, _tables(load_dir, tags, named_by, left_overs, dangling), FINE if is_fine else DAMAGED)


def _tables(
    load_dir: Path,
    tags: list[Facts],
    named_by: dict[str, str],
    left_overs: list[dict[str, Any]],
    dangling: dict[str, str],
) -> list[RenderableType]:
    columns = ("tag", "step", "layout", "size", "ranks", "ZeRO", "precision", "saved at (UTC)", "")
    rows = [_row(facts, named_by) for facts in tags]
    shown: list[RenderableType] = [table(str(load_dir), columns, rows, right=("step", "size", "ranks", "ZeRO"))]
    if not tags:
        shown = [line(f"{load_dir} holds no checkpoint. {hint_for(load_dir)}")]
    shown += [line(f"DAMAGED {facts.tag}: {facts.fault}", "red") for facts in tags if facts.fault]
    shown += [line(f"DAMAGED {file}: it names {tag!r}, which is not there.", "red") for file, tag in dangling.items()]
    if left_overs:
        rows_aside = [(part["name"], nbytes_text(part["nbytes"]), part["what"]) for part in left_overs]
        shown.append(table("Not checkpoints", ("name", "size", "what it is"), rows_aside, right=("size",)))
    return shown


def _row(facts: Facts, named_by: dict[str, str]) -> list[object]:
    time = facts.saved_at[:_TO_SECONDS].replace("T", " ") if facts.saved_at else None
    mark = ", ".join(_namers(facts.tag, named_by))
    size = nbytes_text(facts.nbytes)
    layout = "own" if facts.layout == Layout.OURS.value else facts.layout
    return [facts.tag, facts.step, layout, size, facts.ranks, facts.zero_stage, facts.precision, time, mark]


def _namers(tag: str, named_by: dict[str, str]) -> list[str]:
    return [file for file, named in named_by.items() if named == tag]


def _left_overs(load_dir: Path) -> list[dict[str, Any]]:
    """Names with a leading dot that saves make: of a live save, or left by one that was killed."""
    storage, found = Storage(), []
    for aside in set_aside(load_dir):
        lock = storage.lock(aside.path)
        if lock is not None:
            lock.release()
        if lock is None:
            what = f"a save of {aside.final.name!r} that is running"
        elif aside.kind == "writing":
            what = f"left by an interrupted save of {aside.final.name!r}; the next save removes it"
        elif aside.final.exists():
            what = f"the replaced {aside.final.name!r}; the next save removes it"
        else:
            what = f"the checkpoint {aside.final.name!r}, set aside; a load reads it, the next save puts it back"
        nbytes = sum(files_in(aside.path).values()) if aside.path.is_dir() else aside.path.stat().st_size
        found.append({"name": aside.path.name, "nbytes": nbytes, "is_running": lock is None, "what": what})
    return found
