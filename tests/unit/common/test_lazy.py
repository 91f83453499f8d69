from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = """
from deepspeed.common.lazy import attach
__getattr__, __dir__ = attach(
    __name__,
    submodules=("part",),
    names={"answer": "lazy_sample.part:answer", "whole": "lazy_sample.part"},
    unbuilt={"later": "lazy_sample.later is not built yet"},
)
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "lazy_sample").mkdir()
    (tmp_path / "lazy_sample" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "lazy_sample" / "part.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("lazy_sample")
    for name in ("lazy_sample", "lazy_sample.part"):
        sys.modules.pop(name, None)


def test_importing_the_package_loads_no_part(sample: ModuleType) -> None:
    assert "lazy_sample.part" not in sys.modules
    assert sample.answer == 42
    assert "lazy_sample.part" in sys.modules


def test_a_sub_module_loads_on_attribute_access(sample: ModuleType) -> None:
    assert sample.part is sys.modules["lazy_sample.part"]
    assert sample.whole is sample.part


def test_a_name_once_used_is_an_ordinary_attribute_that_clients_may_replace(sample: ModuleType) -> None:
    assert sample.answer == 42
    assert vars(sample)["answer"] == 42
    sample.answer = 7
    assert importlib.import_module("lazy_sample").answer == 7


def test_an_unknown_name_raises_and_an_unbuilt_one_says_why(sample: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'lazy_sample' has no attribute 'nonsense'"):
        _ = sample.nonsense
    with pytest.raises(AttributeError, match="later is not built yet"):
        _ = sample.later
    assert not hasattr(sample, "later")


def test_dir_lists_every_name_before_it_is_loaded(sample: ModuleType) -> None:
    assert {"answer", "part", "whole"} <= set(dir(sample))
    assert "later" not in dir(sample)


def test_a_module_may_be_called_as_the_function_of_its_name() -> None:
    code = "import deepspeed.utils.z3_leaf_module, torch; print(deepspeed.utils.z3_leaf_module(torch.nn.Linear(1, 1)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
