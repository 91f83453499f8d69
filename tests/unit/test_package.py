from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import deepspeed
from deepspeed import version as version_text
from deepspeed.version import read_git

REPOSITORY = Path(deepspeed.__file__).parent.parent
COME_WITH_OTHERS = {"pydantic_core", "oneccl_bindings_for_pytorch", "triton"}  # with pydantic; with torch for some devices


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_importing_the_package_loads_neither_torch_nor_a_room_and_prints_nothing() -> None:
    loaded = json.loads(_run("import deepspeed, sys, json; print(json.dumps(list(sys.modules)))"))
    assert not {"torch", "numpy", "pydantic", "rich"} & set(loaded)
    assert sorted(name for name in loaded if name.startswith("deepspeed")) == [
        "deepspeed",
        "deepspeed.common",
        "deepspeed.common.lazy",
        "deepspeed.version",
    ]


def test_importing_the_package_costs_next_to_nothing_over_torch() -> None:
    code = "import torch, time; t = time.process_time(); import deepspeed; print(time.process_time() - t)"
    assert min(float(_run(code)) for _ in range(3)) <= 0.10


@pytest.mark.parametrize("name", sorted(set(deepspeed.__all__)))
def test_each_public_name_resolves_by_attribute_and_by_import(name: str) -> None:
    value = getattr(deepspeed, name)
    assert value is not None
    namespace: dict[str, object] = {}
    exec(f"from deepspeed import {name}", namespace)
    assert namespace[name] is value
    assert name in dir(deepspeed)


def test_a_public_name_resolves_in_a_process_that_has_loaded_nothing_else() -> None:
    names = "DeepSpeedEngine DeepSpeedConfig comm.get_rank runtime.lr_schedules.VALID_LR_SCHEDULES utils.logging.logger"
    code = "import deepspeed; " + "; ".join(f"deepspeed.{name}" for name in names.split())
    assert _run(code) == ""


def test_initialize_is_an_ordinary_attribute_that_clients_replace_and_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    original = deepspeed.initialize
    assert inspect.isfunction(original)
    monkeypatch.setattr(deepspeed, "initialize", lambda: "mine")
    assert importlib.import_module("deepspeed").initialize() == "mine"
    monkeypatch.undo()
    assert deepspeed.initialize is original


def test_a_name_that_is_not_built_yet_says_so_and_is_absent_to_hasattr() -> None:
    with pytest.raises(AttributeError, match=r"deepspeed\.InferenceEngine is not built yet in 1\.0\.0\.dev0"):
        _ = deepspeed.InferenceEngine
    assert not hasattr(deepspeed, "init_inference")
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = deepspeed.initialise


def test_what_type_checkers_see_is_what_attribute_access_finds() -> None:
    tree = ast.parse(Path(deepspeed.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name, (module, attribute) in seen.items():
        if name in deepspeed._NAMES:
            assert getattr(deepspeed, name) is getattr(importlib.import_module(str(module)), attribute), name
    renamed = {"ConfigError": "DeepSpeedConfigError"}
    dotted = {"dist", "__git_branch__", "__git_hash__"}  # same objects under a second name
    assert {renamed.get(name, name) for name in seen} == set(deepspeed._NAMES) - dotted


def test_the_version_is_one_text_in_all_its_places() -> None:
    parsed = Version(deepspeed.__version__)
    assert deepspeed.version == deepspeed.__version__ == version_text
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert parts == parsed.release
    importlib.import_module("deepspeed.version")
    assert isinstance(deepspeed.version, str)
    assert importlib.import_module("deepspeed.git_version_info").version == version_text


def test_clients_that_ask_for_at_least_0_19_6_find_it() -> None:
    assert Version(deepspeed.__version__) >= Version("0.19.6")
    assert deepspeed.version >= "0.16.4"


def _repository(folder: Path, head: str) -> Path:
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text(head + "\n")
    return folder


def test_commit_and_branch_are_read_from_the_working_copy(tmp_path: Path) -> None:
    loose = _repository(tmp_path / "loose", "ref: refs/heads/work/one")
    (loose / ".git" / "refs" / "heads" / "work").mkdir(parents=True)
    (loose / ".git" / "refs" / "heads" / "work" / "one").write_text("0123456789abcdef\n")
    assert read_git(loose) == ("01234567", "work/one")
    packed = _repository(tmp_path / "packed", "ref: refs/heads/main")
    (packed / ".git" / "packed-refs").write_text("# pack-refs\nfedcba9876543210 refs/heads/main\n")
    assert read_git(packed) == ("fedcba98", "main")
    assert read_git(_repository(tmp_path / "detached", "00112233445566")) == ("00112233", "unknown")
    assert read_git(_repository(tmp_path / "empty", "ref: refs/heads/none")) == ("unknown", "none")
    assert read_git(tmp_path / "nowhere") == ("unknown", "unknown")


def test_commit_and_branch_are_read_through_a_linked_working_tree(tmp_path: Path) -> None:
    main = _repository(tmp_path / "main", "ref: refs/heads/main")
    (main / ".git" / "refs" / "heads").mkdir(parents=True)
    (main / ".git" / "refs" / "heads" / "side").write_text("abcdefabcdef\n")
    linked = main / ".git" / "worktrees" / "side"
    linked.mkdir(parents=True)
    (linked / "HEAD").write_text("ref: refs/heads/side\n")
    (linked / "commondir").write_text("../..\n")
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / ".git").write_text(f"gitdir: {linked}\n")
    assert read_git(tmp_path / "side") == ("abcdefab", "side")


def test_the_hash_of_this_copy_is_a_commit_or_honestly_unknown() -> None:
    assert deepspeed.__git_hash__ == deepspeed.git_hash
    in_repository = (REPOSITORY / ".git").exists()
    assert (deepspeed.git_hash != "unknown") == in_repository


def _imported(folder: Path) -> set[str]:
    """Top-level names of every module that a file of `folder` imports, by statement or by `import_module("...")`."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(str(node.module))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
                first = node.args[0]
                found.update([first.value] if isinstance(first, ast.Constant) else [])
    return {name.split(".")[0] for name in found} - set(sys.stdlib_module_names) - {"deepspeed", "__future__"}


def test_every_declared_dependency_is_imported_and_every_import_declared() -> None:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = ("tensorboard", "wandb", "comet", "mlflow", "aim", "prometheus", "transformers", "plot", "report")
    always = _names(project["dependencies"])
    optional = {name for extra in extras for name in _names(project["optional-dependencies"][extra])}
    imported = _imported(REPOSITORY / "deepspeed")
    assert always - imported == set()
    assert imported - always - optional - COME_WITH_OTHERS == set()


def test_every_command_is_a_function_that_can_be_imported() -> None:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert "deepspeed" in scripts
    for command, target in scripts.items():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), command


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[; ]", requirement)[0].replace("-", "_") for requirement in requirements}
