"""Opening the link of this launcher: everything that is read from outside for it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource

from deepspeed.launcher.link.client import MemberLink
from deepspeed.launcher.link.job import LinkedJob
from deepspeed.launcher.link.member import Member
from deepspeed.launcher.link.server import HubServer
from deepspeed.launcher.loop import Loop
from deepspeed.version import version

__all__ = ["open_link"]

_TOGETHER_SECONDS = 300.0
"""What launchers may take to come that one command has started together."""

_BY_HAND_SECONDS = 1800.0
"""The same for those started host by host, by a person or a cluster that finds places for them."""

_OTHER_FILES = 256


def open_link(job: LinkedJob, number: int, loop: Loop) -> MemberLink:
    """The link of member `number`, with the hub when that is 0.

    Raises:
        LaunchError: the hub cannot listen.
    """
    limit_seconds = _TOGETHER_SECONDS if job.has_front_end else _BY_HAND_SECONDS
    versions = _versions()
    server = None
    if number == 0:
        _allow_files(len(job.hosts) + _OTHER_FILES)
        server = HubServer(job, versions, limit_seconds, loop)
    member = Member(number, job.hosts[0], job.hosts[number], os.getpid(), job.description, versions, job.token)
    return MemberLink(job, member, loop, limit_seconds, server)


def _versions() -> dict[str, str]:
    """Of what must be the same on all hosts, found without importing it."""
    versions = {"deepspeed": version}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch").partition("+")[
            0
        ]  # another build of one release may take part
    return versions


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard) if hard != resource.RLIM_INFINITY else count, hard))
