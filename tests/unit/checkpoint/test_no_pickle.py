"""No code of a file ever runs: what could run it is in the modules named here, and nowhere else in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import deepspeed

_PACKAGE = Path(deepspeed.__file__).parent
_RUN_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pickletools"}
"""Modules that build objects from bytes, or help to."""

_MODULES = {
    "checkpoint/original/pickles.py": {"pickle", "pickletools"},
    "checkpoint/export/weights_file.py": {"pickle"},
}
"""Modules of the package that import one of them: to write the files of other programs."""

_TORCH_LOADS = {"checkpoint/original/archive.py", "nvme/workload.py"}
"""Those that call `torch.load`, restricted: for files of other programs; `ds_io`, which measures it on files of its own."""

_READERS = {"load", "loads", "Unpickler", "_Unpickler", "whichmodule"}


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        yield path.relative_to(_PACKAGE).as_posix(), ast.parse(path.read_text())


def _imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Calls of an attribute, with their dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func), node


def test_modules_that_build_objects_from_bytes_are_imported_only_to_write() -> None:
    found = {name: used for name, tree in _trees() if (used := _imported(tree) & _RUN_CODE)}
    assert found.keys() <= _MODULES.keys(), f"{found}: checkpoints are read without pickle; see docs/adr/0003"
    for name, used in found.items():
        assert used <= _MODULES[name], name


def test_nothing_unpickles_by_itself() -> None:
    loads = [
        (name, called)
        for name, tree in _trees()
        for called, _ in _calls(tree)
        if called.partition(".")[0] in _RUN_CODE and called.rpartition(".")[2] in _READERS
    ]
    assert loads == []


def test_torch_load_is_called_restricted_and_only_for_files_of_other_programs() -> None:
    for name, tree in _trees():
        for called, call in _calls(tree):
            if called in ("torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.serialization.load"):
                assert (called, name in _TORCH_LOADS) == ("torch.load", True), f"{name} calls {called}"
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert given.get("weights_only") == "True", f"{name}: torch.load without weights_only=True"
            if called.rpartition(".")[2] == "load" and called.startswith(("np.", "numpy.")):
                assert all(keyword.arg != "allow_pickle" for keyword in call.keywords), name


def test_checkpoints_are_agreed_on_without_pickled_objects() -> None:
    """Collectives on objects pickle them; files that ranks exchange words about must not reach those."""
    for name, tree in _trees():
        if name.startswith("checkpoint/") or name in ("engine/saving.py", "engine/loading.py"):
            used = {
                called for called, _ in _calls(tree) if called.endswith(("_object", "_object_list")) and "comm" in called
            }
            assert not used, f"{name}: {used}; use agreement.together"
