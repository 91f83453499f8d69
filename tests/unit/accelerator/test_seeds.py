from __future__ import annotations

import random

import numpy as np
import torch

from deepspeed.accelerator.seeds import set_random_seed


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(1).item()


def test_one_seed_fixes_every_generator() -> None:
    set_random_seed(7)
    first = _draws()
    set_random_seed(7)
    again = _draws()
    set_random_seed(8)
    other = _draws()
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))
