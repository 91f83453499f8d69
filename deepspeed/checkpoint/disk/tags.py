"""Tags: which there are, and which one `latest` names.

What does not live here: what a tag's folder holds (`reader`), how it comes to be (`folders`), and whether all ranks mean the
same tag (`tag_agreement`). Loads no torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from deepspeed.checkpoint.disk.folders import find_folder
from deepspeed.checkpoint.disk.layouts import layout_of
from deepspeed.checkpoint.disk.names import LATEST_FILE, LATEST_UNIVERSAL_FILE, tag_folder
from deepspeed.errors import ArgumentError, CheckpointNotFoundError

__all__ = ["describe_tags", "find_tag", "hint_for", "list_tags", "read_latest", "read_tag_file"]


def list_tags(load_dir: str | os.PathLike[str]) -> list[str]:
    """Tags of the checkpoints directly in `load_dir`, of any layout, numbers in them counted (step2 before step10)."""
    folder = Path(load_dir)
    found = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    return sorted((tag for tag in found if layout_of(folder / tag) is not None), key=_natural)


def describe_tags(load_dir: str | os.PathLike[str]) -> str:
    """The tags of a folder as a sentence for an error text."""
    return f"Tags there: {', '.join(map(repr, list_tags(load_dir))) or 'none'}."


def hint_for(load_dir: str | os.PathLike[str]) -> str:
    """What to give instead of a folder in which a checkpoint was not found: the cure in an error text."""
    folder = Path(os.path.abspath(load_dir))
    if layout_of(folder) is not None:
        return f"{folder} is itself the folder of a tag: give the folder above it, {folder.parent}, and tag {folder.name!r}."
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file: give the folder that holds the tags."
    cure = "Give one of them as tag, or another folder." if list_tags(folder) else "Give another folder."
    return f"{describe_tags(folder)} {cure}"


def read_latest(load_dir: Path, *, prefer_universal: bool = False) -> str | None:
    """The tag in the file `latest`, or, where there is none, in `latest_universal`; None where there is neither.

    `prefer_universal` asks the two in the other order.

    Raises:
        CheckpointNotFoundError: as `read_tag_file`.
    """
    files = (LATEST_FILE, LATEST_UNIVERSAL_FILE)
    tags = (read_tag_file(load_dir / file) for file in (reversed(files) if prefer_universal else files))
    return next((tag for tag in tags if tag is not None), None)


def read_tag_file(path: Path) -> str | None:
    """The tag in a file such as `latest`, without white space around it; None where there is no such file.

    Raises:
        CheckpointNotFoundError: it cannot be read, is empty, or holds what can be no tag.
    """
    try:
        tag = path.read_text(encoding="utf-8", errors="replace").strip()
        tag_folder(path.parent, tag)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointNotFoundError(f"{path} cannot be read: {error.strerror}. {hint_for(path.parent)}") from error
    except ArgumentError as error:
        holds = f"holds {tag!r}, which can be no tag" if tag else "is empty"
        raise CheckpointNotFoundError(f"{path} {holds}. {hint_for(path.parent)}") from error
    return tag


def find_tag(load_dir: Path, tag: str, *, by_latest: bool = False) -> Path:
    """Folder of `tag`.

    Raises:
        CheckpointNotFoundError: there is none; the text lists the tags there are.
    """
    folder = find_folder(tag_folder(load_dir, tag))
    if folder is None:
        source = f"the file {LATEST_FILE!r} names" if by_latest else "you asked for"
        raise CheckpointNotFoundError(
            f"{load_dir} has no checkpoint {tag!r}, which {source}. {hint_for(load_dir)} Every rank must see the folder."
        )
    return folder


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
