"""The report's page in a real browser: light and dark, desktop and phone; by keyboard, without scripts, and to axe-core.

Chromium comes from the system (Debian: apt-get install chromium), Playwright steers it. axe-core is the rule engine that
accessibility audits use; of its findings none may be left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed.run_report import read_run
from deepspeed.run_report.page import render
from tests.support import run_logs
from tests.support.browser import WIDTHS, Visit, open_browser
from tests.support.run_logs import BEGIN, end, rank_step, start, step, write

_EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(run_logs.whole(tmp_path_factory.mktemp("run") / "gpt-moe", steps=400))


def _written(folder: Path) -> Path:
    run = read_run(folder)
    path = folder / "report.html"
    path.write_text(render(run, run.attempts[-1].end + 30), encoding="utf-8")
    return path


_CONTRASTS = """() => {
    const canvas = document.createElement('canvas').getContext('2d');
    const luminance = (colour) => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (a, b) => (Math.max(luminance(a), luminance(b)) + 0.05) / (Math.min(luminance(a), luminance(b)) + 0.05);
    const style = getComputedStyle(document.documentElement);
    return [...Array(8).keys()].map(at => contrast(style.getPropertyValue('--s' + at), style.getPropertyValue('--panel')));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_the_page_is_quiet_fits_its_window_and_passes_axe(browser: Any, whole: Path, width: str, scheme: str) -> None:
    with Visit(browser, whole, width, scheme) as visit:
        assert visit.overflow() == 0
        visit.open_all()
        assert visit.overflow() == 0
        assert visit.faults(at_least=20) == []
        assert visit.complaints == []
        assert visit.requests == [whole.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_areas_and_bars_stand_out_from_their_ground(browser: Any, whole: Path, scheme: str) -> None:
    """WCAG 2.2, 1.4.11: 3 to 1 for graphics, which axe does not measure."""
    with Visit(browser, whole, scheme=scheme) as visit:
        ratios = visit.page.evaluate(_CONTRASTS)
        assert len(ratios) == 8
        assert min(ratios) >= 3
        strokes = visit.page.evaluate(
            "new Set([...document.querySelectorAll('.plot path.line')].map(e => getComputedStyle(e).stroke)).size"
        )
        assert strokes >= 4


def test_charts_are_read_by_arrow_keys(browser: Any, tmp_path: Path) -> None:
    losses = [4.0, 3.0, 2.5, 1.0]
    records = [step(at, BEGIN + at, loss=loss) for at, loss in enumerate(losses, start=10)]
    path = _written(write(tmp_path, {0: [start(0, world_size=1), *records, end(13, BEGIN + 14)]}))
    with Visit(browser, path) as visit:
        slider = visit.page.get_by_role("slider", name="Loss: values by step")
        slider.focus()
        tip = visit.page.locator("#chart-loss .tip")
        told = []
        for key in ("End", "ArrowLeft", "ArrowLeft", "Home", "ArrowRight", "PageUp"):
            visit.page.keyboard.press(key)
            assert tip.is_visible()
            told.append((slider.get_attribute("aria-valuenow"), slider.get_attribute("aria-valuetext")))
        assert told == [
            ("13", "step 13: loss 1"),
            ("12", "step 12: loss 2.5"),
            ("11", "step 11: loss 3"),
            ("10", "step 10: loss 4"),
            ("11", "step 11: loss 3"),
            ("12", "step 12: loss 2.5"),
        ]
        visit.page.keyboard.press("Tab")
        assert not tip.is_visible()
        assert visit.complaints == []


def test_pointing_at_a_chart_tells_its_values(browser: Any, whole: Path) -> None:
    with Visit(browser, whole) as visit:
        box = visit.page.locator("#chart-phases .plot").bounding_box()
        visit.page.locator("#chart-phases").scroll_into_view_if_needed()
        box = visit.page.locator("#chart-phases .plot").bounding_box()
        visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        told = visit.page.locator("#chart-phases .tip").inner_text()
        assert "step 20" in told  # the middle of 400
        for phase in ("forward", "backward", "backward_allreduce", "step"):
            assert f"{phase}: " in told
        (milliseconds,) = [float(line.split()[1]) for line in told.splitlines() if line.startswith("forward:")]
        assert 70 < milliseconds < 100  # 0.3 of 250 to 320 ms


def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(browser: Any, whole: Path) -> None:
    with Visit(browser, whole, "phone") as visit:
        page = visit.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
        assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.goto(whole.as_uri())  # without the fragment, which is where tabbing would begin
        stops = page.evaluate(
            "[...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility()).length"
        )
        tops, outlines = [], []
        for _ in range(stops):
            page.keyboard.press("Tab")
            tops.append(page.evaluate("document.activeElement.getBoundingClientRect().top + scrollY"))
            outlines.append(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
        assert set(outlines) == {"solid"}
        last = page.evaluate(
            "[...document.querySelectorAll('summary')].filter(e => e.checkVisibility()).pop() === document.activeElement"
        )
        assert last
        assert stops > 40
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.parentElement.open")


def test_without_scripts_charts_and_numbers_are_there(browser: Any, whole: Path) -> None:
    with Visit(browser, whole, java_script_enabled=False) as visit:
        assert visit.page.locator("#chart-loss .plot path.line").count() == 3  # kept, given up, evaluation
        visit.page.locator("#chart-loss summary").click()
        assert visit.page.locator("#chart-loss table tbody tr").count() == 21
        assert visit.page.get_by_role("slider").count() == 0


def test_texts_of_a_log_stay_texts(browser: Any, tmp_path: Path) -> None:
    records = [
        start(0, model=_EVIL, host=_EVIL, device=_EVIL, config={_EVIL: _EVIL}, world_size=1),
        *(step(at, BEGIN + at, more={f"loss {_EVIL}": 1.0}) for at in (1, 2)),
        rank_step(2, BEGIN, phases={_EVIL: 1.0}),
        end(2, BEGIN + 2, _EVIL),
    ]
    path = _written(write(tmp_path / "x", {0: records}))
    with Visit(browser, path) as visit:
        visit.open_all()
        for slider in visit.page.get_by_role("slider").all():
            slider.focus()
        assert visit.page.locator("img").count() == 0
        assert visit.complaints == []
        assert visit.overflow() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_extreme_values_long_names_and_many_rows_stay_legible(browser: Any, tmp_path: Path, scheme: str) -> None:
    """On the narrowest phone: names of 200 letters, 64 rows in a grid, values at the ends of what floats hold."""
    name = "layers_without_a_place_to_break_" * 6
    values = [1e308, -1e308, 5e-324, 0.0, None, 3.0]
    told = [step(at, BEGIN + at, value, grad_norm=value, more={f"{name}loss": value}) for at, value in enumerate(values)]
    own = [rank_step(at, BEGIN + at, host_bytes=1e308, phases={name: 1e308}, waited_seconds=1e308) for at in range(6)]
    shares = {f"{name}{at}": [1 / 64] * 64 for at in range(70)}
    experts = {"kind": "experts", "time": BEGIN, "step": 5, "layers": shares}
    for rank in (0, 1):
        records = [start(rank, model=name, host=name, device=name), *told, *own, experts, end(5, BEGIN + 6, name)]
        write(tmp_path / "x", {rank: records})
    with Visit(browser, _written(tmp_path / "x"), "narrow", scheme) as visit:
        visit.open_all()
        assert visit.overflow() == 0
        assert visit.faults(at_least=20) == []
        assert visit.complaints == []
        names = visit.page.locator("#grid-experts .names span").all()
        tops = [box["y"] for each in names if each.inner_text() and (box := each.bounding_box()) is not None]
        assert len(tops) >= 16
        assert min(after - before for before, after in itertools.pairwise(tops)) >= 12
        ticks = visit.page.locator("#grid-experts .x span:visible").all()
        boxes = [box for each in ticks if (box := each.bounding_box()) is not None]
        assert all(one["x"] + one["width"] < other["x"] for one, other in itertools.pairwise(boxes))
        (phase,) = visit.page.locator("#phases tbody th.long").all()
        box = phase.bounding_box()
        assert box is not None
        assert (box["width"], box["height"] < 400) == (pytest.approx(160, abs=20), True)


def test_what_an_intruder_might_write_into_the_file_cannot_run(browser: Any, whole: Path, tmp_path: Path) -> None:
    """The policy is the second fence: markup that escaping would have to stop does nothing all the same."""
    path = tmp_path / "changed.html"
    path.write_text(
        whole.read_text().replace(
            "</main>", "<script>document.title = 'run'</script><img src='http://127.0.0.1:9/x'></main>"
        )
    )
    with Visit(browser, path) as visit:
        assert visit.page.title() == "gpt-moe: run report"
        assert len([each for each in visit.complaints if "Content Security Policy" in each]) == 2
