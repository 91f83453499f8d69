"""A real browser for the tests of pages: the system's Chromium, steered by Playwright.

It outlives single tests, and begins and ends processes of its own as pages come and go, which tests are not blamed for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]  # CI runs as root, where there is no sandbox
_drivers: set[int] = set()


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A browser; the test is skipped where there is none, and fails in CI, whose script installs it."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _go_without("Playwright is not installed: pip install playwright")
    if path is None:
        _go_without("no browser is installed: apt-get install chromium")
    before = {child.pid for child in psutil.Process().children()}
    with sync_playwright() as playwright:
        mine = {child.pid for child in psutil.Process().children()} - before
        _drivers.update(mine)
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
            _drivers.difference_update(mine)


def kept_pids() -> set[int]:
    """Processes of browsers that are open."""
    found = set(_drivers)
    for pid in _drivers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def _go_without(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
