"""The experts that one rank holds, and the marks by which the rest of the library knows their parameters.

    layer of 8 experts, ep_size 4, on expert-parallel rank 1:

        Experts
          deepspeed_experts     children named "2", "3" (their numbers in the whole layer), indexed [0], [1]
            2, 3                deep copies of the given module

Parameters of experts carry `allreduce = False` (not averaged over all data-parallel ranks) and `group_name = "ep_size_4"`.
Names are global, so a checkpoint needs no renaming for another number of ranks (docs/adr/0016, point 6).

Lives here: the copies, names and marks, and running each expert on its own rows. Does not live here: which rows
(`moe.dispatch`). `moe.layer` makes them; `moe.param_groups` and the engine read the marks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.utils import note_part
from deepspeed.errors import ArgumentError
from deepspeed.ops.host_products import fast_products
from deepspeed.optim.clip import MARKS_OF_PARTS

__all__ = ["Experts", "LocalExperts", "expert_group_name"]


def expert_group_name(ep_size: int) -> str:
    """The name of the ranks over which `ep_size` spreads experts: what `param.group_name` holds, `"ep_size_4"`."""
    return f"ep_size_{ep_size}"


class LocalExperts(nn.Module):
    """Modules named by their number in the whole layer and indexed by their place on this rank."""

    def __init__(self, experts: Sequence[nn.Module], first: int = 0, *, is_part: bool = False) -> None:
        """Take the modules and the number of the first; `is_part`: other ranks hold the others."""
        super().__init__()
        self._is_part = is_part
        self._is_placed = False
        self.is_loaded = False
        """Whether a state dict has named them, so that values and numbers belong together."""
        for place, expert in enumerate(experts):
            self.add_module(str(first + place), expert)

    def __getitem__(self, place: int) -> nn.Module:
        """The expert at a place of this rank."""
        return list(self)[place]

    def __len__(self) -> int:
        """How many experts this rank holds."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """This rank's experts in order."""
        return iter([expert for expert in self._modules.values() if expert is not None])

    def rename_from(self, first: int) -> None:
        """Let the names begin at `first`; the modules stay the same."""
        self._is_placed = True
        experts = list(self)
        self._modules.clear()
        for place, expert in enumerate(experts):
            self.add_module(str(first + place), expert)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As torch's, with a word about what is not here."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._is_part:
            note_part(destination, prefix, f"{len(self)} experts of more")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As torch's, but experts that other ranks hold are no unexpected keys: whole state dicts load on every rank.

        Refused while this rank does not know which experts are its own: others would be taken without a word.
        """
        if self._is_part and not self._is_placed:
            error_msgs.append(
                f"{prefix}: which of the experts are this rank's is not known yet. Call deepspeed.initialize(), or "
                "set_deepspeed_parallelism() of the MoE layer, before load_state_dict()."
            )
            return
        self.is_loaded = True
        found: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, found, error_msgs)
        unexpected_keys += [key for key in found if not (self._is_part and key[len(prefix) :].partition(".")[0].isdigit())]


class Experts(nn.Module):
    """Deep copies of one expert, each run on its own stretch of rows.

    `R` = rows of all local experts, `M` = what an expert takes, `N` = what it gives.

    Args:
        expert: a module from `(rows, M)` to `(rows, N)`; it may return a tuple whose first element is that.
        num_local_experts: copies on this rank.
        expert_group_name: name of the expert-parallel ranks, `"ep_size_<n>"`.

    Attributes:
        deepspeed_experts: this rank's experts.
        num_local_experts: how many they are.
        expert_group_name: as given.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        if num_local_experts < 1:
            raise ArgumentError(f"num_local_experts={num_local_experts}: a rank holds at least 1 expert.")
        self.expert_group_name = expert_group_name
        copies = [_copied(expert) for _ in range(num_local_experts)]
        self.deepspeed_experts = LocalExperts(copies, is_part=self.is_spread)
        self.num_local_experts = num_local_experts
        self.mark()

    @property
    def is_spread(self) -> bool:
        """Whether other ranks hold other experts of the layer."""
        return self.expert_group_name not in (None, expert_group_name(1))

    def mark(self) -> None:
        """Put the marks on every parameter; the engine does so again, because a deep copy of a model has lost them."""
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = self.expert_group_name  # type: ignore[attr-defined]

    def place(self, expert_rank: int) -> None:
        """Name the experts for this rank's position among the ranks that the layer's experts are spread over."""
        self.deepspeed_experts.rename_from(expert_rank * self.num_local_experts)

    def forward(self, rows_RM: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        """Run each expert on its rows, which lie one stretch after the other; an expert without rows runs on none.

        So every rank builds the same graph, and every parameter gets a gradient, if only of zeros.

        Args:
            rows_RM: what all local experts take, in their order.
            rows_per_expert: rows of each; they add up to R.

        Returns:
            `(R, N)`, in the same order.
        """
        stretches = rows_RM.split_with_sizes(list(rows_per_expert))
        with fast_products(rows_RM.device):
            outputs = [_first(expert(rows)) for expert, rows in zip(self.deepspeed_experts, stretches, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _copied(expert: nn.Module) -> nn.Module:
    """A deep copy, with the marks of tensor-parallel parts, which torch's copy of a parameter has lost."""
    made = copy.deepcopy(expert)
    for given, param in zip(expert.parameters(), made.parameters(), strict=True):
        for mark in MARKS_OF_PARTS:
            if hasattr(given, mark):
                setattr(param, mark, getattr(given, mark))
    return made


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
