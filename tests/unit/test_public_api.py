from __future__ import annotations

import difflib
from pathlib import Path

from tests.support.public_api import lines

RECORD = Path(__file__).parent.parent / "public_api.txt"


def test_the_public_names_and_signatures_are_those_on_record() -> None:
    """When the change is meant: `python -m tests.support.public_api > tests/public_api.txt`, and a line in CHANGELOG.md."""
    difference = difflib.unified_diff(RECORD.read_text().splitlines(), list(lines()), "on record", "now", lineterm="", n=0)
    assert "\n".join(difference) == ""
