"""Where metrics go: `MonitorMaster` hands each event to every writer that the config enables."""

from deepspeed.monitor import monitor
from deepspeed.monitor.aim import AimMonitor
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.csv_files import CsvMonitor as csvMonitor
from deepspeed.monitor.master import MonitorMaster
from deepspeed.monitor.mlflow import MlflowMonitor
from deepspeed.monitor.prometheus import PrometheusMonitor
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.monitor.writer import Event, Writer

__all__ = [
    "AimMonitor",
    "CometMonitor",
    "Event",
    "MlflowMonitor",
    "MonitorMaster",
    "PrometheusMonitor",
    "TensorBoardMonitor",
    "WandbMonitor",
    "Writer",
    "csvMonitor",
    "monitor",
]
