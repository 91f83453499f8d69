"""How much memory does a forward and backward of a long sequence take, in tiles and chunks, and over ranks?

A decoder of two layers (width 32, a gated MLP of 256, 4,096 words, fp32; one head, over ranks four), one sequence. Run by
itself:

    python benchmarks/long_context.py lengths --tokens 8192 16384 32768 65536     one rank, by what is switched on
    python benchmarks/long_context.py ranks --tokens 16384                       1, 2, 4 ranks that share the sequence
    python benchmarks/long_context.py loss --tokens 8192                         head and loss alone, by the number of tiles
    python benchmarks/long_context.py plot FILE.json... --to docs/guide/long-context.png

| switched on | what it is |
|---|---|
| plain | torch's attention, which holds no scores either; whole MLP, whole logits |
| tiled | `TiledMLP` and `TiledFusedLogitsLoss` |
| + chunks | attention by `chunked_attention`, chunks in host memory |
| + recomputed | each layer in `deepspeed.checkpointing.checkpoint`, its input in a file until backward |

`peak_mib`: the most that tensors of torch's operators held at once (`harness.live_bytes`), weights and their gradients left
out: what rests in host memory or in the file is not among it, as it would not be on a device. `seconds` is the step with
the counting, which slows it down; it tells orders of magnitude alone. Each line is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.live_bytes import LiveBytes

WIDTH, INNER, VOCABULARY, LAYERS, HEADS = 32, 256, 4096, 2, 4
TILE_TOKENS, CHUNK_TOKENS = 256, 2048
VARIANTS = ("plain", "tiled", "+ chunks", "+ recomputed")
MIB = 1 << 20


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    def __init__(self, variant: str, heads: int, group: Any) -> None:
        super().__init__()
        self.rank, self.heads, self.group = VARIANTS.index(variant), heads, group
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = Mlp()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, tokens, heads, size)."""
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self.rank >= VARIANTS.index("+ chunks"):
            from deepspeed.sequence.chunked_attention import chunked_attention

            return chunked_attention(q, k, v, CHUNK_TOKENS, is_offloaded=True).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        if self.group is None:
            context = self._attend(q, k, v)
        else:
            from deepspeed.sequence.layer import DistributedAttention

            context = DistributedAttention(self._attend, self.group, 2, 1)(q, k, v, 0)
        del q, k, v
        x = x + self.out(context.flatten(2))
        given = self.norm_2(x)
        if not self.rank:
            return x + self.mlp(given)
        from deepspeed.sequence.tiled import TiledMLP

        return x + TiledMLP.apply(Mlp.forward, self.mlp, given, math.ceil(given.size(1) / TILE_TOKENS))


class Decoder(nn.Module):
    def __init__(self, variant: str, heads: int = 1, group: Any = None) -> None:
        super().__init__()
        self.variant = variant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(variant, heads, group) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.variant == "+ recomputed":
                import deepspeed

                x = deepspeed.checkpointing.checkpoint(layer, x)
            else:
                x = layer(x)
        tiles = 0 if self.variant == "plain" else math.ceil(tokens.size(1) / TILE_TOKENS)
        return head_loss(self.head, self.norm(x), labels, tiles)


def head_loss(head: nn.Module, x: Tensor, labels: Tensor, tiles: int) -> Tensor:
    def loss(model: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(hidden).flatten(0, 1), targets.flatten())

    if not tiles:
        return loss(head, x, labels)
    from deepspeed.sequence.tiled import TiledFusedLogitsLoss

    return TiledFusedLogitsLoss.apply(loss, head, x, labels, None, tiles)


def _measured(model: nn.Module, *inputs: Tensor) -> dict[str, float]:
    for tensor in (*model.parameters(), *(each for each in inputs if each.requires_grad)):
        tensor.grad = torch.zeros_like(tensor)  # so that backward adds in place
    began = time.perf_counter()
    with LiveBytes() as live:
        loss = model(*inputs)
        kept = live.now_nbytes
        loss.backward()
    seconds = time.perf_counter() - began
    return {"kept_mib": kept / MIB, "peak_mib": live.peak_nbytes / MIB, "seconds": seconds, "loss": loss.item()}


def _tokens(count: int) -> tuple[Tensor, Tensor]:
    whole = torch.randint(VOCABULARY, (1, count + 1), generator=torch.Generator().manual_seed(0))
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def one_length(variant: str, tokens: int) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if variant == "+ recomputed":
        import deepspeed

        offload = {"device": "nvme", "nvme_path": tempfile.mkdtemp(), "min_numel": 1}
        config = {"train_batch_size": 1, "activation_checkpointing": {"offload": offload}}
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
    return _measured(Decoder(variant), *_tokens(tokens))


def one_loss(tiles: int, tokens: int) -> dict[str, float]:
    torch.manual_seed(0)
    head, x = nn.Linear(WIDTH, VOCABULARY, bias=False), torch.randn(1, tokens, WIDTH, requires_grad=True)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return head_loss(self.head, hidden, labels, tiles)

    return _measured(Loss(), x, _tokens(tokens)[1])


def _one_rank(rank: int, world_size: int, variant: str, tokens: int, folder: str) -> None:
    import torch.distributed as dist

    import deepspeed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Decoder(variant, heads=HEADS, group=dist.group.WORLD)
    inputs = [part.chunk(world_size, 1)[rank].contiguous() for part in _tokens(tokens)]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(_measured(model, *inputs)))
    dist.destroy_process_group()


def ranks(variant: str, world_size: int, tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one_rank, (world_size, variant, tokens, folder), nprocs=world_size)
        found = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world_size)]
    return {key: max(each[key] for each in found) for key in ("kept_mib", "peak_mib", "seconds")}


def plot(files: list[str], to: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for file in files for row in json.loads(Path(file).read_text())]
    has_ranks = any(row["what"] == "ranks" for row in rows)
    figure, axes = plt.subplots(1, 1 + has_ranks, figsize=(6 + 4 * has_ranks, 4), squeeze=False)
    _plot_lengths(axes[0, 0], rows)
    if has_ranks:
        _plot_ranks(axes[0, 1], rows)
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def _plot_lengths(left: Any, rows: list[dict[str, Any]]) -> None:
    for variant in VARIANTS:
        mine = sorted(
            (row["tokens"], row["peak_mib"]) for row in rows if row["what"] == "lengths" and row["case"] == variant
        )
        left.plot(*zip(*mine, strict=True), marker="o", label=variant)
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MiB at most", title="one rank: forward and backward")
    ticks = sorted({row["tokens"] for row in rows if row["what"] == "lengths"})
    left.set_xticks(ticks, [f"{each // 1024}k" for each in ticks])
    left.minorticks_off()
    left.grid(alpha=0.3)
    left.legend(loc=(0.4, 0.42))


def _plot_ranks(right: Any, rows: list[dict[str, Any]]) -> None:
    for variant in VARIANTS:
        mine = sorted((row["case"], row["peak_mib"]) for row in rows if row["what"] == "ranks" and row["variant"] == variant)
        if mine:
            sizes, peaks = zip(*mine, strict=True)
            (line,) = right.plot(sizes, peaks, marker="o", label=variant)
            right.plot(sizes, [peaks[0] / each for each in sizes], linestyle=":", color=line.get_color())
    right.set(
        xscale="log",
        yscale="log",
        xlabel="ranks that share the sequence",
        title="a rank's share (dotted: one rank's / ranks)",
    )
    right.set_xticks([1, 2, 4], ["1", "2", "4"])
    right.minorticks_off()
    right.grid(alpha=0.3)
    right.legend()


def _cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.what == "lengths":
        return [
            {"what": "lengths", "case": case, "tokens": each} for each in arguments.tokens for case in arguments.variants
        ]
    if arguments.what == "loss":
        return [{"what": "loss", "case": tiles, "tokens": each} for each in arguments.tokens for tiles in (0, 2, 4, 8, 16)]
    return [
        {"what": "ranks", "case": size, "variant": variant, "tokens": each}
        for each in arguments.tokens
        for variant in arguments.variants
        for size in (1, 2, 4)
    ]


def _run(case: dict[str, Any]) -> dict[str, float]:
    if case["what"] == "lengths":
        return one_length(case["case"], case["tokens"])
    if case["what"] == "loss":
        return one_loss(case["case"], case["tokens"])
    return ranks(case["variant"], case["case"], case["tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lengths", "ranks", "loss", "plot", "one"])
    parser.add_argument("files", nargs="*", help="results to plot, or the case that a process runs")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--to", help="write results, or the plot, to this file")
    arguments = parser.parse_args()
    if arguments.what == "one":
        print(json.dumps(_run(json.loads(arguments.files[0]))))
        return
    if arguments.what == "plot":
        plot(arguments.files, arguments.to)
        return
    rows = []
    for case in _cases(arguments):
        command = [sys.executable, __file__, "one", json.dumps(case)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append({**case, **json.loads(done.stdout.splitlines()[-1])})
        print(
            "  ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in rows[-1].items()
            ),
            flush=True,
        )
        if arguments.to:
            Path(arguments.to).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
