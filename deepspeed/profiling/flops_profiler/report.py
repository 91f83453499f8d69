"""The profile as text.

    Profile of step 1, rank 0
    <the sums>
    Largest modules at each depth
    Modules                        the tree: parameters, MACs, FLOPs, time, and the share of each

Lives here: layout. Does not live here: sums (`summary`), writing (`profiler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from deepspeed.profiling.flops_profiler.numbers import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from deepspeed.profiling.flops_profiler.summary import Row, StepFacts

__all__ = ["aggregated", "full_report"]

_CONVENTIONS = """\
1 MAC = 2 FLOPs; biases are free; causal masks take nothing off; elementwise operators and reductions cost 1 FLOP per
element, softmax 5, norms 5 to 7 (docs/guide/flops-profiler.md). Modules that are called several times have the sum, shared
ones stand where they were called. The optimizer, collectives and what runs outside the model's modules are not counted.
"""


class Profile(Protocol):
    """What a report is made of; `FlopsProfiler` has it."""

    recompute_fwd_factor: float
    step_facts: StepFacts | None

    def rows(self) -> list[Row]:
        """Every module, parents before children."""

    @property
    def uncounted(self) -> dict[str, int]:
        """Operators without a formula, and their calls."""

    @property
    def peak_flops(self) -> float | None:
        """FLOPs per second of the device."""


def full_report(profiler: Profile, step: int, module_depth: int, top_modules: int, *, detailed: bool) -> str:
    """The whole report; see `FlopsProfiler.print_model_profile`."""
    found = profiler.rows()
    facts = profiler.step_facts
    lines = [f"FLOPs profile of step {step}", "=" * 80]
    sums = list(_sums(profiler, found[0], facts))
    width = max(len(name) for name, _ in sums) + 2
    lines += [f"{name + ':':<{width}}{value}".rstrip() for name, value in sums]
    if profiler.uncounted:
        lines += ["", "Operators without a formula, counted as 0 FLOPs (calls):"]
        lines += [f"  {name} ({calls})" for name, calls in sorted(profiler.uncounted.items())]
    lines += ["", _CONVENTIONS]
    text = "\n".join(lines) + "\n" + aggregated(found, module_depth, top_modules)
    if detailed:
        text += "\nModules: parameters, MACs, FLOPs and time of forward, with the share of the model's; FLOPs per second\n"
        text += "".join(_tree(found, module_depth))
    return text + "=" * 80 + "\n"


def _sums(profiler: Profile, root: Row, facts: StepFacts | None) -> Iterator[tuple[str, str]]:
    yield "parameters on this rank", params_to_string(root.params)
    if facts is not None:
        yield "parameters of the whole model", params_to_string(facts.model_params)
        yield "micro-batches", str(facts.micro_batches)
    yield "forward MACs", macs_to_string(root.macs)
    yield "forward FLOPs", number_to_string(root.flops)
    seconds = root.seconds if facts is None else facts.forward_seconds
    yield "forward time", duration_to_string(seconds)
    yield "forward FLOPs per second", flops_to_string(root.flops / seconds if seconds > 0 else 0)
    if root.backward_flops or root.again_flops:
        yield "backward FLOPs", number_to_string(root.backward_flops)
        yield "FLOPs computed again in backward", number_to_string(root.again_flops)
    factor = profiler.recompute_fwd_factor
    yield (
        f"estimate of forward + backward: forward x (3 + {factor:g})",
        number_to_string(root.flops * (3 + factor)),
    )
    if facts is not None:
        yield from _of_step(root, facts, profiler.peak_flops)
    elif profiler.peak_flops is not None and seconds > 0:
        yield "share of the device's peak in forward", f"{root.flops / seconds / profiler.peak_flops:.2%}"


def _of_step(root: Row, facts: StepFacts, peak: float | None) -> Iterator[tuple[str, str]]:
    model_flops = root.flops + root.backward_flops
    compute, step = facts.forward_seconds + facts.backward_seconds, facts.step_seconds
    whole = compute + step
    yield "backward time", duration_to_string(facts.backward_seconds)
    yield "update time", duration_to_string(step)
    yield "time of the step", duration_to_string(whole)
    if compute > 0:
        yield "FLOPs per second, forward + backward", flops_to_string((model_flops + root.again_flops) / compute)
    if whole > 0:
        yield "samples per second, all ranks", f"{facts.samples / whole:.2f}"
    yield f"FLOPs of all {facts.ranks} ranks, recomputation included", number_to_string(facts.all_flops)
    yield "of these computed again", number_to_string(facts.all_again_flops)
    for stage, (forward, backward) in enumerate(facts.by_stage):
        yield (
            f"stage {stage}, all its ranks: forward, backward",
            f"{number_to_string(forward)}, {number_to_string(backward)}",
        )
    if peak is not None and whole > 0:
        yield "MFU: (forward + backward) / time / peak", f"{model_flops / whole / peak:.2%}"
        yield "HFU: the same with what was computed again", f"{(model_flops + root.again_flops) / whole / peak:.2%}"


def aggregated(found: Sequence[Row], module_depth: int, top_modules: int) -> str:
    """The `top_modules` kinds of modules with the most parameters, MACs and time at each depth up to `module_depth`."""
    deepest = max(row.depth for row in found)
    last = deepest if module_depth == -1 else min(module_depth, deepest)
    lines = [f"Largest kinds of modules at each depth (top {top_modules}):"]
    for depth in range(last + 1):
        kinds: dict[str, Row] = {}
        for row in found:
            if row.depth == depth:
                kinds.setdefault(row.kind, Row(row.kind, row.kind, "", depth, row.parent, False)).add(row)
        lines.append(f"depth {depth}:")
        lines.append(
            "  parameters  " + _top([(k, r.params, params_to_string(r.params)) for k, r in kinds.items()], top_modules)
        )
        lines.append("  MACs        " + _top([(k, r.macs, macs_to_string(r.macs)) for k, r in kinds.items()], top_modules))
        lines.append(
            "  time        " + _top([(k, r.seconds, duration_to_string(r.seconds)) for k, r in kinds.items()], top_modules)
        )
    return "\n".join(lines) + "\n"


def _top(values: list[tuple[str, float, str]], count: int) -> str:
    best = sorted(values, key=lambda each: -each[1])[:count]
    return ", ".join(f"{kind}: {text}" for kind, _, text in best)


def _tree(found: Sequence[Row], module_depth: int) -> Iterator[str]:
    root = found[0]
    for row in found:
        if module_depth != -1 and row.depth > module_depth:
            continue
        name = row.path.rpartition(".")[2]
        label = f"({name}): {row.kind}" if row.path else row.kind
        yield f"{'  ' * row.depth}{label}({', '.join(_facts(row, root))})\n"


def _facts(row: Row, root: Row) -> Iterator[str]:
    if row.is_repeat:
        yield "shared: parameters stand with its first place"
    else:
        yield f"{params_to_string(row.params)} parameters {_share(row.params, root.params)}"
    yield f"{macs_to_string(row.macs)} {_share(row.macs, root.macs)}"
    yield f"{number_to_string(row.flops)}FLOPs {_share(row.flops, root.flops)}"
    yield f"{duration_to_string(row.seconds)} {_share(row.seconds, root.seconds)}"
    if row.seconds > 0:
        yield flops_to_string(row.flops / row.seconds)
    if row.backward_flops:
        yield f"backward {number_to_string(row.backward_flops)}FLOPs"
    if row.again_flops:
        yield f"again {number_to_string(row.again_flops)}FLOPs"
    if row.calls > 1:
        yield f"{row.calls} calls"
    if row.extra and "\n" not in row.extra:
        yield row.extra


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "0%"
