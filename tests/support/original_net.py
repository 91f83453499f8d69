"""The model and data behind `tests/fixtures/original`: what is needed to go on from one of those checkpoints.

Initial weights are whatever torch makes: every test loads them. Only shapes, arithmetic and data must be those of
the fixtures.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint import CheckpointSource

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "original"

VOCABULARY, WIDTH, LENGTH, ROWS, MICRO_BATCHES = 17, 12, 5, 2, 2
CLIENT_STATE = {"epoch": 7, "note": "hello"}


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens, in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


class Net(nn.Module):
    """A tied head, frozen parameters, a persistent buffer and one that is not."""

    def __init__(self, hidden: int = 20) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.fc1 = nn.Linear(WIDTH, hidden)
        self.fc2 = nn.Linear(hidden, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("seen", torch.full((1,), 5.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        values = self.emb(tokens)
        values = values + self.fc2(torch.tanh(self.fc1(values)))
        values = self.norm(values + self.frozen(values))
        return token_loss(self.head(values), targets)


class ColumnAndRow(nn.Module):
    """Whole model of the tensor-parallel fixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        values = self.emb(tokens)
        return token_loss(self.head(values + self.down(torch.tanh(self.up(values)))), targets)


def batch(step: int, micro_batch: int, replica: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (ROWS, LENGTH) of one micro-batch of one of the two data-parallel ranks that wrote the fixtures."""
    row = torch.arange(ROWS)[:, None] + ROWS * (replica + 2 * micro_batch + 4 * step)
    column = torch.arange(LENGTH)[None, :]
    return (row * 7 + column * 3) % VOCABULARY, (row * 5 + column * 11 + 1) % VOCABULARY


def settings(stage: int, precision: str, rows: int = ROWS, **blocks: Any) -> dict[str, Any]:
    """The config of the fixtures, for any stage and number of rows per micro-batch and rank."""
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.001,
                "warmup_max_lr": 0.01,
                "warmup_num_steps": 4,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **blocks,
    }


def member_ranges(path: Path) -> list[tuple[str, int, int]]:
    """Name, first byte and bytes of each part of an archive that has a checksum; between them lies padding."""
    content = path.read_bytes()
    ranges = []
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            lengths = content[member.header_offset + 26 : member.header_offset + 30]  # of the name and the extra field
            start = member.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            ranges.append((member.filename, start, member.file_size))
    return ranges


def full_weights(source: CheckpointSource) -> dict[str, Tensor]:
    """Every weight and buffer in its shape: the master where there is one, tied names as well."""
    weights: dict[str, Tensor] = {}
    for prefix in ("module/", "master/"):
        for name in source.names(prefix):
            weights[name.removeprefix(prefix)] = source.read(name).view(source.shape(name))
    for alias, owner in source.state["shared_parameters"].items():
        weights[alias] = weights[owner]
    return weights
