"""The loss of a language model whose output layer gives each rank a part of the vocabulary.

Lives here: the function in the forms that models and users call. Does not live here: the arithmetic
(`comm.vocabulary_loss`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.comm.vocabulary_loss import vocab_parallel_cross_entropy
from deepspeed.errors import ArgumentError
from deepspeed.tensor_parallel.layers import ColumnLinear
from deepspeed.topology.mesh import AxisGroup

__all__ = [
    "VocabParallelCausalLMLoss",
    "VocabParallelCrossEntropyLoss",
    "configure_vocab_parallel_loss",
    "use_vocab_parallel_loss",
    "validate_vocab_parallel_loss",
    "vocab_parallel_cross_entropy",
]


class VocabParallelCrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` for logits of which each rank has a part of the vocabulary."""

    def __init__(
        self, group: Any = None, ignore_index: int = -100, reduction: str = "mean", vocab_size: int | None = None
    ) -> None:
        """Store what `vocab_parallel_cross_entropy` takes."""
        super().__init__()
        self.group, self.ignore_index, self.reduction, self.vocab_size = group, ignore_index, reduction, vocab_size

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss; logits (N, this rank's vocabulary), targets (N)."""
        return vocab_parallel_cross_entropy(
            logits,
            target,
            self.group,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            reduction=self.reduction,  # type: ignore[arg-type]  # checked there
        )


class VocabParallelCausalLMLoss:
    """What transformers calls as `model.loss_function`, on such logits."""

    def __init__(self, axis: AxisGroup, vocab_size: int) -> None:
        """Store the ranks that share the vocabulary, and its size."""
        self.axis, self.vocab_size = axis, vocab_size

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean loss of predicting the next token; with `num_items_in_batch` the sum divided by it."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels.to(logits.device),
            self.axis.group,
            vocab_size=self.vocab_size,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is None:
            return loss
        items = num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        return loss / items


def use_vocab_parallel_loss(model: nn.Module, head: str, axis: AxisGroup) -> None:
    """Let `model` compute its loss from parts of its logits.

    Args:
        model: as transformers builds them.
        head: name of its output layer, which is cut.
        axis: whose ranks share the vocabulary.

    Raises:
        ArgumentError: the model computes its loss itself.
    """
    validate_vocab_parallel_loss(model)
    layer = model.get_submodule(head)
    assert isinstance(layer, ColumnLinear)  # was just made one
    model.loss_function = VocabParallelCausalLMLoss(axis, dict(layer.cuts())["weight"].shape[0])  # type: ignore[assignment]


def validate_vocab_parallel_loss(model: nn.Module) -> None:
    """Refuse a model whose loss would take its part of the logits for all of them.

    Raises:
        ArgumentError: it does not call `self.loss_function` for language models.
    """
    names = inspect.unwrap(type(model).forward).__code__.co_names
    if "loss_function" not in names or "CausalLM" not in type(getattr(model, "loss_function", None)).__name__ + getattr(
        getattr(model, "loss_function", None), "__name__", ""
    ):
        raise ArgumentError(
            f"tensor_parallel.vocab_parallel_lm_head=True, but {type(model).__name__} computes its loss from whole logits "
            "itself. Leave the key out: the output layer is cut as the model's plan says, and its outputs are gathered."
        )


def configure_vocab_parallel_loss(model: nn.Module, backend: str = "torch") -> None:
    """Make a model whose output layer was cut without gathering use the loss over parts of the vocabulary.

    `deepspeed.initialize` does it by itself; for a model whose `loss_function` was replaced afterwards.

    Raises:
        ArgumentError: no output layer gives parts, another back end than "torch", or the model computes its loss itself.
    """
    if backend != "torch":
        raise ArgumentError(
            f'vocab_parallel_ce_backend={backend!r}: Liger\'s kernel needs whole rows of logits. Use "torch".'
        )
    heads = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, ColumnLinear)
        and not module.gather_output
        and name.rpartition(".")[2] in ("lm_head", "embed_out")
    ]
    if not heads:
        raise ArgumentError(
            f"{type(model).__name__} has no output layer that gives each rank a part of the vocabulary. Give "
            "tensor_parallel.vocab_parallel_lm_head=True to deepspeed.initialize."
        )
    name, layer = heads[0]
    use_vocab_parallel_loss(model, name, layer.axis)
