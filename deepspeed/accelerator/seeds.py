"""One seed for every generator of this process.

Called by user scripts, as `deepspeed.runtime.utils.set_random_seed`; the library itself seeds nothing.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from deepspeed.accelerator.select import get_accelerator

__all__ = ["set_random_seed"]


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of every local device included.

    Args:
        seed: from 0 to 2**32 - 1 (numpy's range). Give ranks the same one to have them draw the same numbers.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)
