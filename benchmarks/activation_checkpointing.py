"""What does checkpointing each block cost in time, and does it free what the formula says?

The GPT of `train_step` with 8 blocks and 4 rows per micro-batch, fp32, one rank, our engine at ZeRO stage 0, whoever
checkpoints:

| contender | its blocks |
|---|---|
| ours | `deepspeed.checkpointing.checkpoint` |
| without | as they are |
| torch | `torch.utils.checkpoint`, the non-reentrant form |
| ours, nvme | as ours, inputs in a file on the disk of `--work` |
| the original | its engine, its `deepspeed.checkpointing.checkpoint` |

Goals: a step of ours at most 1.35 of one without (one more forward of the blocks is a third of their forward and
    backward) and 1.02 of torch's; bytes
kept between forward and backward, and the most during backward, within 2 % of the formula
    (`deepspeed.activations.needs`).

    step_ms               median of the steps
    peak_rss_mib          the most that was resident during the steps, less what the process held before the engine was built
    kept_over_formula     bytes that the chain of blocks keeps between forward and backward, over the formula's
    peak_over_formula     the most during its backward, less what gradients on their way take, over the formula's

The last two are counted tensor by tensor (`harness.live_bytes`) after the steps were timed. With "ours, nvme" what was
read back lies in memory that is not counted, so its peak is below the formula; `peak_rss_mib` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.live_bytes import LiveBytes
from benchmarks.harness.models import Gpt, build_model, make_batches
from benchmarks.harness.probes import memory, peak_rss_mib, reset_peak
from benchmarks.harness.trainers import Training, join, make_trainer, rank, run_steps

_WITHOUT = "without"
_TORCH = "torch"
_NVME = "ours, nvme"
_BUFFERS = 2

Run = Callable[..., Tensor]

CASES = (
    Case(
        "activation_checkpointing fp32",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, _WITHOUT, _TORCH, _NVME, ORIGINAL),
        figures=("step_ms", "peak_rss_mib", "kept_over_formula", "peak_over_formula", "first_loss", "last_loss"),
        of=_WITHOUT,
        goals=(
            Goal("step_ms", 1.35, of=_WITHOUT),
            Goal("step_ms", 1.02, of=_TORCH),
            Goal("step_ms", 1.0, of=ORIGINAL),
            Goal("peak_rss_mib", 1.02, of=_TORCH),
            Goal("kept_over_formula", 1.02),
            Goal("peak_over_formula", 1.02),
            Goal("kept_over_formula", 1.02, contender=_NVME),
        ),
        pairs=3,
        side_pairs=3,
        loss_tolerance=1e-4,
        arguments={"dtype": "fp32", "rows": 4, "warm": 1, "steps": 5},
    ),
)


class _Checkpointed(nn.Module):
    """A block that `run` runs."""

    def __init__(self, block: nn.Module, run: Run) -> None:
        super().__init__()
        self.block = block
        self._run = run

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._run(self.block, x_BTD)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    training = Training.of(arguments)
    model = build_model(arguments)
    assert isinstance(model, Gpt)
    engine = ORIGINAL if contender == ORIGINAL else OURS
    join(engine)
    run = _runner(contender, Path(arguments["scratch"]))
    for number, block in enumerate(model.blocks):
        model.blocks[number] = _Checkpointed(block, run)
    batches = make_batches(model, training.rows, rank())
    base = memory()
    micro_step = make_trainer(engine, model, training)
    warm = run_steps(micro_step, batches, 1, warm=0, steps=arguments["warm"])
    reset_peak()
    steps = run_steps(micro_step, batches, 1, warm=0, steps=arguments["steps"])
    figures = {"step_ms": steps.seconds * 1e3, "peak_rss_mib": peak_rss_mib() - base.rss_mib}
    if contender != ORIGINAL:
        figures |= _over_formula(contender, run, arguments)
    return Measured(figures, {"first": warm.first_loss, "last": steps.last_loss})


def _runner(contender: str, scratch: Path) -> Run:
    if contender == _WITHOUT:
        return lambda block, x: block(x)
    if contender == _TORCH:
        from torch.utils.checkpoint import checkpoint

        return lambda block, x: checkpoint(block, x, use_reentrant=False)
    import deepspeed

    run: Run = deepspeed.checkpointing.checkpoint
    if contender == _NVME:
        offload = {"device": "nvme", "nvme_path": str(scratch), "buffer_count": _BUFFERS}
        deepspeed.checkpointing.configure(
            None, deepspeed_config={"train_batch_size": 1, "activation_checkpointing": {"offload": offload}}
        )
    return run


def _over_formula(contender: str, run: Run, arguments: Mapping[str, Any]) -> dict[str, float]:
    """What a chain of blocks keeps and needs, over the formula's figures; blocks that no engine owns."""
    from deepspeed.activations.needs import SegmentBytes, activation_needs

    model = build_model(arguments)
    assert isinstance(model, Gpt)
    blocks = list(model.blocks)
    x_BTD = torch.randn(arguments["rows"], model.positions, model.tokens.embedding_dim, requires_grad=True)
    one_kept, one_peak = _live(blocks[:1], x_BTD)
    segments = [SegmentBytes(x_BTD.nbytes, one_kept - x_BTD.nbytes)] * len(blocks)
    needs = activation_needs(segments, is_moved=contender == _NVME, segments_ahead=_BUFFERS)
    kept, peak = _live([_Checkpointed(block, run) for block in blocks], x_BTD)
    is_plain = contender == _WITHOUT
    return {
        "kept_over_formula": kept / (needs.without_nbytes if is_plain else needs.kept_nbytes),
        "peak_over_formula": (peak - one_peak + one_kept) / (needs.without_nbytes if is_plain else needs.peak_nbytes),
    }


def _live(blocks: list[nn.Module], start_BTD: Tensor) -> tuple[int, int]:
    """Bytes kept between forward and backward, and the most during backward; gradients of parameters are there before."""
    for tensor in (start_BTD, *(parameter for block in blocks for parameter in block.parameters())):
        tensor.grad = torch.zeros_like(tensor)
    with LiveBytes() as live:
        x_BTD = start_BTD * 1
        for block in blocks:
            x_BTD = block(x_BTD)
        loss = (x_BTD * 1).sum()
        del x_BTD
        kept = live.now_nbytes - loss.nbytes
        live.reset_peak()
        loss.backward()
    return kept, live.peak_nbytes
