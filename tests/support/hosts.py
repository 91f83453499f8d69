"""Several hosts on one machine, out of Linux namespaces, for tests of jobs that run on several hosts.

```
   switch: a network namespace with one bridge, which nothing outside reaches; so all test runs may use the same addresses
     |  port1      |  port2      |  port3      <- cut / heal: the cable; hole / fill: packets vanish and the cable looks fine
   node1         node2         node3           each with its own network, process ids, mounts, host name, IPC and sshd,
   10.77.0.11    10.77.0.12    10.77.0.13      its own /dev/shm and /run; /run/local is the node-local folder
```

All other files are shared, as with a network file system. Nothing is named outside the namespaces, so no process and no
network stays when the test run ends, not even after SIGKILL, which leaves only the folder of the run. There lie the keys and
the ssh configuration; ~/.ssh is never used.
`tests.support.slurm` puts a Slurm on such hosts.

    with hosts(3, slots=2) as cluster:
        front_end = cluster[1].command(sys.executable, "-m", "deepspeed.launcher.runner")
        Job(tmp_path, ["-H", str(cluster.hostfile), "train.py"], command=front_end)
        cluster[3].kill()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import psutil
import pytest

from deepspeed.launcher.processes import start_process

__all__ = ["LOCAL_FOLDER", "SECOND_SSH_PORT", "Host", "Hosts", "hosts", "inner", "kept_pids", "missing", "wait_for"]

LOCAL_FOLDER = Path("/run/local")
SECOND_SSH_PORT = 2222
_NETWORK = "10.77.0"
_UP_SECONDS = 20.0

_BOOT = """\
echo {name} > /proc/sys/kernel/hostname
mount -t proc proc /proc
mount -t tmpfs -o size=1G,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd {local}
[ ! -d ~/.ssh ] || mount -t tmpfs tmpfs ~/.ssh
for file in ~/.bashrc ~/.bash_profile ~/.profile; do [ ! -f $file ] || mount --bind /dev/null $file; done
mount --bind {folder}/ssh /etc/ssh
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/{name}/hostname /etc/hostname
trap '' TERM HUP INT
$(command -v sshd) -D -e -f /etc/ssh/sshd_config 2>> {folder}/{name}/sshd.log &
while :; do wait -n 2> /dev/null || sleep 0.2; done
"""

_SSHD = """\
Port 22
Port {second_port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
MaxStartups 256
MaxSessions 256
PidFile none
"""

_SSH = """\
IdentityFile {folder}/key
UserKnownHostsFile none
GlobalKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
"""

_kept: set[int] = set()


def kept_pids() -> set[int]:
    """Processes that hosts consist of: a test that boots one leaves them behind rightly."""
    return _kept


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why hosts cannot be made on this machine; None when they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "hosts out of namespaces need root"
    needed = ("unshare", "nsenter", "ip", "bridge", "ssh", "ssh-keygen", "sshd", "bash")
    absent = [each for each in needed if not shutil.which(each)]
    if absent:
        cure = "apt-get install iproute2 openssh-server openssh-client util-linux"
        return f"hosts out of namespaces need {', '.join(absent)}: {cure}"
    made = ["unshare", "--net", "--pid", "--mount", "--fork", "true"]
    tried = subprocess.run(made, capture_output=True, text=True, check=False)
    return f"this machine lets nobody make namespaces: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def hosts(count: int, slots: int) -> Iterator[Hosts]:
    """Run `count` hosts, node1 to node<count>, within the context; the test skips where that cannot be."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="ds-hosts-") as folder:
        cluster = Hosts(Path(folder), count, slots)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


class Hosts:
    """The hosts of one test run, numbered from 1."""

    def __init__(self, folder: Path, count: int, slots: int) -> None:
        self.folder = folder
        self.hostfile = folder / "hostfile"
        self._hosts = [Host(self, number) for number in range(1, count + 1)]
        self._slots = slots
        self._switch: subprocess.Popen[bytes] | None = None

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number - 1]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def up(self) -> None:
        """Write the files that hosts share, make the switch and boot every host."""
        self._write_files()
        self._switch = start_process(["unshare", "--net", "sleep", "infinity"], os.environ, signal.SIGKILL)
        _kept.add(self._switch.pid)
        wait_for(lambda: _has_own_network(self._switch_pid), "the switch has a network of its own")
        self.switch(["link add br0 type bridge", "link set br0 up"])
        for host in self:
            host.start()
        for host in self:
            host.connect()
        for host in self:
            host.wait_for_sshd()

    def down(self) -> None:
        """End every process of the hosts; their networks end with them."""
        for host in self:
            host.end()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            _kept.discard(self._switch.pid)

    def reset(self) -> None:
        """Bring every host back to how it was after `up`, for the next test: cables, power, and no process of a job."""
        for host in self:
            if host.is_up:
                host.thaw()
                host.heal()
                host.fill()
            else:
                host.boot()
            host.end_jobs()

    def switch(self, lines: Iterable[str], program: str = "ip") -> None:
        """Run commands of `ip` (or `bridge`) on the switch."""
        _in_network(self._switch_pid, lines, program)

    def asked_switch(self, line: str) -> str:
        """What a command of `ip` says on the switch."""
        return _in_network(self._switch_pid, [line], "ip")

    @property
    def _switch_pid(self) -> int:
        assert self._switch is not None
        return self._switch.pid

    def _write_files(self) -> None:
        ssh = self.folder / "ssh"
        ssh.mkdir()
        for key in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", self.folder / key], check=True
            )
        host_key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        (self.folder / "known_hosts").write_text(
            "".join(f"{name} {host_key}\n" for host in self for name in (f"{host.name},{host.address}", *host.ssh_names))
        )
        (ssh / "sshd_config").write_text(_SSHD.format(folder=self.folder, second_port=SECOND_SSH_PORT))
        (ssh / "ssh_config").write_text(_SSH.format(folder=self.folder))
        # gloo asks for the address as IPv6 and complains where that has no name
        names = [f"{address} {host.name}\n" for host in self for address in (host.address, f"::ffff:{host.address}")]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        self.hostfile.write_text("".join(f"{host.name} slots={self._slots}\n" for host in self))


class Host:
    """One host. It exists from `boot` to `kill`; files in its shared folders outlive it."""

    def __init__(self, cluster: Hosts, number: int) -> None:
        self.number = number
        self.name = f"node{number}"
        self.address = f"{_NETWORK}.{10 + number}"
        self.folder = cluster.folder / self.name
        self._cluster = cluster
        self._outer: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._limit: Path | None = None

    # -- power ------------------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the host runs."""
        return self._outer is not None and self._outer.poll() is None

    @property
    def ssh_names(self) -> tuple[str, ...]:
        """How ssh calls the host in its list of known hosts, with other ports than 22."""
        return tuple(f"[{name}]:{SECOND_SSH_PORT}" for name in (self.name, self.address))

    def boot(self) -> None:
        """Start the host (again) and wait until ssh reaches it."""
        self.start()
        self.connect()
        self.wait_for_sshd()

    def kill(self, *, silently: bool = True) -> None:
        """Power loss: every process ends at once, and no packet tells the others; else the kernel closes connections."""
        if silently:
            self.hole()
        self.end()

    def freeze(self) -> None:
        """Stop every process of the host. Its kernel goes on: it acknowledges packets."""
        while running := [
            p for p in self.processes() if _status(p) not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, None)
        ]:
            _signal(running, signal.SIGSTOP)  # again, for those that were started meanwhile

    def thaw(self) -> None:
        """Let the processes go on."""
        _signal(self.processes(), signal.SIGCONT)

    def limit_memory(self, nbytes: int) -> None:
        """Limit the memory of all processes of the host together; the kernel ends one that takes more."""
        root = Path("/sys/fs/cgroup/memory")
        is_first_version = root.is_dir()
        group = (root if is_first_version else Path("/sys/fs/cgroup")) / f"{self._cluster.folder.name}-{self.name}"
        group.mkdir(exist_ok=True)
        (group / ("memory.limit_in_bytes" if is_first_version else "memory.max")).write_text(str(nbytes))
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(process.pid))
        self._limit = group

    # -- cable ------------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Pull the cable: the host and the switch see that it is gone."""
        self._cluster.switch([f"link set port{self.number} down"])

    def heal(self) -> None:
        """Plug the cable in again. Returns when the switch has noticed: before, its port cannot be told anything."""
        self._cluster.switch([f"link set port{self.number} up"])
        wait_for(self._is_plugged_in, f"the switch sees the cable of {self.name}")

    def _is_plugged_in(self) -> bool:
        return "LOWER_UP" in self._cluster.asked_switch(f"link show port{self.number}")

    def hole(self) -> None:
        """Let every packet to and from the host vanish, while the cable looks fine."""
        self._cluster.switch([f"link set dev port{self.number} state 0"], "bridge")

    def fill(self) -> None:
        """Let packets pass again."""
        self._cluster.switch([f"link set dev port{self.number} state 3"], "bridge")

    # -- processes --------------------------------------------------------------------------------------------------------

    def command(self, *argv: str, folder: Path | None = None) -> list[str]:
        """The command that runs `argv` on this host, in `folder` (None: ours), with the environment of whoever starts it.

        Its own process stays outside: signals go to `inner`, and its end is that of `argv` (status or signal).
        """
        join = ["sh", "-c", f'echo $$ > {self._limit}/cgroup.procs; exec "$@"', "sh"] if self._limit is not None else []
        return [
            *join,
            "nsenter",
            "-t",
            str(self._init),
            "-n",
            "-p",
            "-m",
            "-u",
            "-i",
            f"--wd={folder or Path.cwd()}",
            "--",
            *argv,
        ]

    def run(self, *argv: str, seconds: float = 60, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `argv` on this host to its end, which must come within `seconds`."""
        return subprocess.run(self.command(*argv), capture_output=True, text=True, timeout=seconds, env=env, check=False)

    def processes(self) -> list[psutil.Process]:
        """Every process of this host, as seen from outside."""
        if not self.is_up:
            return []
        namespace = os.readlink(f"/proc/{self._init}/ns/pid")
        return [process for process in psutil.process_iter() if _pid_namespace(process.pid) == namespace]

    def jobs(self) -> list[psutil.Process]:
        """The processes beside those that the host consists of."""
        return [process for process in self.processes() if process.pid not in _kept]

    def keep(self) -> None:
        """Take what runs now for a part of the host, as daemons are."""
        _kept.update(process.pid for process in self.processes())

    def end_jobs(self) -> None:
        """End by SIGKILL what `jobs` tells."""
        while jobs := self.jobs():
            _signal(jobs, signal.SIGKILL)
            psutil.wait_procs(jobs, timeout=0.05)

    # -- parts of booting, for Hosts --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first process of the host."""
        assert not self.is_up, f"{self.name} is up"
        self.folder.mkdir(exist_ok=True)
        (self.folder / "hostname").write_text(f"{self.name}\n")
        script = _BOOT.format(name=self.name, folder=self._cluster.folder, local=LOCAL_FOLDER)
        namespaces = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child"]
        with (self.folder / "boot.log").open("ab") as log:
            self._outer = start_process(
                ["unshare", *namespaces, "bash", "-c", script],
                os.environ,
                signal.SIGKILL,
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
        outer = psutil.Process(self._outer.pid)
        wait_for(lambda: bool(outer.children()), f"{self.name} has a first process")
        self._init = outer.children()[0].pid
        _kept.update((self._outer.pid, self._init))

    def connect(self) -> None:
        """Lay the cable from the switch."""
        port = f"port{self.number}"
        self._unplug()
        card = f"address 02:00:00:00:00:{self.number:02x}"  # the same after the next boot: neighbours remember it
        self._cluster.switch(
            [f"link add {port} type veth peer name eth0 {card} netns {self._init}", f"link set {port} master br0 up"]
        )
        lines = ["link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"]
        _in_network(self._init, lines, "ip")

    def wait_for_sshd(self) -> None:
        """Return once sshd listens."""
        wait_for(self._listens, f"sshd of {self.name} listens", self.folder / "sshd.log")
        self.keep()

    def end(self) -> None:
        """End the first process; the kernel ends the rest of the host."""
        if self._outer is None:
            return
        ended = self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._outer.wait()
        psutil.wait_procs(ended, timeout=5)
        _kept.difference_update({self._outer.pid, *(process.pid for process in ended)})
        if self._limit is not None:
            wait_for(self._removes_limit, f"the memory limit of {self.name} is gone")
            self._limit = None
        self._outer = None

    def _unplug(self) -> None:
        """Remove the cable of the time before: the kernel keeps the network of a dead host while connections linger."""
        with contextlib.suppress(AssertionError):  # there is none
            self._cluster.switch([f"link del port{self.number}"])

    def _removes_limit(self) -> bool:
        assert self._limit is not None
        with contextlib.suppress(OSError):
            self._limit.rmdir()
        return not self._limit.exists()

    def _listens(self) -> bool:
        lines = Path(f"/proc/{self._init}/net/tcp").read_text().splitlines()[1:]
        return any(line.split()[1].endswith(":0016") and line.split()[3] == "0A" for line in lines)


def inner(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The process on the host that a `Host.command` runs: the one to send signals to."""
    wait_for(lambda: bool(psutil.Process(process.pid).children()), "the command runs on its host")
    return psutil.Process(process.pid).children()[0]


def _in_network(pid: int, lines: Iterable[str], program: str) -> str:
    argv = ["nsenter", "-t", str(pid), "-n", program, "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program} {lines}: {done.stderr}"
    return done.stdout


def _has_own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def _signal(processes: Iterable[psutil.Process], signum: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def wait_for(claim: Callable[[], bool], what: str, log: Path | None = None) -> None:
    """Return once `claim()` holds; fail with the content of `log` when it does not come to hold."""
    deadline = time.monotonic() + _UP_SECONDS
    while not claim():
        told = log.read_text(errors="replace") if log is not None and log.exists() else ""
        assert time.monotonic() < deadline, f"still not so after {_UP_SECONDS} s: {what}. {told}"
        time.sleep(0.005)
