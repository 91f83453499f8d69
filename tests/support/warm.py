"""What each rank would otherwise do first, done once by the server that ranks are forked from: importing this does it.

    forkserver: import torch, transformers, ...; import tests.support.warm  --- fork ---> ranks

Nothing here chooses or holds anything of a run: a rank still begins with no accelerator, world, library or warning (a test).
What it saves each rank, in processor time where this was measured (a rank that trains two steps of one layer takes 0.1 s):

- the models of the configuration's blocks, with their validators, which are built when they are first used: 60 ms
- the maker of the processor, which the system takes a while to tell: 5 to 60 ms
- a collection of garbage, which would visit every object of the libraries and, writing to each, copy the memory that a
  rank shares with the server: 0.4 s at each `gc.collect()`, against 5 ms
"""

from __future__ import annotations

import atexit
import gc
import importlib
import pkgutil
from collections.abc import Iterator

import deepspeed.config
from deepspeed.config.base import ConfigModel
from deepspeed.ops.host_products import is_mkl_slow

__all__: list[str] = []


def _models(of: type[ConfigModel] = ConfigModel) -> Iterator[type[ConfigModel]]:
    for model in of.__subclasses__():
        yield model
        yield from _models(model)


def _build_models() -> None:
    for module in pkgutil.iter_modules(deepspeed.config.__path__, "deepspeed.config."):
        importlib.import_module(module.name)
    for model in _models():
        model.model_rebuild()


_build_models()
is_mkl_slow()
gc.collect()
gc.freeze()  # last: what is made from here on is a rank's own
atexit.register(gc.unfreeze)  # of the server alone (a rank ends without): libraries report what an interpreter's end leaves
