"""Checkpoints of parts where more than tensor and data ranks take part: pipelines, sequences, buffers, Megatron's marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import deepspeed
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError
from deepspeed.pipe import PipelineModule
from deepspeed.sharding import Cut
from deepspeed.topology.grid import PipeModelDataParallelTopology
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.cut_net import CutNet, Middle, TensorUnit, cut_net, part_of
from tests.support.engines import config, make_engine, masters, train, zero
from tests.support.models import make_batches
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

ROWS, BEFORE, AFTER = 4, 2, 2


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


# -- pipelines --------------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """Stages, tensor-parallel ranks, data-parallel ranks, ZeRO stage."""

    pipe: int
    tensor: int
    data: int
    stage: int


NUMBERS = {"norm": "0", "first": "1", "second": "2"}


def _numbered(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names of a pipeline of the three layers."""
    return {f"{NUMBERS[name.split('.')[0]]}.{name.split('.')[1]}": value for name, value in whole.items()}


def _pipeline(grid: Grid) -> Any:
    model = cut_net()
    topology = PipeModelDataParallelTopology(num_pp=grid.pipe, num_mp=grid.tensor, num_dp=grid.data)
    module = PipelineModule([model.norm, model.first, model.second], topology=topology, loss_fn=F.mse_loss)
    tensor = module.mesh.axis("tensor")
    for middle in module.modules():
        if isinstance(middle, Middle) and tensor.size > 1:
            middle.cut(tensor.rank, tensor.size, tensor.group)
    settings = config(2, ROWS // grid.data, **zero(grid.stage, reduce_bucket_size=100))
    return deepspeed.initialize(model=module, config=settings, optimizer=_adam(module.parameters()))[0]


def _run(engine: Any, grid: Grid, first: int, last: int) -> dict[str, Tensor]:
    rows, rank = ROWS // grid.data, engine.get_data_parallel_rank()
    for step in make_batches(cut_net(), BEFORE + AFTER, 2, 1, ROWS)[first:last]:
        engine.train_batch(iter([tuple(t[rank * rows :][:rows] for t in micro[0]) for micro in step]))
    return masters(engine)


def _train_pipeline(rank: int, world_size: int, folder: Path, before: Grid, after: Grid) -> dict[str, Tensor]:
    engine = _pipeline(before)
    _run(engine, before, 0, BEFORE)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    whole = engine._consolidated_16bit_state_dict()
    assert (whole is None) == (rank > 0)
    engine.destroy()
    engine = _pipeline(after)
    engine.load_checkpoint(folder)
    return _run(engine, after, BEFORE, BEFORE + AFTER)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Grid(2, 2, 1, 0), Grid(1, 2, 2, 1)),
        (Grid(2, 2, 1, 1), Grid(2, 1, 2, 0)),
        (Grid(2, 1, 2, 1), Grid(2, 2, 1, 0)),
        (Grid(1, 4, 1, 0), Grid(2, 2, 1, 1)),
    ],
)
def test_stages_of_parts_are_one_model(before: Grid, after: Grid, tmp_path: Path) -> None:
    batches = make_batches(cut_net(), BEFORE + AFTER, 2, 1, ROWS)
    half = _numbered(train_reference(cut_net(), _adam, batches, BEFORE).weights)
    reference = _numbered(train_reference(cut_net(), _adam, batches).weights)
    of_ranks = run_ranks(_train_pipeline, 4, tmp_path, before, after)
    model = cut_net().cut(0, after.tensor, None)
    cuts = {f"{NUMBERS[n]}.{key}": cut for n in ("first", "second") for key, cut in getattr(model, n).cuts()}
    seen: set[str] = set()
    for rank, weights in enumerate(of_ranks):
        place = rank % after.tensor
        want = {name: reference[name] if after.tensor == 1 else _part(cuts, name, place, reference) for name in weights}
        assert relative_difference(weights, want) < FP64_ROUNDING
        seen |= weights.keys()
    assert seen == reference.keys()
    exported = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert relative_difference(exported, half) < 1e-6  # fp32
    file = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert relative_difference(file, half) < FP64_ROUNDING


def _part(cuts: dict[str, Cut], name: str, rank: int, whole: dict[str, Tensor]) -> Tensor:
    return part_of(cuts[name], rank, whole[name]) if name in cuts else whole[name]


# -- sequences --------------------------------------------------------------------------------------------------------


class SequenceUnit(TensorUnit):
    """Two tensor-parallel neighbours, two sequence-parallel pairs of them."""

    def __init__(self) -> None:
        super().__init__(2)
        groups = [dist.new_group([first, first + 2]) for first in range(2)]
        self._sequence = groups[dist.get_rank() % 2]
        alone = [dist.new_group([rank]) for rank in range(4)]
        self._data = alone[dist.get_rank()]

    def get_sequence_parallel_group(self) -> Any:
        return self._sequence

    def get_sequence_parallel_world_size(self) -> int:
        return 2

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() // 2

    def get_sequence_data_parallel_group(self) -> Any:
        return self._sequence

    def get_sequence_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0


def _engine(model: CutNet, unit: Any, stage: int, **blocks: Any) -> DeepSpeedEngine:
    settings = config(1, ROWS, **zero(stage, reduce_bucket_size=100), **blocks)
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return make_engine(model, settings, mpu=unit, optimizer=_adam(model.parameters()))


def _train_sequences(rank: int, world_size: int, folder: Path, stage: int) -> dict[str, Tensor]:
    unit = SequenceUnit()
    batches = make_batches(cut_net(), BEFORE + AFTER, 1, 2, ROWS)  # a sequence rank's tokens are a batch of their own here
    engine = _engine(cut_net().cut(rank % 2, 2, unit.get_model_parallel_group()), unit, stage)
    train(engine, batches[:BEFORE], rank // 2)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    mine = torch.rand(()).item()
    engine.destroy()
    engine = _engine(cut_net().cut(rank % 2, 2, unit.get_model_parallel_group()), unit, 1 - min(stage, 1))
    engine.load_checkpoint(folder)
    assert torch.rand(()).item() == mine
    return train(engine, batches[BEFORE:], rank // 2).weights


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_of_one_sequence_write_and_read_one_model(stage: int, tmp_path: Path) -> None:
    batches = make_batches(cut_net(), BEFORE + AFTER, 1, 2, ROWS)
    half = train_reference(cut_net(), _adam, batches, BEFORE).weights
    reference = train_reference(cut_net(), _adam, batches).weights
    model = cut_net().cut(0, 2, None)
    cuts = {f"{name}.{key}": cut for name in ("first", "second") for key, cut in getattr(model, name).cuts()}
    for rank, weights in enumerate(run_ranks(_train_sequences, 4, tmp_path, stage)):
        assert relative_difference(weights, {n: _part(cuts, n, rank % 2, reference) for n in weights}) < FP64_ROUNDING
    assert relative_difference(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), half) < FP64_ROUNDING
    assert relative_difference(get_fp32_state_dict_from_zero_checkpoint(tmp_path), half) < 1e-6  # fp32


# -- buffers, marks ---------------------------------------------------------------------------------------------------


class Buffered(CutNet):
    """A buffer of the rank's own, and one that is cut."""

    cut_axis: str | None = None

    drift: Tensor
    slopes: Tensor

    def __init__(self, place: int, size: int) -> None:
        super().__init__(hidden=8)
        self.register_buffer("drift", torch.zeros(1))
        width = 8 // size
        self.register_buffer("slopes", torch.arange(8.0)[place * width :][:width])
        if size > 1:
            self.cut_axis = "tensor"
        self._slopes = Cut.of_widths((8,), 0, [width] * size)

    def cuts(self) -> Any:
        yield "slopes", self._slopes


def _keep_buffers(rank: int, world_size: int, folder: Path, saved: int, resumed: int) -> tuple[float, list[float]]:
    for tensor, is_saved in ((saved, True), (resumed, False)):
        unit = TensorUnit(tensor)
        place = unit.get_model_parallel_rank()
        model = Buffered(place, tensor)
        if tensor > 1:
            model.cut(place, tensor, unit.get_model_parallel_group())
        engine = _engine(model, unit, 1)
        if is_saved:
            model.drift.fill_(rank)
            engine.save_checkpoint(folder)
        else:
            model.drift.fill_(-1)
            model.slopes.zero_()
            engine.load_checkpoint(folder)
        engine.destroy()
    return model.drift.item(), model.slopes.tolist()


@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (2, 4), (4, 2), (4, 1)])
def test_buffers_of_as_many_ranks_are_their_own_and_cut_ones_are_whole(saved: int, resumed: int, tmp_path: Path) -> None:
    width = 8 // resumed
    for rank, (drift, slopes) in enumerate(run_ranks(_keep_buffers, 4, tmp_path, saved, resumed)):
        assert drift == (rank if saved == resumed else 0)
        assert slopes == list(range(8))[rank % resumed * width :][:width]
    exported = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert exported["slopes"].tolist() == list(range(8))
    assert exported["drift"].item() == 0


def _other_shapes(rank: int, world_size: int, folder: Path) -> None:
    unit = TensorUnit(2)
    model = Buffered(rank, 2).cut(rank, 2, unit.get_model_parallel_group())
    model.cut_axis = None
    model.register_buffer("slopes", torch.zeros(3 + rank))
    _engine(model, unit, 1).save_checkpoint(folder)


def test_a_buffer_of_other_shapes_that_no_module_tells_of_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_other_shapes, 2, tmp_path)
    assert len(failed.value.failures) == 2
    for failure in failed.value.failures:
        assert CheckpointError.__name__ in failure.text
        assert "buffer 'slopes' is torch.float32 of shape (4,)" in failure.text
        assert "let cuts() of its module say" in failure.text


def _marked(rank: int, world_size: int, folder: Path, saved: int, resumed: int, stage: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tensor, is_saved in ((saved, True), (resumed, False)):
        unit = TensorUnit(tensor)
        model = _net_of_eight()
        model.cut(unit.get_model_parallel_rank(), tensor, unit.get_model_parallel_group())
        for middle in (model.first, model.second):
            middle.cut_axis = None
            for name, dim in (("up", 0), ("down", 1)):
                param: Any = getattr(middle, name)
                param.tensor_model_parallel, param.partition_dim = True, dim
        if not is_saved:
            for param in model.parameters():
                param.data.zero_()
        engine = _engine(model, unit, stage)
        if is_saved:
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
            found = masters(engine)
        engine.destroy()
    return found


def _net_of_eight() -> CutNet:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return CutNet(8).double()


@pytest.mark.parametrize(("saved", "resumed", "stage"), [(2, 4, 0), (4, 2, 3)])
def test_parameters_with_megatrons_marks_are_equal_parts(saved: int, resumed: int, stage: int, tmp_path: Path) -> None:
    whole = dict(_net_of_eight().named_parameters())
    model = _net_of_eight().cut(0, resumed, None)
    cuts = {f"{name}.{key}": cut for name in ("first", "second") for key, cut in getattr(model, name).cuts()}
    for rank, weights in enumerate(run_ranks(_marked, 4, tmp_path, saved, resumed, stage)):
        for name, value in weights.items():
            wanted = whole[name].detach()
            assert torch.equal(value, wanted if "shared" in name else _part(cuts, name, rank % resumed, {name: wanted}))
