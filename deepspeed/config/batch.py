"""The batch triangle: samples per step = samples per forward x accumulation steps x data-parallel ranks.

Lives here: pure arithmetic on the three sizes. Does not live here: how many data-parallel ranks there are; `config.root`
asks the caller. Called by `config.root`; the engine keeps the `BatchSizes`.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed.errors import BatchSizeError

__all__ = ["BatchSizes", "resolve_batch"]

_CHECK = "Check batch related parameters"


class BatchSizes(NamedTuple):
    """Three sizes that multiply out; each is at least 1."""

    train: int
    """Samples of all ranks per optimizer step (`train_batch_size`)."""
    micro: int
    """Samples per rank and forward (`train_micro_batch_size_per_gpu`)."""
    accumulation: int
    """Forward and backward passes per optimizer step (`gradient_accumulation_steps`)."""


def resolve_batch(train: int | None, micro: int | None, accumulation: int | None, dp_world_size: int) -> BatchSizes:
    """Derive the sizes that were not given and check that the three multiply out.

        train = micro x accumulation x dp_world_size

    Accumulation is 1 when it can be neither read nor derived.

    Args:
        train: samples of all ranks per optimizer step, or None.
        micro: samples per rank and forward, or None.
        accumulation: micro-batches per optimizer step, or None.
        dp_world_size: ranks that see different data, at least 1.

    Raises:
        BatchSizeError: neither `train` nor `micro` is given, a size is below 1, or no whole sizes multiply out. The text
            names the ranks and sizes that would work.
    """
    _refuse_small(train, micro, accumulation, dp_world_size)
    if train is None and micro is None:
        raise BatchSizeError(
            f"{_CHECK}: neither train_batch_size nor train_micro_batch_size_per_gpu is given. Set at least one of them; "
            f"the rest follows from train = micro x accumulation x {dp_world_size} data-parallel {_ranks(dp_world_size)}."
        )
    if train is None:
        assert micro is not None  # one of the two is given
        steps = accumulation or 1
        return BatchSizes(micro * steps * dp_world_size, micro, steps)
    if micro is None:
        steps = accumulation or 1
        sizes = BatchSizes(train, train // (steps * dp_world_size), steps)
    else:
        sizes = BatchSizes(train, micro, accumulation or train // (micro * dp_world_size))
    if sizes.micro * sizes.accumulation * dp_world_size != train:
        raise BatchSizeError(_mismatch(train, micro, accumulation, dp_world_size))
    return sizes


def _refuse_small(train: int | None, micro: int | None, accumulation: int | None, dp_world_size: int) -> None:
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "the number of data-parallel ranks": dp_world_size,
    }
    small = [f"{name}={size}" for name, size in sizes.items() if size is not None and size < 1]
    if small:
        raise BatchSizeError(f"{_CHECK}: {', '.join(small)}; needed 1 or more. Correct it, or leave the key out.")


def _mismatch(train: int, micro: int | None, accumulation: int | None, ranks: int) -> str:
    """Say what does not multiply out, and what would with the same number of ranks."""
    given = [f"train_batch_size={train}"]
    given += [f"train_micro_batch_size_per_gpu={micro}"] if micro else []
    given += [f"gradient_accumulation_steps={accumulation}"] if accumulation else []
    product = f"train_micro_batch_size_per_gpu x gradient_accumulation_steps x {ranks} data-parallel {_ranks(ranks)}"
    found = ""
    if micro and accumulation:
        found = f" but {micro} x {accumulation} x {ranks} = {micro * accumulation * ranks}"
    what = f"{_CHECK}: {', '.join(given)} on {ranks} data-parallel {_ranks(ranks)}{found}"
    return f"{what}; needed train_batch_size = {product}. {_cure(train, micro, accumulation, ranks)}"


def _cure(train: int, micro: int | None, accumulation: int | None, ranks: int) -> str:
    """Name the nearest sizes that work."""
    step = ranks * (micro or 1) * (accumulation or 1)
    multiples = (step,) if micro and accumulation else (train // step * step, -(-train // step) * step)
    fits = [str(size) for size in multiples if size >= 1]
    options = [f"train_batch_size {' or '.join(fits)}"]
    if micro and accumulation and train % (micro * ranks) == 0:
        options.append(f"gradient_accumulation_steps {train // (micro * ranks)}")
    if train % (ranks * (accumulation or 1)) == 0 and micro:
        options.append(f"train_micro_batch_size_per_gpu {train // (ranks * (accumulation or 1))}")
    product = (micro or 1) * (accumulation or 1)
    if train % product == 0 and train // product != ranks:
        needed = train // product
        start = f" (deepspeed --num_gpus {needed} train.py)" if ranks == 1 else ""  # no launcher, or a launcher told 1
        options.append(f"{needed} data-parallel {_ranks(needed)}{start}")
    return f"These would work: {', or '.join(options)}. Or set two of the three and leave the last out."


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"
