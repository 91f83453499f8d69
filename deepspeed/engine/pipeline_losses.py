r"""Losses of a batch, brought from where they are made to all ranks.

    last stage   loss x micro-batches  --\
    others       nothing               ---+-- all reduce --> sum over micro-batches, mean over data-parallel ranks

    last stage   {name: loss} ...      --\                  where the model has losses to report beside it:
    others       nothing               ---+-- all gather --> means by name

A rank that is here has heard of every failure in what came before: whoever failed does not take part, and says so.

Does not live here: computing them (`pipeline_batch`), writing them (`report`). `engine.pipeline` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.watch import naming
from deepspeed.errors import PipelineError
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["LossSums"]


class LossSums:
    """The losses of one batch at a time.

    Args:
        mesh: of the ranks.
        device: where collectives work.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._others: dict[str, list[Tensor]] = {}
        self._has_others = False

    def begin(self) -> None:
        """A batch begins."""
        self._others.clear()

    def note_others(self, named: Mapping[str, Any] | None) -> None:
        """Take what `PipelineModule.get_additional_losses` says of the micro-batch that has just made its loss.

        Raises:
            PipelineError: something that is no scalar.
        """
        for name, value in (named or {}).items():
            loss = torch.as_tensor(value)
            if loss.numel() != 1:
                raise PipelineError(
                    f"get_additional_losses() gave a tensor of shape {tuple(loss.shape)} for {name!r}; a scalar is needed. "
                    "Reduce it."
                )
            self._others.setdefault(name, []).append(loss.detach().reshape(()))

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum over micro-batches, the mean over data-parallel ranks. Collective over all ranks, and blocks.

        Args:
            losses: scalars, of each micro-batch, on the last stage.
        """
        sums = torch.zeros(3, dtype=self._wide, device=self._device)
        if losses:
            sums[0] = torch.stack(list(losses)).sum(dtype=self._wide)
            sums[1] = float(losses[0].dtype == torch.float64)
        sums[2] = float(bool(self._others))
        ranks = self._mesh.pipe_data
        if ranks.size > 1:
            with naming("losses of a batch"):
                comm.all_reduce(sums, group=ranks.group)
        total = sums[0] / self._mesh.data_parallel.size
        is_double, self._has_others = (count > 0 for count in sums[1:].tolist())
        return total if self._wide == torch.float64 and is_double else total.float()

    def others(self) -> dict[str, float]:
        """Means of the other losses over micro-batches and data-parallel ranks, by name. Collective, after `total`."""
        if not self._has_others:
            return {}
        mine = {name: [float(torch.stack(each).sum(dtype=self._wide)), len(each)] for name, each in self._others.items()}
        ranks, gathered = self._mesh.pipe_data, [mine]
        if ranks.size > 1:
            gathered = [{} for _ in range(ranks.size)]
            comm.all_gather_object(gathered, mine, group=ranks.group)
        sums: dict[str, list[float]] = {}
        for name, (value, count) in (item for each in gathered for item in each.items()):
            before, counted = sums.get(name, (0.0, 0))
            sums[name] = [before + value, counted + count]
        return {name: value / count for name, (value, count) in sums.items()}

    def meet(self) -> None:
        """Block until all ranks are at the end of the batch. Collective over all ranks."""
        ranks = self._mesh.pipe_data
        if ranks.size > 1:
            with naming("end of a batch"):
                comm.all_reduce(here := torch.zeros(1, device=self._device), group=ranks.group)
                here.tolist()  # the host waits, too
