"""A real browser for the tests of pages: the system's Chromium, steered by Playwright.

It outlives single tests, and begins and ends processes of its own as pages come and go, which tests are not blamed for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844), "narrow": (320, 640)}
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


class Visit:
    """A page that was opened, with what it complained about and asked for."""

    def __init__(self, browser: Any, path: Path, width: str = "desktop", scheme: str = "light", **more: Any) -> None:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        self._context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", **more)
        self.page = self._context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def open_all(self) -> None:
        """Unfold what is folded."""
        self.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")

    def overflow(self) -> int:
        """Pixels that the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def faults(self, at_least: int) -> list[tuple[str, Any, str]]:
        """What axe-core finds; fails where it looked at fewer rules than `at_least`, for then there was no page."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response
        assert len(found["passes"]) >= at_least
        return [
            (each["id"], [node["target"] for node in each["nodes"]][:5], each["nodes"][0]["failureSummary"])
            for each in found["violations"]
        ]


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
