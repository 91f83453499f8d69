"""The plan's page in a real browser, as the report's: light and dark, desktop and phone, by keyboard, to axe-core."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed.planning.page import page
from deepspeed.planning.planned import plan
from tests.support.browser import WIDTHS, Visit, open_browser

_CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}}
_LONG = "org/" + "a_model_whose_name_has_no_place_to_break_" * 4
_EVIL = "<script>document.title = 'run'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


def _written(folder: Path, subject: str) -> Path:
    path = folder / "plan.html"
    path.write_text(page(replace(plan(13e9, _CONFIG, 16, 80e9), subject=subject), bandwidth=50), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_the_plan_is_quiet_fits_its_window_and_passes_axe(browser: Any, tmp_path: Path, width: str, scheme: str) -> None:
    path = _written(tmp_path, _LONG)
    with Visit(browser, path, width, scheme) as visit:
        assert visit.overflow() == 0
        assert visit.faults(at_least=15) == []
        assert (visit.complaints, visit.requests) == ([], [path.as_uri()])
        ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 28)"}[scheme]


def test_on_a_phone_whether_it_fits_is_read_without_scrolling(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, _written(tmp_path, "13B"), "narrow") as visit:
        assert visit.page.get_by_role("region", name="Terms").evaluate("e => e.scrollWidth - e.clientWidth") <= 0
        told = visit.page.locator("td", has_text=re.compile("^(yes|no)$"))
        ends = [box["x"] + box["width"] for cell in told.all() if (box := cell.bounding_box()) is not None]
        assert len(ends) == 9
        assert max(ends) <= WIDTHS["narrow"][0] - 16


def test_tables_are_reached_by_keyboard_and_show_it(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, _written(tmp_path, "13B"), "phone") as visit:
        reached = []
        for _ in range(2):
            visit.page.keyboard.press("Tab")
            reached.append(visit.page.evaluate("document.activeElement.getAttribute('aria-label')"))
            assert visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert reached == ["Terms", "Settings side by side"]


def test_names_stay_texts_and_no_script_runs(browser: Any, tmp_path: Path) -> None:
    path = _written(tmp_path, _EVIL)
    with Visit(browser, path) as visit:
        assert visit.page.locator("img, script").count() == 0
        assert visit.complaints == []
    path.write_text(path.read_text().replace("</main>", f"{_EVIL}</main>"))  # past the escaping, the policy stops it
    with Visit(browser, path) as visit:
        assert visit.page.title() != "run"
        assert any("Content Security Policy" in each for each in visit.complaints)
