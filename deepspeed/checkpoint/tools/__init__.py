"""The command `deepspeed-checkpoint`: what is in a checkpoint, whether it is whole, how two differ, and the way out of it.

    main -- arguments --> listing   ls      the tags of a folder, and what interrupted saves left
                          contents  show    one checkpoint: tensors, files, state
                          damage    verify  every file against its checksum
                          diff      diff    two checkpoints, per parameter <-- comparing (tensors), state_diff (the rest)
                          exports   export  weights alone, or another layout; merge: the folders of several nodes

Each command makes one record of plain values and shows it as tables or, with `--json`, as it is. All of them read through
`checkpoint.source.CheckpointSource`, so every layout is served alike, and hold about one block of one tensor in memory.

Does not live here: reading and writing (`checkpoint`). Called as a command.
"""

from __future__ import annotations

from deepspeed.checkpoint.tools.main import main

__all__ = ["main"]
