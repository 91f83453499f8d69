"""Train a small GPT with mixtures of experts on real text, and write down where the tokens go.

        deepspeed --num_gpus 2 examples/moe/train.py --aux 0.01 --out runs/moe/balanced
        deepspeed --num_gpus 2 examples/moe/train.py --aux 0 --out runs/moe/alone

        tokens_BT -> embedding -> [ norm -> attention -> + , MoEBlock ] x depth -> norm -> logits_BTV

Attention, text and tokens are those of `examples/gpt`. Every rank holds its part of the experts. `--out` gets routing.csv:
now and then, the loss on validation text and the share of all choices that each expert of each block got there. In eval
mode the second choice is no sample, so the shares are what the gates have learnt.

Shape suffixes: B sequences, T tokens of a sequence, D width, E experts.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from deepspeed.moe.layer import MoE
from deepspeed.utils import RepeatingLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))

from corpus import Corpus, Windows, prepare
from model import Attention, GPTConfig, rotary_tables

LOOKED_AT = 32
"""Validation windows of each rank whose routing is written down."""


class MoEBlock(nn.Module):
    """The block of the guide: experts in place of one feed-forward block, their loss beside the output."""

    def __init__(self, d_model: int, d_ff: int, num_experts: int = 16, ep_size: int = 8) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))
        self.moe = MoE(
            hidden_size=d_model, expert=expert, num_experts=num_experts, ep_size=ep_size, k=2, capacity_factor=1.25
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, D) in and out, and the load-balancing loss of this layer."""
        out, l_aux, _exp_counts = self.moe(x)
        return x + out, l_aux


class MoEGPT(nn.Module):
    """Embedding, attention and experts by turns, and the loss of the next token with every layer's own added."""

    def __init__(self, config: GPTConfig, experts: int, ep_size: int, aux: float) -> None:
        super().__init__()
        self.aux = aux
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(config.depth + 1))
        self.attentions = nn.ModuleList(Attention(config) for _ in range(config.depth))
        self.blocks = nn.ModuleList(MoEBlock(config.width, 2 * config.width, experts, ep_size) for _ in range(config.depth))
        cosines, sines = rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to train on, and the mean cross-entropy in nats per token."""
        x_BTD = self.embedding(tokens_BT)
        aux_losses = []
        for norm, attention, block in zip(self.norms, self.attentions, self.blocks, strict=False):
            x_BTD = x_BTD + attention(norm(x_BTD), self.cosines, self.sines)
            x_BTD, l_aux = block(x_BTD)
            aux_losses.append(l_aux)
        logits_BTV = F.linear(self.norms[-1](x_BTD), self.embedding.weight)
        task_loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
        return task_loss + self.aux * sum(aux_losses), task_loss.detach()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with experts on text.")
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them; default: Python's standard library")
    add("--out", type=Path, default=Path("runs/moe/balanced"), help="folder for the text and routing.csv")
    add("--aux", type=float, default=0.01, help="weight of the load-balancing loss; 0 leaves it out")
    add("--steps", type=int, default=600)
    add("--look-every", type=int, default=20, help="steps between looks at the routing")
    add("--batch", type=int, default=8, help="sequences per rank and step")
    add("--context", type=int, default=64, help="tokens per sequence")
    add("--vocab", type=int, default=512, help="tokens in the vocabulary")
    add("--depth", type=int, default=2, help="pairs of attention and experts")
    add("--width", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--experts", type=int, default=8, help="experts of each block, spread over all ranks")
    add("--local_rank", type=int, help="given by the launcher")
    return parser.parse_args()


def load_corpus(args: argparse.Namespace) -> Corpus:
    """Rank 0 prepares the text, then every rank loads it."""
    path = args.out / "text.npz"
    if comm.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        prepare(args.data, args.vocab).save(path)
    comm.barrier()
    return Corpus.load(path)


@torch.no_grad()
def look(engine: deepspeed.DeepSpeedEngine, tokens_BT: Tensor) -> list[tuple[float, list[float]]]:
    """For each block: the loss on this rank's `tokens_BT`, and of all ranks' choices there each expert's share."""
    engine.eval()
    _, task_loss = engine(tokens_BT[:, :-1], tokens_BT[:, 1:])
    engine.train()
    comm.all_reduce(task_loss)
    found = []
    for block in engine.module.blocks:
        counts_E = block.moe.deepspeed_moe.exp_counts.float().to(engine.device)
        comm.all_reduce(counts_E)
        found.append((task_loss.item() / engine.world_size, (counts_E / counts_E.sum()).tolist()))
    return found


def main() -> None:
    """One run."""
    args = parse_args()
    deepspeed.init_distributed()
    corpus = load_corpus(args)
    torch.manual_seed(0)
    config = GPTConfig(corpus.vocab_size, args.context, args.depth, args.width, args.heads)
    model = MoEGPT(config, args.experts, comm.get_world_size(), args.aux)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        training_data=Windows(corpus.training, args.context),
        config={
            "train_micro_batch_size_per_gpu": args.batch,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
            "dataloader_drop_last": True,
        },
    )
    windows = Windows(corpus.validation, args.context)
    apart = max(1, len(windows) // (LOOKED_AT * engine.world_size)) * engine.world_size
    mine = range(engine.global_rank, len(windows), apart)
    looked_at_BT = torch.stack([windows[n] for n in mine[:LOOKED_AT]]).to(engine.device)
    rows = []
    batches = RepeatingLoader(loader)
    for step in range(args.steps + 1):
        if step % args.look_every == 0 or step == args.steps:
            rows += [[step, n, loss, *shares] for n, (loss, shares) in enumerate(look(engine, looked_at_BT))]
        if step < args.steps:
            tokens_BT = next(batches).to(engine.device)
            loss, _ = engine(tokens_BT[:, :-1], tokens_BT[:, 1:])
            engine.backward(loss)
            engine.step()
    if engine.global_rank == 0:
        with (args.out / "routing.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["step", "block", "loss", *(f"expert {n}" for n in range(args.experts))], *rows])
        for step, block, loss, *shares in rows[-args.depth :]:
            text = " ".join(f"{share:.2f}" for share in shares)
            print(f"step {step}: validation loss {loss:.3f}, block {block}: shares {text}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
