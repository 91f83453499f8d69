"""`ds_ssh`: run one command on every host of a hostfile, through pdsh.

Lives here: the command line. Does not live here: jobs (`runner`), questions to hosts (`launcher.survey`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from deepspeed.common.logging import get_logger
from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.launcher.arguments import DLTS_HOSTFILE
from deepspeed.launcher.hostfile import fetch_hostfile

__all__ = ["main", "run"]

logger = get_logger(__name__)


def run(words: Sequence[str]) -> int:
    """Run the command in `words` on all hosts and return the highest of its exit statuses.

    Raises:
        LaunchError: there is no pdsh or no hostfile, or the hostfile cannot be read.
    """
    parser = argparse.ArgumentParser(prog="ds_ssh", description="Run a command on every host of a hostfile, through pdsh.")
    parser.add_argument("-f", "--hostfile", default=DLTS_HOSTFILE, help=f"hosts, one a line ({DLTS_HOSTFILE})")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run; quote what the hosts' shells are to expand")
    args = parser.parse_args(words)
    if not args.command:
        parser.error("a command to run is needed, for example: ds_ssh -f hostfile hostname")
    pdsh = shutil.which("pdsh")
    if pdsh is None:
        raise LaunchError("ds_ssh needs pdsh, which is not on PATH: apt-get install pdsh.")
    hosts = fetch_hostfile(args.hostfile, is_required=False)
    if hosts is None:
        raise LaunchError(f"there is no hostfile {args.hostfile}: name one with -f; each line is `HOST slots=N`.")
    sys.stdout.write(f"{pdsh}\nhostfile={args.hostfile}\n")
    sys.stdout.flush()
    environ = {**os.environ, "PDSH_RCMD_TYPE": "ssh"}
    return subprocess.run([pdsh, "-S", "-w", ",".join(hosts), *args.command], env=environ, check=False).returncode


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line `words` (None: that of this process) and exit with its status."""
    try:
        status = run(sys.argv[1:] if words is None else words)
    except DeepSpeedError as error:
        logger.error("%s", error)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
