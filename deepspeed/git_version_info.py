"""Door to `deepspeed.version`, under the name that some clients import."""

from __future__ import annotations

from deepspeed.version import git_branch, git_hash, version

__all__ = ["git_branch", "git_hash", "version"]
