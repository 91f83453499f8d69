"""One HTML file of a run: no network, no other file.

    sections --> templates/page.html.j2, page.css, page.js --> text

Names, errors and configurations in a log are texts of strangers: templates escape everything, the script writes texts alone,
and a content security policy forbids any other script and any request. Called by `command`. Needs jinja2.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from deepspeed.errors import MissingPackageError
from deepspeed.run_report import texts
from deepspeed.run_report.reading import Run
from deepspeed.run_report.sections import sections
from deepspeed.run_report.summary import Summary, findings, summarise
from deepspeed.version import version

__all__ = ["render"]

_TEMPLATES = "templates"


@dataclass(frozen=True)
class _Tile:
    name: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class _State:
    level: Literal["bad", "watch", "good"]
    text: str


def render(run: Run, now: float) -> str:
    """The page.

    Args:
        run: what was read.
        now: seconds of the Unix clock: when the page is written.

    Raises:
        MissingPackageError: jinja2 is not installed.
    """
    environment = _environment()
    shown, absent = sections(run)
    summary = summarise(run)
    script = _file("page.js")
    text: str = environment.get_template("page.html.j2").render(
        name=run.name,
        folder=str(run.folder),
        state=_state(summary, now),
        about=_about(summary),
        tiles=_tiles(summary),
        findings=findings(run, now),
        sections=shown,
        idents={section.ident: section.title for section in shown},
        absent=absent,
        version=version,
        written=texts.clock(now),
        style=_file("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return text


def _environment() -> Any:
    """A jinja2 environment that escapes what no template calls safe, and knows no undefined name."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError as error:
        raise MissingPackageError(
            "deepspeed report writes its page with jinja2, which is not installed: pip install 'deepspeed[report]'; "
            "--json needs none."
        ) from error
    loader = jinja2.FunctionLoader(_file)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)


def _file(name: str) -> str:
    return resources.files("deepspeed.run_report").joinpath(_TEMPLATES).joinpath(name).read_text(encoding="utf-8")


def _state(summary: Summary, now: float) -> _State:
    if summary.state == "done":
        return _State("good", f"Done after {texts.duration(summary.seconds)}")
    if summary.state == "failed":
        return _State("bad", f"Failed after {texts.duration(summary.seconds)}")
    return _State("watch", f"No end recorded; last record {texts.duration(max(0.0, now - summary.end))} ago")


def _about(summary: Summary) -> list[str]:
    ranks = f"{summary.world_size} rank{'s' if summary.world_size != 1 else ''}"
    mesh = ", ".join(f"{axis} {size}" for axis, size in summary.mesh.items() if size != 1)
    hosts = summary.hosts[0] if len(summary.hosts) == 1 else f"{len(summary.hosts)} hosts" if summary.hosts else ""
    of_stage = " in its first stage" if summary.mesh.get("pipe", 1) > 1 else ""
    numel = f" with {texts.count(summary.parameters)} parameters{of_stage}" if summary.parameters else ""
    model = f"{summary.model}{numel}" if summary.model else ""
    about = [model, ranks + (f" ({mesh})" if mesh else ""), summary.device, hosts]
    about += [f"deepspeed {summary.version}" if summary.version else None, f"from {texts.clock(summary.begin)} UTC"]
    return [each for each in about if each]


def _tiles(summary: Summary) -> list[_Tile]:
    last = texts.UNKNOWN if summary.last_step is None else f"{summary.last_step:,}"
    tiles = [
        _Tile("Last step", last, f"{summary.attempts} starts" if summary.attempts > 1 else ""),
        _Tile("Loss", texts.number(summary.loss), f"from {texts.number(summary.first_loss)}"),
        _Tile("Time per step", texts.seconds(summary.step_seconds), "median"),
        _Tile("Samples per second", texts.number(summary.samples_per_second), "median"),
    ]
    if summary.mfu is not None:
        tiles.append(_Tile("MFU", texts.share(summary.mfu), "median"))
    if summary.peak_nbytes is not None:
        plan = f"plan {texts.nbytes(summary.plan_nbytes)}" if summary.plan_nbytes else "fullest rank"
        tiles.append(_Tile("Peak memory", texts.nbytes(summary.peak_nbytes), plan))
    if summary.skipped:
        tiles.append(_Tile("Skipped steps", f"{summary.skipped:,}", "overflow"))
    return tiles
