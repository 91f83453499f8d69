"""What the launchers of a job say to each other: lines of JSON of bounded length.

```
   hub                                     caller (a member, or the front end)
    |------------- Greeting(nonce) --------->|      the hub speaks first: nobody tells a stranger anything
    |<------------ Hello ---------------------|      who it is, and that it knows the token of the job
    |------------- Refused | Go ------------>|
    |<------------ Beat --------------------->|      every second, both ways
    |<------------ Failed(cause) ------------|      a rank failed, or the member was asked to end
    |<------------ Stop(cause) --------------|      the front end was asked to end
    |------------- Stop(cause) ------------->|      end your ranks
    |<------------ Done ---------------------|      nothing of the job is left here
    |------------- Done -------------------->|      nor anywhere else: leave
```

Pure. Does not live here: who says what when (`hub`, `member`), sockets (`wire`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import signal
from dataclasses import dataclass
from typing import Any

from deepspeed.errors import LaunchError
from deepspeed.launcher.link.cause import Cause

__all__ = [
    "LINE_NBYTES",
    "PROTOCOL",
    "Beat",
    "Done",
    "Failed",
    "Go",
    "Greeting",
    "Hello",
    "LinkError",
    "Message",
    "Refused",
    "Stop",
    "decode",
    "encode",
    "proof_of",
    "split_lines",
]

PROTOCOL = 2
LINE_NBYTES = 16384
_TEXT_CHARACTERS = 1200  # twelve bytes each at most: JSON writes what is not ASCII as \uXXXX, twice for a pair


class LinkError(LaunchError):
    """What came over a link is not what a launcher of this job says."""


@dataclass(frozen=True)
class Greeting:
    """The hub's first word."""

    protocol: int
    nonce: str


@dataclass(frozen=True)
class Hello:
    """Who calls."""

    protocol: int
    member: int | None
    """Number of the member; None: the front end."""

    host: str
    pid: int
    job: str
    """Hosts and slots of the job as the caller knows them."""

    versions: dict[str, str]
    """Of what must be the same everywhere."""

    proof: str
    """See `proof_of`."""


@dataclass(frozen=True)
class Go:
    """All are there: start your ranks."""


@dataclass(frozen=True)
class Refused:
    """You do not belong here."""

    reason: str


@dataclass(frozen=True)
class Beat:
    """I am here."""


@dataclass(frozen=True)
class Failed:
    """Something ended here; the ranks of this host are being ended."""

    cause: Cause


@dataclass(frozen=True)
class Stop:
    """End your ranks; `is_now`: without the time to end by themselves."""

    cause: Cause
    is_now: bool = False


@dataclass(frozen=True)
class Done:
    """See the picture above."""

    is_settled: bool = False
    """From the hub: whether all members are done and the front end has heard why, so that no exit status need say more."""


Message = Greeting | Hello | Go | Refused | Beat | Failed | Stop | Done

_KINDS: dict[str, type[Message]] = {
    kind.__name__.lower(): kind for kind in (Greeting, Hello, Go, Refused, Beat, Failed, Stop, Done)
}


def encode(message: Message) -> bytes:
    """One line, at most `LINE_NBYTES` long. Texts for people are cut for that, and rid of what is no text (parts of names
    of files that are no UTF-8).

    Raises:
        LinkError: a name is too long.
    """
    fields = dataclasses.asdict(message)
    if "cause" in fields:
        fields["cause"]["text"] = _presentable(fields["cause"]["text"])
    if "reason" in fields:
        fields["reason"] = _presentable(fields["reason"])
    line = json.dumps({"say": type(message).__name__.lower(), **fields}).encode() + b"\n"
    if len(line) > LINE_NBYTES:
        raise LinkError(
            f"a {type(message).__name__} of {len(line)} bytes is longer than {LINE_NBYTES}: use shorter host names."
        )
    return line


def _presentable(text: str) -> str:
    return text[:_TEXT_CHARACTERS].encode(errors="replace").decode()


def decode(line: bytes) -> Message:
    """Undo `encode`.

    Raises:
        LinkError: the line is no message.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("say")]
        if "cause" in fields:
            fields["cause"] = _possible(_checked(Cause(**fields["cause"])))
        message: Message = _checked(kind(**fields))
        return message
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LinkError(f"{line[:80]!r} is no message of a launcher.") from error


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
    "bool": (bool,),
    "dict[str, str]": (dict,),
    "Cause": (Cause,),
}


def _checked(message: Any) -> Any:
    """`message`, whose fields have the types that its class declares, and whose texts can be written.

    Raises:
        TypeError: they have not.
        UnicodeEncodeError: half a pair of surrogates, which JSON lets pass.
    """
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        is_right = isinstance(value, _TYPES[str(field.type)]) and isinstance(value, bool) == (field.type == "bool")
        if not is_right or (isinstance(value, dict) and not all(isinstance(text, str) for text in value.values())):
            raise TypeError(field.name)
        texts = [value] if isinstance(value, str) else [*value, *value.values()] if isinstance(value, dict) else []
        for text in texts:
            text.encode()
    return message


def _possible(cause: Cause) -> Cause:
    """`cause`, with which a process can exit, and a rank be asked to end.

    Raises:
        ValueError: it cannot.
    """
    if not 0 < cause.status <= 255 or cause.signum not in signal.valid_signals():
        raise ValueError(f"status {cause.status}, signal {cause.signum}")
    return cause


def split_lines(received: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines of `received`, and the rest.

    Raises:
        LinkError: a line is longer than any message.
    """
    *lines, rest = received.split(b"\n")
    if any(len(line) >= LINE_NBYTES for line in (*lines, rest)):
        raise LinkError(f"a line of more than {LINE_NBYTES} bytes is no message of a launcher.")
    return lines, rest


def proof_of(token: str, nonce: str) -> str:
    """What only who knows the token of the job can answer to `nonce`; the token itself never travels."""
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()
