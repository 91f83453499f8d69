"""A pipeline's checkpoint holds one model under global names: it loads at any cut, and exports whole.

One world per number of ranks saves, or resumes; every place that saves meets every place that resumes.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed.errors import CheckpointError
from tests.support.engines import config, masters, moments, zero
from tests.support.pipelines import Whole, layers, make_pipeline, own, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, train_reference

ADAM = functools.partial(torch.optim.AdamW, lr=0.02)
BEFORE, AFTER = 3, 3
MICRO_BATCHES = 4


class Place(NamedTuple):
    """How a run is laid out."""

    stages: int
    data_ranks: int
    zero_stage: int
    chunks: int = 1

    @property
    def ranks(self) -> int:
        return self.stages * self.data_ranks

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


PLACES = (Place(1, 1, 1), Place(2, 1, 0), Place(3, 1, 1), Place(2, 2, 1), Place(1, 2, 0), Place(4, 1, 0), Place(2, 1, 1, 2))


class Counting(nn.Module):
    """A buffer that every forward changes, and state besides."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.note = "new"

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]


def _described() -> list[Any]:
    described = layers(4, frozen=(2,))
    described.insert(4, Counting())
    return described


def _batches(data_ranks: int) -> Any:
    """The same global batches on one data-parallel rank and on two."""
    whole = token_batches(BEFORE + AFTER, MICRO_BATCHES, 1)
    if data_ranks == 1:
        return whole
    return [[[step[2 * micro][0], step[2 * micro + 1][0]] for micro in range(MICRO_BATCHES // 2)] for step in whole]


def _engine(place: Place, **blocks: Any) -> Any:
    schedule = "interleaved" if place.chunks > 1 else "1f1b"
    settings = config(
        MICRO_BATCHES // place.data_ranks,
        2,
        **zero(place.zero_stage, reduce_bucket_size=100),
        gradient_clipping=0.5,
        pipeline={"schedule": schedule},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}},
        **blocks,
    )
    return make_pipeline(_described(), place.stages, settings, optimizer=ADAM, num_chunks=place.chunks)


def _counting(engine: Any) -> list[Counting]:
    return [module for module in engine.module.modules() if isinstance(module, Counting)]


def _save(rank: int, _world_size: int, folder: str, places: list[Place]) -> dict[str, Any]:
    outcome = {}
    for place in places:
        engine = _engine(place)
        batches = _batches(place.data_ranks)
        train_pipeline(engine, batches[:BEFORE])
        for counting in _counting(engine):
            counting.note = "saved"
        engine.save_checkpoint(f"{folder}/{place.name}", client_state={"place": place.name})
        losses = train_pipeline(engine, batches[BEFORE:])
        outcome[place.name] = (losses, masters(engine), moments(engine))
        engine.destroy()
    return outcome


def _resume(rank: int, _world_size: int, folder: str, places: list[Place], saved: list[Place]) -> dict[str, Any]:
    outcome = {}
    for place in places:
        for origin in saved:
            engine = _engine(place)
            path, client = engine.load_checkpoint(f"{folder}/{origin.name}")
            assert path == f"{folder}/{origin.name}/global_step{BEFORE}"
            assert client == {"place": origin.name}
            assert engine.global_steps == BEFORE
            for counting in _counting(engine):
                assert counting.note == "saved"
                assert counting.seen == BEFORE * MICRO_BATCHES // origin.data_ranks
            losses = train_pipeline(engine, _batches(place.data_ranks)[BEFORE:])
            outcome[f"{origin.name} to {place.name}"] = (losses, masters(engine), moments(engine))
            engine.destroy()
    return outcome


def _of_ranks(ranks: int) -> list[Place]:
    return [place for place in PLACES if place.ranks == ranks]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The folder of all saves, and for each place what its ranks came to without a stop."""
    folder = tmp_path_factory.mktemp("saved")
    outcome: dict[str, list[Any]] = {}
    for ranks in sorted({place.ranks for place in PLACES}):
        results = run_ranks(_save, ranks, str(folder), _of_ranks(ranks))
        outcome.update((place.name, [result[place.name] for result in results]) for place in _of_ranks(ranks))
    return folder, outcome


@pytest.fixture(scope="module")
def reference() -> Any:
    """One process, plain torch, without a stop."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        from deepspeed.runtime.lr_schedules import WarmupLR

        return WarmupLR(optimizer, warmup_num_steps=5, warmup_max_lr=0.02)

    return train_reference(Whole(_described()), ADAM, _batches(1), clip=0.5, scheduler_factory=schedule)


@pytest.mark.parametrize("ranks", sorted({place.ranks for place in PLACES}))
def test_a_run_goes_on_at_any_cut_as_if_it_had_never_stopped(
    saved: tuple[Path, dict[str, list[Any]]], reference: Any, ranks: int
) -> None:
    folder, uninterrupted = saved
    for rank, result in enumerate(run_ranks(_resume, ranks, str(folder), _of_ranks(ranks), list(PLACES))):
        for name, (losses, weights, states) in result.items():
            origin, _, place = name.partition(" to ")
            if origin == place:
                before = uninterrupted[place][rank]
                assert losses == before[0], name
                assert all(torch.equal(value, before[1][key]) for key, value in weights.items()), name
                assert all(
                    torch.equal(value, before[2][key][part])
                    for key, parts in states.items()
                    for part, value in parts.items()
                ), name
            assert losses == pytest.approx(reference.losses[BEFORE:], abs=1e3 * FP64_ROUNDING), name
            for key, value in weights.items():
                torch.testing.assert_close(
                    value, reference.weights[key], rtol=0, atol=1e3 * FP64_ROUNDING, msg=f"{name} {key}"
                )


def test_an_export_has_every_layer_and_each_tied_weight(saved: tuple[Path, dict[str, list[Any]]]) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder, _ = saved
    whole = Whole(_described())
    wanted = {name for name in whole.state_dict() if not name.endswith("_extra_state")}
    first: dict[str, Tensor] = {}
    for place in PLACES:
        exported = get_fp32_state_dict_from_zero_checkpoint(str(folder / place.name))
        assert set(exported) == wanted, place
        first = first or exported
        for name, value in exported.items():
            if not name.endswith("seen"):
                torch.testing.assert_close(value, first[name], rtol=0, atol=1e-6, msg=f"{place} {name}")


def _misfit(rank: int, _world_size: int, folder: str) -> str:
    engine = make_pipeline(layers(3, frozen=(2,)), 2, config(2, 2), optimizer=ADAM)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    train_pipeline(engine, token_batches(1, 2, 1))
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_on_all_stages(saved: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, _ = saved
    for text in run_ranks(_misfit, 2, str(folder / PLACES[1].name)):
        assert "does not fit the model" in text


def _evaluate(rank: int, _world_size: int) -> Any:
    described = layers(2)
    engine = make_pipeline(described, 2, config(3, 2), optimizer=ADAM)
    data = engine.get_data_parallel_rank()
    batches = token_batches(1, 3, 2)
    mine = next(own(batches, data))
    whole = Whole(described)
    logits = [[whole.logits(tokens) for tokens, _ in each] for each in (next(own(batches, 0)), next(own(batches, 1)))]
    losses = [[whole(*batch) for batch in each] for each in (next(own(batches, 0)), next(own(batches, 1)))]
    mean = torch.stack([loss for each in losses for loss in each]).mean()
    is_last = engine.is_last_stage()

    def close(got: Any, want: Any) -> None:
        torch.testing.assert_close(got, want.detach() if isinstance(want, Tensor) else want, rtol=0, atol=FP64_ROUNDING)

    close(engine.eval_batch(iter(mine)), mean)
    assert engine.training
    close(engine.eval_batch(iter(mine), reduce_output="sum"), mean * 3)
    close(
        engine.eval_batch(iter(mine), num_micro_batches=2), torch.stack([each[n] for each in losses for n in (0, 1)]).mean()
    )
    each = engine.eval_batch(iter(mine), reduce_output=None)
    silent = engine.eval_batch(iter(mine), bcast_loss=False)
    loss, outputs = engine.eval_batch(iter(mine), return_logits=True)
    raw = engine.eval_batch(iter(mine), compute_loss=False, reduce_output=None)
    averaged = engine.eval_batch(iter(mine), compute_loss=False)
    inferred = engine.inference_batch(iter((tokens,) for tokens, _ in mine))
    close(loss, mean)
    if not is_last:
        assert (each, silent, outputs, raw, averaged, inferred) == (None,) * 6
        return
    close(torch.stack(each), torch.stack(losses[data]))
    close(silent, mean)
    for got in (outputs, raw, inferred):
        close(torch.stack(got), torch.stack(logits[data]))
    close(averaged, torch.stack([each for of_rank in logits for each in of_rank]).mean(0))


def test_evaluation_gives_losses_and_outputs_where_they_were_asked_for() -> None:
    run_ranks(_evaluate, 4)


# -- the weights alone --------------------------------------------------------------------------------------------------


def _weights_alone(rank: int, _world_size: int, folder: str, place: Place) -> dict[str, Tensor]:
    described = layers(4, frozen=(2,), dtype=torch.float32)
    described.insert(4, Counting())
    schedule = "interleaved" if place.chunks > 1 else "1f1b"
    blocks = {**zero(place.zero_stage), "bf16": {"enabled": True}, "pipeline": {"schedule": schedule}}
    engine = make_pipeline(described, place.stages, config(2, 2, **blocks), optimizer=ADAM, num_chunks=place.chunks)
    train_pipeline(engine, token_batches(2, 2, place.data_ranks))
    for counting in _counting(engine):
        counting.note = "saved"
    assert engine.save_16bit_model(folder, "whole.bin")
    assert engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match="_extra_state"):
        engine.save_16bit_model(folder, "whole.safetensors")
    whole = engine._consolidated_16bit_state_dict()
    assert (whole is None) == (rank > 0)
    if whole is not None:
        Whole(described).load_state_dict(whole, strict=True)
    return {name: value for name, value in engine.module.state_dict().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize(
    "place", [Place(1, 1, 0), Place(2, 2, 1), Place(3, 1, 0), Place(2, 1, 1, 2)], ids=lambda each: each.name
)
def test_the_weights_of_all_stages_are_one_file(place: Place, tmp_path: Path) -> None:
    of_ranks = run_ranks(_weights_alone, place.ranks, str(tmp_path), place)
    whole = Whole(_described()).to(torch.bfloat16)
    found = torch.load(tmp_path / "whole.bin", weights_only=True)
    assert found.keys() == whole.state_dict().keys()
    assert found["4._extra_state"] == {"note": "saved"}
    assert found["4.seen"] == 4
    for values in of_ranks:
        for name, value in values.items():
            assert value.dtype == found[name].dtype
            assert torch.equal(value, found[name]), name
    whole.load_state_dict(found, strict=True)
    trained = torch.load(tmp_path / "trained.bin", weights_only=True)
    assert found.keys() - trained.keys() == {name for name, param in whole.named_parameters() if not param.requires_grad}


def _cannot_write(rank: int, _world_size: int, folder: str) -> None:
    engine = make_pipeline(layers(3), 3, config(2, 2), optimizer=ADAM)
    Path(folder, "file").touch()
    with pytest.raises(CheckpointError, match=r"could not write the model's weights into .*file/m\.bin"):
        engine.save_16bit_model(f"{folder}/file", "m.bin")
    assert engine.save_16bit_model(folder, "m.safetensors")
    train_pipeline(engine, token_batches(1, 2, 1))


def test_weights_that_cannot_be_written_are_one_error_on_all_stages(tmp_path: Path) -> None:
    run_ranks(_cannot_write, 3, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m.safetensors"]
    assert load_file(tmp_path / "m.safetensors").keys() == Whole(layers(3)).state_dict().keys()
