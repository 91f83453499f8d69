"""Which ranks this launcher starts, and which of the job's launchers it is. Pure, over arguments and variables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.launcher.hostfile import ResourceError, Slot, decode_world_info
from deepspeed.launcher.placement import RankPlace, place_of_rank, place_ranks

__all__ = ["TOKEN_NAME", "Seat", "read_seat"]

TOKEN_NAME = "DS_JOB_TOKEN"
"""The variable that holds what all launchers of a job know and nobody else; it does not reach the ranks."""


@dataclass(frozen=True)
class Seat:
    """The place of this launcher."""

    world_info: Mapping[str, Sequence[Slot]]
    places: tuple[RankPlace, ...]
    """Of the ranks it starts."""

    number: int
    """Of the launcher: its host's, or under a scheduler its rank's."""

    is_per_rank: bool
    has_front_end: bool

    @property
    def host(self) -> str:
        """Name of this host in the job."""
        return list(self.world_info)[self.places[0].node_rank]

    @property
    def slots(self) -> Sequence[Slot]:
        """Devices of this host that the job may use."""
        return self.world_info[self.host]

    @property
    def is_linked(self) -> bool:
        """Whether there are others to talk to."""
        place = self.places[0]
        return self.has_front_end or (place.world_size if self.is_per_rank else place.node_count) > 1


def read_seat(args: argparse.Namespace, environ: Mapping[str, str]) -> Seat:
    """Our place.

    Args:
        args: what `parse_launch_args` returned.
        environ: where a scheduler tells it.

    Raises:
        LaunchError: the world info cannot be used, or has no such place.
    """
    if args.world_info == "None":
        raise ResourceError("--world_info was not given: start jobs through the deepspeed command, which makes it.")
    world_info = decode_world_info(args.world_info)
    if args.from_scheduler is None:
        return Seat(world_info, place_ranks(world_info, args.node_rank), args.node_rank, False, args.front_end)
    rank = _scheduled_rank(args.from_scheduler, environ, sum(map(len, world_info.values())))
    return Seat(world_info, (place_of_rank(world_info, rank),), rank, True, args.front_end)


_VARIABLES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def _scheduled_rank(scheduler: str, environ: Mapping[str, str], world_size: int) -> int:
    rank_name, size_name = _VARIABLES[scheduler]
    try:
        rank, size = int(environ[rank_name]), int(environ[size_name])
    except (KeyError, ValueError):
        raise ResourceError(
            f"--from_scheduler {scheduler}, but {rank_name} and {size_name} do not say which rank this is: "
            "start this through the deepspeed command, or by the scheduler that was named."
        ) from None
    if size != world_size:
        raise ResourceError(
            f"{size_name}={size}, but the job has {world_size} ranks: start as many as the hosts have slots."
        )
    return rank
