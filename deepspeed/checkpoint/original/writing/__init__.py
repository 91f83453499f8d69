"""From any `CheckpointSource` to the original's files: `to_stages.write_stages` and `to_universal.write_universal`.

Does not live here: pickles (`original.pickles`). Called by `ds_to_universal` and `deepspeed-checkpoint export`.
"""

from __future__ import annotations
