"""Pipelines in situations of their own: the guide's listing, stages with nothing to train, loss scales, offload, loaders."""

from __future__ import annotations

import copy
import csv
import functools
import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError, CommError, PipelineError, UnbuiltFeatureError
from deepspeed.ops.lamb import FusedLamb
from tests.support.engines import config, masters, zero
from tests.support.pipelines import Block, Head, Whole, layers, make_pipeline, own, token_batches, token_loss, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


# -- the guide's listing, 48 blocks ---------------------------------------------------------------------------------------


class EmbeddingLayer(nn.Module):
    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.table(tokens)
        return found

    def project_to_vocab(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table.weight)


class TransformerBlock(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(d_model), nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model)
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        x = x + mixed
        added: Tensor = x + self.mlp(x)
        return added


def cross_entropy_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _listing(rank: int, _world_size: int, folder: str) -> list[float]:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    vocab, d_model, n_heads, total_steps = 13, 8, 2, 6
    layers = (
        [TiedLayerSpec("embed", EmbeddingLayer, vocab, d_model)]
        + [LayerSpec(TransformerBlock, d_model, n_heads) for _ in range(48)]
        + [
            LayerSpec(nn.LayerNorm, d_model),
            TiedLayerSpec("embed", EmbeddingLayer, vocab, d_model, forward_fn=lambda layer, x: layer.project_to_vocab(x)),
        ]
    )
    net = PipelineModule(layers=layers, num_stages=4, loss_fn=cross_entropy_loss, partition_method="parameters")
    engine, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=str(Path(folder) / "ds_config.json")
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (2, 7), generator=generator)
    data_iter = iter([(tokens[:, :-1], tokens[:, 1:])] * total_steps * 4)
    return [engine.train_batch(data_iter=data_iter).item() for _ in range(total_steps)]


def test_the_guides_listing_runs_as_printed(tmp_path: Path) -> None:
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 3e-3}},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": True},
        "steps_per_print": 50,
        "wall_clock_breakdown": False,
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    first, *others = run_ranks(_listing, 4, str(tmp_path), timeout_seconds=120)
    assert all(losses == first for losses in others)
    assert first[-1] < first[0] - 0.3, "one batch again and again"


# -- stages with little or nothing to train -------------------------------------------------------------------------------


def _without_parameters(rank: int, world_size: int, zero_stage: int) -> None:
    described = [*layers(1, tied=False), torch.tanh, nn.Identity()]
    batches = token_batches(4, 3, world_size // 4)
    reference = train_reference(Whole(described), SGD, batches, clip=0.3)
    blocks = {
        **zero(zero_stage),
        "gradient_clipping": 0.3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_min_lr": 0.05, "warmup_max_lr": 0.05}},
    }
    engine = make_pipeline(described, 4, config(3, 2, **blocks), partition_method=[1, 0, 1, 0, 1, 1])
    assert engine.stage_id < 3 or not list(engine.module.parameters())
    assert train_pipeline(engine, batches) == pytest.approx(reference.losses, abs=FP64_ROUNDING)
    assert engine.get_global_grad_norm() == pytest.approx(reference.norms[-1], abs=FP64_ROUNDING)
    got = masters(engine)
    assert relative_difference(got, {name: reference.weights[name] for name in got}) <= FP64_ROUNDING


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_last_stage_that_only_computes_the_loss(zero_stage: int) -> None:
    run_ranks(_without_parameters, 4, zero_stage)


def _frozen(rank: int, _world_size: int, frozen: tuple[int, ...]) -> None:
    described = layers(4, tied=False, frozen=frozen)
    for spec in described[:1]:
        spec.module_kwargs.clear()
    batches = token_batches(3, 2, 1)
    reference = train_reference(Whole(described), SGD, batches)
    engine = make_pipeline(described, 3, config(2, 2), optimizer=SGD)
    assert train_pipeline(engine, batches) == pytest.approx(reference.losses, abs=FP64_ROUNDING)
    got = masters(engine)
    assert relative_difference(got, {name: reference.weights[name] for name in got}) <= FP64_ROUNDING


def test_frozen_layers_pass_gradients_on_and_stay() -> None:
    run_ranks(_frozen, 3, (0, 1, 2, 3))


def _all_used(rank: int, _world_size: int, schedule: str) -> None:
    described = layers(4)
    chunks = 2 if schedule == "interleaved" else 1
    blocks = {**zero(1, ignore_unused_parameters=False, reduce_bucket_size=1000), "pipeline": {"schedule": schedule}}
    batches = token_batches(2, 3, 1)
    reference = train_reference(Whole(described), SGD, batches)
    engine = make_pipeline(described, 2, config(3, 2, **blocks), optimizer=SGD, num_chunks=chunks)
    assert train_pipeline(engine, batches) == pytest.approx(reference.losses, abs=FP64_ROUNDING)

    described[3] = described[3].build()
    described[3].add_module("spare", nn.Linear(1, 1, dtype=torch.float64))
    engine = make_pipeline(described, 2, config(3, 2, **blocks), optimizer=SGD, num_chunks=chunks)
    with pytest.raises(PipelineError, match=r"2 of .* parameters have no gradient since the last update .*3\.spare\.weight"):
        train_pipeline(engine, batches)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
def test_parameters_without_a_gradient_are_looked_for_once_per_batch(schedule: str) -> None:
    run_ranks(_all_used, 2, schedule)


# -- precision and places ---------------------------------------------------------------------------------------------------


class Explosive(Block):
    """Its gradient is infinite in the second batch."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed, dtype)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        factor = float("inf") if self.calls == 3 else 1.0
        return (
            super().forward(hidden)
            + 0 * (self.widen.weight * factor).sum().nan_to_num(0.0) * (factor == 1.0)
            + ((self.widen.weight.sum() * 0.0 * factor) if factor != 1.0 else 0.0)
        )


def _overflow(rank: int, _world_size: int) -> list[Any]:
    described = layers(3, tied=True, dtype=torch.float32)
    described[2] = deepspeed.pipe.LayerSpec(Explosive, 1, torch.float32)
    fp16 = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}
    engine = make_pipeline(described, 2, config(2, 2, fp16=fp16, gradient_clipping=0.5), optimizer=SGD)
    seen = []
    for step in own(token_batches(4, 2, 1), 0):
        engine.train_batch(iter(step))
        seen.append((engine.skipped_steps, engine.optimizer.loss_scale, engine.was_step_applied()))
    return seen


def test_an_overflow_in_one_stage_is_skipped_by_all_and_halves_the_scale() -> None:
    first, last = run_ranks(_overflow, 2)
    assert first == last
    assert first == [(0, 64.0, True), (1, 32.0, False), (1, 32.0, True), (1, 32.0, True)]


def _offloaded(rank: int, world_size: int) -> None:
    described = layers(2, tied=True, dtype=torch.float32)
    batches = token_batches(4, 2, 2)
    reference = train_reference(Whole(described), functools.partial(torch.optim.AdamW, lr=1e-2), batches, clip=0.3)
    blocks = {
        **zero(1, offload_optimizer={"device": "cpu"}),
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
    }
    engine = make_pipeline(described, 2, config(2, 2, **blocks))
    assert train_pipeline(engine, batches) == pytest.approx(reference.losses, rel=1e-5)
    got = masters(engine)
    assert relative_difference(got, {name: reference.weights[name] for name in got}) <= 1e-5


def test_optimizer_state_in_host_memory() -> None:
    run_ranks(_offloaded, 4)


# -- data and config -----------------------------------------------------------------------------------------------------


def _own_loader(rank: int, _world_size: int) -> list[float]:
    tokens = torch.arange(16 * 6).view(16, 6) % 11
    data = [(row[:-1], row[1:]) for row in tokens]
    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=SGD, training_data=data)
    losses = [engine.train_batch().item() for _ in range(6)]  # 24 rows of 16: the loader begins again
    engine.set_batch_fn(lambda batch: (batch["tokens"], batch["labels"]))
    engine.set_dataiterator(iter([{"tokens": tokens[:2, :-1], "labels": tokens[:2, 1:]}] * 2))
    losses.append(engine.train_batch().item())
    return losses


def test_the_engines_own_loader_repeats_and_batch_fn_takes_batches_apart() -> None:
    first, last = run_ranks(_own_loader, 2)
    assert first == last
    assert len(first) == 7


def _batch_sizes(rank: int, world_size: int) -> None:
    settings = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    engine = make_pipeline(layers(2), 2, settings, optimizer=SGD)
    assert (engine.dp_world_size, engine.micro_batches, engine.micro_batch_size) == (2, 6, 2)
    engine.set_train_batch_size(16)
    assert engine.micro_batches == 4
    engine.micro_batches = 2
    assert engine.train_batch_size() == 8
    train_pipeline(engine, token_batches(1, 2, 2))
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (1, 8, 2)
    with pytest.raises(ArgumentError, match="needs at least 1"):
        engine.micro_batches = 0
    assert (engine.num_stages, engine.stage_id, engine.is_first_stage()) == (2, rank // 2, rank < 2)
    assert engine.grid.get_stage_id() == engine.get_pipeline_parallel_rank() == rank // 2
    with pytest.raises(ArgumentError, match="Leave mpu out"):
        deepspeed.initialize(model=engine.module, config=settings, mpu=engine.grid)
    for arguments, keys in (({}, {"sequence_parallel_size": 2}), ({"mesh_param": (2, 2)}, {})):
        with pytest.raises(
            UnbuiltFeatureError, match=r"2 sequence-parallel ranks with a PipelineModule.*activation_checkpoint"
        ):
            deepspeed.initialize(model=engine.module, config={**settings, **keys}, **arguments)


def test_batch_sizes_count_replicas_not_ranks() -> None:
    run_ranks(_batch_sizes, 4)


def _changing_counts(rank: int, world_size: int, schedule: str) -> None:
    described = layers(4)
    counts = (4, 1, 6, 4, 2)
    batches = [token_batches(len(counts), count, world_size // 2)[step] for step, count in enumerate(counts)]
    reference = train_reference(Whole(described), SGD, batches, clip=0.3)
    blocks = {**zero(1, reduce_bucket_size=100), "gradient_clipping": 0.3, "pipeline": {"schedule": schedule}}
    chunks = 2 if schedule == "interleaved" else 1
    engine = make_pipeline(described, 2, config(4, 2, **blocks), optimizer=SGD, num_chunks=chunks)
    losses = []
    for count, step in zip(counts, batches, strict=True):
        engine.micro_batches = count
        losses += train_pipeline(engine, [step])
    assert losses == pytest.approx(reference.losses, abs=FP64_ROUNDING)
    got = masters(engine)
    assert relative_difference(got, {name: reference.weights[name] for name in got}) <= FP64_ROUNDING
    assert (engine.micro_steps, engine.global_samples) == (sum(counts), sum(counts) * world_size)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("gpipe", 2), ("zero_bubble", 2), ("interleaved", 4)])
def test_the_number_of_micro_batches_may_change_from_batch_to_batch(schedule: str, ranks: int) -> None:
    run_ranks(_changing_counts, ranks, schedule)


def _untagged(rank: int, _world_size: int, chunks: int) -> None:
    """As on devices: a group for each kind and direction of messages, opened at the start."""
    described = layers(4)
    batches = token_batches(2, 4, 1)
    reference = train_reference(Whole(described), SGD, batches)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    net = deepspeed.pipe.PipelineModule(described, num_stages=3, num_chunks=chunks, loss_fn=token_loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "communication_backend_name", lambda: "nccl")
        settings = config(4, 2, pipeline={"schedule": schedule})
        engine = deepspeed.initialize(model=net, config=settings, optimizer=SGD)[0]
    assert train_pipeline(engine, batches) == pytest.approx(reference.losses, abs=FP64_ROUNDING)


@pytest.mark.parametrize("chunks", [1, 2])
def test_lines_of_back_ends_without_tags_have_groups_of_their_own(chunks: int) -> None:
    run_ranks(_untagged, 3, chunks)


def _differing_stages(rank: int, _world_size: int) -> str:
    clip = 1.0 if rank == 0 else 2.0
    with pytest.raises(CommError) as caught:
        make_pipeline(layers(2), 2, config(2, 2, gradient_clipping=clip), optimizer=SGD)
    return str(caught.value)


def test_stages_with_different_configs_are_told() -> None:
    for text in run_ranks(_differing_stages, 2):
        assert "rank 0 has config gradient_clipping: 1.0" in text


def _recomputed(rank: int, _world_size: int, schedule: str) -> None:
    described = layers(4)
    batches = token_batches(3, 3, 1)
    reference = train_reference(Whole(described), SGD, batches)
    block = {"schedule": schedule, "activation_checkpoint_interval": 2}
    engine = make_pipeline(described, 2, config(3, 2, pipeline=block), optimizer=SGD)
    assert engine.module.activation_checkpoint_interval == 2
    assert train_pipeline(engine, batches) == pytest.approx(reference.losses, abs=FP64_ROUNDING)
    got = masters(engine)
    assert relative_difference(got, {name: reference.weights[name] for name in got}) <= FP64_ROUNDING


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_layers_may_be_recomputed(schedule: str) -> None:
    run_ranks(_recomputed, 2, schedule)


class Counted(Block):
    """A block that counts its forwards."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed, dtype)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden)


def _counted(rank: int, _world_size: int, interval: int, only: list[str] | None) -> dict[str, int]:
    described = layers(5, tied=False)
    described[1:6] = [deepspeed.pipe.LayerSpec(Counted, n, torch.float64) for n in range(5)]
    engine = make_pipeline(
        described,
        2,
        config(3, 2, pipeline={"activation_checkpoint_interval": interval}),
        optimizer=SGD,
        partition_method="uniform",
        checkpointable_layers=only,
    )
    assert engine.module.parts == [0, 4, 8], "embedding, blocks 1 to 3; blocks 4 and 5, norm, head"
    batches = token_batches(1, 3, 1)
    train_pipeline(engine, batches)
    trained = {name: layer.calls for name, layer in engine.module.named_children() if isinstance(layer, Counted)}
    engine.eval_batch(iter(next(own(batches, 0))))
    for name, layer in engine.module.named_children():
        assert not isinstance(layer, Counted) or layer.calls == trained[name] + 3
    return trained


@pytest.mark.parametrize(
    ("interval", "only", "twice"),
    [
        (0, None, ""),
        (1, None, "12345"),
        (2, None, "12345"),
        (2, ["Counted"], "2345"),
        (3, ["Counted"], "3"),
        (1, ["Head"], ""),
    ],
)
def test_layers_of_recomputed_pieces_run_twice_and_others_once(interval: int, only: list[str] | None, twice: str) -> None:
    first, last = run_ranks(_counted, 2, interval, only)
    assert {**first, **last} == {name: 6 if name in twice else 3 for name in "12345"}


def _copies(rank: int, _world_size: int) -> None:
    described: list[Any] = [Block(0, torch.float64), nn.Tanh(), Head(1, torch.float64)]
    plain = copy.deepcopy(described)
    engine = make_pipeline(described, 2, config(1, 2), optimizer=SGD, loss_fn=token_loss)
    assert engine.training
    assert [name for name, _ in engine.module.named_parameters()] == (
        [f"0.{name}" for name, _ in plain[0].named_parameters()] if rank == 0 else ["2.weight"]
    )


def test_names_are_those_of_the_whole_list_of_layers() -> None:
    run_ranks(_copies, 2)


# -- modes and reports ----------------------------------------------------------------------------------------------------


def _timed(rank: int, _world_size: int) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)
    engine = make_pipeline(layers(2), 2, config(2, 2, wall_clock_breakdown=True, memory_breakdown=True), optimizer=SGD)
    train_pipeline(engine, token_batches(3, 2, 1))
    times = [line.splitlines() for line in told if line.startswith("time of step ")]
    assert [len(times), any(line.startswith("memory | ") for line in told)] == ([3, True] if rank == 0 else [0, False])
    for _, *rows in times:
        assert [row.split()[0] for row in rows] == ["forward", "backward", "step"]
    timers = engine._parts.report.timers
    assert not any(timers(name).started for name in ("forward", "backward", "step"))
    engine.eval_batch(iter(next(own(token_batches(1, 2, 1), 0))))
    assert timers("forward").elapsed() == 0.0  # an evaluation is no part of a step


def test_a_pipeline_tells_its_times_and_its_memory() -> None:
    run_ranks(_timed, 2)


class Telling(deepspeed.pipe.PipelineModule):
    """Reports how large outputs are, beside the loss."""

    size: Tensor

    def get_additional_losses(self) -> dict[str, Tensor]:
        return {"aux_size": self.size}


def _monitored(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], float]:
    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        net.size = logits.detach().square().mean()
        sizes.append(float(net.size))
        return token_loss(logits, labels)

    sizes: list[float] = []
    net = Telling(layers(2), num_stages=2, loss_fn=loss_fn)
    settings = config(3, 2, csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"})
    engine = deepspeed.initialize(model=net, config=settings, optimizer=SGD)[0]
    batches = token_batches(2, 3, world_size // 2)
    losses = train_pipeline(engine, batches)
    trained = list(sizes)
    evaluated = engine.eval_batch(iter(next(own(batches, engine.get_data_parallel_rank()))), reduce_output="sum")
    engine.inference_batch(iter(next(own(batches, engine.get_data_parallel_rank()))))
    return losses, trained, evaluated.item()


def test_a_monitor_gets_losses_of_training_and_evaluation_and_those_beside_them(tmp_path: Path) -> None:
    of_ranks = run_ranks(_monitored, 4, str(tmp_path))
    losses, _, evaluated = of_ranks[0]
    of_replicas = [sizes for _, sizes, _ in of_ranks if sizes]
    means = [sum(sum(sizes[at : at + 3]) for sizes in of_replicas) / 6 for at in (0, 3)]
    written = {
        path.stem.removeprefix("Train_Samples_"): [tuple(map(float, row)) for row in list(csv.reader(path.open()))[1:]]
        for path in (tmp_path / "job").iterdir()
    }
    assert written["train_loss"] == [(12.0, pytest.approx(losses[0])), (24.0, pytest.approx(losses[1]))]
    assert written["aux_size"] == [(12.0, pytest.approx(means[0])), (24.0, pytest.approx(means[1]))]
    assert written["eval_loss"] == [(24.0, pytest.approx(evaluated / 3))]
    assert {"lr", "grad_norm"} < written.keys()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        normal: Tensor = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return hidden + self.dropout(normal)


def _kept_in_eval(rank: int, _world_size: int) -> None:
    described = layers(2, tied=False)
    described[1:1] = [Noisy()]
    described[-2:-2] = [Noisy()]
    engine = make_pipeline(described, 2, config(2, 2), optimizer=SGD)
    noisy = next(module for module in engine.modules() if isinstance(module, Noisy))
    noisy.norm.eval()
    batch = next(own(token_batches(1, 2, 1), 0))
    for _ in range(2):
        engine.train_batch(iter(batch))
        assert (noisy.norm.training, noisy.dropout.training, engine.training) == (False, True, True)
        engine.eval_batch(iter(batch))
        assert (noisy.norm.training, noisy.dropout.training, engine.training) == (False, True, True)
    assert int(noisy.norm.num_batches_tracked) == 0
    engine.eval()
    engine.train_batch(iter(batch))
    assert noisy.norm.training, "train_batch() trains an engine that is in evaluation mode"
    assert int(noisy.norm.num_batches_tracked) == 2


def test_layers_that_were_put_into_evaluation_mode_stay_there() -> None:
    run_ranks(_kept_in_eval, 2)


def _one_way(rank: int, world_size: int) -> None:
    engine = make_pipeline(layers(2, dtype=torch.float32), 2, config(3, 2), optimizer=SGD)
    batch = next(own(token_batches(1, 3, 2), engine.get_data_parallel_rank()))
    everywhere = engine.eval_batch(iter(batch))
    at_the_end = engine.eval_batch(iter(batch), bcast_loss=False)
    assert at_the_end is None if rank < 2 else torch.equal(at_the_end, everywhere)

    class Tokens(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return logits.argmax(-1)

    described = [*layers(2), Tokens()]
    engine = make_pipeline(described, 2, config(1, 2), optimizer=SGD, loss_fn=lambda tokens, _: tokens.sum())
    alone = engine.inference_batch(iter(batch))
    reduced = engine.eval_batch(iter(batch), compute_loss=False, return_logits=True)
    if rank >= 2:
        assert alone is not None
        assert torch.equal(reduced[1][0], alone[0]), "outputs of this rank"
        assert not torch.equal(reduced[0], alone[0]), "a sum over ranks"


def test_losses_are_reduced_in_one_way_and_outputs_stay_those_of_the_rank() -> None:
    run_ranks(_one_way, 4)


def _dropped(rank: int, _world_size: int) -> bool:
    engine = make_pipeline(layers(2), 1, config(2, 2), optimizer=SGD)
    train_pipeline(engine, token_batches(1, 2, 1))
    is_there = weakref.ref(engine)
    gc.collect()
    gc.disable()  # only its references may free it
    del engine
    return is_there() is None


def test_an_engine_that_is_dropped_is_freed_at_once() -> None:
    assert run_ranks(_dropped, 1) == [True]


# -- an optimizer that clips by a norm of its own -------------------------------------------------------------------------


def _own_norm(rank: int, world_size: int) -> str:
    lamb = functools.partial(FusedLamb, lr=0.01, max_grad_norm=0.5)
    with pytest.raises(UnbuiltFeatureError) as refused:
        make_pipeline(layers(), 2, config(1, 2), optimizer=lamb)
    return str(refused.value)


def test_an_optimizer_that_would_clip_by_the_norm_of_one_stage_is_refused() -> None:
    assert all('Use "gradient_clipping"' in text for text in run_ranks(_own_norm, 2))
