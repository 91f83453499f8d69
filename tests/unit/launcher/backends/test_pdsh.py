"""What pdsh carries is text for a shell: a real shell gives every word and value back as it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed.launcher.backends import BACK_ENDS, Job

TELL = """\
import json, os, sys
values = {name: value for name, value in os.environ.items() if name.startswith("T_")}
print(json.dumps([sys.argv[1:], values, os.getcwd()]))
"""
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
NASTY = [
    "a b",
    'say "hi"',
    "it's",
    "$HOME `id` $(id)",
    "two\nlines",
    "caf\u00e9 \u2713",
    "",
    "%n %h %u %%",
    "\\",
    "*",
    "~",
    "#",
    "!x",
]


def _by_pdsh(text: str) -> str:
    """What pdsh hands to the shell of host number 0, seen on pdsh 2.34: it replaces %n, %h, %u and %%."""
    return re.sub("%[nhu%]", lambda found: {"%n": "0", "%h": "worker-0", "%u": "root", "%%": "%"}[found[0]], text)


def _arrives(words: list[str], values: list[str], folder: Path) -> None:
    exports = {f"T_{i}": value for i, value in enumerate(values)}
    job = Job({"worker-0": [0]}, (sys.executable, "-c", TELL), ("--flag",), tuple(words), exports, {}, str(folder), folder)
    argv = BACK_ENDS["pdsh"].command(job, "pdsh").argv
    text = _by_pdsh(" ".join(argv[6:]))
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True, env={}, cwd="/")
    assert json.loads(done.stdout) == [["--node_rank=0", "--flag", "--", *words], exports, str(folder)]


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("it's 100%n $HOME"))


@settings(max_examples=40)
@example(NASTY, NASTY)
@given(st.lists(TEXT.filter(lambda word: word != ":"), max_size=5), st.lists(TEXT, max_size=4))
def test_words_values_and_folder_arrive_unchanged(odd_folder: Path, words: list[str], values: list[str]) -> None:
    _arrives(words, values, odd_folder)


def test_all_hosts_of_a_large_job_are_reached_at_once() -> None:
    job = Job({f"w{number}": [0] for number in range(1500)}, ("python",), (), ("t.py",), {}, {}, "/job", Path("/job"))
    argv = BACK_ENDS["pdsh"].command(job, "pdsh").argv
    assert argv[argv.index("-f") + 1] == "1500"
