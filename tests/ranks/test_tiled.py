"""Tiles under the engine: every ZeRO stage trains as one plain process does, and reduces each parameter once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed import checkpointing
from deepspeed.comm.recorder import RECORDER
from deepspeed.sequence.tiled import TiledFusedLogitsLoss, TiledMLP
from deepspeed.sequence.tiled_decoder import tile_decoder
from tests.support.engines import SHARDS_PARAMETERS, config, make_engine, masters, train, zero
from tests.support.models import GptBlock, TiedGpt, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STAGES = (0, 1, 2, 3)
TILES = 3  # of four tokens
STEPS = 3
FORMS = ("plain", "tiled", "checkpointed", "client")


class ClientTiles(torch.autograd.Function):
    """Tiles as clients write them: a backward inside of backward for each, and `ds_grad_is_ready` at the last."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Tensor], Tensor], x: Tensor, params: list[nn.Parameter]) -> Tensor:
        ctx.fn, ctx.params = fn, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([fn(tile) for tile in x.chunk(TILES, 1)], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (x,) = ctx.saved_tensors
        tiles = [tile.detach().requires_grad_() for tile in x.chunk(TILES, 1)]
        for number, (tile, part) in enumerate(zip(tiles, grad.chunk(TILES, 1), strict=True)):
            for param in ctx.params:
                param.ds_grad_is_ready = number == len(tiles) - 1
            with torch.enable_grad():
                output = ctx.fn(tile)
            torch.autograd.backward(output, part)
        return None, torch.cat([tile.grad for tile in tiles if tile.grad is not None], 1), None


class Gpt(TiedGpt):
    """The small GPT, whose MLPs and loss run in tiles, in one of `FORMS`."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__(blocks=3)
        self.form = form
        for block in self.blocks:
            block.mlp = Mlp(block)
            block.forward = functools.partial(_block, block, form)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            hidden = checkpointing.checkpoint(block, hidden) if self.form == "checkpointed" else block(hidden)
        hidden, labels = self.norm(hidden), tokens[:, 1:]
        if self.form == "plain":
            return _loss(self, hidden, labels)
        return TiledFusedLogitsLoss.apply(_loss, self, hidden, labels, None, TILES, [self.head.weight], "mean")


class Mlp(nn.Module):
    """The two linear layers of a block, which stay the block's."""

    def __init__(self, block: GptBlock) -> None:
        super().__init__()
        self.layers = (block.up, block.down)

    def forward(self, hidden: Tensor) -> Tensor:
        up, down = self.layers
        return down(torch.tanh(up(hidden)))


def _block(block: Any, form: str, hidden: Tensor) -> Tensor:
    attended = hidden + block.project(block.qkv(block.norm_1(hidden)).chunk(3, -1)[2].cumsum(1))
    given = block.norm_2(attended)
    if form == "plain":
        return attended + block.mlp(given)
    params = [*block.up.parameters(), *block.down.parameters()]
    if form == "client":
        return attended + ClientTiles.apply(block.mlp, given, params)
    return attended + TiledMLP.apply(Mlp.forward, block.mlp, given, TILES, params)


def _loss(model: Gpt, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())


def _train(rank: int, world_size: int, is_plain_backward: bool) -> dict[str, tuple[dict[str, Tensor], dict[str, int]]]:
    """Setting -> (weights, collectives)."""
    found = {}
    for stage in STAGES:
        for form in FORMS:
            model = build(Gpt, form, dtype=torch.float64)
            settings = config(2, **zero(stage, reduce_bucket_size=50, stage3_param_persistence_threshold=0))
            engine = make_engine(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
            if is_plain_backward:
                engine.backward = torch.Tensor.backward  # type: ignore[method-assign, assignment]
            batches = make_batches(model, STEPS, 2, world_size)
            RECORDER.reset()
            RECORDER.enabled = True  # from the first step on: there the reducer does not know yet what arrives twice
            train(engine, batches, rank)
            RECORDER.enabled = False
            counts = {name: sum(entry[0] for entry in RECORDER.comms_dict[name].values()) for name in RECORDER.operations()}
            found[f"stage {stage}, {form}"] = masters(engine), counts
            engine.destroy()
    return found


@pytest.mark.parametrize(("world_size", "is_plain_backward"), [(1, False), (2, False), (2, True)])
def test_every_stage_trains_tiles_as_one_plain_process_does(world_size: int, is_plain_backward: bool) -> None:
    model = build(Gpt, dtype=torch.float64)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    plain = train_reference(model, optimizer, make_batches(model, STEPS, 2, world_size)).weights
    for found in run_ranks(_train, world_size, is_plain_backward):
        assert len(found) == len(STAGES) * len(FORMS)
        for setting, (weights, _) in found.items():
            assert relative_difference(weights, plain) <= FP64_ROUNDING, setting
        if not is_plain_backward:
            for stage in STAGES:
                plainly, tiled, checkpointed, client = (found[f"stage {stage}, {form}"][1] for form in FORMS)
                assert tiled == checkpointed == plainly, stage
                gathers = {key: count for key, count in client.items() if key == "all_gather_into_tensor"}  # none alone
                assert client == plainly | (gathers if stage == SHARDS_PARAMETERS else {}), stage


# -- a decoder of Hugging Face's library --------------------------------------------------------------------------------


def _train_decoder(rank: int, _: int, is_tiled: bool) -> dict[str, Tensor]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.gradient_checkpointing_enable()
    if is_tiled:
        tile_decoder(model, mlp_tiles=3, loss_tiles=2)
    settings = config(1, **zero(3, stage3_param_persistence_threshold=0))
    engine = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        tokens = torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
    return masters(engine)


def test_a_decoder_in_tiles_trains_as_without_at_stage_3() -> None:
    plain, tiled = (run_ranks(_train_decoder, 2, is_tiled)[0] for is_tiled in (False, True))
    assert relative_difference(tiled, plain) <= 1e-5  # fp32: three steps of sums of 8 x 40 terms
