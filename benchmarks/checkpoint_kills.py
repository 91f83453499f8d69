"""Does `kill -9` at any moment of a save cost more than that save?

    python benchmarks/checkpoint_kills.py [--kills 200] [--ranks 2] [--seed 0] [--folder DIR]

    every round    ranks resume from what the last round left, save once (left-overs are gone then), and save on and on,
                   over one tag or under a new one in turn
                   one rank, another or all are killed: by the clock, or around a call of theirs that touches the disk
                   every tag on the disk must open whole, `latest` must name one, and nothing that a save had returned for
                   may be lost

No timing: the outcome is a list of faults, empty when all is well, and how often what was met. The ranks are forked from
this process, which has loaded everything, so a round takes a fraction of a second. A few rounds are a test
(`tests/jobs/test_checkpoint_kills.py`); this is for the long run before a release.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist

from deepspeed.checkpoint import Piece, list_tags, open_checkpoint
from deepspeed.checkpoint.agreement import ranks_of
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.writer import Content, start_checkpoint

_NUMEL = 100_000
_ANSWER_SECONDS = 60.0
_CALLS = ("open", "write", "pwrite", "fsync", "fdatasync", "mkdir", "replace", "rename", "unlink", "rmdir", "close")
_SAME_TAG = "same"


# -- one checkpoint ---------------------------------------------------------------------------------------------------


def save(folder: Path, value: int, rank: int, ranks: int) -> None:
    """Write a checkpoint that is `value` all over: shards, states, tensors inside states."""
    start, stop = _NUMEL * rank // ranks, _NUMEL * (rank + 1) // ranks
    pieces = [
        Piece("master/w", (_NUMEL,), start, torch.full((stop - start,), float(value))),
        Piece("module/w", (_NUMEL,), start, torch.full((stop - start,), value, dtype=torch.int64)),
    ]
    content = Content(
        pieces,
        state=lambda: {"value": value},
        client_state=lambda: {"value": value, "tensor": torch.tensor(value)},
        rank_state=lambda: {"value": value, "tensor": torch.full((10,), value)},
    )
    together = ranks_of(rank, ranks)
    start_checkpoint(folder, _SAME_TAG if value % 2 else f"step{value}", content, together).finish(together)


def value_of(folder: Path, tag: str | None, rank: int = 0, ranks: int = 1) -> int:
    """The value of a checkpoint that is whole: hashes are right, and all that it holds says the same."""
    reader = open_checkpoint(folder, tag, rank=rank, world_size=ranks)
    client = reader.client_state()
    held = {int(reader.state["value"]), int(client["value"]), int(client["tensor"])}
    for of_rank in range(reader.manifest.world_size):
        state = reader.rank_state(of_rank)
        held |= {int(state["value"]), *map(int, state["tensor"])}
    for name in ("master/w", "module/w"):
        held |= {int(number) for number in reader.read(name).unique()}
    if len(held) != 1:
        raise ValueError(f"{reader.folder} holds parts of several saves: {sorted(held)}")
    return held.pop()


# -- a rank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trap:
    """A rank that ends itself by SIGKILL at the `call`-th of its calls that touch the disk, before or after it."""

    rank: int
    call: int
    is_before: bool

    def set(self) -> None:
        """Put the trap around the calls of this process."""
        count = 0

        def trapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                is_it = count == self.call
                if is_it and self.is_before:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    return original(*args, **options)
                finally:  # also where the call fails: a folder may be there already
                    if is_it:
                        os.kill(os.getpid(), signal.SIGKILL)

            return call

        for name in _CALLS:
            setattr(os, name, trapped(getattr(os, name)))
        Storage.exchange = trapped(Storage.exchange)  # type: ignore[method-assign]  # in a process of its own


def _rank_main(folder: Path, rendezvous: str, rank: int, ranks: int, trap: Trap | None, tell: int, go: int) -> None:
    """Body of a forked rank; it never returns."""
    write = os.write  # that of a rank without a trap

    def say(*words: object) -> None:
        write(tell, (json.dumps([rank, *words]) + "\n").encode())

    stacks = open(f"{rendezvous}.{rank}", "w")  # noqa: SIM115 - faulthandler needs it open for ever
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        _save_until_killed(folder, rendezvous, rank, ranks, trap, say, go)
    except BaseException as error:  # a fork of this process must not go on with what its caller has open
        say("ended", type(error).__name__, str(error)[:300])
    finally:
        os._exit(1)


def _save_until_killed(
    folder: Path, rendezvous: str, rank: int, ranks: int, trap: Trap | None, say: Callable[..., None], go: int
) -> None:
    """Resume, save once, wait, then save on and on; ends only by the error of a rank whose peer was killed."""
    dist.init_process_group("gloo", f"file://{rendezvous}", world_size=ranks, rank=rank, timeout=timedelta(seconds=60))
    value = value_of(folder, None, rank, ranks)
    say("resumed", value)
    value += 1
    began = time.monotonic()
    save(folder, value, rank, ranks)
    say("saved", value, time.monotonic() - began)
    os.read(go, 1)
    if trap is not None and trap.rank == rank:
        trap.set()
    while True:
        value += 1
        say("saving", value)
        save(folder, value, rank, ranks)
        say("saved", value)


class World:
    """The ranks of one round, seen from outside."""

    def __init__(self, folder: Path, ranks: int, trap: Trap | None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="kills-")
        self._rendezvous = rendezvous = str(Path(self._scratch.name, "rendezvous"))
        self._hear, tell = os.pipe()
        go, self._go = os.pipe()
        self._ranks = ranks
        self._rest = b""
        self._said: list[list[Any]] = []
        self.pids: dict[int, int] = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _rank_main(folder, rendezvous, rank, ranks, trap, tell, go)
            self.pids[rank] = pid
        os.close(tell)
        os.close(go)

    def wait_for(self, word: str, count: int) -> list[list[Any]]:
        """The first `count` lines that say `word`.

        Raises:
            TimeoutError: they did not come; every rank is killed.
        """
        found: list[list[Any]] = []
        ended: list[list[Any]] = []
        for line in self._lines():
            if line[1] in (word, "ended"):
                (found if line[1] == word else ended).append(line)
            if len(found) == count:
                return found
        raise TimeoutError(f"{len(found)} of {count} times {word!r} was said before all ranks were gone: {ended}")

    def let_go(self) -> None:
        """Let the ranks save on."""
        os.write(self._go, b"x" * self._ranks)

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> list[list[Any]]:
        """Wait until every rank is gone (the peers of a killed one notice); return all that they had said."""
        for _ in self._lines():
            pass
        for pid in self.pids.values():
            os.waitpid(pid, 0)
        os.close(self._hear)
        os.close(self._go)
        self._scratch.cleanup()
        return self._said

    def _stacks(self) -> dict[int, str]:
        """Where each rank that lives is."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1)  # faulthandler answers at once, even inside a blocking call
        return {rank: Path(f"{self._rendezvous}.{rank}").read_text() for rank in self.pids}

    def _lines(self) -> Iterator[list[Any]]:
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self._said.append(json.loads(line))
                yield self._said[-1]
            if not select.select([self._hear], [], [], _ANSWER_SECONDS)[0]:
                stacks = self._stacks()
                self.kill(list(self.pids))
                raise TimeoutError(f"the ranks said nothing for {_ANSWER_SECONDS} s and were killed; their stacks: {stacks}")
            chunk = os.read(self._hear, 1 << 16)
            if not chunk:
                return
            self._rest += chunk


# -- rounds -----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What came of it."""

    kills: int = 0
    resumed: int = 0
    faults: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)


def run(folder: Path, kills: int, ranks: int, seed: int) -> Report:
    """Kill `kills` times."""
    rng = random.Random(seed)
    report = Report()
    save(folder, 1, 0, 1)
    for number in range(kills):
        try:
            _round(folder, ranks, rng, report)
        except Exception as error:  # whatever it is, it is a finding, and the next round shows whether it lasts
            report.faults.append(f"round {number}: {type(error).__name__}: {error}")
    return report


def _round(folder: Path, ranks: int, rng: random.Random, report: Report) -> None:
    expected = value_of(folder, None)
    by_clock = rng.random() < 0.5
    trap = None if by_clock else Trap(rng.randrange(ranks), rng.randint(1, 60), is_before=rng.random() < 0.5)
    world = World(folder, ranks, trap)
    with _always_ended(world) as lines:
        for _, _, value in world.wait_for("resumed", ranks):
            if value != expected:
                raise ValueError(f"a rank resumed from {value}, but {expected} was there")
        seconds = max(line[3] for line in world.wait_for("saved", ranks))
        report.resumed += 1
        left_over = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        if left_over:
            raise ValueError(f"a whole save left {left_over}")
        world.let_go()
        if by_clock:
            world.wait_for("saving", 1 + ranks * rng.randrange(2))
            time.sleep(rng.uniform(0, 1.2 * seconds))
            world.kill(rng.choice([[0], [ranks - 1], list(range(ranks))]))
    report.kills += 1
    left_over = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    for _, _, kind, text in (line for line in lines if line[1] == "ended"):
        if kind not in ("CommError", "CheckpointError"):
            raise ValueError(f"the peer of a killed rank met {kind}: {text}")
        report.met[f"a peer met a {kind}"] += 1
    returned = max((line[2] for line in lines if line[1] == "saved"), default=expected + 1)
    begun = max((line[2] for line in lines if line[1] == "saving"), default=returned)
    value = _check(folder, returned, begun)
    report.met["by the clock" if by_clock else "at a call"] += 1
    report.met["left-overs" if left_over else "no left-overs"] += 1
    report.met["the save in flight was lost" if value < begun else "the save in flight was whole"] += 1
    report.met["over the same tag" if begun % 2 else "under a new tag"] += 1
    for tag in list_tags(folder)[:-3]:  # as users do, so that the disk does not fill
        if tag not in (_SAME_TAG, (folder / "latest").read_text()):
            shutil.rmtree(folder / tag)


@contextmanager
def _always_ended(world: World) -> Iterator[list[list[Any]]]:
    """Collect what is said after the block; kill the ranks when the block fails."""
    lines: list[list[Any]] = []
    try:
        yield lines
    except BaseException:
        world.kill(list(world.pids))
        world.end()
        raise
    lines += world.end()


def _check(folder: Path, returned: int, begun: int) -> int:
    """See that every checkpoint is whole and nothing that a save returned for is lost; return the value of `latest`."""
    value = value_of(folder, None)
    if not returned <= value <= begun:
        raise ValueError(f"`latest` has value {value}; a save had returned for {returned}, the last begun was {begun}")
    for tag in list_tags(folder):
        of_tag = value_of(folder, tag)
        if (_SAME_TAG if of_tag % 2 else f"step{of_tag}") != tag:
            raise ValueError(f"tag {tag!r} has value {of_tag}")
    return value


def main() -> int:
    """Run, print the report as JSON, and fail where there was a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-", dir=options.folder) as folder:
        report = run(Path(folder, "saves"), options.kills, options.ranks, options.seed)
    print(json.dumps({**vars(report), "seconds": round(time.monotonic() - began, 1)}, indent=1))
    return 1 if report.faults or report.kills < options.kills else 0


if __name__ == "__main__":
    raise SystemExit(main())
