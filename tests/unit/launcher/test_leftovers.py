from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from deepspeed.launcher.leftovers import removing
from tests.support.launching import ROOT, wait_until


def _made(folder: Path) -> tuple[Path, Path]:
    file, tree = folder / "a 'file'", folder / "-tree"
    file.touch()
    (tree / "below").mkdir(parents=True)
    return file, tree


def test_files_go_at_the_end(tmp_path: Path) -> None:
    file, tree = _made(tmp_path)
    with removing(file, tree, tmp_path / "none"):
        assert file.exists()
        assert tree.exists()
    assert list(tmp_path.iterdir()) == []


def test_files_go_when_their_process_is_killed_with_its_group(tmp_path: Path) -> None:
    file, tree = _made(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from deepspeed.launcher.leftovers import removing\n"
        "with removing(*map(Path, sys.argv[1:])): print('made', flush=True); time.sleep(300)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(file), str(tree)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"made\n"
    assert file.exists()
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not list(tmp_path.iterdir()), "the files are gone")
