"""`deepspeed-checkpoint verify DIR`: every file against its checksum, every fault named.

Our own manifest and the zip archives of the original both carry checksums. Lives here: the walk over tags and files. Does
not live here: the comparison of one file (`reader`, `original`). Called by `main`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import RenderableType

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.file_check import find_file_fault
from deepspeed.checkpoint.disk.layouts import Layout, layout_of
from deepspeed.checkpoint.disk.manifest import Manifest
from deepspeed.checkpoint.disk.tags import find_tag
from deepspeed.checkpoint.original.archive import check_archive
from deepspeed.checkpoint.tools.facts import files_in
from deepspeed.checkpoint.tools.output import DAMAGED, FINE, Report, line, nbytes_text
from deepspeed.checkpoint.tools.places import Place, all_tags, find_place, latest_files, open_place
from deepspeed.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, DeepSpeedError

__all__ = ["Verdict", "verify", "verify_tag"]

_ARCHIVE = ".pt"


@dataclass(frozen=True)
class Verdict:
    """What was found about one tag."""

    tag: str
    layout: str
    files: int
    nbytes: int
    faults: list[str]
    notes: list[str]
    """Worth knowing, and no damage."""


def verify(path: Path, tag: str | None, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Check one tag, or all tags of a folder and what `latest` names.

    Args:
        path: folder of tags, or that of one tag.
        tag: only this tag.
        progress: told the file that is read now.

    Raises:
        ArgumentError, CheckpointNotFoundError: nothing there to check.
    """
    faults: list[str] = []
    if tag is not None or not path.is_dir() or layout_of(path) is not None:
        places = [find_place(path, tag)]
    else:
        places = [Place(path, each, find_tag(path, each)) for each in all_tags(path)]
        there = {place.tag for place in places}
        faults = [
            f"{f}: it names {named!r}, which is not there" for f, named in latest_files(path).items() if named not in there
        ]
        if not places and not faults:
            raise CheckpointNotFoundError(f"{path} holds no checkpoint. Give the folder that holds the tags, or one tag's.")
    verdicts = [verify_tag(place, progress) for place in places]
    is_fine = not faults and not any(verdict.faults for verdict in verdicts)
    record = {"folder": str(path), "is_fine": is_fine, "faults": faults, "tags": [asdict(verdict) for verdict in verdicts]}
    return Report(
        record, [*_lines(verdicts), *(line(f"DAMAGED {fault}", "red") for fault in faults)], FINE if is_fine else DAMAGED
    )


def verify_tag(place: Place, progress: Callable[[str], None] = lambda text: None) -> Verdict:
    """Check every file of one tag."""
    layout = layout_of(place.folder)
    files = files_in(place.folder)
    name = "unknown" if layout is None else layout.value
    if layout is Layout.OURS:
        faults, notes = _check_ours(place.folder, files, progress)
    else:
        faults, notes = _check_others(place, files, progress), []
    return Verdict(place.tag, name, len(files), sum(files.values()), faults, notes)


def _check_ours(folder: Path, there: dict[str, int], progress: Callable[[str], None]) -> tuple[list[str], list[str]]:
    path = folder / names.MANIFEST_FILE
    try:
        manifest = Manifest.parse(path.read_bytes(), str(path))
    except (DeepSpeedError, OSError) as error:
        return [f"{names.MANIFEST_FILE}: {error} The other files cannot be checked without it."], []
    faults, elsewhere = [], []
    for file, entry in manifest.files.items():
        if file not in there and _is_of_another_node(manifest, file):
            elsewhere.append(file)
            continue
        progress(f"{folder.name}/{file}")
        if fault := find_file_fault(folder / file, entry):
            faults.append(fault)
    strangers = sorted(there.keys() - manifest.files.keys() - {names.MANIFEST_FILE})
    notes = [
        f"{file} is named like a file of the checkpoint but belongs to none"
        if names.is_own_file(file)
        else f"{file} is not a file of the checkpoint"
        for file in strangers
    ]
    if elsewhere:
        notes.append(f"saved by several nodes, and not checked here: {', '.join(elsewhere)}")
    return faults, notes


def _is_of_another_node(manifest: Manifest, file: str) -> bool:
    return manifest.node is not None and manifest.node.home_of(file) not in (None, manifest.node.number)


def _check_others(place: Place, there: Iterable[str], progress: Callable[[str], None]) -> list[str]:
    """First every archive by itself, so that one damaged file hides no other; then whether together they are complete."""
    faults = []
    for file in there:
        if file.endswith(_ARCHIVE):
            progress(f"{place.folder.name}/{file}")
            if fault := check_archive(place.folder / file):
                faults.append(f"{file}: {fault}")
    return faults or _lost_files(place)


def _lost_files(place: Place) -> list[str]:
    """What the files that are there show to be missing; state that cannot be given for other reasons is no damage."""
    try:
        source = open_place(place)
    except DeepSpeedError as error:
        return [str(error)]
    try:
        source.names(names.optimizer_tensor("", "")[:-1])
    except CheckpointDamagedError as error:
        return [str(error)]
    except CheckpointError:
        return []
    return []


def _lines(verdicts: list[Verdict]) -> list[RenderableType]:
    shown: list[RenderableType] = []
    for verdict in verdicts:
        what = f"{verdict.tag} ({verdict.layout}, {verdict.files} files, {nbytes_text(verdict.nbytes)})"
        shown += [line(f"DAMAGED {what}", "bold red") if verdict.faults else line(f"whole   {what}")]
        shown += [line(f"  {fault}", "red") for fault in verdict.faults]
        shown += [line(f"  note: {note}", "dim") for note in verdict.notes]
    return shown
