"""ZenFlow: important columns are updated with every step, all others every few steps on the CPU, behind training if asked.

    settings   what the `zenflow` block asks for, in steps
    schedule   what each update does, as data; when the rest is ripe
    columns    which columns matter, and where they lie in a rank's shards (pure tensors, one small all-reduce)
    moments    state that changes hands when a column is chosen or dropped
    weights    the update itself: a `zero.master.MasterWeights` with this schedule

docs/adr/0012-zenflow.md says what was decided and why; docs/guide/zenflow.md is for users. Built by `engine.training`.
"""

from __future__ import annotations

__all__: list[str] = []
