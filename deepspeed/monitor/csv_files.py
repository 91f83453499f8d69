"""One CSV file per metric."""

from __future__ import annotations

import csv
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from deepspeed.common.logging import warn_once
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
        self._stems: set[str] = set()

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
        if name not in self._files:
            path = self.log_dir / f"{self._free_stem(name)}.csv"
            before = _last_byte(path) if path.exists() else b""
            file = self._files[name] = path.open("a", newline="", encoding="utf-8")
            if not before:
                csv.writer(file).writerow(["step", name.rsplit("/", maxsplit=1)[-1]])
            elif before != b"\n":
                file.write("\r\n")  # the last row of a killed run was cut
        return self._files[name]

    def _free_stem(self, name: str) -> str:
        """A file's name without ".csv" that no other metric has got."""
        stem = name.replace("/", "_").replace(" ", "_")
        if stem in self._stems:
            stem, plain = f"{stem}_{zlib.crc32(name.encode()):08x}", stem
            warn_once(("csv_monitor", stem), "the metric %r goes to %s.csv: %s.csv is another one's", name, stem, plain)
        self._stems.add(stem)
        return stem


def _last_byte(path: Path) -> bytes:
    """Of the file; empty where the file is. The rows of a long run are not read for it."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
        return file.read(1)
