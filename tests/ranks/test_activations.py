"""Checkpointed parts on several ranks: shards over tensor-parallel ranks, every ZeRO stage, streams that resume."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.live_bytes import LiveBytes
from deepspeed import checkpointing
from deepspeed.activations.needs import SegmentBytes, activation_needs
from deepspeed.errors import UsageError
from deepspeed.offload import placement
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import TiedGpt, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STAGES = (0, 1, 2, 3)
FORMS = ("checkpoint", "reentrant_checkpoint")


class CheckpointedGpt(TiedGpt):
    """A small GPT whose blocks are checkpointed; `form` names the function, "" for none."""

    def __init__(self, form: str = "") -> None:
        super().__init__(blocks=3)
        self.form = form

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            hidden = getattr(checkpointing, self.form)(block, hidden) if self.form else block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens[:, 1:].flatten())


# -- ZeRO ---------------------------------------------------------------------------------------------------------------


def _train_every_stage(rank: int, world_size: int, folder: str, steps: int) -> list[tuple[str, Any]]:
    """(setting, weights) of each stage, form and place."""
    found = []
    for device in ("none", "nvme"):
        for stage in STAGES:
            for form in FORMS:
                model = build(CheckpointedGpt, form, dtype=torch.float64)
                offload = {"device": device, "min_numel": 1, "nvme_path": folder if device == "nvme" else None}
                blocks = zero(stage, reduce_bucket_size=50, stage3_param_persistence_threshold=0)
                settings = config(2, **blocks, activation_checkpointing={"offload": offload})
                engine = make_engine(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
                outcome = train(engine, make_batches(model, steps, 2, world_size), rank)
                found.append((f"stage {stage}, {form}, {device}", outcome.weights))
                engine.destroy()
    checkpointing.forget()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_trains_as_one_plain_process_does(world_size: int, tmp_path: Path) -> None:
    steps = 3
    model = build(CheckpointedGpt, dtype=torch.float64)
    plain = train_reference(
        model, functools.partial(torch.optim.AdamW, lr=1e-2), make_batches(model, steps, 2, world_size)
    ).weights
    for found in run_ranks(_train_every_stage, world_size, str(tmp_path), steps):
        assert len(found) == 2 * len(STAGES) * len(FORMS)
        for setting, weights in found:
            assert relative_difference(weights, plain) <= FP64_ROUNDING, setting
    assert not list(tmp_path.iterdir())


# -- tensor-parallel ranks ------------------------------------------------------------------------------------------------


class Mpu:
    """All ranks are tensor-parallel ones, as Megatron's object tells it."""

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_tensor_model_parallel_group(self) -> Any:
        return dist.group.WORLD


ROWS, WIDTH, LAYERS = 5, 7, 4  # 35 elements divide over neither 2 nor 3 ranks
INPUT = ROWS * WIDTH * 8
COMPARISON = 2 * 8  # the numbers of the last comparison between ranks, which gloo may hold a moment longer


def _layers() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(LAYERS))


def _run(layers: nn.ModuleList, run: Any) -> tuple[list[Tensor], int]:
    """Gradients, and the bytes kept between forward and backward."""
    start = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).div(50).requires_grad_()
    with LiveBytes() as live:
        x = start * 1
        for layer in layers:
            x = run(lambda x, layer=layer: layer(x).tanh(), x)
        loss = x.sum()
        del x
        kept_nbytes = live.now_nbytes - loss.nbytes
        loss.backward()
    return [tensor.grad for tensor in (start, *layers.parameters()) if tensor.grad is not None], kept_nbytes


def _partitioned(rank: int, world_size: int, form: str, **keys: Any) -> tuple[bool, int]:
    plain, _ = _run(_layers(), lambda function, x: function(x))
    checkpointing.configure(Mpu(), partition_activations=True, **keys)
    ours, kept_nbytes = _run(_layers(), getattr(checkpointing, form))
    return len(plain) == len(ours) and all(map(torch.equal, plain, ours)), kept_nbytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inputs_are_kept_in_shards_and_gradients_are_those_of_a_plain_call(world_size: int, form: str) -> None:
    segments = [SegmentBytes(INPUT, 0)] * LAYERS
    shard_nbytes = -(-ROWS * WIDTH // world_size) * 8
    for is_equal, kept_nbytes in run_ranks(_partitioned, world_size, form):
        assert is_equal
        assert 0 <= kept_nbytes - (LAYERS - 1) * shard_nbytes - INPUT <= COMPARISON
        padding = activation_needs(segments, tensor_ranks=world_size).kept_nbytes - (LAYERS - 1) * shard_nbytes - INPUT
        assert -8 * LAYERS < padding <= 0


def _differing(rank: int, world_size: int) -> str:
    checkpointing.configure(Mpu(), partition_activations=True)
    x = torch.full((4, 4), float(rank), requires_grad=True) * 1
    try:
        for _ in range(2):
            x = checkpointing.checkpoint(torch.exp, x)
    except UsageError as error:
        return str(error)
    return ""


def test_inputs_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    for text in run_ranks(_differing, 2):
        assert "16 elements of torch.float32, differs between the tensor-parallel ranks [0, 1]" in text
        assert "Leave partition_activations out" in text


def _in_buffers(rank: int, world_size: int) -> tuple[bool, int]:
    return _partitioned(rank, world_size, "checkpoint", contiguous_checkpointing=True, num_checkpoints=LAYERS - 1)


def test_contiguous_buffers_hold_the_shards() -> None:
    for is_equal, kept_nbytes in run_ranks(_in_buffers, 2):
        assert is_equal
        in_slots = (LAYERS - 1) * 192  # of 18 doubles, at whole lines of 64 bytes
        assert 0 <= kept_nbytes - in_slots - INPUT <= COMPARISON


def _on_the_host(rank: int, world_size: int) -> tuple[bool, int]:
    placement.is_host_apart = lambda device: True
    one_data_rank = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    checkpointing.configure(Mpu(), {**one_data_rank, "activation_checkpointing": {"offload": {"min_numel": 1}}})
    return _partitioned(rank, world_size, "checkpoint", checkpoint_in_cpu=True)


def test_shards_go_to_the_host_with_cpu_checkpointing() -> None:
    for is_equal, kept_nbytes in run_ranks(_on_the_host, 2):
        assert is_equal
        assert 0 <= kept_nbytes - INPUT <= COMPARISON


def _streams(rank: int, world_size: int) -> tuple[list[float], list[float], bool]:
    checkpointing.configure(Mpu())
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker, x = checkpointing.get_cuda_rng_tracker(), torch.ones(1000, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        agreed = F.dropout(x, 0.5)
        with tracker.fork():
            own = F.dropout(x, 0.5)
        seen.append((agreed[:5].tolist(), own[:5].tolist()))
        return (agreed * 3 + own).exp()

    seen: list[tuple[list[float], list[float]]] = []
    checkpointing.checkpoint(function, x).sum().backward()
    return (*seen[0], seen[0] == seen[1])


def test_dropout_agrees_between_ranks_outside_of_the_stream_and_differs_inside() -> None:
    (agreed, own, repeats), (agreed_1, own_1, repeats_1) = run_ranks(_streams, 2)
    assert repeats
    assert repeats_1
    assert agreed == agreed_1
    assert own != own_1


class WithoutGroup:
    """Tells a size, and no group."""

    def get_model_parallel_world_size(self) -> int:
        return 2


def test_an_mpu_without_a_group_is_refused_and_one_without_tensor_ranks_means_one() -> None:
    with pytest.raises(UsageError, match="2 tensor-parallel ranks, and no group"):
        checkpointing.configure(WithoutGroup(), partition_activations=True)
    checkpointing.configure(object(), partition_activations=True)
    x = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(torch.exp, x * 1).sum().backward()
    assert x.grad is not None


# -- streams in checkpoints -----------------------------------------------------------------------------------------------


def _save_and_resume(rank: int, world_size: int, folder: str) -> bool:
    checkpointing.configure(Mpu())
    checkpointing.model_parallel_cuda_manual_seed(5)
    model = nn.Linear(3, 3)
    engine = make_engine(model, config(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    tracker = checkpointing.get_cuda_rng_tracker()
    engine.save_checkpoint(folder)
    with tracker.fork():
        drawn = torch.rand(4)
    engine.load_checkpoint(folder)
    with tracker.fork():
        return torch.equal(torch.rand(4), drawn)


def test_streams_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(_save_and_resume, 2, str(tmp_path)) == [True, True]


def _dropped_on_one_rank(rank: int, world_size: int) -> bool:
    """A graph without backward that only rank 0 has kept in a cycle: what leaves differs, what is compared does not."""
    checkpointing.configure(Mpu(), partition_activations=True)
    gc.disable()
    cycle: list[Any] = []
    start = torch.ones(4, 4, requires_grad=True)
    dropped = checkpointing.checkpoint(torch.exp, start * 1)
    if rank == 0:
        cycle.extend((dropped, cycle))
    del dropped
    x = start * 1
    x = checkpointing.checkpoint(lambda x: x * x, x)
    x = checkpointing.checkpoint(lambda x: x * x, x)
    x.sum().backward()
    gc.enable()
    return bool((start.grad == 4).all())


def test_a_graph_that_one_rank_has_not_collected_yet_disturbs_nobody() -> None:
    assert run_ranks(_dropped_on_one_rank, 2) == [True, True]
