"""`examples/moe`: both runs in a tiny configuration, as a newcomer starts them."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tests.support.launching import ROOT, Job

TINY = (
    *("--data", str(ROOT / "deepspeed" / "config"), "--steps", "6", "--look-every", "3", "--batch", "2", "--context", "16"),
    *("--vocab", "300", "--depth", "1", "--width", "16", "--heads", "2", "--experts", "4"),
)


def test_both_runs_write_their_routing_and_the_plot_is_drawn(tmp_path: Path) -> None:
    command = (sys.executable, str(ROOT / "examples" / "moe" / "run.py"))
    with Job(tmp_path, TINY, command=command) as job:
        assert job.wait(120) == 0, job.output
    assert (tmp_path / "runs/moe/routing.png").stat().st_size > 0
    for run in ("balanced", "alone"):
        with (tmp_path / "runs/moe" / run / "routing.csv").open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["step", "block", "loss", "expert 0", "expert 1", "expert 2", "expert 3"]
        assert [row[0] for row in rows] == ["0", "3", "6"]
        assert all(abs(sum(map(float, row[3:])) - 1) < 1e-6 for row in rows)
        assert float(rows[-1][2]) < float(rows[0][2])
