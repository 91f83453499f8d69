"""What is marked runs as it is inside a compiled function, and what is around it is compiled."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from deepspeed.common.compiling import not_compiled

_SEEN: list[bool] = []


@not_compiled
def _marked(x: Tensor) -> Tensor:
    _SEEN.append(torch.compiler.is_compiling())
    return x + x.sum().item()  # data-dependent: nothing that a graph could hold


def test_the_graph_breaks_around_what_is_marked() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: _marked(x * 2) * 3, backend=backend)
    _SEEN.clear()
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 18.0))
    assert _SEEN == [False]
    assert len(graphs) == 2, "before it and after it"


def test_what_is_marked_loads_no_compiler() -> None:
    code = (
        "import sys, torch; from deepspeed.common.compiling import not_compiled; "
        "f = not_compiled(lambda x: x + 1); assert f(1) == 2; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
