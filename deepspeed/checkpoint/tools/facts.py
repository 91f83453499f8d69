"""A checkpoint in one line: layout, step, ranks, ZeRO stage, precision, size, time.

Lives here: gathering these from any layout, tolerating damage. Does not live here: what is inside (`contents`).
Called by `listing`, `contents`, `damage` and `exports`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.disk.layouts import layout_of
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.checkpoint.tools.output import dtype_text
from deepspeed.checkpoint.tools.places import Place, open_place
from deepspeed.errors import DeepSpeedError

__all__ = ["Facts", "facts_of", "files_in", "look_at"]

_PRECISIONS = (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16"))
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Facts:
    """What is told about a checkpoint at a glance; None: not stored, or not readable."""

    tag: str
    layout: str
    step: int | None
    ranks: int | None
    zero_stage: int | None
    precision: str | None
    nbytes: int
    saved_at: str | None
    fault: str | None
    """Why it cannot be opened."""


def look_at(place: Place) -> Facts:
    """Facts about a checkpoint that may be damaged."""
    try:
        return facts_of(open_place(place), place)
    except DeepSpeedError as error:
        layout = layout_of(place.folder)
        name = "unknown" if layout is None else layout.value
        return Facts(place.tag, name, None, None, None, None, _total(place.folder), _changed_at(place.folder), str(error))


def facts_of(source: CheckpointSource, place: Place) -> Facts:
    """Facts about an open checkpoint."""
    state, layout = source.state, layout_of(place.folder)
    manifest = source.manifest if isinstance(source, CheckpointReader) else None
    return Facts(
        tag=place.tag,
        layout="unknown" if layout is None else layout.value,
        step=state.get("global_steps"),
        ranks=manifest.world_size if manifest else state.get("dp_world_size"),
        zero_stage=state.get("zero_stage"),
        precision=_precision(source),
        nbytes=_total(place.folder),
        saved_at=manifest.saved_at if manifest else _changed_at(place.folder),
        fault=None,
    )


def files_in(folder: Path) -> dict[str, int]:
    """Every file in a folder and below, by its path from there -> bytes."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _precision(source: CheckpointSource) -> str | None:
    """What the model computed with: the configuration says it, else the stored weights."""
    config: Mapping[str, Any] = source.state.get("ds_config") or {}
    for key, name in _PRECISIONS:
        block = config.get(key)
        if isinstance(block, Mapping) and block.get("enabled"):
            return name
    module = source.names("module/")
    dtypes = {source.dtype(name) for name in module or source.names("master/")}
    found = sorted(_SHORT.get(dtype_text(dtype), dtype_text(dtype)) for dtype in dtypes if dtype.is_floating_point)
    return ", ".join(found) or None


def _total(folder: Path) -> int:
    return sum(files_in(folder).values())


def _changed_at(folder: Path) -> str | None:
    """When the newest file was changed, for layouts that store no time."""
    times = [path.stat().st_mtime for path in folder.rglob("*") if path.is_file()]
    return datetime.fromtimestamp(max(times), timezone.utc).isoformat(timespec="seconds") if times else None
