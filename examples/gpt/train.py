"""Train a small GPT on real text through `deepspeed.initialize`. Start it with the launcher, or see `run.py`.

        deepspeed --num_gpus 2 examples/gpt/train.py --steps 2800 --until 1400     first half, ends with a checkpoint
        deepspeed --num_gpus 2 examples/gpt/train.py --steps 2800 --resume         the rest, from that checkpoint

Everything lands in `--out`: text.npz (tokens), csv/ and tensorboard/ (metrics), checkpoints/, loss.png, sample.txt.

Shape suffixes as in `model.py`: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from bpe import Tokenizer
from corpus import Corpus, Windows, prepare
from model import GPT, GPTConfig
from plot import draw_curve
from progress import Display, make_display

import deepspeed
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import RepeatingLoader

VALIDATION_WINDOWS = 128
VALIDATION_BATCH = 16
LOSS_SMOOTHING = 0.95
"""Weight of the past in the loss that the progress display shows."""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on text.")
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them; default: Python's standard library")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for logs, checkpoints, plot and sample")
    add("--config", type=Path, default=Path(__file__).with_name("ds_config.json"), help="DeepSpeed config")
    add("--steps", type=int, default=2800, help="optimizer steps of the whole run, both launches together")
    add("--until", type=int, help="step at which this launch saves and ends; default: --steps")
    add("--resume", action="store_true", help="go on from the latest checkpoint in --out")
    add("--batch", type=int, default=4, help="sequences per rank and forward")
    add("--context", type=int, default=128, help="tokens per sequence")
    add("--vocab", type=int, default=1024, help="tokens in the vocabulary; 256 trains on bytes")
    add("--depth", type=int, default=2, help="Transformer blocks")
    add("--width", type=int, default=128, help="width of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--validate-every", type=int, help="steps between validations; default: a sixteenth of --steps")
    add("--prompt", default="\n\ndef ", help="beginning of the sample")
    add("--sample-tokens", type=int, default=300, help="length of the sample")
    add("--temperature", type=float, default=0.7, help="of the sample: lower is safer, higher is wilder")
    add("--seed", type=int, default=0, help="of the initial weights and the sample")
    add("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    args.until = args.steps if args.until is None else min(args.until, args.steps)
    args.validate_every = args.validate_every or max(1, args.steps // 16)
    return args


def main() -> None:
    """One launch: the text, the engine, the steps, a checkpoint, the plot; a sample when the run is complete."""
    args = parse_args()
    deepspeed.init_distributed()
    corpus = load_corpus(args)
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(corpus.vocab_size, args.context, args.depth, args.width, args.heads))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, training_data=Windows(corpus.training, args.context), config=make_config(args)
    )
    client_state = load_checkpoint(engine, args) if args.resume else {"resumed_at": []}
    if engine.global_rank == 0:
        print(describe(model, corpus, engine), flush=True)
    validation_loss = train(engine, loader, corpus, client_state, args)
    client_state["validation_loss"] = validation_loss
    engine.save_checkpoint(args.out / "checkpoints", client_state=client_state)
    if args.until == args.steps:
        write_sample(engine, model, Tokenizer(corpus.merges), args)
    if engine.global_rank == 0:
        draw_curve(
            args.out / "csv" / "Train_Samples_train_loss.csv",
            args.out / "csv" / "Validation_Samples_loss.csv",
            args.out / "loss.png",
            unigram_entropy=corpus.unigram_entropy(),
            context=args.context,
            resumed_at=client_state["resumed_at"],
        )
        print(summary(validation_loss, corpus, args), flush=True)
    engine.destroy()


def load_corpus(args: argparse.Namespace) -> Corpus:
    """Rank 0 prepares the text for a new run and clears away an earlier run's results; then every rank loads it."""
    path = args.out / "text.npz"
    if comm.get_rank() == 0 and not args.resume:
        if path.exists():  # this folder holds an earlier run of ours, not something else of the user's
            for name in ("csv", "tensorboard", "checkpoints"):
                shutil.rmtree(args.out / name, ignore_errors=True)
        prepare(args.data, args.vocab).save(path)
    comm.barrier()
    return Corpus.load(path)


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    """The config file with its "auto" values filled in."""
    values = {
        "train_micro_batch_size_per_gpu": args.batch,
        # fp32 on a CPU: only the newest multiply bf16 fast, most are slower with it.
        "bf16.enabled": get_accelerator().device_name() != "cpu",
        "scheduler.params.warmup_num_steps": max(1, args.steps // 20),
        "scheduler.params.total_num_steps": args.steps,
        "tensorboard.output_path": str(args.out),
        "csv_monitor.output_path": str(args.out),
    }
    return fill_auto(json.loads(args.config.read_text()), values)


def fill_auto(config: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy of `config` in which each "auto" is the value of that dotted path; one without a value stays."""
    filled: dict[str, Any] = {}
    for key, value in config.items():
        path = prefix + key
        if isinstance(value, Mapping):
            filled[key] = fill_auto(value, values, path + ".")
        else:
            filled[key] = values.get(path, value) if value == "auto" else value
    return filled


def load_checkpoint(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Bring back weights, optimizer, schedule and place in the data; returns the state that this script had saved."""
    folder, client_state = engine.load_checkpoint(args.out / "checkpoints")
    if client_state is None:
        raise FileNotFoundError(f"--resume: no checkpoint in {args.out / 'checkpoints'}. Train without --resume first.")
    if engine.global_rank == 0:
        print(f"resumed from {folder}", flush=True)
    return {**client_state, "resumed_at": [*client_state["resumed_at"], engine.global_samples]}


def train(
    engine: deepspeed.DeepSpeedEngine, loader: Any, corpus: Corpus, client_state: Mapping[str, Any], args: argparse.Namespace
) -> float:
    """Take optimizer steps up to `args.until`; returns the validation loss then, in nats per token."""
    windows = Windows(corpus.validation, args.context)
    batches = RepeatingLoader(loader)
    first_step, mean_loss, seconds = engine.global_steps, math.nan, 0.0
    with make_display(engine.global_rank == 0, first_step, args.until) as display:
        validation_loss = validate(engine, windows, display)
        if "validation_loss" in client_state:
            display.say(f"validation loss {client_state['validation_loss']:.4f} when saved, {validation_loss:.4f} now")
        while engine.global_steps < args.until:
            started, step_before = time.perf_counter(), engine.global_steps
            tokens_BT = next(batches).to(engine.device)
            loss = engine(tokens_BT[:, :-1], tokens_BT[:, 1:])
            engine.backward(loss)
            engine.step()
            loss_now = loss.item()
            seconds += time.perf_counter() - started
            mean_loss = loss_now if math.isnan(mean_loss) else LOSS_SMOOTHING * mean_loss + (1 - LOSS_SMOOTHING) * loss_now
            if engine.global_steps > step_before:  # with accumulation, not every micro-batch ends an optimizer step
                tokens = (engine.global_steps - first_step) * engine.train_batch_size() * args.context
                display.step(engine.global_steps, mean_loss, tokens / seconds)
                if engine.global_steps % args.validate_every == 0 or engine.global_steps == args.until:
                    validation_loss = validate(engine, windows, display)
    return validation_loss


@torch.no_grad()
def validate(engine: deepspeed.DeepSpeedEngine, windows: Windows, display: Display) -> float:
    """Mean loss over evenly spread validation windows, which the ranks share; told to display and monitor."""
    spread = range(0, len(windows), max(1, len(windows) // VALIDATION_WINDOWS))
    mine = [windows[i] for i in spread[engine.global_rank :: engine.world_size]]
    sum_and_count = torch.zeros(2, device=engine.device)
    engine.eval()
    for start in range(0, len(mine), VALIDATION_BATCH):
        tokens_BT = torch.stack(mine[start : start + VALIDATION_BATCH]).to(engine.device)
        loss = engine(tokens_BT[:, :-1], tokens_BT[:, 1:])
        sum_and_count += torch.stack((loss * len(tokens_BT), torch.full_like(loss, len(tokens_BT))))
    engine.train()
    comm.all_reduce(sum_and_count)
    mean_loss = float(sum_and_count[0] / sum_and_count[1])
    display.say(f"step {engine.global_steps:5}  validation loss {mean_loss:.4f}")
    if engine.global_rank == 0:
        engine.monitor.write_events([("Validation/Samples/loss", mean_loss, engine.global_samples)])
    return mean_loss


def write_sample(engine: deepspeed.DeepSpeedEngine, model: GPT, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Let the model write. All ranks draw the same text, so that this also works where weights are sharded."""
    prompt_T = torch.tensor(tokenizer.encode(args.prompt.encode()), device=engine.device)
    generator = torch.Generator().manual_seed(args.seed)
    model.eval()
    tokens_T = model.generate(prompt_T, args.sample_tokens, args.temperature, generator)
    if engine.global_rank == 0:
        text = tokenizer.decode(tokens_T.tolist()).decode(errors="replace").strip("\n")
        (args.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
        print(f"--- sample, temperature {args.temperature} ---\n{text}\n--- end of sample ---", flush=True)


def describe(model: GPT, corpus: Corpus, engine: deepspeed.DeepSpeedEngine) -> str:
    """What is trained on what, in two lines."""
    numel = sum(param.numel() for param in model.parameters())
    bytes_per_token = corpus.validation_nbytes / len(corpus.validation)
    return (
        f"text: {len(corpus.training):,} training and {len(corpus.validation):,} validation tokens of "
        f"{corpus.vocab_size} kinds, {bytes_per_token:.2f} bytes each\n"
        f"model: {numel:,} parameters; {engine.world_size} ranks ({engine.device.type}), "
        f"{engine.train_batch_size()} sequences per step"
    )


def summary(validation_loss: float, corpus: Corpus, args: argparse.Namespace) -> str:
    """The result beside what a model without context could reach."""
    entropy, factor = corpus.unigram_entropy(), corpus.bits_per_byte_of_nat
    return (
        f"validation loss  {validation_loss:.3f} nats per token = {validation_loss * factor:.3f} bits per byte\n"
        f"unigram entropy  {entropy:.3f} nats per token = {entropy * factor:.3f} bits per byte (same tokens, no context)\n"
        f"loss curve: {args.out / 'loss.png'}   metrics: tensorboard --logdir {args.out / 'tensorboard'}"
    )


if __name__ == "__main__":
    main()
