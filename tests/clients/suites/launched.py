"""What ranks of a client's script run first: `launched.py SCRIPT ARGS...` runs SCRIPT as `__main__` on a CPU.

Only checks of the client for hardware are stepped around, each with its reason; nothing of ours and no assertion is touched.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch


def main() -> None:
    """Step around the client's hardware checks, then be the script."""
    _gloo_for_nccl()
    _client_counts_ranks()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def _gloo_for_nccl() -> None:
    """`test_zero3_integration.py` asks for NCCL on whatever is no XPU or HPU, a machine without any device included."""
    begin = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **settings: Any) -> None:
        begin("gloo" if backend == "nccl" else backend, *args, **settings)

    torch.distributed.init_process_group = init_process_group


def _client_counts_ranks() -> None:
    """Accelerate looks for a back end by device, finds none, and would count one process under its own launcher."""
    from accelerate import PartialState

    found = PartialState._prepare_backend

    def prepare(state: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        return found(state, cpu, sagemaker_dp, backend or "gloo")

    PartialState._prepare_backend = prepare


if __name__ == "__main__":
    main()
