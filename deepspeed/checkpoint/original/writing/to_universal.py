"""Any checkpoint as the original's universal folder: one folder per parameter, which it resumes from on any number of ranks.

    CheckpointSource --- plan ---> one job per file --- worker threads ---> .<name>.converting-.../ --- commit ---> <name>/
                                                                                   then latest_universal names it

Elements go from the source to the file block by block, so a worker needs one block of memory, whatever a parameter's size.
Values are written in the parameter's shape (the form that the original makes of ZeRO stages 1 and 2), and
`optimizer_state.pt` also holds what its stage 3 asks for: it reads this form at stages 1, 2 and 3.

[Note: model-state files] Where the source's folder has them (stage files, universal folders) they are copied, for only they
hold what this library does not know. From our own layout they are made, in the form of each ZeRO stage.

Does not live here: the form of the files (`model_states`), commits (`conversion_folder`), reading
(`original.reading.universal`). Called by `checkpoint.ds_to_universal` and the tools.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.constants import (
    PARAMETER_TO_AVERAGE_PATTERNS,
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PARAMETER_WITH_SUB_PARAMS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    VOCABULARY_PARAMETER_PATTERNS,
)
from deepspeed.checkpoint.disk.layouts import Layout, layout_of
from deepspeed.checkpoint.disk.names import LATEST_UNIVERSAL_FILE, optimizer_tensor, split_optimizer_tensor
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.files import StageFiles
from deepspeed.checkpoint.original.pickles import save_archive
from deepspeed.checkpoint.original.reading.universal import (
    MASTER_FILE,
    MEMBERS_KEY,
    OPTIMIZER_STATE_FILE,
    STEP_FILE,
    UNIVERSAL_FOLDER,
)
from deepspeed.checkpoint.original.scaler_states import scaler_record
from deepspeed.checkpoint.original.stand_ins import ZeroStageEnum
from deepspeed.checkpoint.original.writing.conversion_folder import point_to, written_aside
from deepspeed.checkpoint.original.writing.model_states import (
    LAYOUT_VERSION,
    model_file,
    model_states_of,
    sharded_model_states_of,
    streamed,
)
from deepspeed.checkpoint.original.writing.weights import Weights, sort_weights
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.errors import CheckpointError

__all__ = ["MissingUniversalInfoError", "Progress", "UnmatchedPatternError", "write_universal"]

Progress = Callable[[int, int], None]
"""Called after each file with (files written, files in all)."""

_Job = Callable[[Path], object]
"""Writes one file, or all of one parameter, into the working folder."""


class MissingUniversalInfoError(CheckpointError, ValueError):
    """Stage files say nothing of how parameters are cut, and nobody said that this is all right."""


class UnmatchedPatternError(CheckpointError, AssertionError):
    """A pattern of `universal_checkpoint_info` matches no parameter."""


def write_universal(
    source: CheckpointSource,
    output_folder: str | os.PathLike[str],
    *,
    workers: int = 2,
    inject_missing_state: bool = False,
    keep_temp_folder: bool = False,
    strict: bool = True,
    progress: Progress | None = None,
    storage: Storage | None = None,
) -> None:
    """Write a universal folder, and let `latest_universal` beside it name it. Not collective: one process calls it.

    Args:
        source: what to convert.
        output_folder: folder of the new tag; one that stands there is replaced once the new one is whole.
        workers: threads that write parameters.
        inject_missing_state: take stage files without `universal_checkpoint_info` as those of a model without tensor
            parallelism.
        keep_temp_folder: leave what was written beside the output when the conversion fails.
        strict: a pattern of `universal_checkpoint_info` that matches no parameter is an error.
        progress: told after each parameter and file.
        storage: the file system.

    Raises:
        MissingUniversalInfoError, UnmatchedPatternError: see above; nothing is written.
        CheckpointError: the source cannot be read, or has a value that this layout cannot hold; or the system
            refused, e.g. a full disk. What was at the output before is intact.
    """
    output, storage = Path(output_folder).absolute(), storage or Storage()
    weights = sort_weights(source)
    info = _universal_info(source, inject_missing_state)
    if strict:
        _check_patterns(info, weights.trained)
    jobs = [*_model_jobs(source, weights), *_parameter_jobs(source, weights, info, storage)]
    with written_aside(output, storage, keep_unfinished=keep_temp_folder) as working:
        (working / UNIVERSAL_FOLDER).mkdir()
        _run(jobs, working, workers, progress)
        storage.sync_folder(working / UNIVERSAL_FOLDER)
    point_to(output.parent / LATEST_UNIVERSAL_FILE, output.name, storage)


def _run(jobs: list[_Job], working: Path, workers: int, progress: Progress | None) -> None:
    """Run all jobs; the first error ends it, after the jobs that are running."""
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="to-universal") as pool:
        running = [pool.submit(job, working) for job in jobs]
        try:
            for number, done in enumerate(as_completed(running), start=1):
                done.result()
                if progress is not None:
                    progress(number, len(jobs))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# -- model-state files ----------------------------------------------------------------------------------------------------


def _model_jobs(source: CheckpointSource, weights: Weights) -> Iterator[_Job]:
    """[Note: model-state files]"""
    files = [file.name for file in StageFiles.of(path.name for path in source.folder.iterdir()).models]
    if files and layout_of(source.folder) is not Layout.OURS:
        yield from (partial(_copy_file, source.folder / file) for file in files)
        return
    yield partial(_save, model_states_of(source, weights), model_file())
    world_size = source.state["dp_world_size"]
    for rank in range(world_size):
        yield partial(_save, sharded_model_states_of(source, weights, rank, world_size), model_file(rank))


def _copy_file(file: Path, working: Path) -> None:
    with file.open("rb") as existing, (working / file.name).open("xb") as copy:
        shutil.copyfileobj(existing, copy, 1 << 20)
        copy.flush()
        os.fsync(copy.fileno())


def _save(content: Any, name: str, working: Path) -> None:
    save_archive(content, working / name)


# -- parameters -----------------------------------------------------------------------------------------------------------


def _parameter_jobs(source: CheckpointSource, weights: Weights, info: Mapping[str, Any], storage: Storage) -> Iterator[_Job]:
    keys: dict[str, list[str]] = {}
    for tensor in source.names("optimizer/"):
        parameter, key = split_optimizer_tensor(tensor)
        keys.setdefault(parameter, []).append(key)
    for name in weights.trained:
        yield partial(_write_trained, source, weights, storage, name, keys.get(name, []), _joining_fields(info, name))
    for name in [*weights.frozen, *weights.buffers]:
        yield partial(_write_static, source, weights, storage, name)
    if source.state["optimizer"] is not None:
        yield partial(_save, _optimizer_state(source), f"{UNIVERSAL_FOLDER}/{OPTIMIZER_STATE_FILE}")


def _write_trained(
    source: CheckpointSource,
    weights: Weights,
    storage: Storage,
    name: str,
    keys: list[str],
    fields: Mapping[str, Any],
    working: Path,
) -> None:
    folder = working / UNIVERSAL_FOLDER / name
    folder.mkdir()
    tensors = {MASTER_FILE: weights.tensors[name], **{f"{key}.pt": optimizer_tensor(name, key) for key in keys}}
    for file, tensor in tensors.items():
        save_archive({**fields, "param": streamed(source, tensor, _full_precision(source.dtype(tensor)))}, folder / file)
    for key, value in _scalars(source, name).items():
        save_archive(torch.tensor(float(value)), folder / (STEP_FILE if key == "step" else f"{key}.pt"))
    storage.sync_folder(folder)


def _write_static(source: CheckpointSource, weights: Weights, storage: Storage, name: str, working: Path) -> None:
    folder = working / UNIVERSAL_FOLDER / name
    folder.mkdir()
    tensor = weights.tensors[name]
    save_archive({"param": streamed(source, tensor, _full_precision(source.dtype(tensor)))}, folder / MASTER_FILE)
    storage.sync_folder(folder)


def _full_precision(dtype: torch.dtype) -> torch.dtype:
    """The type in which the layout keeps a tensor: fp32 for smaller floats; integers and fp64 as they are."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize else dtype


def _scalars(source: CheckpointSource, name: str) -> dict[str, float]:
    """State of a parameter that is one number."""
    optimizer = source.state["optimizer"]
    scalars = {} if optimizer is None else optimizer["scalars"].get(name, {})
    for key, value in scalars.items():
        if value is not None and not isinstance(value, int | float):
            raise CheckpointError(
                f"optimizer state {key!r} of {name!r} is {value!r}; the universal layout holds tensors and numbers only. "
                "Resume from our own layout, which holds it."
            )
    return {key: value for key, value in scalars.items() if value is not None}


# -- the optimizer --------------------------------------------------------------------------------------------------------


def _optimizer_state(source: CheckpointSource) -> dict[str, Any]:
    """What `optimizer_state.pt` holds for ZeRO stages 1 and 2, and, last, for stage 3."""
    state, optimizer = source.state, source.state["optimizer"]
    assert optimizer is not None  # the caller asked
    groups = [{**group, "params": [number]} for number, group in enumerate(optimizer["groups"])]
    members = optimizer["members"] or [[] for _ in groups]
    steps = [scalars["step"] for scalars in optimizer["scalars"].values() if "step" in scalars]
    inner = {number: {"step": torch.tensor(float(steps[0]))} for number in range(len(groups))} if steps else {}
    scaler = scaler_record(state["loss_scaler"], state["ds_config"], state["global_steps"])
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": bool(vars(scaler)["dynamic"]),
        "overflow": False,
        "clip_grad": float((state["ds_config"] or {}).get("gradient_clipping") or 0.0),
        "zero_stage": ZeroStageEnum(state["zero_stage"]),
        "group_paddings": [0] * len(groups),
        "param_alignment_paddings": [[0] * len(names) for names in members],
        "partition_count": [state["dp_world_size"]] * len(groups),
        "ds_version": LAYOUT_VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": inner, "param_groups": groups},
        MEMBERS_KEY: optimizer["members"],
    }


# -- tensor parallelism ---------------------------------------------------------------------------------------------------

_REPLICATED = (TP_REPLICATED_PARAMETER_PATTERNS, PARAMETER_TO_AVERAGE_PATTERNS)


def _universal_info(source: CheckpointSource, inject_missing_state: bool) -> Mapping[str, Any]:
    """`universal_checkpoint_info` of stage files; empty for the other layouts, whose tensors are whole.

    Raises:
        MissingUniversalInfoError: there is none.
    """
    files = StageFiles.of(path.name for path in source.folder.iterdir()).models
    if layout_of(source.folder) is Layout.OURS or not files:
        return {}
    states: Mapping[str, Any] = load_archive(source.folder / files[0].name)
    info: Mapping[str, Any] | None = states.get(UNIVERSAL_CHECKPOINT_INFO)
    if info is None and layout_of(source.folder) is Layout.STAGES and not inject_missing_state:
        raise MissingUniversalInfoError(
            f"{source.folder} has no {UNIVERSAL_CHECKPOINT_INFO!r} in its model states, so nothing says whether its "
            "parameters are cut by tensor parallelism. If they are not, pass --inject_missing_state "
            "(inject_missing_state=True); else give the model that attribute where it was saved, and save again."
        )
    return info or {}


def _check_patterns(info: Mapping[str, Any], names: list[str]) -> None:
    """
    Raises:
        UnmatchedPatternError: a pattern matches none of the names.
    """
    listed = {key: patterns for key, patterns in info.items() if key.endswith("_patterns") or _is_pattern_list(key)}
    unmatched = [
        f"{pattern!r} ({key})"
        for key, patterns in listed.items()
        for pattern in _patterns_of(patterns)
        if not any(re.match(pattern, name) for name in names)
    ]
    if unmatched:
        raise UnmatchedPatternError(
            f"{UNIVERSAL_CHECKPOINT_INFO} has patterns that match no parameter: {', '.join(unmatched)}. Correct them where "
            "the checkpoint was saved, or pass --no_strict (strict=False) to go on without."
        )


def _is_pattern_list(key: str) -> bool:
    return key in (PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, PARAMETER_WITH_SUB_PARAMS)


def _patterns_of(entries: Any) -> Iterator[str]:
    for entry in entries or ():
        if isinstance(entry, str):
            yield entry
        else:
            yield from (entry["patterns"] if isinstance(entry, Mapping) else entry.patterns)


def _joining_fields(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """How the original cuts a parameter again for its tensor-parallel ranks: the fields beside `param`."""

    def matches(key: str) -> bool:
        return any(re.match(pattern, name) for pattern in _patterns_of(info.get(key)))

    if any(matches(key) for key in _REPLICATED):
        return {}
    fields: dict[str, Any] = {"cat_dim": 1 if matches(PARAMETER_WITH_ROW_PARALLELISM_PATTERNS) else 0}
    if matches(VOCABULARY_PARAMETER_PATTERNS):
        fields["vocab_tensor"] = True
    if matches(PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0):
        fields["param_n_sub_params"] = 2
    for entry in info.get(PARAMETER_WITH_SUB_PARAMS) or ():
        if any(re.match(pattern, name) for pattern in _patterns_of([entry])):
            fields["sub_param_shape"] = entry
    return fields
