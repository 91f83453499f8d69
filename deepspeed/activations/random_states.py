"""Named random streams: dropout that differs between tensor-parallel ranks inside their shards, and agrees elsewhere.

    default generator    seed                         the same on all ranks of a tensor-parallel group
    "model-parallel-rng" seed + 2718 + rank           inside `with tracker.fork():`

A stream is the state that the device's generator has inside its `fork`; it goes on where the last `fork` of that name
ended. On a CPU the "device's" generator is the host's. Recomputation sets all streams back to where they were in forward
(`restored`).

Called by clients through `deepspeed.checkpointing`, by `segment`, and by `engine.random_state`, which puts streams into
checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError

__all__ = ["MODEL_PARALLEL_STREAM", "CudaRNGStatesTracker", "set_device_rng_state", "tracker"]

MODEL_PARALLEL_STREAM = "model-parallel-rng"
"""Published as `_MODEL_PARALLEL_RNG_TRACKER_NAME`."""


class CudaRNGStatesTracker:
    """Streams by name, of whatever device there is: the name is the published one.

    Attributes:
        states_: name -> state of the generator.
        seeds_: seeds that streams were added with.
    """

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """Streams as they are now: name -> state, a 1-D uint8 tensor on the host that nobody writes to."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Inverse of `get_states`; streams that `states` lacks are gone."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a stream; the generator itself is left as it was.

        Raises:
            ArgumentError: there is one of that name, or one that was begun with that seed and would repeat it.
        """
        if name in self.states_:
            raise ArgumentError(f"random stream {name!r} exists already. Use it, or call reset() first.")
        if seed in self.seeds_:
            raise ArgumentError(
                f"random stream {name!r} with seed {seed}: another stream was begun with it and would draw the same "
                "numbers. Give another seed."
            )
        self.seeds_.add(seed)
        self.states_[name] = _seeded(seed)

    def reseed(self, name: str, seed: int) -> None:
        """Begin a stream that exists anew.

        Raises:
            ArgumentError: there is none of that name.
        """
        self._check(name)
        self.states_[name] = _seeded(seed)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from a stream inside the block; after it the generator goes on as if nothing had been drawn.

        Raises:
            ArgumentError: there is none of that name.
        """
        self._check(name)
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(outside)

    @contextlib.contextmanager
    def restored(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Let streams be those of `states` inside the block, and after it what they were before."""
        before = self.states_
        self.states_ = dict(states)
        try:
            yield
        finally:
            self.states_ = before

    def _check(self, name: str) -> None:
        if name not in self.states_:
            there = ", ".join(map(repr, self.states_)) or "none"
            raise ArgumentError(
                f"there is no random stream {name!r}; there are: {there}. Call model_parallel_cuda_manual_seed(seed), or "
                "add(name, seed), first."
            )


tracker = CudaRNGStatesTracker()
"""The one of this process, published as `_CUDA_RNG_STATE_TRACKER`: the model's code asks for it by that name."""


def set_device_rng_state(new_state: Tensor, device: int = -1) -> None:
    """Set the generator of a device to a state that its `get_rng_state` gave; -1 is the current device."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)


def _seeded(seed: int) -> Tensor:
    """State of the device's generator right after seeding; the generator is left as it was."""
    accelerator = get_accelerator()
    outside = accelerator.get_rng_state()
    try:
        accelerator.manual_seed(seed)
        state: torch.Tensor = accelerator.get_rng_state()
        return state
    finally:
        accelerator.set_rng_state(outside)
