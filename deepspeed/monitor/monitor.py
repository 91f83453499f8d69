"""Door to the writers of `deepspeed.monitor` at the path that scripts import them from."""

from __future__ import annotations

from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.csv_files import CsvMonitor as csvMonitor
from deepspeed.monitor.master import MonitorMaster
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor

__all__ = ["CometMonitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
