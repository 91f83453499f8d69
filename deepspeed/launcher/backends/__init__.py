"""How the members of a job are started on several hosts: by pdsh, an MPI or Slurm. Pure: values in, a command line out.

Lives here: one file per family of back ends. Does not live here: choosing hosts, starting the command and watching the job
(`runner`), and what a member does (`launch`).
"""

from deepspeed.launcher.backends.job import BackEnd, BackEndError, Command, Job, Programs
from deepspeed.launcher.backends.table import BACK_ENDS

__all__ = ["BACK_ENDS", "BackEnd", "BackEndError", "Command", "Job", "Programs"]
