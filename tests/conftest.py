"""Every test gives back the process as it found it: environment, folder, ranks, global state, seeds, threads, children.

Modules that a test never loaded are not loaded for it, so that tests of pure rooms do not wait for torch.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests.support.ranks import helper_pids
from tests.support.signals import hear_signals
from tests.support.turns import turn

_LEAVE_SECONDS = 2.0  # for threads and processes that were told to end and need a moment
_LASTING_THREADS = {"tqdm_monitor"}  # torch's compiler shows progress through tqdm, which keeps one for the process


settings.register_profile("ours", deadline=None)  # the first example may pay for an import; time is no property here
settings.load_profile("ours")


def pytest_configure() -> None:
    """Let the jobs of tests hear the signals that ask them to end, however pytest was started."""
    hear_signals()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the collector of garbage, which took a quarter of that time: nearly all made here stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail on a name that another process would give otherwise: workers must find the same tests."""
    named = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if named:
        raise pytest.UsageError(f"addresses in the names of {len(named)} tests, such as {named[0]}: give them ids.")


def pytest_unconfigure() -> None:
    """Let the interpreter end as it would: libraries report objects that nothing collected."""
    gc.unfreeze()


_TURNS = pytest.StashKey[str]()  # folder in which the workers of a run take turns


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where it takes turns with the others."""
    if _TURNS not in node.config.stash:
        folder = tempfile.TemporaryDirectory(prefix="tests-turns-")
        node.config.add_cleanup(folder.cleanup)
        node.config.stash[_TURNS] = folder.name
    node.workerinput["turns"] = node.config.stash[_TURNS]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around a test with its fixtures, those of its module included: its turn."""
    told = getattr(item.config, "workerinput", None)
    if told is None:
        return (yield)
    with turn(Path(told["turns"]), alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def _collector_looks_at_what_the_module_made() -> None:
    """Keep it from what was there before, libraries and thousands of tests: some tests collect fifty times."""
    gc.collect()  # what is garbage already
    gc.freeze()


@pytest.fixture(autouse=True)
def _process_is_left_as_found() -> Iterator[None]:
    environ, folder = dict(os.environ), os.getcwd()
    threads, children = set(threading.enumerate()), _children()
    helpers = [psutil.Process(pid) for pid in helper_pids() if pid in children]
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    _reset_global_state()
    _fail_on_leaks(threads, children)
    if ended := [process.pid for process in helpers if not process.is_running()]:
        pytest.fail(f"the test ended processes that the whole run needs: {ended}", pytrace=False)


@pytest.fixture(autouse=True)
def _seeds_and_defaults_are_fixed() -> Iterator[None]:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch.manual_seed(0)
    thread_count, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(thread_count)
    torch.set_default_dtype(dtype)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it loads the compiler: seconds
        torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def without_native_library() -> Iterator[str]:
    """Run the test on the torch twins; gives the reason that `absence` tells."""
    module = importlib.import_module("deepspeed.ops.native.library")
    module._load.cache_clear()
    before, os.environ["DS_NATIVE"] = os.environ.get("DS_NATIVE"), "0"
    yield "DS_NATIVE=0 is set"
    module._load.cache_clear()
    del os.environ["DS_NATIVE"]
    if before is not None:
        os.environ["DS_NATIVE"] = before


def _reset_global_state() -> None:
    """Forget what rooms hold for the process, in this order: upper rooms stand on lower ones."""
    _call("deepspeed.activations.checkpointing", "forget")
    _call("deepspeed.tensor_parallel.recorded", "reset")
    _call("deepspeed.topology.groups", "reset")
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _call("deepspeed.comm.world", "reset_world")
    _call("deepspeed.comm.blocking", "dismiss")
    _call("deepspeed.accelerator.select", "set_accelerator", None)
    _call("deepspeed.common.logging", "set_rank", None)
    _call("deepspeed.common.logging", "forget_warnings")


def _call(module_name: str, function: str, *args: Any) -> None:
    module = sys.modules.get(module_name)
    if module is not None:
        getattr(module, function)(*args)


def _fail_on_leaks(threads: set[threading.Thread], children: set[int]) -> None:
    deadline = time.monotonic() + _LEAVE_SECONDS
    if _left(threads, children):
        gc.collect()  # engines that were dropped end their threads when they are collected
    while (left := _left(threads, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


def _left(threads: set[threading.Thread], children: set[int]) -> list[str]:
    new = [thread for thread in set(threading.enumerate()) - threads if thread.name not in _LASTING_THREADS]
    alive = [f"thread {thread.name!r}" for thread in new if thread.is_alive()]
    keepers = [sys.modules.get(f"tests.support.{name}") for name in ("hosts", "browser")]
    kept = set(helper_pids()).union(*(keeper.kept_pids() for keeper in keepers if keeper is not None))
    return alive + [f"process {pid}" for pid in _children() - children - kept]


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
