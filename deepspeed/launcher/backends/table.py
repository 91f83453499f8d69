"""The back ends by the names that `--launcher` knows."""

from __future__ import annotations

from deepspeed.launcher.backends.hydra import MPICH, MVAPICH, IntelMPI
from deepspeed.launcher.backends.job import BackEnd
from deepspeed.launcher.backends.openmpi import OpenMPI
from deepspeed.launcher.backends.pdsh import PDSH
from deepspeed.launcher.backends.slurm import Slurm

__all__ = ["BACK_ENDS"]

BACK_ENDS: dict[str, BackEnd] = {
    back_end.name: back_end for back_end in (PDSH(), OpenMPI(), MPICH(), IntelMPI(), MVAPICH(), Slurm())
}
"""By name; the first is the default."""
