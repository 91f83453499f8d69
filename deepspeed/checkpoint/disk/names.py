"""Every file name and tensor name of the on-disk format: one table.

Lives here: spelling, and the rules for tags. Does not live here: what is stored under a name. Everything in this room uses
it, and so do the rooms that hand tensors to it.

| tensor name                          | what it is                                                            |
|--------------------------------------|-----------------------------------------------------------------------|
| `module/<parameter or buffer>`       | the value the model computes with, in the model's dtype               |
| `master/<parameter>`                 | the fp32 master copy, where there is one                              |
| `optimizer/<parameter>/<state key>`  | one tensor of the optimizer's state, e.g. `exp_avg`                   |
| `state/<n>`, `client_state/<n>`      | tensors inside the state and the client state, counted from 0         |
| `rank_state/<rank, 5 digits>/<n>`    | tensors inside the state of one rank                                  |
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path, PurePosixPath

from deepspeed.errors import ArgumentError

__all__ = [
    "CLIENT_STATE_FILE",
    "LATEST_FILE",
    "LATEST_UNIVERSAL_FILE",
    "MANIFEST_FILE",
    "RANK_STATE_FIELD",
    "client_state_tensor",
    "fragment_key",
    "is_own_file",
    "master_tensor",
    "module_tensor",
    "new_tag_folder",
    "optimizer_tensor",
    "rank_of_shard",
    "rank_state_tensor",
    "shard_file",
    "split_optimizer_tensor",
    "state_tensor",
    "tag_folder",
]

LATEST_FILE = "latest"
LATEST_UNIVERSAL_FILE = "latest_universal"
MANIFEST_FILE = "manifest.json"
CLIENT_STATE_FILE = "client_state.json"

RANK_STATE_FIELD = "rank_state"
"""Field of a shard's safetensors metadata that holds the JSON of that rank's own state."""

_MAX_PART_NBYTES = 255 - len("..converting-") - 16
"""What file systems allow, less the most that is put around a folder's name while its content is not in place."""

_UNREADABLE = ("Cc", "Cs")
"""Unicode categories: control characters (a reader of text changes some), and what UTF-8 cannot encode."""

_SHARD_FILE = re.compile(r"rank_(\d{5,})\.safetensors")
_LOOKS_LIKE_A_FRAGMENT = re.compile(r"@\d+$")


def shard_file(rank: int) -> str:
    """File that `rank` writes."""
    return f"rank_{rank:05d}.safetensors"


def rank_of_shard(file: str) -> int | None:
    """Rank that writes `file`; None: it is no shard."""
    match = _SHARD_FILE.fullmatch(file)
    return None if match is None else int(match[1])


def is_own_file(name: str) -> bool:
    """Whether this format writes a file of that name into a tag's folder; all others belong to the user."""
    return name in (MANIFEST_FILE, CLIENT_STATE_FILE) or _SHARD_FILE.fullmatch(name) is not None


def module_tensor(name: str) -> str:
    """Name of a parameter or buffer as the model holds it."""
    return f"module/{name}"


def master_tensor(name: str) -> str:
    """Name of a parameter's fp32 master copy."""
    return f"master/{name}"


def optimizer_tensor(parameter: str, key: str) -> str:
    """Name of one entry of the optimizer's state, e.g. `exp_avg` of `fc1.weight`; a slash in the key is written `%2F`."""
    return f"optimizer/{parameter}/{key.replace('%', '%25').replace('/', '%2F')}"


def split_optimizer_tensor(name: str) -> tuple[str, str]:
    """Parameter and state key of a name made by `optimizer_tensor`."""
    parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
    return parameter, key.replace("%2F", "/").replace("%25", "%")


def state_tensor(number: int) -> str:
    """Name of the `number`-th tensor found in the state."""
    return f"state/{number}"


def client_state_tensor(number: int) -> str:
    """Name of the `number`-th tensor found in the client state."""
    return f"client_state/{number}"


def rank_state_tensor(rank: int, number: int) -> str:
    """Name of the `number`-th tensor found in the state of one rank."""
    return f"rank_state/{rank:05d}/{number}"


def fragment_key(name: str, start: int, *, is_whole: bool) -> str:
    """Key of a fragment in its file: the plain tensor name where the file holds the whole tensor, else `<name>@<start>`.

    No two fragments of one file share a key: a name that itself ends in `@<digits>` always gets its start appended.
    """
    return name if is_whole and not _LOOKS_LIKE_A_FRAGMENT.search(name) else f"{name}@{start}"


def tag_folder(save_dir: Path, tag: str) -> Path:
    """Folder of a tag, after checking that the tag stays inside `save_dir` and clashes with none of our own names.

    Raises:
        ArgumentError: an empty or absolute tag, one with `..`, or one of which a part starts with a dot or the first is
            `latest` or `latest_universal`.
    """
    parts = PurePosixPath(tag).parts
    is_bad = not parts or tag.startswith("/") or "\0" in tag or any(part.startswith(".") for part in parts)
    if is_bad or parts[0] in (LATEST_FILE, LATEST_UNIVERSAL_FILE):
        raise ArgumentError(
            f"tag={tag!r} cannot name a checkpoint folder in {save_dir}. Give a relative name such as 'global_step100' "
            f"that does not begin with the part {LATEST_FILE!r} or {LATEST_UNIVERSAL_FILE!r} and of which no part starts "
            "with a dot."
        )
    return save_dir.joinpath(*parts)


def new_tag_folder(save_dir: Path, tag: str) -> Path:
    """Folder of a tag that is to be saved: `tag_folder`, where also the names beside it must be possible and `latest` must
    lead back to it.

    Raises:
        ArgumentError: as `tag_folder`; white space around the tag, control characters in it, or a part that is too long.
    """
    folder = tag_folder(save_dir, tag)
    if tag != tag.strip() or any(unicodedata.category(character) in _UNREADABLE for character in tag):
        raise ArgumentError(
            f"tag={tag!r} has white space around it or control characters in it, so the file {LATEST_FILE!r} could not lead "
            "back to it. Give a tag without them."
        )
    longest = max(PurePosixPath(tag).parts, key=lambda part: len(part.encode()))
    if len(longest.encode()) > _MAX_PART_NBYTES:
        raise ArgumentError(
            f"tag={tag!r} is too long: {longest!r} has {len(longest.encode())} bytes. A folder's name may have "
            f"{_MAX_PART_NBYTES}, since the folder that a save works in has a longer one. Give a shorter tag."
        )
    return folder
