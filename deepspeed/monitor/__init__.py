"""Where metrics go: `MonitorMaster` hands each event to every writer that the config enables."""

from deepspeed.monitor.master import MonitorMaster
from deepspeed.monitor.writers import CometMonitor, Event, TensorBoardMonitor, WandbMonitor, Writer
from deepspeed.monitor.writers import CsvMonitor as csvMonitor

__all__ = ["CometMonitor", "Event", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "Writer", "csvMonitor"]
