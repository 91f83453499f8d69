"""The model, data and settings of the checkpoints in `tests/fixtures/peer-checkpoints`, which the original 0.19.8 wrote.

Names and shapes are those of the fixtures; weights come out of them, so what a model starts with is arbitrary on purpose: a
value that a load forgets makes a difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FIXTURES = Path(__file__).parents[1] / "fixtures" / "peer-checkpoints"

VOCABULARY, WIDTH, HIDDEN, TOKENS, ROWS, MICRO_BATCHES = 17, 12, 20, 5, 2, 2


class PeerNet(nn.Module):
    """Tied embedding and head, a residual MLP, a frozen layer, a persistent and another buffer; forward gives the loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.emb = nn.Embedding(VOCABULARY, WIDTH)
            self.fc1 = nn.Linear(WIDTH, HIDDEN)
            self.fc2 = nn.Linear(HIDDEN, WIDTH, bias=False)
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.full((1,), float(seed + 1)))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        hidden = self.emb(tokens)
        hidden = hidden + self.fc2(torch.tanh(self.fc1(hidden)))
        logits = self.head(self.norm(hidden + self.frozen(hidden)))
        return nn.functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def peer_batch(step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one micro-batch of one data-parallel rank, each (rows, tokens)."""
    row = torch.arange(ROWS).view(-1, 1) + ROWS * rank + 2 * ROWS * micro_batch + 4 * ROWS * step
    place = torch.arange(TOKENS).view(1, -1)
    return (row * 7 + place * 3) % VOCABULARY, (row * 5 + place * 11 + 1) % VOCABULARY


def peer_config(stage: int, precision: str, **blocks: Any) -> dict[str, Any]:
    """The fixtures' settings: AdamW of torch, a linear warm-up, clipping, two micro-batches per step."""
    adamw = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True}
    warm_up = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupLR", "params": warm_up},
        "zero_optimization": {"stage": stage},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **blocks,
    }
