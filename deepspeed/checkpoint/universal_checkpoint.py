"""Published names around universal checkpoints.

`SubparamShape` says how a fused parameter is made of sub-parameters; models put it into `universal_checkpoint_info`, and
pickles name it by this path. Does not live here: reading and writing universal folders (`original`). Called by users.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from deepspeed.checkpoint.original.stand_ins import SubparamShape

__all__ = ["SubparamShape", "enable_universal_checkpoint"]


def enable_universal_checkpoint(param_list: Iterable[nn.Parameter]) -> None:
    """Accept parameters that shall be loadable from a universal checkpoint: here all are, so nothing has to be done."""
    del param_list
