"""Feeding micro-batches: `DeepSpeedDataLoader` cuts a dataset over ranks, `RepeatingLoader` never ends."""

from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.data.repeating import RepeatingLoader
from deepspeed.data.sampler import ResumableSampler

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader", "ResumableSampler"]
