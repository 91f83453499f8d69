"""What differs between hosts that each told everything about themselves: versions, operators, variables, clocks.

Pure. Does not live here: asking (`launcher.survey`), the report of one host (`env_report`, which calls this).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepspeed.launcher.survey import Answer

__all__ = ["difference_lines", "told_variables"]

_FAMILIES = ("NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "KMP_", "DS_", "DEEPSPEED_", "CUDA_", "PYTORCH_", "TORCH_")
_NAMES = {"LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONPATH"}
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH")
_MOST_SKEW_SECONDS = 0.5
_ABSENT = "(not there)"


def told_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer ranks, without any whose name tells of a secret."""
    names = [name for name in sorted(environ) if name.startswith(_FAMILIES) or name in _NAMES]
    return {name: environ[name] for name in names if not any(word in name for word in _SECRETS)}


def difference_lines(answers: Sequence[Answer]) -> list[str]:
    """The report over all hosts: a heading, then one line per difference, each beginning with "- "."""
    told = {answer.host: dict(_flat("", answer.facts)) for answer in answers if not answer.trouble}
    lines = [f"{len(told)} of {len(answers)} host(s) answered: {', '.join(told) or 'none'}"]
    lines += [f"- {answer.host} did not answer: {answer.trouble}" for answer in answers if answer.trouble]
    for key in dict.fromkeys(key for facts in told.values() for key in facts):
        hosts_by_value: dict[str, list[str]] = {}
        for host, facts in told.items():
            hosts_by_value.setdefault(facts.get(key, _ABSENT), []).append(host)
        if len(hosts_by_value) > 1:
            parts = (f"{', '.join(hosts)}: {value or '(empty)'}" for value, hosts in hosts_by_value.items())
            lines.append(f"- {key}: {' | '.join(parts)}")
    clocks = [answer for answer in answers if not answer.trouble]
    if clocks:
        first, last = min(clocks, key=lambda each: each.skew_seconds), max(clocks, key=lambda each: each.skew_seconds)
        apart = last.skew_seconds - first.skew_seconds
        if apart - first.skew_error_seconds - last.skew_error_seconds > _MOST_SKEW_SECONDS:
            lines.append(f"- clock: that of {last.host} is {apart:.3f} s ahead of that of {first.host}")
    return lines if any(line.startswith("- ") for line in lines) else [*lines, "nothing differs"]


def _flat(prefix: str, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(f"{key} ", value)
        else:
            yield key, value if isinstance(value, str) else repr(value)
