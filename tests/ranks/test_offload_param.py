"""Parameters on a tier (`offload_param`, ZeRO stage 3): the numbers are those of the same run without it, to the last bit.

The separate form of the host tier, which a CPU has no use for, is forced through the seam `offload.placement`.
"""

from __future__ import annotations

import copy
import errno
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError, CommError, ConfigError, FileIoError, UsageError
from deepspeed.offload import placement, shard_file
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio.engine import IoEngine
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param, safe_set_full_fp32_param
from tests.support.engines import Outcome, config, make_engine, masters, model_weights, moments, train, zero
from tests.support.models import Branching, Lora, ManyTinyLayers, TiedGpt, TinyModel, build, cast_batches, make_batches
from tests.support.ranks import run_ranks
from tests.support.sweeps import IS_SWEEP

WORLD_SIZES = (1, 2, 3)
STEPS = 4
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODELS: dict[str, Callable[[], TinyModel]] = {"gpt": TiedGpt, "lora": Lora, "branch": Branching}
NOTHING_STAYS = {"max_in_cpu": 0}
GATHERS = (("stage3_gather_16bit_weights_on_model_save", True),)


@dataclass(frozen=True)
class Setting:
    """One training."""

    precision: str = "bf16"
    model: str = "gpt"
    accumulation: int = 1
    clip: float = 0.0
    offload: tuple[tuple[str, Any], ...] = ()
    """Keys of `offload_param` besides the path."""

    is_apart: bool = False
    """Host memory counts as another place than the device's."""

    others: tuple[tuple[str, Any], ...] = ()
    """Further keys of `zero_optimization`."""

    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def batches(self, world_size: int, steps: int = STEPS) -> Any:
        """What it trains on."""
        batches = make_batches(build(MODELS[self.model]), steps, self.accumulation, world_size)
        return cast_batches(batches, PRECISIONS[self.precision])

    def engine(self, folder: Path, model: nn.Module | None = None) -> DeepSpeedEngine:
        """A new engine over a new model."""
        model = build(MODELS[self.model]) if model is None else model
        keys: dict[str, Any] = {"stage3_param_persistence_threshold": 0, **dict(self.others)}
        if self.offload:
            keys["offload_param"] = {"nvme_path": str(folder), **dict(self.offload)}
        blocks: dict[str, Any] = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        if self.precision == "fp16":
            blocks["fp16"]["initial_scale_power"] = 8
        settings = config(self.accumulation, gradient_clipping=self.clip, **blocks, **zero(3, **keys))
        trained = [p for p in model.parameters() if p.requires_grad]
        placement.is_host_apart = lambda device: self.is_apart
        return make_engine(model, settings, optimizer=self.optimizer(trained, lr=1e-2))

    def on(self, **offload: Any) -> Setting:
        """The same with parameters on a tier."""
        return replace(self, offload=tuple(offload.items()))


def _differences(got: Outcome, want: Outcome) -> list[str]:
    unlike = [name for name in ("losses", "norms") if getattr(got, name) != getattr(want, name)]
    for name in ("weights", "model_weights"):
        theirs, ours = getattr(want, name), getattr(got, name)
        unlike += [f"{name} {each}" for each in theirs if not torch.equal(ours[each], theirs[each])]
    return unlike


def _away(engine: DeepSpeedEngine) -> list[int]:
    """How many buckets of each sharded flat group rest in the file."""
    return [0 if flat.tier is None else len(flat.tier.buckets) for flat in engine._parts.partition.sharded]


# -- the same numbers -------------------------------------------------------------------------------------------------


def _settings() -> Iterator[Setting]:
    grid = [Setting(*each) for each in itertools.product(PRECISIONS, MODELS, (1, 2), (0.0, 0.05))]
    yield from grid if IS_SWEEP else grid[::5]  # 5 goes round all four: each value of each is seen


TIERS: dict[str, dict[str, Any]] = {
    "nothing stays": {"device": "nvme", **NOTHING_STAYS},
    "one buffer, some stay": {"device": "nvme", "max_in_cpu": 150, "buffer_count": 1},
    "host": {"device": "cpu"},
}


def _matrix(rank: int, world_size: int, folder: Path) -> list[str]:
    found = []
    for setting in _settings():
        if setting.model == "branch" and world_size > 1:
            continue  # ranks that run different modules: see the test of what they are told
        batches = setting.batches(world_size)
        engine = setting.engine(folder)
        want = train(engine, batches, rank)
        engine.destroy()
        for name, offload in TIERS.items():
            engine = setting.on(**offload).engine(folder)
            found += [f"{setting}, {name}: {each}" for each in _differences(train(engine, batches, rank), want)]
            if (sum(_away(engine)) > 0) != (offload["device"] == "nvme"):
                found.append(f"{setting}, {name}: {_away(engine)} buckets rest in the file")
            engine.destroy()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_is_the_same_to_the_last_bit(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(_matrix, world_size, tmp_path, timeout_seconds=240) == [[]] * world_size
    assert list(tmp_path.iterdir()) == []  # destroy() has removed the files


def _apart(rank: int, world_size: int, folder: Path) -> list[str]:
    found = []
    for precision in ("fp32", "bf16"):
        setting = Setting(precision, accumulation=2, clip=0.05)
        batches = setting.batches(world_size)
        want = train(setting.engine(folder), batches, rank)
        for offload in ({"device": "cpu"}, {"device": "nvme", "max_in_cpu": 150}):
            apart = Setting(precision, "gpt", 2, 0.05, tuple(offload.items()), is_apart=True)
            engine = apart.engine(folder)
            found += [f"{apart}: {each}" for each in _differences(train(engine, batches, rank), want)]
            flats = engine._parts.partition.sharded
            assert all(flat.keeps_values_apart and flat.has_own_masters for flat in flats if flat.kind.is_trained)
            engine.destroy()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_host_tier_apart_from_the_device_gives_the_same_numbers(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(_apart, world_size, tmp_path) == [[]] * world_size


def _both(rank: int, world_size: int, folder: Path) -> list[str]:
    found = []
    pairs = itertools.product(PRECISIONS, (DeepSpeedCPUAdam, DeepSpeedCPULion))
    for precision, host_optimizer in pairs if IS_SWEEP else (("fp32", DeepSpeedCPULion), ("bf16", DeepSpeedCPUAdam)):
        plain = Setting(precision, "lora", 2, 0.05, optimizer=host_optimizer)
        batches = plain.batches(world_size)
        want = train(plain.engine(folder), batches, rank)
        for device, state_device, is_apart in itertools.product(("cpu", "nvme"), ("cpu", "nvme"), (False, True)):
            state = {"device": state_device, "nvme_path": str(folder), "pipeline_read": True}
            setting = replace(
                plain,
                offload=(("device", device), ("max_in_cpu", 20)),
                is_apart=is_apart,
                others=(("offload_optimizer", state), ("sub_group_size", 4096)),
            )
            engine = setting.engine(folder)
            found += [f"{setting}: {each}" for each in _differences(train(engine, batches, rank), want)]
            engine.destroy()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_and_optimizer_state_on_tiers_together_give_the_same_numbers(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(_both, world_size, tmp_path, timeout_seconds=240) == [[]] * world_size
    assert list(tmp_path.iterdir()) == []


def _budgets(rank: int, world_size: int, folder: Path) -> list[str]:
    found = []
    for keys in (
        {"stage3_max_live_parameters": 400, "stage3_prefetch_bucket_size": 200, "stage3_max_reuse_distance": 0},
        {"stage3_prefetch_bucket_size": 0},
        {"allgather_sequential": True},
        {"stage3_use_all_reduce_for_fetch_params": True},
        {"stage3_param_persistence_threshold": 60},
        {"memory_efficient_linear": False},
    ):
        setting = Setting(others=tuple(keys.items()))
        batches = setting.batches(world_size)
        want = train(setting.engine(folder), batches, rank)
        engine = setting.on(device="nvme", buffer_count=2, **NOTHING_STAYS).engine(folder)
        found += [f"{keys}: {each}" for each in _differences(train(engine, batches, rank), want)]
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_budget_of_stage_3_works_with_parameters_in_a_file(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(_budgets, world_size, tmp_path) == [[]] * world_size


# -- everything else that touches parameters --------------------------------------------------------------------------


def _edits(rank: int, world_size: int, folder: Path) -> list[Any]:
    found: list[Any] = []
    for setting in (Setting(model="lora"), Setting(model="lora").on(device="nvme", **NOTHING_STAYS)):
        batches = setting.batches(world_size, 3)
        engine = setting.engine(folder)
        train(engine, batches[:1], rank)
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        params = [frozen[0], engine.module.second.up]
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for param in params:
                param.mul_(1.5) if rank == 0 else param.zero_()
        safe_set_full_fp32_param(params[1], safe_get_full_fp32_param(params[1]) + 0.25)
        outcome = train(engine, batches[1:2], rank)
        engine.eval()
        with torch.no_grad():
            evaluated = engine(*batches[2][0][rank]).item()
        engine.train()
        engine.load_module_state_dict({name: value * 0.5 for name, value in model_weights(engine).items()})
        local = safe_get_local_fp32_param(params[1])
        outcome2 = train(engine, batches[2:], rank)
        after = _destroyed(engine)
        found.append((outcome.losses, outcome2.losses, outcome2.weights, evaluated, local, outcome2.model_weights, after))
    return found


def _destroyed(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    engine.destroy()
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_edits_evaluation_and_destroy_are_the_same(world_size: int, tmp_path: Path) -> None:
    for without, with_tier in run_ranks(_edits, world_size, tmp_path):
        for one, other in zip(without, with_tier, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == []


def _saved(rank: int, world_size: int, folder: Path, setting: Setting) -> Outcome:
    engine = setting.engine(folder / "disk")
    batches = setting.batches(world_size, 6)
    train(engine, batches[:3], rank)
    engine.save_checkpoint(folder / "saved", "tag")
    engine.save_16bit_model(folder / "saved", "weights.safetensors")
    return train(engine, batches[3:], rank)


def _resumed(rank: int, world_size: int, folder: Path, setting: Setting, steps: int) -> tuple[Any, ...]:
    engine = setting.engine(folder / "disk")
    train(engine, setting.batches(world_size, 1), rank)  # there is something to be replaced
    engine.load_checkpoint(folder / "saved", "tag")
    loaded = (masters(engine), model_weights(engine), moments(engine))
    return loaded, train(engine, setting.batches(world_size, 6)[3 : 3 + steps], rank)


@pytest.mark.parametrize(("precision", "model"), [("fp32", "lora"), ("bf16", "gpt")])
def test_checkpoints_go_from_and_to_a_tier_at_any_number_of_ranks(precision: str, model: str, tmp_path: Path) -> None:
    plain = Setting(precision, model, 2, 0.05, others=GATHERS)
    tier = plain.on(device="nvme", **NOTHING_STAYS)
    for saved, others in ((plain, (tier,)), (tier, (plain, tier))):
        folder = tmp_path / ("tier" if saved.offload else "plain")
        went_on = run_ranks(_saved, 2, folder, saved)
        for resumed in others:
            pairs = zip(run_ranks(_resumed, 2, folder, resumed, 3), went_on, strict=True)
            assert [_differences(outcome, want) for (_, outcome), want in pairs] == [[], []]
        on_three = [run_ranks(_resumed, 3, folder, resumed, 0)[0][0] for resumed in (plain, tier)]
        torch.testing.assert_close(on_three[1], on_three[0], rtol=0, atol=0)
    files = [(tmp_path / name / "saved" / "weights.safetensors").read_bytes() for name in ("plain", "tier")]
    assert files[0] == files[1]


def _without_training(rank: int, world_size: int, folder: Path) -> list[float]:
    losses = []
    for offload in ({}, {"offload_param": {"device": "nvme", "nvme_path": str(folder / "disk"), **NOTHING_STAYS}}):
        keys = {"stage3_param_persistence_threshold": 0, **offload}
        engine = make_engine(build(TiedGpt, seed=3), config(bf16={"enabled": True}, **zero(3, **keys)))
        assert (sum(_away(engine)) > 0) == bool(offload)
        for saved in ("saved", "again") if offload else ("saved",):
            engine.load_checkpoint(folder / saved, "tag", load_module_only=True)
            engine.eval()
            with torch.no_grad():
                losses.append(engine(*make_batches(engine.module, 1, 1, world_size)[0][0][rank]).item())
            engine.save_checkpoint(folder / "again", "tag")
    return losses


def test_an_engine_without_an_optimizer_evaluates_and_saves_what_rests_in_a_file(tmp_path: Path) -> None:
    run_ranks(_saved, 2, tmp_path, Setting(others=GATHERS))
    for in_memory, in_file, saved_and_loaded in run_ranks(_without_training, 2, tmp_path):
        assert in_memory == in_file == saved_and_loaded


# -- a model that is built on the tier --------------------------------------------------------------------------------


def _built(rank: int, world_size: int, folder: Path, model_name: str) -> list[Any]:
    found: list[Any] = []
    for offload, stays in (({}, {}), ({"device": "nvme"}, {"max_in_cpu": 0}), ({"device": "nvme"}, {"max_in_cpu": 100})):
        setting = Setting("bf16", model_name, offload=tuple({**offload, **stays}.items()))
        block = {"stage": 3, **({"offload_param": {"nvme_path": str(folder), **offload, **stays}} if offload else {})}
        torch.manual_seed(rank)  # the first rank's values count
        with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": block, "bf16": {"enabled": True}}):
            model = MODELS[model_name]()
        if offload and not stays["max_in_cpu"]:
            assert [path.name for path in folder.glob(f"*init_rank{rank}*")]
            assert all(p.ds_tensor.is_meta and p.partition_numel() == p.ds_tensor.numel() for p in model.parameters())
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            for param in model.parameters():
                param.add_(0.125 if rank == 0 else 7)
        engine = setting.engine(folder, model)
        assert not list(folder.glob(f"*init_rank{rank}*"))  # all values are the engine's now
        found.append(train(engine, setting.batches(world_size), rank))
        engine.destroy()
    return [_differences(each, found[0]) for each in found[1:]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("model", ["gpt", "lora"])
def test_a_model_that_is_built_in_files_trains_as_one_built_in_memory(model: str, world_size: int, tmp_path: Path) -> None:
    assert run_ranks(_built, world_size, tmp_path, model) == [[[], []]] * world_size
    assert list(tmp_path.iterdir()) == []


def _copied(rank: int, world_size: int, folder: Path) -> bool:
    block = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder), **NOTHING_STAYS}}
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": block}):
        model = build(TiedGpt)
    twin = copy.deepcopy(model)
    with deepspeed.zero.GatheredParameters(model.parameters()), deepspeed.zero.GatheredParameters(twin.parameters()):
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        return all(one is not other and torch.equal(one, other) for one, other in pairs)


def test_a_model_in_files_can_be_copied(tmp_path: Path) -> None:
    assert run_ranks(_copied, 2, tmp_path) == [True, True]


def _no_room_to_build(rank: int, world_size: int, folder: Path) -> str:
    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        shard_file.os.posix_fallocate = full
    block = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder), **NOTHING_STAYS}}
    with pytest.raises(FileIoError) as caught, deepspeed.zero.Init(config_dict_or_path={"zero_optimization": block}):
        build(TiedGpt)
    return str(caught.value)


def test_a_rank_without_room_for_the_model_stops_all_while_it_is_built(tmp_path: Path) -> None:
    texts = run_ranks(_no_room_to_build, 3, tmp_path)
    assert all("rank 1" in text and "shards needs 4096 bytes by now" in text for text in texts), texts


# -- reads overlap ----------------------------------------------------------------------------------------------------


def _reads(rank: int, world_size: int, folder: Path) -> list[str]:
    keys = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    offload = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 3, **NOTHING_STAYS}
    model = build(functools.partial(Layers, 8))
    settings = config(1, **zero(3, offload_param=offload, **keys))
    engine = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batches = make_batches(model, 2, 1, world_size)
    train(engine, batches[:1], rank)
    tier = engine._parts.partition.sharded[0].tier
    assert tier is not None
    layer_of = {offset: f"read {_layer_of(engine, bucket)}" for bucket, offset in tier._offsets.items()}
    log: list[str] = []
    original = IoEngine.read
    IoEngine.read = lambda self, file, offset, into: log.append(layer_of[offset]) or original(self, file, offset, into)
    for number, layer in enumerate(engine.module.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: log.append(f"run {number}"))
    engine(*batches[1][0][rank])
    IoEngine.read = original
    return log


class Layers(ManyTinyLayers):
    """Layers that are units of their own."""

    VALUES = 400


def _layer_of(engine: DeepSpeedEngine, bucket: int) -> str:
    flat = engine._parts.partition.sharded[0]
    slot = flat.layout.slots[flat.layout.buckets[bucket].first_slot]
    return flat.members[slot.index].name.split(".")[1]


def test_reads_are_ahead_of_their_use_by_as_many_buffers_as_there_are(tmp_path: Path) -> None:
    for log in run_ranks(_reads, 2, tmp_path):
        assert log[:4] == ["read 0", "read 1", "read 2", "read 3"][: len(log[:4])]
        for number in range(1, 5):
            ahead = [entry for entry in log[: log.index(f"run {number}")] if entry.startswith("read")]
            assert len(ahead) >= number + 3, (number, log)  # its own, and three more are on their way
        assert [entry for entry in log if entry.startswith("read")][:8] == [f"read {number}" for number in range(8)]


# -- refusals and faults ----------------------------------------------------------------------------------------------


def _refused(rank: int, world_size: int, folder: Path, offload: dict[str, Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        Setting().on(**offload).engine(folder)
    return str(caught.value)


def test_a_buffer_that_is_too_small_is_refused_before_training_with_the_size_that_works(tmp_path: Path) -> None:
    small = {"device": "nvme", "buffer_size": 20, **NOTHING_STAYS}
    texts = run_ranks(_refused, 2, tmp_path, small, ConfigError)
    assert texts[0] == texts[1]
    needed = int(texts[0].split("Set buffer_size to at least ")[1].split(",")[0])
    assert "buffer_size = 20 elements, but one rank's shard of the unit with" in texts[0]
    run_ranks(_trained_once, 2, tmp_path, {**small, "buffer_size": needed})
    assert run_ranks(_refused, 2, tmp_path, {**small, "buffer_size": needed - 1}, ConfigError)


def _trained_once(rank: int, world_size: int, folder: Path, offload: dict[str, Any]) -> None:
    setting = Setting().on(**offload)
    train(setting.engine(folder), setting.batches(world_size, 1), rank)


def _no_space(rank: int, world_size: int, folder: Path) -> str:
    original = IoEngine.open

    def full(self: IoEngine, path: Path, nbytes: int | None = None, *, create: bool = False) -> Any:
        if rank == 1:
            raise FileIoError(errno.ENOSPC, f"{path} needs {nbytes} bytes, 0 are free on its disk.")
        return original(self, path, nbytes, create=create)

    IoEngine.open = full  # type: ignore[method-assign]
    with pytest.raises(FileIoError) as caught:
        Setting().on(device="nvme", **NOTHING_STAYS).engine(folder)
    assert caught.value.errno == errno.ENOSPC
    return str(caught.value)


def test_a_rank_without_space_stops_all_before_training(tmp_path: Path) -> None:
    for text in run_ranks(_no_space, 3, tmp_path):
        assert "parameters needs" in text


def _cut_short(rank: int, world_size: int, folder: Path) -> str:
    setting = Setting(others=GATHERS).on(device="nvme", **NOTHING_STAYS)
    engine = setting.engine(folder)
    batches = setting.batches(world_size, 2)
    train(engine, batches[:1], rank)
    engine.save_checkpoint(folder.parent / "saved", "tag")
    if rank == world_size - 1:
        (path,) = folder.glob(f"*parameters_rank{rank}-*/parameters")
        with path.open("r+b") as file:
            file.truncate(100)
    with pytest.raises(FileIoError) as caught:
        train(engine, batches[1:], rank)
    _is_over(engine, batches, rank, folder)
    return str(caught.value)


def _is_over(engine: DeepSpeedEngine, batches: Any, rank: int, folder: Path) -> None:
    """Whatever is tried says the same on all ranks, and destroy() lets go of everything."""
    checkpoint = folder.parent / "saved"
    for attempt in (
        lambda: model_weights(engine),
        lambda: engine.load_checkpoint(checkpoint, "tag"),
        lambda: train(engine, batches[1:], rank),
        lambda: engine.save_16bit_model(folder.parent),
    ):
        with pytest.raises((UsageError, CheckpointError), match=r"could not be read or written before .* load a checkpoint"):
            attempt()
    engine.destroy()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_file_that_one_rank_cannot_read_is_an_error_on_all_that_names_file_and_rank(
    world_size: int, tmp_path: Path
) -> None:
    *others, own = run_ranks(_cut_short, world_size, tmp_path)
    assert "the file ends at byte 100" in own
    assert f"parameters_rank{world_size - 1}-" in own
    assert others == [f"rank {world_size - 1}: {own}"] * (world_size - 1)
    assert list(tmp_path.iterdir()) == []  # destroy() has removed the files all the same


def _diverges(rank: int, world_size: int, folder: Path) -> str:
    setting = Setting(model="branch").on(device="nvme", **NOTHING_STAYS)
    with pytest.raises(CommError) as caught:
        train(setting.engine(folder), setting.batches(world_size, 20), rank)
    return str(caught.value)


def test_ranks_that_run_different_modules_are_told_which(tmp_path: Path) -> None:
    for text in run_ranks(_diverges, 2, tmp_path):
        assert "All ranks" in text
        assert "module 'branch'" in text


def _write_fails(rank: int, world_size: int, folder: Path) -> str:
    setting = Setting(others=GATHERS).on(device="nvme", **NOTHING_STAYS)
    engine = setting.engine(folder)
    batches = setting.batches(world_size, 2)
    train(engine, batches[:1], rank)
    engine.save_checkpoint(folder.parent / "saved", "tag")
    if rank == 0:
        tier = engine._parts.partition.sharded[0].tier
        assert tier is not None
        tier._tier.file.file.is_writable = False
    with pytest.raises(FileIoError) as caught:
        train(engine, batches[1:], rank)
    _is_over(engine, batches, rank, folder)
    return str(caught.value)


def test_a_write_that_fails_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    own, other = run_ranks(_write_fails, 2, tmp_path)
    assert "open for reading only" in own
    assert other == "rank 0 " + own.removeprefix("rank 0 ")
    assert list(tmp_path.iterdir()) == []


def _below_stage_3(rank: int, world_size: int, folder: Path) -> list[int]:
    offload = {"device": "nvme", "nvme_path": str(folder), **NOTHING_STAYS}
    engine = make_engine(build(TiedGpt), config(**zero(2, offload_param=offload)))
    return _away(engine)


def test_below_stage_3_parameters_stay_where_they_are_and_the_user_is_settled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(_below_stage_3, 1, tmp_path) == [[]]
    assert capfd.readouterr().out.count("offload_param has no effect at stage 2: use stage 3") == 1
