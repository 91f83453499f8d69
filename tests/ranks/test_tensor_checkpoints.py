"""Checkpoints and exports of layers that tensor-parallel ranks hold in parts: whole tensors, whatever ranks come next.

A run is laid out as (tensor-parallel ranks, data-parallel ranks, ZeRO stage, precision). It is saved after some steps, and
goes on in another layout. One spawned world saves all runs of its number of ranks, one resumes all of its own. Shown:

    loaded    weights, moments: what was saved, to the last bit
    gone on   after more steps the uninterrupted run's weights, of one process with plain PyTorch, as far as fp64 rounds
    exported  save_16bit_model, the consolidated state dict, zero_to_fp32: the whole weights that the ranks held together
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspeed.checkpoint import open_checkpoint
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.sharding import Cut
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.cut_net import CutNet, TensorUnit, part_of
from tests.support.engines import config, make_engine, masters, model_weights, moments, train, zero
from tests.support.models import cast_batches, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

ROWS, BEFORE, AFTER = 4, 3, 3


class Place(NamedTuple):
    """How a run is laid out."""

    tensor: int
    data: int
    stage: int
    precision: str = "fp64"
    hidden: int = 9

    @property
    def ranks(self) -> int:
        """Of all."""
        return self.tensor * self.data

    @property
    def folder(self) -> str:
        """Name of the checkpoint's folder."""
        return "-".join(map(str, self))


MOVES = [
    (Place(2, 2, 0), Place(2, 2, 0)),
    (Place(2, 2, 0), Place(4, 1, 1)),
    (Place(2, 2, 1), Place(1, 2, 2)),
    (Place(2, 2, 2), Place(3, 1, 0)),
    (Place(2, 2, 3), Place(1, 1, 0)),
    (Place(2, 2, 3), Place(2, 1, 3)),
    (Place(4, 1, 3), Place(2, 2, 1)),
    (Place(4, 1, 0), Place(2, 1, 2)),
    (Place(3, 1, 1), Place(2, 2, 3)),
    (Place(1, 2, 3), Place(2, 2, 2)),
    (Place(1, 1, 0), Place(4, 1, 3)),
    (Place(2, 1, 1), Place(2, 2, 1)),
    (Place(3, 1, 1, hidden=2), Place(2, 1, 0, hidden=2)),
    (Place(2, 1, 0, hidden=2), Place(3, 1, 3, hidden=2)),
    (Place(2, 2, 1, "bf16"), Place(3, 1, 3, "bf16")),
    (Place(2, 2, 3, "bf16"), Place(1, 1, 0, "bf16")),
]


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def _net(hidden: int) -> CutNet:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return CutNet(hidden).double()


def _cuts(place: Place) -> dict[str, Cut]:
    if place.tensor == 1:
        return {}
    model = _net(place.hidden).cut(0, place.tensor, None)
    return {f"{name}.{key}": cut for name in ("first", "second") for key, cut in getattr(model, name).cuts()}


def _batches(place: Place) -> Any:
    """Global batches of `ROWS` rows, shared out over the data-parallel ranks."""
    whole = make_batches(_net(place.hidden), BEFORE + AFTER, 2, 1, ROWS)
    rows = ROWS // place.data
    return [
        [[tuple(t[rank * rows :][:rows] for t in micro[0]) for rank in range(place.data)] for micro in step]
        for step in whole
    ]


def _engine(place: Place, *, is_fresh: bool = True) -> DeepSpeedEngine:
    model = _net(place.hidden).float() if place.precision == "bf16" else _net(place.hidden)
    if not is_fresh:  # other weights, to be replaced
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
    unit = None
    if place.tensor > 1:
        unit = TensorUnit(place.tensor)
        model.cut(unit.get_model_parallel_rank(), place.tensor, unit.get_model_parallel_group())
    settings = config(2, ROWS // place.data, **zero(place.stage, reduce_bucket_size=100))
    if place.stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 8
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if place.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    return make_engine(model, settings, mpu=unit, optimizer=_adam(model.parameters()))


def _train(engine: DeepSpeedEngine, place: Place, first: int, last: int) -> None:
    batches = _batches(place)[first:last]
    if place.precision == "bf16":
        batches = cast_batches(batches, torch.bfloat16)
    train(engine, batches, torch.distributed.get_rank() // place.tensor)


class State(NamedTuple):
    """What an engine holds, of parts the rank's own."""

    weights: dict[str, Tensor]
    model_weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    steps: dict[str, float]


def _state(engine: DeepSpeedEngine) -> State:
    flat = {f"{name} {key}": value for name, of_name in moments(engine).items() for key, value in of_name.items()}
    optimizer = engine.optimizer
    assert optimizer is not None
    steps = {str(n): float(s["step"]) for n, s in enumerate(optimizer.optimizer.state.values()) if "step" in s}
    return State(masters(engine), model_weights(engine), flat, steps)


class Saved(NamedTuple):
    """What came of a run that was saved."""

    state: State
    consolidated: dict[str, Tensor] | None
    random: float


def _save(rank: int, world_size: int, folder: Path, places: list[Place]) -> list[Saved]:
    found = []
    for place in places:
        engine = _engine(place)
        _train(engine, place, 0, BEFORE)
        state = _state(engine)
        engine.save_checkpoint(folder / place.folder, "t")
        random = torch.rand(()).item()
        engine.save_16bit_model(folder / place.folder, "model.safetensors" if place.stage == 3 else "pytorch_model.bin")
        found.append(Saved(state, engine._consolidated_16bit_state_dict(), random))
        engine.destroy()
    return found


class Resumed(NamedTuple):
    """What came of a run that went on."""

    loaded: State
    after: dict[str, Tensor]
    random: float


def _resume(rank: int, world_size: int, folder: Path, moves: list[tuple[Place, Place]]) -> list[Resumed]:
    found = []
    for saved, place in moves:
        engine = _engine(place, is_fresh=False)
        engine.load_checkpoint(folder / saved.folder)
        random = torch.rand(()).item()
        loaded = _state(engine)
        _train(engine, place, BEFORE, BEFORE + AFTER)
        found.append(Resumed(loaded, masters(engine), random))
        engine.destroy()
    return found


def _whole(parts: list[dict[str, Tensor]], cuts: dict[str, Cut]) -> dict[str, Tensor]:
    """Whole tensors from those of all tensor-parallel ranks; keys are names, and what comes after a space."""
    whole = {}
    for key in {key: None for part in parts for key in part}:
        cut = cuts.get(key.split(" ")[0])
        if cut is None:
            assert all(torch.equal(part[key], parts[0][key]) for part in parts)
            whole[key] = parts[0][key]
            continue
        whole[key] = next(part[key] for part in parts if key in part).new_empty(cut.shape)
        for rank, spans in enumerate(cut.parts):
            at = 0
            for span in spans:
                if span.length:
                    place = whole[key].narrow(cut.dim, span.start, span.length)
                    place.copy_(parts[rank][key].narrow(cut.dim, at, span.length))
                at += span.length
    return whole


def _same(got: dict[str, Tensor], whole: dict[str, Tensor], cuts: dict[str, Cut], rank: int) -> None:
    """`got`, of a tensor-parallel rank, is its part of `whole`, bit by bit; what it has nothing of may lack."""
    for key, value in whole.items():
        cut = cuts.get(key.split(" ")[0])
        wanted = value if cut is None else part_of(cut, rank, value)
        if wanted.numel():
            assert torch.equal(got[key], wanted), key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[Place, list[Saved]]:
    """Every run that a move begins with: what its ranks saved."""
    found: dict[Place, list[Saved]] = {}
    places = list(dict.fromkeys(place for place, _ in MOVES))
    for ranks in sorted({place.ranks for place in places}):
        here = [place for place in places if place.ranks == ranks]
        of_ranks = run_ranks(_save, ranks, folder, here, timeout_seconds=120)
        found.update({place: [of_rank[number] for of_rank in of_ranks] for number, place in enumerate(here)})
    return found


def _saved_whole(place: Place, of_ranks: list[Saved], kind: str) -> dict[str, Tensor]:
    return _whole([getattr(each.state, kind) for each in of_ranks[: place.tensor]], _cuts(place))


@pytest.mark.parametrize("ranks", sorted({place.ranks for _, place in MOVES}))
def test_a_run_goes_on_over_other_tensor_parallel_ranks(ranks: int, folder: Path, saved: dict[Place, list[Saved]]) -> None:
    moves = [move for move in MOVES if move[1].ranks == ranks]
    of_ranks = run_ranks(_resume, ranks, folder, moves, timeout_seconds=120)
    for number, (before, place) in enumerate(moves):
        cuts = _cuts(place)
        batches = _batches(Place(1, 1, 0, hidden=place.hidden))
        reference = train_reference(_net(place.hidden), _adam, batches)
        for rank, found in enumerate(of_rank[number] for of_rank in of_ranks):
            for kind in ("weights", "model_weights", "moments"):
                whole = _saved_whole(before, saved[before], kind)
                _same(getattr(found.loaded, kind), whole, cuts, rank % place.tensor)
            assert set(found.loaded.steps.values()) == {BEFORE}
            if place.precision == "fp64":
                want = {
                    name: part_of(cuts[name], rank % place.tensor, whole) if name in cuts else whole
                    for name, whole in reference.weights.items()
                }
                assert relative_difference(found.after, want) < FP64_ROUNDING
            first = of_ranks[rank - rank % place.tensor][number]
            assert found.random == first.random  # what is dropped of whole activations is alike
            data = rank // place.tensor
            if data < before.data:  # the rank that saw these samples
                assert found.random == saved[before][data * before.tensor].random


def test_exports_hold_whole_tensors(folder: Path, saved: dict[Place, list[Saved]]) -> None:
    for place, of_ranks in saved.items():
        weights = _saved_whole(place, of_ranks, "weights")
        model = _saved_whole(place, of_ranks, "model_weights")
        where = folder / place.folder
        exported = get_fp32_state_dict_from_zero_checkpoint(where)
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], value.float()) for name, value in weights.items())
        consolidated = of_ranks[0].consolidated
        assert consolidated is not None
        assert all(each.consolidated is None for each in of_ranks[1:])
        assert consolidated.keys() == model.keys()
        assert all(torch.equal(consolidated[name], value) for name, value in model.items())
        file = _loaded(where)
        assert all(torch.equal(file[name], value) for name, value in model.items())


def _loaded(where: Path) -> dict[str, Tensor]:
    if (where / "pytorch_model.bin").exists():
        loaded: dict[str, Tensor] = torch.load(where / "pytorch_model.bin", weights_only=True)
        return loaded
    return load_file(where / "model.safetensors")


def test_every_tensor_is_written_once_by_its_name_and_parts_by_all_that_hold_them(
    folder: Path, saved: dict[Place, list[Saved]]
) -> None:
    for place in saved:
        source: Any = open_checkpoint(folder / place.folder)
        cuts = _cuts(place)
        for name, entry in source.manifest.tensors.items():
            parameter = name.split("/")[1]
            cut = cuts.get(parameter) if not name.startswith(("rank_state", "state")) else None
            assert entry.cut == (None if cut is None or cut.is_in_order else type(entry.cut).of(cut))
            writers = {fragment.file for fragment in entry.fragments}
            if cut is not None:
                assert len(writers) >= sum(cut.width(rank) > 0 for rank in range(cut.ranks))
        assert source.state["mesh"] == {
            axis: size for axis, size in (("replica", place.data), ("tensor", place.tensor)) if size > 1
        }
