"""From the original's files to `CheckpointSource`: `stages.StageSource` and `universal.UniversalSource`.

Does not live here: opening an archive (`original.archive`). Called by `checkpoint.opening`.
"""

from __future__ import annotations
