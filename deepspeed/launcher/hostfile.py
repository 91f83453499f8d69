"""Which hosts and slots a job uses: hostfile, filters and the world info that carries the answer.

Pure text and integers: no torch, no processes. `fetch_hostfile` is the one function that reads a file. The runner calls it.

    hostfile            --include "a@b:1"         world info
    a slots=4    --->   {a: [0,1,2,3],    --->    base64 of {"a": [0, 1, 2, 3], "b": [1]}
    b slots=2            b: [1]}
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError
from deepspeed.launcher.text_files import read_text

__all__ = [
    "ResourceError",
    "Slot",
    "decode_world_info",
    "encode_world_info",
    "fetch_hostfile",
    "parse_filter",
    "parse_hostfile",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
    "select_first",
]

logger = get_logger("deepspeed.launcher.hostfile")

Slot = int | str
"""A device of one host: its index, or what the vendor calls it (a GPU's UUID) where the user chose by that name."""

_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)")


class ResourceError(LaunchError, ValueError):
    """A hostfile, a filter or a count names resources that cannot be had."""


def parse_hostfile(lines: Iterable[str], source: str = "hostfile") -> dict[str, int]:
    """Read `HOST slots=N` lines; blank lines and lines that start with `#` are skipped, text after the number is ignored.

    Args:
        lines: the lines of the file.
        source: name of the file, for error texts.

    Returns:
        Slots per host, in the order of the file: the order of ranks.

    Raises:
        ResourceError: for every bad or repeated line at once, or when no host is left.
    """
    first_line: dict[str, int] = {}
    slots: dict[str, int] = {}
    faults: list[str] = []
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        entry = _ENTRY.match(line)
        if entry is None:
            faults.append(f"line {number}: Hostfile contains a bad entry: {line!r}; write {_corrected(line)!r}")
            continue
        host = entry[1]
        if host in slots:
            faults.append(
                f"line {number}: Hostfile contains multiple entries for {host} (first in line {first_line[host]}); "
                f"keep one line with all its slots"
            )
            continue
        first_line[host], slots[host] = number, int(entry[2])
    if faults:
        raise ResourceError(f"{source}: " + "; ".join(faults) + ".")
    if not slots:
        raise ResourceError(
            f"{source}: Hostfile is empty or not formatted correctly: no line like 'worker-0 slots=8' was found."
        )
    return slots


def _corrected(line: str) -> str:
    """The line that was probably meant."""
    numbers = re.findall(r"=\s*(\d+)|\s(\d+)", line)
    return f"{line.split(maxsplit=1)[0]} slots={next((a or b for a, b in numbers), 'N')}"


def fetch_hostfile(hostfile_path: str | Path, *, is_required: bool = True) -> dict[str, int] | None:
    """Read the hostfile at `hostfile_path`.

    Args:
        hostfile_path: the file.
        is_required: whether its absence deserves a warning; the default path is usually absent.

    Returns:
        Slots per host in file order, or None when there is no such file: the job then runs on this machine alone.

    Raises:
        ResourceError: see `parse_hostfile`.
        LaunchError: see `read_text`.
    """
    path = Path(hostfile_path)
    text = read_text(path)
    if text is None:
        if is_required:
            logger.warning("hostfile %s was not found: the job uses this machine alone.", path)
        return None
    return parse_hostfile(text.splitlines(), str(path))


def parse_filter(text: str, option: str = "filter") -> dict[str, list[int] | None]:
    """Read `HOST[:SLOT,SLOT...]@HOST...`.

    Args:
        text: the value of the option; empty means no host.
        option: name of the option, for error texts.

    Returns:
        Sorted slots per host, or None for the whole host. Repeated hosts are merged.

    Raises:
        ResourceError: for a part that does not follow the grammar.
    """
    chosen: dict[str, list[int] | None] = {}
    for node in text.split("@") if text else []:
        host, *slot_texts = node.split(":")
        if not host or len(slot_texts) > 1:
            raise ResourceError(
                f"{option} {text!r}: {node!r} should be HOST or HOST:SLOT,SLOT, for example 'worker-0@worker-1:0,2'."
            )
        slots = _slots(slot_texts[0], node, f"{option} {text!r}") if slot_texts else None
        known = chosen.get(host, [])
        chosen[host] = None if slots is None or known is None else sorted({*known, *slots})
    return chosen


def _slots(text: str, node: str, where: str) -> list[int]:
    try:
        return [int(slot) for slot in text.split(",")]
    except ValueError:
        raise ResourceError(
            f"{where}: the slots of {node!r} must be integers with commas between, for example 'worker-1:0,1'."
        ) from None


def parse_resource_filter(
    host_info: Mapping[str, Sequence[Slot]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[Slot]]:
    """Keep the slots that `include_str` names, or all but those that `exclude_str` names.

    Args:
        host_info: the slots of each host.
        include_str: see `parse_filter`; empty means all.
        exclude_str: see `parse_filter`; not together with `include_str`.

    Returns:
        Slots per host in the order of `host_info`, without hosts that have none left.

    Raises:
        ResourceError: for both filters at once, an unknown host or slot, or a filter that does not follow the grammar.
    """
    if include_str and exclude_str:
        raise ResourceError(
            f"--include {include_str!r} and --exclude {exclude_str!r} are mutually exclusive: give one of them."
        )
    named = parse_filter(include_str or exclude_str, "--include" if include_str else "--exclude")
    for host, slots in named.items():
        _check_exists(host, slots or [], host_info)
    return {host: kept for host, slots in host_info.items() if (kept := _kept(host, slots, named, bool(include_str)))}


def _kept(host: str, slots: Sequence[Slot], named: Mapping[str, list[int] | None], is_include: bool) -> list[Slot]:
    if host not in named:
        return [] if is_include else list(slots)
    chosen = named[host]
    return [slot for slot in slots if (chosen is None or slot in chosen) is is_include]


def _check_exists(host: str, slots: Iterable[int], host_info: Mapping[str, Sequence[Slot]]) -> None:
    if host not in host_info:
        nearest = difflib.get_close_matches(host, host_info, 1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(host_info)}."
        raise ResourceError(f"Hostname {host!r} not found in hostfile; {hint}")
    for slot in slots:
        if slot not in host_info[host]:
            raise ResourceError(f"No slot '{slot}' specified on host {host!r}; it has {_as_text(host_info[host])}.")


def _as_text(slots: Sequence[Slot]) -> str:
    return "slots " + ", ".join(map(str, slots)) if slots else "no slots"


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[Slot]]:
    """As `parse_resource_filter`, for a pool that gives the number of slots of each host."""
    return parse_resource_filter({host: list(range(count)) for host, count in resource_pool.items()}, inclusion, exclusion)


def select_first(slots: Mapping[str, Sequence[Slot]], num_nodes: int | None, num_gpus: int | None) -> dict[str, list[Slot]]:
    """Keep the first `num_nodes` hosts, and slots 0 to `num_gpus` - 1 on each; None keeps all.

    The number of slots is the user's word: it may exceed what the hostfile says (several ranks on one device).

    Raises:
        ResourceError: when there are fewer hosts, or a count is below 1.
    """
    for option, count in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if count is not None and count < 1:
            raise ResourceError(f"{option} {count}: give at least 1, or leave the option out to use all there are.")
    if num_nodes is not None and num_nodes > len(slots):
        raise ResourceError(
            f"--num_nodes {num_nodes}, but there are only {len(slots)} hosts ({', '.join(slots)}). "
            f"Give at most {len(slots)}, or a hostfile with more hosts."
        )
    hosts = list(slots)[:num_nodes]
    return {host: list(slots[host]) if num_gpus is None else list(range(num_gpus)) for host in hosts}


def encode_world_info(world_info: Mapping[str, Sequence[Slot]]) -> str:
    """Return the URL-safe base64 of `{host: [slot, ...]}` as JSON, hosts in rank order."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def decode_world_info(text: str) -> dict[str, list[Slot]]:
    """Undo `encode_world_info`.

    Raises:
        ResourceError: when `text` is not such an encoding.
    """
    try:
        world_info = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError):
        world_info = None
    if not isinstance(world_info, dict) or not all(isinstance(slots, list) for slots in world_info.values()):
        raise ResourceError(
            f"--world_info {text!r} is not the base64 of a JSON object of hosts and slots; "
            'the deepspeed command makes it, for example of {"localhost": [0, 1]}.'
        )
    return world_info
