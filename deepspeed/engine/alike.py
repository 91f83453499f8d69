"""Do all ranks build the same engine? Asked once, before the first value moves.

    config keys, parameters, buffers, optimizer groups --> one line each --> 8 bytes --> all-gather: all equal?
                                                            '-- no: two ranks' lines, the first difference, raised on all

Ranks that differ here would make different calls later, or mix up values of different parameters without any call that
differs. Keys that only steer reports and places of files may differ.

Lives here: the lines and the comparison. Does not live here: values (`zero.sanity`), calls that differ (`comm.watch`).
`engine.build` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from pydantic import BaseModel
from torch import nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.comm.divergence import shortened
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.blocks import blocks_of
from deepspeed.config.root import MONITORS
from deepspeed.engine.experts import name_on_rank
from deepspeed.errors import CommError
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.shard import whole_shape

__all__ = ["RanksDifferError", "check_alike", "common_description", "description", "first_difference"]

_MAY_DIFFER = {*MONITORS, "aio", "autotuning", "comms_logger", "flops_profiler", "timers", "dump_state", "log_level"}
_MAY_DIFFER |= {"memory_breakdown", "run_log", "steps_per_print", "wall_clock_breakdown", "disable_python_gc"}
_PLACES = ("path", "folder", "dir", "directory")


class RanksDifferError(CommError):
    """Ranks were given different configs, models or optimizers."""


def description(config: DeepSpeedConfig, module: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """What ranks must have in common, a line each: `what: value`, in the order in which they would be used.

    Experts that are spread over ranks stand there by their place on a rank.
    """
    shown = name_on_rank(module)
    names = {id(param): shown(name) for name, param in module.named_parameters()}
    lines = list(_config_lines(config))
    for number, param in enumerate(module.parameters()):
        name, kind = names[id(param)], "trained" if param.requires_grad else "frozen"
        lines.append(f"parameter {number}: {name!r}, shape {tuple(whole_shape(param))}, {param.dtype}, {kind}")
    for number, (name, buffer) in enumerate(module.named_buffers()):
        lines.append(f"buffer {number}: {shown(name)!r}, shape {tuple(buffer.shape)}, {buffer.dtype}")
    if optimizer is not None:
        lines.append(f"optimizer: {type(optimizer).__name__}")
        for number, group in enumerate(optimizer.param_groups):
            of = ", ".join(repr(names.get(id(param), "?")) for param in group["params"])
            lines.append(f"optimizer group {number}: {of}")
    return lines


def common_description(config: DeepSpeedConfig, optimizer: Optimizer | None) -> list[str]:
    """What stages of a pipeline must have in common, though their layers differ."""
    groups = 0 if optimizer is None else len(optimizer.param_groups)
    return [*_config_lines(config), f"optimizer: {type(optimizer).__name__}", f"optimizer groups: {groups}"]


def _config_lines(config: DeepSpeedConfig) -> Iterator[str]:
    blocks = blocks_of(type(config))
    for name in type(config).model_fields:
        if name not in _MAY_DIFFER:
            yield f"config {name}: {getattr(config, name)}"
    for name in blocks:
        if name in _MAY_DIFFER or not config.is_given(name):  # what nobody wrote has its defaults, and is not built
            continue
        block = getattr(config, name)
        if isinstance(block, BaseModel):  # to write a default is no difference
            yield from _value_lines(f"config {name}", block.model_dump(mode="json", exclude_defaults=True))


def _value_lines(key: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            if not str(name).endswith(_PLACES):
                yield from _value_lines(f"{key}.{name}", part)
    else:
        yield f"{key}: {value}"


def first_difference(mine: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    """The first lines that two descriptions do not share; "nothing" where one of them has no line there."""
    keys_of_others = {line.partition(": ")[0] for line in others}
    for one, other in zip_longest(mine, others, fillvalue=""):
        if one == other:
            continue
        key, others_key = one.partition(": ")[0], other.partition(": ")[0]
        if one and key not in keys_of_others:  # given here alone: the line beside it is about something else
            return one, f"no {key}"
        if other and others_key not in {line.partition(": ")[0] for line in mine}:
            return f"no {others_key}", other
        return one or "nothing more", other or "nothing more"
    return "", ""


def check_alike(lines: Sequence[str], axis: AxisGroup, device: torch.device) -> None:
    """Check that the ranks of `axis` have the same description. Collective over it: one all-gather of 8 bytes per rank.

    Args:
        lines: of this rank.
        axis: the ranks that must be alike.
        device: where its back end wants tensors.

    Raises:
        RanksDifferError: on every rank, when two differ.
    """
    if axis.size == 1:
        return
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    gathered = torch.empty(axis.size, dtype=torch.int64, device=device)
    comm.all_gather_into_tensor(gathered, torch.tensor([digest], dtype=torch.int64, device=device), group=axis.group)
    digests = gathered.tolist()
    differing = [position for position, each in enumerate(digests) if each != digests[0]]
    if not differing:
        return
    alike = [axis.ranks[position] for position, each in enumerate(digests) if each == digests[differing[0]]]
    first, other = axis.ranks[0], alike[0]
    texts = [_broadcast(text, source, axis, device).decode().split("\n") for source in (first, other)]
    one, another = first_difference(*texts)
    raise RanksDifferError(
        f"rank {axis.ranks[axis.rank]}: ranks were given different engines to build: rank {first} has {one}, but rank(s) "
        f"{shortened(alike)} have {another}. Ranks {shortened(axis.ranks)} need the same config, model and optimizer in "
        "the same order: look for code before deepspeed.initialize() that depends on the rank."
    )


def _broadcast(text: bytes, source: int, axis: AxisGroup, device: torch.device) -> bytes:
    """The bytes of global rank `source` on every rank of `axis`."""
    numel = torch.tensor([len(text)], dtype=torch.int64, device=device)
    comm.broadcast(numel, src=source, group=axis.group)
    is_source = axis.ranks[axis.rank] == source
    content = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8) if is_source else torch.empty(int(numel), dtype=torch.uint8)
    )
    content = content.to(device)
    comm.broadcast(content, src=source, group=axis.group)
    return content.cpu().numpy().tobytes()
