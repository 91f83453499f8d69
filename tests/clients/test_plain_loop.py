"""A training loop that belongs to its author: only `initialize`, `backward`, `step` and checkpoints are ours.

    meta model -> to_empty -> init_weights      its own loader, schedule, log and checkpoints by step, in float64

The reference is the same loop on torch alone, in one process, over the global batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from tests.support.ranks import run_ranks

VOCABULARY, WIDTH, LENGTH = 17, 8, 6
ROWS_PER_STEP = 12
STEPS, SAVED_AT = 8, 5
CLIP = 0.05  # below every norm here


class Block(nn.Module):
    """Mixes a token with the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_BTW: Tensor, counts_T1: Tensor) -> Tensor:
        normed_BTW = self.norm(hidden_BTW)
        before_BTW = self.mix(normed_BTW).cumsum(1) / counts_T1
        return hidden_BTW + self.out(torch.tanh(before_BTW + normed_BTW))


class Decoder(nn.Module):
    """Two blocks. `init_weights` gives every parameter and buffer its value: the constructor may run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("counts_T1", torch.empty(LENGTH - 1, 1), persistent=False)

    def init_weights(self) -> None:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, param in self.named_parameters():
                is_gain = name.endswith("norm.weight")
                param.fill_(1.0) if is_gain else param.normal_(0, 0.3, generator=generator)
            self.counts_T1.copy_(torch.arange(1.0, LENGTH)[:, None])

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTW = self.embed(tokens_BT[:, :-1])
        for block in self.blocks:
            hidden_BTW = block(hidden_BTW, self.counts_T1)
        logits_NV = self.head(hidden_BTW).flatten(0, 1)
        return nn.functional.cross_entropy(logits_NV, tokens_BT[:, 1:].flatten())


class TokenLoader:
    """Endless tokens in which each follows from the one before; knows where it is, and takes that back."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._mine = slice(rank, None, world_size)
        self._generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> TokenLoader:
        return self

    def __next__(self) -> Tensor:
        first = torch.randint(VOCABULARY, (ROWS_PER_STEP, 1), generator=self._generator)
        return ((first + 3 * torch.arange(LENGTH)) % VOCABULARY)[self._mine]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class Line(NamedTuple):
    """What the loop logs of a step."""

    step: int
    loss: float
    rate: float
    norm: float


def _parts() -> tuple[Decoder, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    with torch.device("meta"):
        model = Decoder()
    model.to_empty(device="cpu")
    model.double()
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def _plain_loop() -> list[Line]:
    model, optimizer, schedule = _parts()
    loader, log = TokenLoader(0, 1), []
    for step in range(STEPS):
        loss = model(next(loader))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        log.append(Line(step, loss.item(), optimizer.param_groups[0]["lr"], norm.item()))
        schedule.step()
    return log


def _loop(rank: int, world_size: int, folder: Path, stage: int, is_resumed: bool) -> list[Line]:
    model, optimizer, schedule = _parts()
    config = {
        "train_micro_batch_size_per_gpu": ROWS_PER_STEP // world_size,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loader, log, begin = TokenLoader(rank, world_size), [], 0
    if is_resumed:
        _, state = engine.load_checkpoint(folder, tag=f"step-{SAVED_AT}")
        begin = state["step"]
        loader.load_state_dict(state["loader"])
        schedule.load_state_dict(state["schedule"])
    for step in range(begin, STEPS):
        loss = engine(next(loader))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        comm.all_reduce(mean)
        rate, norm = optimizer.param_groups[0]["lr"], engine.get_global_grad_norm()
        log.append(Line(step, mean.item() / world_size, rate, float(norm)))
        schedule.step()
        if step + 1 == SAVED_AT and not is_resumed:
            state = {"step": SAVED_AT, "loader": loader.state_dict(), "schedule": schedule.state_dict()}
            engine.save_checkpoint(folder, tag=f"step-{SAVED_AT}", client_state=state)
    engine.destroy()
    return log


def _assert_same(log: list[Line], expected: list[Line]) -> None:
    assert [line.step for line in log] == [line.step for line in expected]
    for ours, theirs in zip(log, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


def _loops(rank: int, world_size: int, folder: Path) -> dict[tuple[int, bool], list[Line]]:
    runs = [(stage, is_resumed) for stage in (0, 1, 2, 3) for is_resumed in (False, True)]
    return {run: _loop(rank, world_size, folder / str(run[0]), *run) for run in runs}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_loop_logs_what_it_logs_on_torch_alone(world_size: int, tmp_path: Path) -> None:
    """Losses, rates of its own schedule, and norms before clipping, at each stage; from the middle after a resume."""
    expected = _plain_loop()
    assert expected[-1].loss < expected[0].loss
    assert all(line.norm > CLIP for line in expected)
    for logs in run_ranks(_loops, world_size, tmp_path):
        for (_, is_resumed), log in logs.items():
            _assert_same(log, expected[SAVED_AT if is_resumed else 0 :])


def test_a_checkpoint_by_step_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_loop, 2, tmp_path, 3, False)
    for log in run_ranks(_loop, 3, tmp_path, 3, True):
        _assert_same(log, _plain_loop()[SAVED_AT:])
