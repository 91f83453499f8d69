"""The version of this package, and of the working copy it runs from.

`version` is the one place that holds the version: the build reads it here. The two `git_` names are read from the files of
the repository at first use, without running git, and are "unknown" for an installed package.

Called by the package, its door `git_version_info`, `env_report` and every checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["git_branch", "git_hash", "version", "version_major", "version_minor", "version_patch"]

version: str = "1.0.0.dev0"
version_major, version_minor, version_patch = (int(part) for part in version.split(".")[:3])

git_hash: str
git_branch: str

_UNKNOWN = "unknown"


def read_git(repository: Path) -> tuple[str, str]:
    """Return commit (the first 8 digits) and branch of a working copy; "unknown" for what cannot be told.

    Args:
        repository: the folder that holds `.git`, which is a folder, or in a linked working tree a file naming one.
    """
    try:
        folder = _git_folder(repository)
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:8], _UNKNOWN
        reference = head.removeprefix("ref: ")
        return _commit(folder, reference)[:8], reference.removeprefix("refs/heads/")
    except OSError:
        return _UNKNOWN, _UNKNOWN


def _git_folder(repository: Path) -> Path:
    entry = repository / ".git"
    if entry.is_file():
        return repository / entry.read_text().strip().removeprefix("gitdir: ")
    return entry


def _commit(folder: Path, reference: str) -> str:
    common = folder / "commondir"
    shared = folder / common.read_text().strip() if common.exists() else folder
    for place in (folder, shared):
        if (place / reference).exists():
            return (place / reference).read_text().strip()
    packed = shared / "packed-refs"
    lines = packed.read_text().splitlines() if packed.exists() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {reference}")), _UNKNOWN)


def __getattr__(name: str) -> Any:
    if name not in ("git_hash", "git_branch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    globals()["git_hash"], globals()["git_branch"] = read_git(Path(__file__).resolve().parent.parent)
    return globals()[name]
