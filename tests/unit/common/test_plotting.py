from __future__ import annotations

import sys

import pytest

from deepspeed.common.plotting import new_figure
from deepspeed.errors import MissingPackageError


def test_a_figure_has_the_size_asked_for() -> None:
    assert new_figure(3, 2, "--png").get_size_inches().tolist() == [3, 2]


def test_without_matplotlib_the_option_that_needs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"--png needs matplotlib: pip install 'deepspeed\[plot\]'"):
        new_figure(3, 2, "--png")
