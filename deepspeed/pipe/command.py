"""The command `deepspeed-pipeline`: what a schedule does when, how much of it is idle, and how many activations it keeps.

    deepspeed-pipeline draw --schedule 1f1b --stages 4 --micro-batches 8 [--chunks 2] [--costs 1,1,1] [--png FILE]

Does not live here: orders (`orders`), times (`timeline`), drawing (`drawing`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from deepspeed.errors import DeepSpeedError
from deepspeed.pipe.drawing import save_png, text_lines
from deepspeed.pipe.orders import OrderName, order_of
from deepspeed.pipe.timeline import Costs, Timeline, ideal_bubble, simulate

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; None means the words of this process. Exits with the reason, status 1, where there is no schedule."""
    args = _parse(words)
    costs = args.costs._replace(transfer=args.transfer)
    try:
        orders = [
            order_of(args.schedule, stage, args.stages, args.micro_batches, args.chunks) for stage in range(args.stages)
        ]
        timeline = simulate(orders, costs)
        ideal = ideal_bubble(args.schedule, args.stages, args.micro_batches, args.chunks, costs)
        sys.stdout.write("\n".join([*text_lines(timeline), "", *_summary(timeline, ideal)]) + "\n")
        if args.png is not None:
            save_png(timeline, f"{_title(args)}: idle {timeline.bubble:.1%}", args.png)
    except DeepSpeedError as error:
        sys.exit(f"deepspeed-pipeline: {error}")


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="deepspeed-pipeline", description="Look at the schedules of pipelines.")
    draw = parser.add_subparsers(dest="command", required=True).add_parser("draw", help="draw when each stage does what")
    draw.add_argument(
        "--schedule", choices=get_args(OrderName), default="1f1b", help="as in the configuration; default: 1f1b"
    )
    draw.add_argument("--stages", type=_count, required=True, help="stages of the pipeline")
    draw.add_argument("--micro-batches", type=_count, required=True, help="micro-batches of a batch")
    draw.add_argument("--chunks", type=_count, default=1, help="parts of the model per stage, for interleaved; default: 1")
    draw.add_argument(
        "--costs",
        type=_costs,
        default=Costs(),
        metavar="F,B,W",
        help="time of one micro-batch on a stage: forward, gradients of inputs, gradients of weights; default: 1,1,1",
    )
    draw.add_argument("--transfer", type=float, default=0.0, help="time from one stage to the next; default: 0")
    draw.add_argument("--png", type=Path, help="file for a picture")
    args = parser.parse_args(words)
    if args.transfer < 0:
        draw.error("--transfer must not be negative")
    return args


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needed is a whole number above 0")
    return int(text)


def _costs(text: str) -> Costs:
    times = [float(part) for part in text.split(",")]
    if len(times) != 3 or min(times) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: needed are three times above 0, for example 1,1,1")
    return Costs(*times)


def _title(args: argparse.Namespace) -> str:
    chunks = f", {args.chunks} chunks" if args.chunks > 1 else ""
    return f"{args.schedule}, {args.stages} stages, {args.micro_batches} micro-batches{chunks}"


def _summary(timeline: Timeline, ideal: float) -> list[str]:
    return [
        f"length {timeline.makespan:g}, idle {timeline.bubble:.1%} (ideal {ideal:.1%})",
        f"activations alive at most, by stage: {', '.join(map(str, timeline.live_peaks))}",
    ]
