"""Several models, layers of experts, and parts of layers: what one Accelerator and its plugins may hold with us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from tests.support.accelerate_runs import RATE, Recipe, assert_same_weights, build_accelerator, fits, prepared, weights
from tests.support.clients import Sentences, assert_same_curve, tiny_llama, tiny_llama_config
from tests.support.ranks import run_ranks

ROWS = 4


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **more,
    }


def _accelerator(stages: dict[str, int] | None) -> Any:
    """With a plugin per name; without, the reference under DDP."""
    from accelerate import Accelerator, InitProcessGroupKwargs, data_loader
    from accelerate.utils import DeepSpeedPlugin

    data_loader.is_datasets_available = lambda: False  # none of ours is one; to import and see takes a rank 2 s
    plugins = stages and {name: DeepSpeedPlugin(hf_ds_config=_config(stage)) for name, stage in stages.items()}
    gloo = InitProcessGroupKwargs(backend="gloo")
    return Accelerator(cpu=plugins is None, deepspeed_plugins=plugins, kwargs_handlers=[gloo])


def _select(accelerator: Any, stages: dict[str, int] | None, name: str) -> None:
    if stages is not None:
        accelerator.state.select_deepspeed_plugin(name)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def _loader() -> Any:
    return DataLoader(Sentences(), batch_size=ROWS)


def _distils(rank: int, world_size: int, stages: dict[str, int] | None) -> dict[str, Any]:
    """A student learns from a frozen teacher, as in Accelerate's guide for several models."""
    accelerator = _accelerator(stages)
    _select(accelerator, stages, "student")
    model = tiny_llama()
    student, optimizer, batches = accelerator.prepare(model, _adamw(model), _loader())
    _select(accelerator, stages, "teacher")
    frozen = tiny_llama(seed=1).requires_grad_(False).eval()
    teacher = accelerator.prepare(frozen) if stages is not None else frozen
    kept = {name: value.detach().clone() for name, value in tiny_llama(seed=1).state_dict().items()}
    losses, norms = [], []
    for batch in batches:
        with torch.no_grad():
            wanted = teacher(**batch).logits
        out = student(**batch)
        loss = out.loss + nn.functional.mse_loss(out.logits, wanted)
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(student.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = weights(accelerator, teacher)
    assert after is None or all(torch.equal(after[name], value) for name, value in kept.items())
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize(("student", "teacher"), [(0, 3), (2, 3), (3, 3), (2, 0), (3, 0)])
def test_a_frozen_teacher_stands_beside_the_engine_that_trains(student: int, teacher: int) -> None:
    expected = run_ranks(_distils, 2, None, init=False)
    got = run_ranks(_distils, 2, {"student": student, "teacher": teacher}, init=False)
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)


def _trains_two(rank: int, world_size: int, stages: dict[str, int] | None) -> dict[str, Any]:
    """Two models, each with an Accelerator of its own: the way with us, as one Accelerator keeps one engine."""
    from accelerate import Accelerator

    first = _accelerator(stages)
    second = Accelerator(cpu=stages is None)
    models = [tiny_llama(seed=0), tiny_llama(seed=1)]
    _select(first, stages, "first")
    one, one_optimizer, batches = first.prepare(models[0], _adamw(models[0]), _loader())
    _select(second, stages, "second")
    two, two_optimizer = second.prepare(models[1], _adamw(models[1]))
    losses: list[float] = []
    for batch in batches:
        for accelerator, model, optimizer in ((first, one, one_optimizer), (second, two, two_optimizer)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses}


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 3), (0, 1)])
def test_two_models_train_side_by_side(first: int, second: int) -> None:
    expected = run_ranks(_trains_two, 2, None, init=False)
    got = run_ranks(_trains_two, 2, {"first": first, "second": second}, init=False)
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_curve(ours["losses"], theirs["losses"])


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "architectures": ["MixtralForCausalLM"]}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**{**tiny_llama_config().to_diff_dict(), **own, "model_type": "mixtral"}))


def _routes(rank: int, world_size: int, plugin: dict[str, Any] | None) -> dict[str, Any]:
    recipe = Recipe(plugin=plugin)
    accelerator = build_accelerator(recipe)
    given = _mixtral()
    model, optimizer, batches = accelerator.prepare(given, _adamw(given), _loader())
    leaves = [type(each).__name__ for each in given.modules() if getattr(each, "_z3_leaf", False)]
    return {**fits(accelerator, model, optimizer, batches), "leaves": leaves}


def test_layers_of_experts_are_leaves_at_stage_3_and_train_as_under_ddp() -> None:
    expected = run_ranks(_routes, 2, None, init=False)
    plugin = {"zero_stage": 3, "transformer_moe_cls_names": "MixtralSparseMoeBlock"}
    for ours, theirs in zip(run_ranks(_routes, 2, plugin, init=False), expected, strict=True):
        assert ours["leaves"] == ["MixtralSparseMoeBlock"] * 2
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)


def _in_parts(rank: int, world_size: int, config: dict[str, Any] | None) -> dict[str, Any]:
    recipe = Recipe(plugin=None if config is None else {"hf_ds_config": config})
    accelerator = build_accelerator(recipe)
    model, optimizer, batches, _ = prepared(accelerator, recipe)
    own = sum(value.numel() for value in model.parameters())
    return {**fits(accelerator, model, optimizer, batches), "numel": own, "weights": weights(accelerator, model)}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_of_layers_over_two_ranks_train_as_whole_layers_do(stage: int, world_size: int) -> None:
    config = {**_config(stage), "tensor_parallel": {"autotp_size": 2}}
    whole = run_ranks(_in_parts, world_size // 2, None, init=False)
    parts = run_ranks(_in_parts, world_size, config, init=False)
    for rank, ours in enumerate(parts):
        theirs = whole[rank // 2]
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
        assert ours["numel"] < theirs["numel"]
        assert (ours["weights"] is None) is (rank > 0)  # Accelerate hands rank 0 the whole
        if ours["weights"] is not None:
            assert_same_weights(ours["weights"], theirs["weights"], 1e-4)


def _spread(rank: int, world_size: int, stage: int) -> str:
    recipe = Recipe(plugin={"hf_ds_config": {**_config(stage), "expert_parallel": {"enabled": True, "autoep_size": 2}}})
    accelerator = build_accelerator(recipe)
    given = _mixtral()
    start = {name: value.detach().clone() for name, value in given.state_dict().items()}
    model, _, _ = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1), _loader())
    try:
        state = accelerator.get_state_dict(model)
    except ValueError as error:
        whole = model._consolidated_16bit_state_dict()
        assert rank or clone_tensors_for_torch_save(whole).keys() == start.keys()
        return str(error)
    assert (state is None) == (rank > 0)
    assert state is None or all(torch.equal(state[name], value) for name, value in start.items())
    return "whole"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_spread_experts_come_out_whole_or_not_at_all(stage: int) -> None:
    for said in run_ranks(_spread, 2, stage, init=False):
        if stage == 3:
            assert said == "whole"
        else:
            assert "model.layers.0.mlp.experts has experts" in said
            assert "engine.save_16bit_model" in said
