"""Lost files and entries of the original's layouts are named; what may honestly lack is not called damage."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.opening import open_folder
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.files import ExpertFile
from deepspeed.checkpoint.original.pickles import save_archive
from deepspeed.checkpoint.original.reading.completeness import (
    check_experts,
    check_layer_slices,
    check_optimizer_state,
    check_same_names,
    check_trained_layers,
    check_weights,
    expert_ranks_of,
)
from deepspeed.checkpoint.original.reading.pipeline import Shape
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.checkpoint.tools.damage import verify_tag
from deepspeed.checkpoint.tools.places import Place
from deepspeed.errors import CheckpointDamagedError, CheckpointError
from tests.support.original_net import FIXTURES

Copy = Callable[..., Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A fixture's folder without the files of some patterns."""

    def make(case: str, *lost: str) -> Path:
        tag = next(path for path in (FIXTURES / case).iterdir() if path.is_dir())
        folder = Path(shutil.copytree(tag, tmp_path / tag.name))
        for pattern in lost:
            files = list(folder.glob(pattern))
            assert files, f"{pattern} is in the fixture"
            for file in files:
                file.unlink()
        return folder

    return make


def opened(folder: Path) -> CheckpointSource:
    return open_folder(folder, folder.name, Alone())


@pytest.mark.parametrize(
    ("case", "lost", "text"),
    [
        ("moe-stage0-fp32", "layer_0_expert_1_*", "layer_0_expert_1_"),
        ("moe-stage0-fp32", "layer_0_expert_3_*", "layer_0_expert_3_"),
        ("moe-stage2-bf16", "layer_0_expert_0_*", "layer_0_expert_0_"),
        ("moe-stage2-bf16", "layer_0_expert_*", r"layer_0_expert_0_.*layer_0_expert_3_"),
        ("moe-stage0-fp32", "expp_rank_0_*", r"expp_rank \(.*\) 0"),
        ("moe-stage0-fp32", "expp_rank_1_*", r"expp_rank \(.*\) 1"),
        ("pipeline-fp32", "layer_00*", r"1 of shape \(17, 12\)\) than the layers 1, 2, 3, which"),
        ("pipeline-fp32", "layer_02*", r"1 of shape \(12, 12\).* than the layers 0, 1, 3, which"),
        ("pipeline-fp32", "layer_03*", "than the layers 0, 1, 2, which"),
        ("pipeline-fp32", "layer_*", r"no layer_\*-model_states"),
        ("pipeline-stage1-bf16", "layer_00*", r"'tied_modules.emb.weight'.*a layer_\*"),
        ("pipeline-stage1-bf16", "layer_02*", r"'2.a.weight'.*layer_02-"),
        ("pipeline-stage1-bf16", "layer_03*", r"'3.a.weight'.*layer_03-"),
        ("pipeline-stage1-bf16", "*mp_rank_01_optim*", "mp_rank_01_optim_states"),
        ("tp2-stage1-bf16", "*mp_rank_00_optim*", "mp_rank_00_optim_states"),
        ("tp2-stage1-bf16", "*mp_rank_01_optim*", "mp_rank_01_optim_states"),
        ("tp2-stage0-fp32", "mp_rank_01*", "mp_rank 1"),
        ("universal-from-stage2-bf16", "zero/fc1.weight/exp_avg.pt", "lacks exp_avg of 'fc1.weight', which"),
        ("universal-from-stage3-bf16", "zero/fc1.weight/exp_avg*.pt", "exp_avg of 'fc1.weight', exp_avg_sq of 'fc1.weight'"),
        ("universal-from-stage1-fp32", "zero/fc1.weight/step.pt", "step of 'fc1.weight'"),
        ("universal-from-stage2-bf16", "zero/*/exp_avg.pt", "exp_avg of 'emb.weight'.* and 1 more"),
        ("universal-from-stage2-bf16", "zero/*/exp_avg_sq.pt", "exp_avg_sq of 'emb.weight'"),
        (
            "universal-from-stage3-bf16",
            "zero/*/exp_avg*.pt",
            "exp_avg of 'emb.weight'.*For the weights alone, remove zero/opt",
        ),
        ("universal-from-stage2-bf16", "zero/*/step.pt", "step of 'emb.weight'"),
        ("universal-from-stage2-bf16", "zero/optimizer_state.pt", "lacks zero/optimizer_state.pt"),
        ("universal-from-stage3-bf16", "zero_pp_rank_1_*", "model states of mp_rank 0 1"),
    ],
)
def test_a_lost_file_is_named_when_the_checkpoint_is_opened(copy: Copy, case: str, lost: str, text: str) -> None:
    folder = copy(case, lost)
    with pytest.raises(CheckpointDamagedError, match=text) as caught:
        opened(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("case", "lost", "dtype"),
    [
        ("stage2-bf16", "*optim_states.pt", "torch.bfloat16, torch.float32"),
        ("pipeline-stage1-bf16", "*optim_states.pt", "torch.bfloat16"),
        ("tp2-stage1-bf16", "*optim_states.pt", "torch.bfloat16"),
        ("moe-stage2-bf16", "*optim_states.pt", "torch.bfloat16"),
        ("moe-stage0-fp32", "expp_*", "torch.float32"),
    ],
)
def test_without_any_optimizer_file_the_weights_are_read_with_a_warning_and_the_state_is_damage(
    copy: Copy, caplog: pytest.LogCaptureFixture, case: str, lost: str, dtype: str
) -> None:
    whole = opened(FIXTURES / case / "step3")
    assert not caplog.records
    folder = copy(case, lost)
    with caplog.at_level(logging.WARNING):
        source = opened(folder)
        source.with_members([["any"]])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"as the model held them ({dtype})" in caplog.text
    assert source.names("master/") == []
    assert source.names("module/") == whole.names("module/")
    for name in source.names("module/"):
        assert torch.equal(source.read(name), whole.read(name))
    assert source.state["optimizer"] is not None
    with pytest.raises(CheckpointDamagedError, match=r"there are no .*_optim_states.pt.*load_optimizer_states=False"):
        source.names("optimizer/")
    assert "there are no" in "".join(verify_tag(Place(folder.parent, "step3", folder)).faults)


def test_state_that_is_refused_for_other_reasons_is_no_damage() -> None:
    folder = FIXTURES / "stage0-fp32/step3"
    with pytest.raises(CheckpointError):
        opened(folder).names("optimizer/")
    assert verify_tag(Place(folder.parent, "step3", folder)).faults == []


def _change(path: Path, change: Callable[[Any], object]) -> None:
    content = load_archive(path, mmap=False)
    change(content)
    path.unlink()
    save_archive(content, path)


@pytest.mark.parametrize(
    ("case", "file", "change", "text"),
    [
        ("stage2-bf16", "mp_rank_00*", lambda c: c["module"].pop("fc1.weight"), "list 'fc1.weight'"),
        ("stage2-bf16", "mp_rank_00*", lambda c: c["module"].pop("seen"), "list 'seen'"),
        (
            "stage2-bf16",
            "mp_rank_00*",
            lambda c: [c[key].pop("frozen.bias") for key in ("module", "frozen_param_fragments")],
            "list 'frozen.bias'",
        ),
        ("tp2-stage0-fp32", "mp_rank_01*", lambda c: c["module"].pop("up.bias"), "rank 1 of 2 has no weight of 'up.bias'"),
        ("pipeline-stage1-bf16", "layer_01*", lambda c: c.pop("n.bias"), "holds '1.n.bias'.*layer_01-"),
    ],
)
def test_a_lost_weight_is_named(copy: Copy, case: str, file: str, change: Callable[[Any], object], text: str) -> None:
    folder = copy(case)
    _change(next(folder.glob(file)), change)
    with pytest.raises(CheckpointDamagedError, match=text):
        opened(folder)


@pytest.mark.parametrize(
    ("case", "rank", "key", "text"),
    [
        ("stage2-bf16", 1, "exp_avg", "shard of rank 1 lacks exp_avg for 'fc1.weight'"),
        ("stage2-bf16", 0, "exp_avg_sq", "shard of rank 0 lacks exp_avg_sq for 'fc1.weight'"),
        ("stage3-bf16", 1, "step", "shard of rank 1 lacks step for 'emb.weight'"),
    ],
)
def test_state_that_one_shard_lacks_is_named(copy: Copy, case: str, rank: int, key: str, text: str) -> None:
    folder = copy(case)
    inner = "optimizer_state_dict" if case.startswith("stage3") else "base_optimizer_state"
    for path in folder.glob(f"bf16_zero_pp_rank_{rank}_*"):
        _change(path, lambda content: content["optimizer_state_dict"][inner]["state"][0].pop(key))
    with pytest.raises(CheckpointDamagedError, match=text):
        opened(folder)


# -- the rules by themselves ----------------------------------------------------------------------------------------------


def _experts(*numbers: tuple[int | None, int]) -> list[ExpertFile]:
    return [ExpertFile(layer, expert, 0, "") for layer, expert in numbers]


def test_experts_are_counted_layer_by_layer() -> None:
    check_experts([], {})
    check_experts(_experts((0, 0), (0, 1), (1, 0)), {"num_experts": [2, 1]})
    check_experts(_experts((None, 0), (None, 1)), {"num_experts": [2]})
    with pytest.raises(CheckpointDamagedError, match="layer_1_expert_0_"):
        check_experts(_experts((0, 0), (0, 1)), {"num_experts": [2, 1]})
    with pytest.raises(CheckpointDamagedError, match="layer_3_expert_1_"):
        check_experts(_experts((3, 0), (3, 2)), {})
    check_experts([], {"num_experts": [4], "ds_autoep_layers": {"0": {}}})


def test_expert_parallel_ranks_are_told_by_the_names_of_the_groups() -> None:
    groups = [{"name": "all"}, {"name": "ep_size_2", "moe": True}, {"name": "ep_size_4", "moe": True}]
    assert expert_ranks_of({"param_groups": groups}) == 4
    assert expert_ranks_of({"param_groups": [{"name": "mine", "moe": True}]}) == 1
    assert expert_ranks_of({"param_groups": groups[:1]}) == expert_ranks_of(None) == 0


def test_weights_of_stage_3_and_of_a_pipeline_lie_elsewhere() -> None:
    model = {"module": {}, "param_shapes": [{"a": (2,)}]}
    check_weights(model, {}, is_sharded=True)
    check_weights({**model, "module": None}, {}, is_sharded=False)
    check_weights({"module": {}, "frozen_param_shapes": {"f": (1,)}, "frozen_param_fragments": None}, {}, is_sharded=False)
    with pytest.raises(CheckpointDamagedError, match="list 'a'"):
        check_weights(model, {"a": (0,)}, is_sharded=False)


def test_slices_that_one_tensor_parallel_rank_lacks_are_named() -> None:
    check_same_names("weight", [{"a", "b"}, {"b", "a"}])
    with pytest.raises(CheckpointDamagedError, match="rank 0 of 2 has no weight of 'b'"):
        check_same_names("weight", [{"a": 0}, {"a": 0, "b": 0}])
    with pytest.raises(CheckpointDamagedError, match="layer 01 has 1 of 2"):
        check_layer_slices({0: [1, 2], 1: [1]}, 2)


def _entry(fill: float, *shape: int) -> dict[str, Any]:
    return {"step": torch.tensor(3.0), "exp_avg": torch.full(shape, fill)}


def test_a_tied_layer_needs_one_file_even_if_only_a_part_of_it_is_tied() -> None:
    tied, bias, late_bias, other = _entry(1, 9, 4), _entry(2, 9), _entry(3, 9), _entry(4, 4, 4)
    layers: dict[int, list[Shape]] = {0: [(9, 4), (9,)], 1: [(4, 4)]}
    check_trained_layers(layers, [[tied, bias], [tied, late_bias, other]])
    check_trained_layers({0: [(9, 4)], 4: [(4, 4)]}, [[tied], [other, tied]])
    with pytest.raises(CheckpointDamagedError, match=r"1 of shape \(4, 4\)\) than the layers 0, which"):
        check_trained_layers({0: layers[0]}, [[tied, bias], [tied, late_bias, other]])


def test_frozen_layers_and_entries_without_state_ask_for_nothing() -> None:
    check_trained_layers({0: [(2,)], 5: [(3,)]}, [[{}, {}], [_entry(1, 3)]])


ADAM = {"lr": 1, "betas": (0.9, 0.9), "eps": 1e-8}
FULL = {"exp_avg", "exp_avg_sq", "step"}


def _check(keys: dict[str, set[str]], group: dict[str, Any], *, steps: int = 3, **more: Any) -> None:
    arguments: dict[str, Any] = {"members": [list(keys)], "dims": {}, "may_lack_all": False, "steps": steps, **more}
    check_optimizer_state([group], keys=keys, **arguments)


def test_optimizers_of_other_kinds_keep_the_state_they_keep() -> None:
    _check({"a": FULL, "b": FULL}, ADAM)
    _check({"a": FULL - {"step"}}, {**ADAM, "step": 3})
    _check({"a": set(), "b": set()}, ADAM, steps=0)
    _check({"a": set()}, {"lr": 1, "momentum": 0.0})
    _check({"a": {"exp_avg"}}, {"lr": 1, "betas": (0.9, 0.9)})  # Lion
    _check({"a": {"exp_avg", "exp_inf", "step"}}, ADAM)  # Adamax
    _check({"a": {"momentum_buffer"}}, {**ADAM, "use_muon": True})
    _check({"a": {"row"}, "b": {"exp_avg_sq"}}, {"lr": 1}, dims={"a": 2, "b": 1})  # Adafactor


def test_a_parameter_that_never_had_a_gradient_may_have_no_state_but_not_half_of_it() -> None:
    _check({"a": FULL, "b": set()}, ADAM, may_lack_all=True)
    with pytest.raises(CheckpointDamagedError, match="exp_avg of 'b'"):
        _check({"a": FULL, "b": set()}, ADAM)
    with pytest.raises(CheckpointDamagedError, match="step of 'b'"):
        _check({"a": FULL, "b": FULL - {"step"}}, ADAM, may_lack_all=True)


def test_groups_of_unknown_members_are_compared_where_they_are_alike() -> None:
    keys = {"a": FULL, "b": {"momentum_buffer"}}
    check_optimizer_state([ADAM, {"momentum": 1}], [], keys, dims={}, may_lack_all=False, steps=3)
    with pytest.raises(CheckpointDamagedError, match="momentum_buffer of 'a'"):
        check_optimizer_state([ADAM, ADAM], [], keys, dims={}, may_lack_all=False, steps=3)
