"""Tiers: where state rests that does not fit on the device, and how it moves.

`swap_folder` makes a folder of one process's own, `tier_file` keeps ranges in a file there, `sub_groups` plans how much is
in memory at once, `run_buffers` moves it: read the next, step this one, write the last. `placement` says which tier an
engine uses, `agreement` lets all ranks know what one of them met. What the bytes mean is the business of `deepspeed.zero`.
"""

__all__: list[str] = []
