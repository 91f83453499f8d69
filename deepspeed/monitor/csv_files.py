"""One CSV file per metric."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from deepspeed.config.monitor import CsvMonitorConfig
from deepspeed.monitor.writer import Event


class CsvMonitor:
    """One file per metric in `output_path/job_name`, appended to when it is there already.

    "Train/Samples/lr" goes to Train_Samples_lr.csv, with the header `step,lr`.
    """

    def __init__(self, config: CsvMonitorConfig) -> None:
        self.log_dir = Path(config.output_path, config.job_name)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Append one row per event, and flush the files."""
        touched = {}
        for name, value, samples in event_list:
            file = touched[name] = self._file(name)
            csv.writer(file).writerow([samples, float(value)])
        for file in touched.values():
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        stem = name.replace("/", "_").replace(" ", "_")
        if stem not in self._files:
            path = self.log_dir / f"{stem}.csv"
            before = path.read_bytes()[-1:] if path.exists() else b""
            file = self._files[stem] = path.open("a", newline="", encoding="utf-8")
            if not before:
                csv.writer(file).writerow(["step", name.rsplit("/", maxsplit=1)[-1]])
            elif before != b"\n":
                file.write("\r\n")  # the last row of a killed run was cut
        return self._files[stem]
