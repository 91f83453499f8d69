"""Stage files that the original wrote, read as one checkpoint: every name and value is what the original gives out."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.reading.stages import StageSource
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError
from deepspeed.optim.schedules import WarmupLR
from tests.support.original_net import CLIENT_STATE, FIXTURES, ColumnAndRow, batch, full_weights, member_ranges

NET = ("stage1-fp32", "stage1-bf16-fp32acc", "stage2-bf16", "stage3-bf16")
OWN = ("stage2-roundrobin-bf16", "stage3-subgroups-bf16")
ALIGNED = "stage2-aligned-bf16"
TRAINED = ["emb.weight", "fc1.weight", "fc1.bias", "fc2.weight", "norm.weight", "norm.bias"]


def open_case(case: str) -> StageSource:
    return StageSource(FIXTURES / case / "step3", "step3", Alone())


def expected(case: str, file: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / case / f"{file}.safetensors")


def whole(source: CheckpointSource, name: str) -> Tensor:
    return source.read(name).view(source.shape(name))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].float(), value.float(), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("case", NET)
def test_full_weights_equal_those_of_the_original_s_own_consolidation(case: str) -> None:
    source: CheckpointSource = open_case(case)
    source.check_own_share()
    assert_same(full_weights(source), expected(case, "expected_fp32"))


@pytest.mark.parametrize("case", [*NET, *OWN, ALIGNED])
def test_the_state_is_settled_in_our_terms(case: str) -> None:
    source = open_case(case)
    state = source.state
    assert (state["global_steps"], state["global_samples"], state["skipped_steps"], state["micro_steps"]) == (3, 24, 0, 6)
    assert (state["dp_world_size"], state["zero_stage"]) == (2, int(case[5]))
    assert state["shared_parameters"] == {"head.weight": "emb.weight"}
    assert state["frozen_parameters"] == ["frozen.weight", "frozen.bias"]
    assert state["has_frozen_parameters"]
    assert state["buffers"] == ["seen"]
    assert state["lr_scheduler"] == {"last_batch_iteration": 2}
    assert state["ds_config"] is not None
    assert state["ds_config"]["gradient_clipping"] == 1.0
    assert state["data"] is None
    assert state["loss_scaler"] == {}
    optimizer = state["optimizer"]
    assert optimizer is not None
    assert [group["weight_decay"] for group in optimizer["groups"]] == [0.01, 0.0][: len(optimizer["groups"])]
    assert optimizer["groups"][0]["betas"] == (0.9, 0.95)
    assert "params" not in optimizer["groups"][0]
    assert sorted(name for names in optimizer["members"] for name in names) == sorted(TRAINED)
    assert optimizer["scalars"] == {name: {"step": 3.0} for name in TRAINED}
    assert source.client_state() == CLIENT_STATE
    assert source.client_state() is not source.client_state()
    assert source.rank_state(0) == source.rank_state(7) == {}


@pytest.mark.parametrize("case", [*NET, *OWN, ALIGNED])
def test_weights_stand_under_their_names_once_with_masters_only_in_16_bit(case: str) -> None:
    source = open_case(case)
    masters = source.names("master/")
    assert masters == ([] if "fp32" in case.split("-") else sorted(f"master/{name}" for name in TRAINED))
    modules = {"seen", "frozen.weight", "frozen.bias"} | (set() if case.startswith("stage3") else set(TRAINED))
    assert source.names("module/") == sorted(f"module/{name}" for name in modules)
    assert source.dtype("module/seen") == torch.float32
    assert source.dtype("module/frozen.weight") == (torch.float32 if masters == [] else torch.bfloat16)
    for name in masters:
        assert source.dtype(name) == torch.float32
        rounded = name.replace("master/", "module/")
        if rounded in source.names():
            assert torch.equal(whole(source, name).bfloat16(), whole(source, rounded))


def test_groups_are_those_of_the_optimizer_whatever_order_or_sub_groups_the_shards_have() -> None:
    for case in OWN:
        optimizer = open_case(case).state["optimizer"]
        assert optimizer is not None
        assert [set(names) for names in optimizer["members"]] == [
            {"emb.weight", "fc1.weight", "fc2.weight"},
            {"fc1.bias", "norm.weight", "norm.bias"},
        ]


def test_masters_and_moments_of_sub_groups_equal_what_the_original_s_functions_gave() -> None:
    source = open_case("stage3-subgroups-bf16")
    for key, value in expected("stage3-subgroups-bf16", "expected_state").items():
        kind, name = key.split("/", 1)
        stored = f"master/{name}" if kind == "fp32" else f"optimizer/{name}/{kind}"
        assert torch.equal(whole(source, stored), value), key


def test_reordered_parameters_are_found_where_they_lie_and_not_where_the_shards_say() -> None:
    """The original's own functions for whole values are misled here: what they gave differs from the model."""
    source = open_case("stage2-roundrobin-bf16")
    given = expected("stage2-roundrobin-bf16", "expected_state")
    for name in TRAINED:
        master = whole(source, f"master/{name}")
        assert torch.equal(master.bfloat16(), whole(source, f"module/{name}"))
        assert torch.equal(master, given[f"fp32/{name}"]) is (name in ("emb.weight", "fc1.bias"))


def test_padding_between_parameters_is_left_out() -> None:
    source = open_case(ALIGNED)
    given = expected(ALIGNED, "expected_state")
    for name in TRAINED:
        assert torch.equal(whole(source, f"master/{name}"), given[f"fp32/{name}"])
        assert torch.equal(whole(source, f"master/{name}").bfloat16(), whole(source, f"module/{name}"))


@pytest.mark.parametrize("case", NET)
def test_moments_lie_where_the_masters_lie(case: str) -> None:
    """All flat tensors of a shard have one layout: check it against the one that the values show, the master's."""
    source = open_case(case)
    assert source.names("optimizer/") == sorted(f"optimizer/{n}/{k}" for n in TRAINED for k in ("exp_avg", "exp_avg_sq"))
    for name in TRAINED:
        square = whole(source, f"optimizer/{name}/exp_avg_sq")
        assert square.shape == expected(case, "expected_fp32")[name].shape
        assert square.min() >= 0
        assert square.max() > 0
    # The embedding's rows of tokens that no batch has got no gradient from the input, and all get one from the head.
    assert whole(source, "optimizer/emb.weight/exp_avg_sq").count_nonzero() == 17 * 12


def test_any_range_is_read_across_ranks_and_into_any_dtype() -> None:
    source = open_case("stage1-fp32")
    value = whole(source, "module/fc1.weight").flatten()  # elements 0-159 lie on rank 0, the rest on rank 1
    for start, length in ((0, 240), (150, 20), (159, 2), (160, 80), (239, 1), (7, 0)):
        assert torch.equal(source.read("module/fc1.weight", start, length), value[start : start + length])
    out = torch.empty(20, dtype=torch.float64)
    assert source.read("module/fc1.weight", 150, out=out) is out
    assert torch.equal(out, value[150:170].double())
    with pytest.raises(ArgumentError, match="has 240 elements"):
        source.read("module/fc1.weight", 230, 20)
    with pytest.raises(ArgumentError, match="Nearest names: 'module/fc1"):
        source.read("module/fc1.weights")


@pytest.mark.parametrize("case", ["pipeline-fp32", "pipeline-stage1-bf16"])
def test_a_pipeline_s_layers_become_one_model(case: str) -> None:
    source = open_case(case)
    tied = "0.weight" if case == "pipeline-fp32" else "tied_modules.emb.weight"
    layers = {f"module/{int(name[6:8])}.{name[9:]}": value for name, value in expected(case, "expected_layers").items()}
    layers[f"module/{tied}"] = layers.pop("module/0.weight")
    assert_same({name: whole(source, name) for name in source.names("module/")}, layers)
    if case == "pipeline-stage1-bf16":
        assert_same(full_weights(source), expected(case, "expected_fp32"))
    names = [name.removeprefix("module/") for name in layers]
    assert source.names("optimizer/") == sorted(f"optimizer/{n}/{k}" for n in names for k in ("exp_avg", "exp_avg_sq"))
    assert all(source.shape(f"optimizer/{name}/exp_avg") == source.shape(f"module/{name}") for name in names)
    state = source.state
    assert state["optimizer"] is not None
    assert sorted(state["optimizer"]["members"][0]) == sorted(names)
    assert (state["zero_stage"], state["dp_world_size"], state["global_samples"]) == (int("stage1" in case), 1, 12)


def test_both_stages_of_a_pipeline_without_zero_hold_the_same_moments_of_the_tied_layer() -> None:
    """So it does not matter which of the two is taken."""
    folder = FIXTURES / "pipeline-fp32/step3"
    first, second = (load_archive(folder / f"mp_rank_0{rank}_model_states.pt")["optimizer"]["state"][0] for rank in (0, 1))
    assert torch.equal(first["exp_avg"], second["exp_avg"])
    found = open_case("pipeline-fp32")
    assert torch.equal(whole(found, "optimizer/0.weight/exp_avg"), first["exp_avg"])


@pytest.mark.parametrize("case", ["moe-stage0-fp32", "moe-stage2-bf16"])
def test_experts_stand_under_their_global_numbers(case: str) -> None:
    source = open_case(case)
    weights = expected(case, "expected_weights")
    assert_same({n.removeprefix("module/"): whole(source, n) for n in source.names("module/")}, weights)
    if case == "moe-stage2-bf16":
        assert source.names("master/") == sorted(f"master/{name}" for name in weights)
        for name, value in weights.items():
            assert torch.equal(whole(source, f"master/{name}").bfloat16(), value), name
    assert source.names("optimizer/") == sorted(f"optimizer/{n}/{k}" for n in weights for k in ("exp_avg", "exp_avg_sq"))
    optimizer = source.state["optimizer"]
    assert optimizer is not None
    assert [group["name"] for group in optimizer["groups"]] == ["all", "ep_size_2"]
    assert [len(names) for names in optimizer["members"]] == [4, 16]


def test_moments_of_experts_are_those_of_the_rank_that_trained_them() -> None:
    sources = [open_case("moe-stage0-fp32"), open_case("moe-stage2-bf16")]
    name = "optimizer/moe.deepspeed_moe.experts.deepspeed_experts.{}.0.weight/exp_avg_sq"
    means = [[float(whole(source, name.format(expert)).mean()) for expert in range(4)] for source in sources]
    # The same model and data in fp32 and bf16: each expert's statistic agrees with its own, and no two experts are alike.
    for expert in range(4):
        assert math.isclose(means[0][expert], means[1][expert], rel_tol=0.1)
        others = [means[1][other] for other in range(4) if other != expert]
        assert all(not math.isclose(means[0][expert], other, rel_tol=0.1) for other in others)


@pytest.mark.parametrize(("case", "tolerance"), [("tp2-stage0-fp32", 1e-6), ("tp2-stage1-bf16", 4e-3)])
def test_tensor_parallel_slices_make_up_the_model_that_was_trained(case: str, tolerance: float) -> None:
    """The loss of the next batch is what the original got from its slices; bf16 rounds to 8 bits: 2**-8 = 4e-3."""
    source = open_case(case)
    model = ColumnAndRow()
    weights = {name: whole(source, f"module/{name}") for name in model.state_dict()}
    assert source.names("module/") == sorted(f"module/{name}" for name in weights)
    model.load_state_dict(weights)
    report = json.loads((FIXTURES / case / "expected_resume.json").read_text())
    loss = model(*batch(3, 0, 0)).item()
    assert math.isclose(loss, report[0]["losses"][0], rel_tol=tolerance)
    for name, value in weights.items():
        assert source.shape(f"optimizer/{name}/exp_avg") == tuple(value.shape)
    if case == "tp2-stage1-bf16":
        assert all(torch.equal(whole(source, f"master/{n}").bfloat16(), value) for n, value in weights.items())


def test_without_zero_ambiguous_names_of_moments_are_refused_but_weights_are_read() -> None:
    source = open_case("stage0-fp32")
    for name, value in expected("stage0-fp32", "expected_state").items():
        if name.startswith("fp32/"):
            assert torch.equal(whole(source, f"module/{name.removeprefix('fp32/')}"), value)
    assert source.state["shared_parameters"] == {"head.weight": "emb.weight"}  # by what shares storage: nothing lists it
    assert source.names() == source.names("module/")
    with pytest.raises(CheckpointError, match=r"norm\.weight, norm\.bias, frozen\.bias.*load_optimizer_states=False"):
        source.names("optimizer/")


def test_without_zero_the_caller_s_names_give_every_moment_its_place() -> None:
    source = open_case("stage0-fp32").with_members([TRAINED])
    for key, value in expected("stage0-fp32", "expected_state").items():
        kind, name = key.split("/", 1)
        assert torch.equal(whole(source, f"module/{name}" if kind == "fp32" else f"optimizer/{name}/{kind}"), value), key
    assert source.state["frozen_parameters"] == ["frozen.weight", "frozen.bias"]
    assert source.state["optimizer"] is not None
    assert source.state["optimizer"]["members"] == [TRAINED]


def test_names_that_are_not_needed_or_do_not_fit_change_nothing() -> None:
    for case in ("stage1-fp32", "stage0-bf16"):
        source = open_case(case)
        assert source.with_members([["other"]]) is source
    with pytest.raises(CheckpointError, match="do not fit"):
        open_case("stage0-fp32").with_members([["other"]]).names("optimizer/")


def test_without_zero_16_bit_masters_tell_the_names_themselves() -> None:
    source = open_case("stage0-bf16")
    assert source.names("master/") == sorted(f"master/{name}" for name in TRAINED)
    for key, value in expected("stage0-bf16", "expected_state").items():
        kind, name = key.split("/", 1)
        if kind == "fp32":  # recorded from the model, in bf16
            assert torch.equal(whole(source, f"master/{name}").bfloat16().float(), value)
        else:
            assert torch.equal(whole(source, f"optimizer/{name}/{kind}"), value)
    assert source.state["loss_scaler"] == {}


def test_the_stored_schedule_goes_on_in_ours() -> None:
    weights = [torch.nn.Parameter(torch.ones(1))]
    schedule = WarmupLR(torch.optim.SGD(weights, lr=1.0), 0.001, 0.01, 4, "linear")
    state = open_case("stage1-fp32").state["lr_scheduler"]
    assert state is not None
    schedule.load_state_dict(dict(state))  # type: ignore[arg-type]
    schedule.step()
    report = json.loads((FIXTURES / "stage1-fp32/expected_resume.json").read_text())
    assert schedule.get_last_lr() == pytest.approx([report[0]["lr_after_step"][0]], rel=1e-12)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Any:
    def make(case: str) -> Path:
        return Path(shutil.copytree(FIXTURES / case / "step3", tmp_path / case))

    return make


@pytest.mark.parametrize(
    ("case", "missing", "text"),
    [
        ("stage2-bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "optimizer shards of mp_rank 0 1: 2 were saved"),
        ("stage3-bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt", "model states of mp_rank 0 1"),
        ("pipeline-stage1-bf16", "mp_rank_01_model_states.pt", "lacks the mp_rank 1"),
        ("stage2-bf16", "mp_rank_00_model_states.pt", r"no \*_model_states.pt"),
    ],
)
def test_a_missing_file_is_settled(copy: Any, case: str, missing: str, text: str) -> None:
    folder = copy(case)
    (folder / missing).unlink()
    with pytest.raises(CheckpointDamagedError, match=text):
        StageSource(folder, "step3", Alone())


def test_without_any_shard_the_16_bit_weights_are_read_and_the_moments_refused(copy: Any) -> None:
    folder = copy("stage2-bf16")
    for path in folder.glob("*optim*"):
        path.unlink()
    source = StageSource(folder, "step3", Alone())
    assert torch.equal(whole(source, "module/fc1.bias"), whole(open_case("stage2-bf16"), "module/fc1.bias"))
    assert source.names("master/") == []
    with pytest.raises(CheckpointDamagedError, match=r"no \*_optim_states"):
        source.names("optimizer/")
    folder = copy("stage3-bf16")
    for path in folder.glob("*optim*"):
        path.unlink()
    with pytest.raises(CheckpointDamagedError, match="stage 3"):
        StageSource(folder, "step3", Alone())


def test_shards_that_do_not_belong_to_the_model_states_are_told(copy: Any) -> None:
    folder = copy("stage2-bf16")
    other = FIXTURES / "stage2-roundrobin-bf16/step3"
    for path in folder.glob("*optim*"):
        shutil.copy(other / path.name, path)
    with pytest.raises(CheckpointDamagedError, match=r"stage2-bf16: "):
        StageSource(folder, "step3", Alone())


def test_damage_of_each_file_is_named_by_the_rank_that_checks_it(copy: Any) -> None:
    folder = copy("stage1-fp32")

    class Pair(Alone):
        world_size = 2

    for path in sorted(folder.glob("*.pt")):
        whole_content = path.read_bytes()
        content = bytearray(whole_content)
        _, start, nbytes = max(member_ranges(path), key=lambda member: member[2])
        content[start + nbytes // 2] ^= 4
        sources = []
        for rank in range(2):
            ranks = Pair()
            ranks.rank = rank
            sources.append(StageSource(folder, "step3", ranks))
        path.write_bytes(content)
        errors = []
        for source in sources:
            try:
                source.check_own_share()
            except CheckpointDamagedError as error:
                errors.append(str(error))
        assert len(errors) == 1
        assert path.name in errors[0]
        path.write_bytes(whole_content)


def test_files_of_the_user_in_the_folder_are_left_alone(copy: Any) -> None:
    folder = copy("stage1-fp32")
    (folder / "notes.pt").write_bytes(b"mine")
    (folder / "more").mkdir()
    StageSource(folder, "step3", Alone()).check_own_share()


def test_shards_of_the_other_precision_left_over_under_the_tag_are_not_taken(copy: Any) -> None:
    folder = copy("stage2-bf16")
    for path in (FIXTURES / "stage1-fp32/step3").glob("*optim*"):
        shutil.copy(path, folder / path.name)
    source = StageSource(folder, "step3", Alone())
    assert_same(full_weights(source), expected("stage2-bf16", "expected_fp32"))


@pytest.mark.parametrize("case", ["stage2-bf16", "stage3-bf16"])
def test_frozen_parameters_that_were_left_out_are_not_there_and_may_lack(copy: Any, case: str) -> None:
    """From stage 2 on the original lists them as None then, and as an empty dictionary where the model has none."""
    folder = copy(case)
    for path in folder.glob("*model_states.pt"):
        content = load_archive(path, mmap=False)
        for name in ("frozen.weight", "frozen.bias"):
            del content["module"][name]
        content["frozen_param_shapes"] = content["frozen_param_fragments"] = None
        torch.save(content, path)
    source = StageSource(folder, "step3", Alone())
    assert not source.state["has_frozen_parameters"]
    assert not [name for name in source.names() if "frozen" in name]
    assert open_case("moe-stage2-bf16").state["has_frozen_parameters"]


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


@pytest.mark.parametrize("case", ["stage2-bf16", "pipeline-fp32", "moe-stage0-fp32"])
def test_a_bomb_in_any_file_is_refused_by_name_and_does_not_run(copy: Any, case: str, tmp_path: Path) -> None:
    folder = copy(case)
    (tmp_path / "latest").write_text(case)
    for path in sorted(folder.glob("*.pt")):
        whole_content = path.read_bytes()
        torch.save({**load_archive(path, mmap=False), "more": Bomb(tmp_path / "ran")}, path)
        with pytest.raises(CheckpointError, match=rf"{path.name} names .*\bposix\.system"):
            open_checkpoint(tmp_path)
        path.write_bytes(whole_content)
    assert not (tmp_path / "ran").exists()
    assert open_checkpoint(tmp_path).tag == case
