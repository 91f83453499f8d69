"""The command line of `ds_io` and `ds_nvme_tune`, as far as it is one: shared options, their checks, how a command ends.

    option       ds_io       ds_nvme_tune
    --io_size    required    400M           bytes of a tensor
    --loops      3           1              transfers that count
    --gpu                                   the tensor lies on the device
    GDS          --use_gds   --gds          refused

Does not live here: options of one command alone, what is measured. Called by the two commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedError
from deepspeed.nvme.sizes import size_option

__all__ = ["TransferOptions", "end_with"]


class TransferOptions(argparse.ArgumentParser):
    """Options of a command that moves tensors to and from files, with their defaults in the help.

    Args:
        prog: the command.
        description: what it does.
        io_size: default bytes of a tensor; None: it must be given.
        loops: default number of transfers.
        gds: name of the option for GPUDirect Storage, without dashes.
    """

    def __init__(self, prog: str, description: str, *, io_size: int | None = None, loops: int, gds: str) -> None:
        super().__init__(prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        self._gds = gds
        self.add_argument(
            "--io_size",
            type=size_option,
            required=io_size is None,
            default=io_size,
            help="bytes of the tensor that each process, or folder, moves; K, M, G work",
        )
        self.add_argument("--loops", type=int, default=loops, help="transfers that count")
        self.flag("--gpu", help="the tensor lies on the device")
        self.flag(f"--{gds}", help="GPUDirect Storage; not built yet")

    def flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Read the command line; one whose shared options cannot be followed ends the process with status 2."""
        options = self.parse_args(arguments)
        self.require_at_least(1, options, "loops")
        if getattr(options, self._gds):
            self.error(
                f"--{self._gds}: not built yet in this version. Use --gpu alone: bytes go through page-locked host memory"
            )
        if options.gpu and get_accelerator().device_name() == "cpu":
            self.error("--gpu: this machine has no accelerator that torch can use. Leave it out, or install a torch for it")
        return options

    def require_at_least(self, least: int, options: argparse.Namespace, *names: str) -> None:
        """End the process with status 2 when one of the named numbers is smaller."""
        for name in names:
            if getattr(options, name) < least:
                self.error(f"--{name} {getattr(options, name)}: at least {least} is needed")


def end_with(command: str, run: Callable[[], None], *, after_interrupt: str) -> NoReturn:
    """Run and exit: 0; 1 with the reason on standard error when it cannot be measured; 130 after Ctrl-C.

    Args:
        command: its name, for what is told.
        run: the work.
        after_interrupt: what is left on the disk then, in words.
    """
    try:
        run()
    except (DeepSpeedError, OSError) as error:
        sys.stderr.write(f"{command}: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write(f"{command}: interrupted; {after_interrupt}\n")
        sys.exit(130)
    sys.exit(0)
