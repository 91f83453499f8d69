"""The scripts that a save leaves next to `latest`: they call the installed library, so they never grow old.

Does not live here: what they do (`export.consolidate`). Called by `background` after a save, on the first rank.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed.checkpoint.disk.folders import new_token
from deepspeed.checkpoint.disk.storage import Storage

__all__ = ["SCRIPTS", "place_scripts"]

SCRIPTS = ("zero_to_fp32", "zero_to_torch")
"""Names of the scripts, and of the modules of `deepspeed.utils` that they call."""

_TEXT = '''#!/usr/bin/env python3
"""Write the weights of a checkpoint in this folder as files that plain PyTorch loads: {name}.py . OUTPUT_DIR"""
import sys

from deepspeed.utils.{name} import main

sys.exit(main())
'''


def place_scripts(save_dir: str | os.PathLike[str], storage: Storage | None = None) -> None:
    """Put the scripts into the folder of all tags, each in one step; those that are there already are left alone.

    Raises:
        OSError: the system refused; the checkpoints are what they were.
    """
    storage = storage or Storage()
    for name in SCRIPTS:
        path, text = Path(save_dir, f"{name}.py"), _TEXT.format(name=name).encode()
        if path.is_file() and path.read_bytes() == text:
            continue
        aside = path.with_name(f".{path.name}.writing-{new_token()}")
        storage.write_file(aside, text)
        aside.chmod(aside.stat().st_mode | 0o111)
        storage.rename(aside, path)
