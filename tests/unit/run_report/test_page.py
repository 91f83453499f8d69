"""The page as markup: one file, no address but its own, every text escaped, every section there or said to be missing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepspeed.launcher import runner
from deepspeed.run_report import read_run
from deepspeed.run_report.command import main
from deepspeed.run_report.page import render
from tests.support import run_logs
from tests.support.run_logs import BEGIN, end, rank_step, start, step, write

_VOID = {"meta", "link", "br", "img", "input", "hr"}
_EVIL = "<script>alert('x')</script>\"'&<img src=x onerror=alert(1)>"
_TITLES = {
    "Training", "Loss scale", "Speed", "Memory", "Where a step's time goes", "Communication", "Who waits for whom",
    "Pipeline schedule", "Expert load", "Modules", "Checkpoints and restarts", "Ranks", "Configuration",
}  # fmt: skip


class _Page(HTMLParser):
    """Elements with their attributes, texts by element; fails on an end tag that closes nothing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _page(folder: Path) -> tuple[str, _Page]:
    run = read_run(folder)
    text = render(run, run.attempts[-1].end + 30)
    return text, _Page(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, _Page]:
    return _page(run_logs.whole(tmp_path_factory.mktemp("run") / "gpt", steps=300))


def test_a_whole_log_fills_every_section(whole: tuple[str, _Page]) -> None:
    _, page = whole
    assert _TITLES | {"What stands out"} == set(page.texts["h2"])


def test_the_page_asks_for_no_other_file(whole: tuple[str, _Page]) -> None:
    text, page = whole
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "xlink:href", "action", "poster", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert re.findall(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|innerHTML", text) == []


def test_the_policy_lets_the_pages_own_script_run_and_nothing_else(whole: tuple[str, _Page]) -> None:
    text, page = whole
    (policy,) = [str(meta["content"]) for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    told = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{told}';" in policy


def test_links_and_labels_lead_somewhere_and_no_two_elements_have_one_name(whole: tuple[str, _Page]) -> None:
    _, page = whole
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in page.elements:
        for key in ("aria-labelledby", "aria-describedby"):
            assert (attributes.get(key) or names[0]) in names
        if (attributes.get("href") or "").startswith("#"):
            assert str(attributes["href"])[1:] in names


def test_every_drawing_has_its_words_and_every_chart_its_numbers(whole: tuple[str, _Page]) -> None:
    text, page = whole
    for svg in page.all("svg"):
        assert svg.get("aria-hidden") == "true" or (svg.get("role") == "img" and svg.get("aria-labelledby"))
    charts = re.findall(r'<figure class="chart[^>]*id="([^"]+)".*?</figure>', text, re.DOTALL)
    assert len(charts) >= 12
    for chart in re.findall(r'<figure class="chart[^>]*id=.*?</figure>', text, re.DOTALL):
        assert "<table" in chart
        assert "<desc" in chart


def test_texts_of_a_log_are_never_markup(tmp_path: Path) -> None:
    config = {"train_batch_size": 1, _EVIL: _EVIL}
    phases = {_EVIL: 1.0}
    comm = {_EVIL: {"count": 1, "nbytes": 1, "seconds": 1}}
    records = [
        start(
            0,
            model=_EVIL,
            host=_EVIL,
            device=_EVIL,
            version=_EVIL,
            config=config,
            plan={_EVIL: 1.0},
            mesh={_EVIL: 2},
            world_size=1,
        ),
        step(1, BEGIN, more={_EVIL: 1.0, f"loss {_EVIL}": 2.0}),
        rank_step(1, BEGIN, phases=phases, comm=comm),
        {"kind": "experts", "time": BEGIN, "step": 1, "layers": {_EVIL: [0.5, 0.5]}},
        {"kind": "schedule", "time": BEGIN, "name": _EVIL, "text": _EVIL, "works": [[0, 0, 1, _EVIL, 1]]},
        {"kind": "checkpoint", "time": BEGIN, "action": _EVIL, "tag": _EVIL, "step": 1},
        {"kind": "profile", "time": BEGIN, "step": 1, "tree": [{"name": _EVIL}]},
        {"kind": _EVIL, "time": BEGIN},
        end(1, BEGIN, _EVIL),
    ]
    text, page = _page(write(tmp_path / "a<b>&'", {0: records}))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert len(page.all("script")) == 1
    assert text.count("&lt;script&gt;alert") >= 15
    assert "a&lt;b&gt;&amp;&#39;" in text


def test_what_is_not_in_the_log_is_named_with_what_writes_it(tmp_path: Path) -> None:
    text, page = _page(write(tmp_path, {0: [start(0, world_size=1, config=None)]}))
    assert "Not in this log" in page.texts["h2"]
    said = dict(zip(page.texts["dt"][-len(page.texts["dt"]) :], page.texts["dd"], strict=False))
    assert said
    for title, cure in (
        ("Training", "run_log.every"),
        ("Where a step&#39;s time goes", "forward, backward"),
        ("Communication", "collectives"),
        ("Pipeline schedule", "PipelineModule"),
        ("Expert load", "MoE"),
        ("Modules", "flops_profiler"),
    ):
        assert re.search(rf"<dt>{re.escape(title)}</dt><dd>[^<]*{cure}", text), title
    assert {"Training", "Expert load"}.isdisjoint(page.texts["h2"])


def test_a_long_log_makes_a_small_page(tmp_path: Path) -> None:
    text, page = _page(run_logs.whole(tmp_path, steps=10_000, ranks=2))
    assert len(text.encode()) < 1_500_000
    assert any("10,000 reported steps in 400 buckets" in note for note in page.texts["p"])


def test_many_ranks_and_layers_are_shown_in_part_which_is_said(tmp_path: Path) -> None:
    layers = {f"layer {at}": [1 / 128] * 128 for at in range(80)}
    write(tmp_path, {0: [start(0, world_size=256), {"kind": "experts", "time": BEGIN, "step": 1, "layers": layers}]})
    for rank in range(256):
        records = [rank_step(at, BEGIN + at, waited_seconds=1.0 / (rank + 1)) for at in range(1, 4)]
        write(tmp_path, {rank: [*([] if rank == 0 else [start(rank, world_size=256)]), *records]})
    text, page = _page(tmp_path)
    notes = page.texts["p"]
    assert any("The first 64 of 80 layers are shown." in note for note in notes)
    assert any("neighbours are joined" in note for note in notes)
    assert any("The 8 ranks drawn are the fullest" in note for note in notes)
    assert any("The first 200 of 256 ranks are shown." in note for note in notes)
    assert len(text) < 1_000_000


def test_the_command_writes_the_page_into_the_folder_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_logs.whole(tmp_path / "run", steps=40)
    runner.main(["report", str(folder)])
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert main([str(folder), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


def test_a_page_that_cannot_be_written_says_how_to_put_it_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_logs.whole(tmp_path / "run", steps=40)
    assert main([str(folder), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert re.search(r"page.html: .*No such file or directory.*--out FILE.html", capsys.readouterr().err)


def test_figures_are_told_as_strict_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_logs.whole(tmp_path, steps=60)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (told["state"], told["last_step"], told["straggler"], told["world_size"]) == ("done", 60, 2, 4)
    assert set(told["phase_seconds"]) == {"forward", "backward", "backward_allreduce", "step"}
    assert told["operations"][0]["name"] == "reduce_scatter"
    assert [each["action"] for each in told["checkpoints"]].count("load") == 1


def test_a_folder_of_several_runs_shows_the_newest_and_lists_them_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, last in enumerate((5, 3)):
        begin = BEGIN + 100 * number
        steps = [step(at, begin + at) for at in range(1, last + 1)]
        write(tmp_path, {0: [start(0, begin, world_size=1), *steps, end(last, begin + 9)]})
    write(tmp_path / "engine-2", {0: [start(0, world_size=1)]})
    assert main([str(tmp_path), "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)
    assert main([str(tmp_path), "--json", "--run", "1"]) == 0
    first = json.loads(capsys.readouterr().out)
    keys = ("run", "runs", "attempts", "first_step", "last_step", "other_engines")
    assert [newest[key] for key in keys] == [2, 2, 1, 1, 3, ["engine-2"]]
    assert [first[key] for key in keys] == [1, 2, 1, 1, 5, ["engine-2"]]
    assert [each["text"] for each in newest["findings"]] == [
        "This is run 2 of 2 in this folder: each began with the first step. deepspeed report --run 1 shows the first.",
        "Other engines trained in the same processes: engine-2 in this folder. Each has its own report.",
    ]
    assert "Runs in this folder" in render(read_run(tmp_path), BEGIN + 200)
    assert main([str(tmp_path), "--run", "3"]) == 2
    assert "run 3 was asked for, and there are 2" in capsys.readouterr().err


def test_without_jinja2_the_install_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_logs.whole(tmp_path, steps=20)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main([str(folder)]) == 2
    assert "pip install 'deepspeed[report]'" in capsys.readouterr().err
    assert main([str(folder), "--json"]) == 0


def test_a_log_that_is_not_there_ends_with_its_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        runner.main(["report", str(tmp_path / "nowhere")])
    assert status.value.code == 2
    assert "no such folder. Give the folder" in capsys.readouterr().err
