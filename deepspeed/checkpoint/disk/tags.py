"""Tags: which there are, and which one `latest` names.

What does not live here: what a tag's folder holds (reader), how it comes to be (folders), and whether all ranks mean the
same tag (tag_agreement). Loads no torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from deepspeed.checkpoint.disk.folders import find_folder
from deepspeed.checkpoint.disk.layouts import layout_of
from deepspeed.checkpoint.disk.names import LATEST_FILE, LATEST_UNIVERSAL_FILE, tag_folder
from deepspeed.errors import CheckpointNotFoundError

__all__ = ["describe_tags", "find_tag", "list_tags", "read_latest"]


def list_tags(load_dir: str | os.PathLike[str]) -> list[str]:
    """Tags of the checkpoints directly in `load_dir`, of any layout, numbers in them counted (step2 before step10)."""
    folder = Path(load_dir)
    found = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    return sorted((tag for tag in found if layout_of(folder / tag) is not None), key=_natural)


def describe_tags(load_dir: str | os.PathLike[str]) -> str:
    """The tags of a folder as a sentence for an error text."""
    return f"Tags there: {', '.join(map(repr, list_tags(load_dir))) or 'none'}."


def read_latest(load_dir: Path, *, prefer_universal: bool = False) -> str | None:
    """The tag in the file `latest`, or, where there is none, in `latest_universal`; None where there is neither.

    `prefer_universal` asks the two in the other order.
    """
    files = (LATEST_FILE, LATEST_UNIVERSAL_FILE)
    for file in reversed(files) if prefer_universal else files:
        try:
            return (load_dir / file).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            continue
    return None


def find_tag(load_dir: Path, tag: str, *, by_latest: bool = False) -> Path:
    """Folder of `tag`.

    Raises:
        CheckpointNotFoundError: there is none; the text lists the tags there are.
    """
    folder = find_folder(tag_folder(load_dir, tag))
    if folder is None:
        source = f"the file {LATEST_FILE!r} names" if by_latest else "you asked for"
        raise CheckpointNotFoundError(
            f"{load_dir} has no checkpoint {tag!r}, which {source}. {describe_tags(load_dir)} Give one of them as tag, "
            f"or another folder; every rank must see it."
        )
    return folder


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
