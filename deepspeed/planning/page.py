"""The plan as one page that needs no network: the tables and bars of `text`, for a browser.

Everything that comes from the caller (names of models, texts of errors) is escaped by the template engine. Called by
`command`. Does not live here: numbers (`comparison`), what the rows say (`text`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from deepspeed.errors import ArgumentError
from deepspeed.planning.comparison import Comparison
from deepspeed.planning.text import Sides, amount, sentences, where

__all__ = ["page"]


def page(comparison: Comparison, bandwidth: float | None = None) -> str:
    """Return the page.

    Args:
        comparison: what it shows.
        bandwidth: GB/s that a rank sends at; None: no times.

    Raises:
        ArgumentError: jinja2 cannot be imported.
    """
    source = files("deepspeed.planning").joinpath("templates/plan.html").read_text(encoding="utf-8")
    template = _jinja2().Environment(autoescape=True, trim_blocks=True).from_string(source)
    asked, sides = comparison.asked, Sides.of(comparison, bandwidth)
    largest = max((term.nbytes for term in asked.terms), default=1)
    most = max((plan.peak_nbytes() for plan in sides.plans), default=1) or 1
    terms = [
        {
            "name": term.name,
            "amount": amount(term.nbytes),
            "tier": term.tier,
            "where": where(term),
            "lower": term.lower,
            "percent": _percent(term.nbytes, largest),
        }
        for term in sorted(asked.terms, key=lambda each: -each.nbytes)
    ]
    rows = [
        {"label": row[0], "cells": _answer_first(sides, row)[1:], "percent": _percent(plan.peak_nbytes(), most)}
        for plan, row in zip(sides.plans, sides.rows, strict=True)
    ]
    text: str = template.render(
        subject=comparison.subject,
        numel=f"{comparison.numel:,}",
        ranks=comparison.ranks,
        label=asked.label,
        peak=amount(asked.peak_nbytes()),
        sentences=sentences(comparison),
        terms=terms,
        columns=_answer_first(sides, sides.columns),
        rows=rows,
    )
    return text


def _answer_first(sides: Sides, row: Sequence[str]) -> list[str]:
    """Whether a setting fits stands beside its name: a phone has no room for the last column."""
    cells = list(row)
    if "fits" in sides.columns:
        cells.insert(1, cells.pop(list(sides.columns).index("fits")))
    return cells


def _percent(nbytes: float, of: float) -> str:
    return f"{100 * nbytes / of:.1f}"


def _jinja2() -> Any:
    try:
        return importlib.import_module("jinja2")
    except ImportError as cause:  # torch brings it, but not every build of torch
        raise ArgumentError(
            "--html was asked for, and the page is made with jinja2, which is not there. pip install jinja2"
        ) from cause
