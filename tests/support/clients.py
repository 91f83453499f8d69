"""Tiny models and data for the libraries that people reach us through, and the rule their runs are compared by.

A run of a client with us is compared with the same client without: same ranks (DDP over gloo), same seeds, same batches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 64
CURVE_TOLERANCE = 1e-5
"""How far apart the fp32 losses of two runs may be: sums over ranks and parameters are taken in another order."""


def tiny_llama(seed: int = 0, **settings: Any) -> Any:
    """A Llama of two layers in fp32 (about 20 thousand parameters), the same wherever it is built."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_llama_config(**settings))


def tiny_llama_config(**settings: Any) -> Any:
    """Settings of `tiny_llama`: width 32, 4 heads of which 2 for keys, tied to nothing."""
    from transformers import LlamaConfig

    ours = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**{**ours, **heads, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **settings})


class Sentences(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens that follow a rule (each is the one before plus a step of its row), so that losses fall."""

    def __init__(self, rows: int = 32, length: int = 12, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(3, VOCABULARY, (rows, 1), generator=generator)
        step = torch.randint(1, 4, (rows, 1), generator=generator)
        self._tokens_RT = 3 + (first + step * torch.arange(length)) % (VOCABULARY - 3)

    def __len__(self) -> int:
        return len(self._tokens_RT)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens_T = self._tokens_RT[row]
        return {"input_ids": tokens_T, "attention_mask": torch.ones_like(tokens_T), "labels": tokens_T.clone()}


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter by name, on every rank, gathered where ZeRO stage 3 shards it. All ranks call it."""
    import deepspeed

    named = dict(module.named_parameters())
    sharded = [param for param in named.values() if hasattr(param, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        return {name: param.detach().clone() for name, param in named.items()}


def on_gloo(client: Mapping[str, str] | None = None) -> None:
    """Start this rank's process group the way clients must on machines without a device; call it before the client's own.

    Accelerate finds no back end without a device and would then count one process (spec of the clients, section 15). Told
    of gloo alone it counts the ranks, but takes the run for one that is not distributed and never makes DDP: hence `cpu`.

    Args:
        client: environment variables that the client's own launcher would set; ACCELERATE_USE_DEEPSPEED=true for a run
            with us, nothing for the reference under DDP.
    """
    os.environ.update(client or {})
    from accelerate import PartialState

    PartialState(cpu=os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true", backend="gloo")


def assert_same_curve(got: Sequence[float], expected: Sequence[float], tolerance: float = CURVE_TOLERANCE) -> None:
    """Fail unless both runs logged the same losses, and the run learnt something (a flat curve would compare nothing)."""
    assert len(got) == len(expected) > 1
    assert expected[-1] != expected[0]
    assert list(got) == pytest.approx(list(expected), rel=0, abs=tolerance)
