"""A real Slurm over the hosts of `tests.support.hosts`: one node per host, the controller on node1, no accounting.

The daemons live in the hosts and end with them. A host that was booted again has none until `start_node`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import LOCAL_FOLDER, Host, Hosts, wait_for

__all__ = ["Slurm", "slurm"]

_CONFIG = """\
ClusterName=test
SlurmctldHost=node1
AuthType=auth/munge
AuthInfo=socket={local}/munge.sock
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={local}/spool
SlurmctldPidFile={local}/slurmctld.pid
SlurmdPidFile={local}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
CommunicationParameters=NoAddrCache
ReturnToService=2
SlurmdTimeout=20
KillWait=5
InactiveLimit=0
SchedulerType=sched/backfill
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Slurm:
    """A Slurm whose commands run on the hosts with `environment` beside their own."""

    def __init__(self, cluster: Hosts, folder: Path, cpus: int) -> None:
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._cluster = cluster
        self._folder = folder
        (folder / "state").mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        nodes = "".join(f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=2000\n" for host in cluster)
        (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, local=LOCAL_FOLDER) + nodes)
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\n")

    def start(self) -> None:
        """Start all daemons, and return when every node can be used."""
        for host in self._cluster:
            self._start_munge(host)
        self._daemon(self._cluster[1], "slurmctld")
        for host in self._cluster:
            self._daemon(host, "slurmd", "-N", host.name)
        wait_for(lambda: self._idle_count() == len(self._cluster), "all nodes are idle", self._folder / "slurmctld.log")
        for host in self._cluster:
            host.keep()

    def start_node(self, host: Host) -> None:
        """Start the daemons of a host that was booted again."""
        self._start_munge(host)
        self._daemon(host, "slurmd", "-N", host.name)
        host.keep()

    def _start_munge(self, host: Host) -> None:
        places = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        files = [f"--{option}={LOCAL_FOLDER / name}" for option, name in places.items()]
        self._daemon(host, "munged", "--force", f"--key-file={self._folder / 'munge.key'}", *files)

    def _daemon(self, host: Host, *argv: str) -> None:
        """Run a program that goes into the background by itself."""
        done = host.run(*argv, env={**os.environ, **self.environment})
        assert done.returncode == 0, f"{argv} on {host.name}: {done.stdout}{done.stderr}"

    def _idle_count(self) -> int:
        told = self._cluster[1].run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", env={**os.environ, **self.environment})
        return len(told.stdout.split())


@contextlib.contextmanager
def slurm(cluster: Hosts, cpus: int = 4) -> Iterator[Slurm]:
    """Run a Slurm on `cluster` whose nodes claim `cpus` each; the test skips where Slurm is not installed."""
    absent = [each for each in ("munged", "slurmctld", "slurmd", "srun", "sinfo") if not shutil.which(each)]
    if absent:
        pytest.skip(f"Slurm needs {', '.join(absent)}: apt-get install munge slurmctld slurmd slurm-client")
    made = Slurm(cluster, cluster.folder / "slurm", cpus)
    made.start()
    yield made
