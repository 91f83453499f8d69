"""Tensor ranks that hold parts of the tokens between blocks train as one process does."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.errors import ArgumentError, UnbuiltFeatureError
from tests.support.cut_net import cuts_of, part_of
from tests.support.engines import config, masters, zero
from tests.support.families import VOCABULARY, WithLoss, build, double_throughout
from tests.support.ranks import run_ranks

STEPS, RATE, TOKENS = 6, 1e-3, 8
ROUNDING = 1e-10


def _tokens(seed: int, length: int = TOKENS) -> Tensor:
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def _settings(tensor: int, stage: int) -> dict[str, Any]:
    return config(
        1,
        1,
        **zero(stage),
        optimizer={"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        tensor_parallel={"autotp_size": tensor, "sequence_parallel": True},
    )


def _train(rank: int, world_size: int, family: str, stage: int, recomputes: bool) -> tuple[list[str], set[int]]:
    wrong, seen = [], set()
    with double_throughout(family):
        whole = WithLoss(build(family))
        cut = copy.deepcopy(whole)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE, weight_decay=0.0)
        engine = deepspeed.initialize(model=cut, config=_settings(world_size, stage))[0]
        if recomputes:
            cast("Any", cut.inner).gradient_checkpointing_enable()
        norm: Any = next(module for name, module in cut.named_modules() if name.endswith("input_layernorm"))
        norm.register_forward_pre_hook(lambda module, args: seen.add(args[0].shape[1]))
        for step in range(STEPS):
            ids = _tokens(step)
            optimizer.zero_grad()
            loss = whole(ids)
            loss.backward()
            optimizer.step()
            found = engine(ids)
            engine.backward(found)
            engine.step()
            if abs(found.item() - loss.item()) > ROUNDING:
                wrong.append(f"step {step}: loss {found.item()}, not {loss.item()}")
        got = masters(engine)
        cuts = cuts_of(cut)
        for name, value in whole.named_parameters():
            want = part_of(cuts[name], engine.get_model_parallel_rank(), value.detach()) if name in cuts else value.detach()
            off = (got[name] - want).abs().max().item() if want.numel() else 0.0
            if not off <= ROUNDING:
                wrong.append(f"{name} is off by {off:g}")
    return wrong, seen


@pytest.mark.parametrize(
    ("family", "ranks", "stage", "recomputes"),
    [
        ("llama", 2, 0, False),
        ("llama", 4, 3, False),
        ("llama", 2, 1, True),
        ("gpt_neox", 2, 2, False),
        ("qwen3", 2, 0, False),
        ("phi", 2, 0, False),
    ],
)
def test_parts_of_tokens_train_as_one_process_does(family: str, ranks: int, stage: int, recomputes: bool) -> None:
    for wrong, seen in run_ranks(_train, ranks, family, stage, recomputes, timeout_seconds=120):
        assert wrong == []
        assert seen == {TOKENS // ranks}


def _refused(rank: int, world_size: int, family: str, length: int, changes: dict[str, Any]) -> str:
    try:
        engine = deepspeed.initialize(model=WithLoss(build(family, **changes)), config=_settings(world_size, 0))[0]
        engine(_tokens(0, length))
    except (ArgumentError, UnbuiltFeatureError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "length", "changes", "said"),
    [
        ("llama", 7, {}, "must be a multiple of 2"),
        ("llama", 8, {"attention_dropout": 0.1}, "with dropout"),
        ("mixtral", 8, {}, "was not cut"),
    ],
)
def test_what_needs_all_tokens_is_refused(family: str, length: int, changes: dict[str, Any], said: str) -> None:
    assert all(said in text for text in run_ranks(_refused, 2, family, length, changes))
