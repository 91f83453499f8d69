"""The way onto the disk: one save of all ranks, in the foreground or the background, and what follows it.

    background.Saver: describe -> snapshot (when training goes on) -> writer (shards, commit) -> scripts, retention, tiers
    engines, write_share, nodes: where bytes go, which ranks write them, and one disk per node

Does not live here: bytes and folders (`disk`). Called by `engine.saving` and, for node-local disks, `engine.loading`.
"""

from __future__ import annotations
