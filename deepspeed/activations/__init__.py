"""Activation checkpointing: what a part of the model was given is kept, what it computed is computed again in backward.

`checkpointing` is the documented surface, `deepspeed.checkpointing`. `segment` recomputes, `keeping` decides where what
is kept rests until backward, `partition`, `buffers`, `host` and `disk` are the places, `needs` is the arithmetic of
memory, `random_states` the generators that tensor-parallel ranks draw from.
"""

__all__: list[str] = []
