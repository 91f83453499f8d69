"""Checkpoints of Hugging Face models that were cut over ranks: the model's own weights, under its own names.

Every family is cut over 4 ranks, trained, and saved; loaded into one that is cut over 2, with parameters sharded over two
data-parallel ranks, and saved again from there. Both checkpoints are of one model, to the last bit, which plain transformers
loads from the file of 16-bit weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.tools.comparing import compare_tensors
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.tensor_parallel.auto import apply_auto_tp
from deepspeed.topology.mesh import AxisGroup
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.cut_net import TensorUnit
from tests.support.engines import config, make_engine, zero
from tests.support.families import build, double_throughout, logits_of, loss_of, tokens
from tests.support.ranks import run_ranks

FAMILIES = ["llama", "llama_tied", "gpt2", "gpt_neox", "falcon_new", "phi3", "t5", "qwen3", "mixtral", "bloom"]
"""Copies of key/value heads, tied and vocabulary-parallel embeddings, fused matrices in several orders, experts."""


def _engine(name: str, tensor: int, stage: int, *, is_fresh: bool) -> tuple[DeepSpeedEngine, TensorUnit]:
    unit, model = TensorUnit(tensor), build(name)
    if not is_fresh:  # other weights, to be replaced
        for param in model.parameters():
            param.data.zero_()
    group = unit.get_model_parallel_group()
    axis = AxisGroup(comm.get_all_ranks_from_group(group), comm.get_rank(), group)
    apply_auto_tp(model, TensorParallelConfig(autotp_size=tensor), axis)
    settings = config(1, 2, **zero(stage, stage3_gather_16bit_weights_on_model_save=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return make_engine(model, settings, mpu=unit, optimizer=optimizer), unit


def _save_and_move(rank: int, world_size: int, folder: Path, names: list[str]) -> None:
    comm.init_distributed("gloo")
    for name in names:
        with double_throughout(name):
            engine, _ = _engine(name, 4, 1, is_fresh=True)
            for step in range(2):
                ids = tokens(seed=step)
                more = {"decoder_input_ids": ids.flip(1)} if name == "t5" else {}
                engine.backward(loss_of(engine(input_ids=ids, use_cache=False, **more).logits, ids))
                engine.step()
            engine.save_checkpoint(folder / name, "four")
            engine.save_16bit_model(folder / name, "four.bin")
            engine.destroy()
            engine, _ = _engine(name, 2, 3, is_fresh=False)
            engine.load_checkpoint(folder / name, "four")
            engine.save_checkpoint(folder / name, "two")
            engine.save_16bit_model(folder / name, "two.bin")
            engine.destroy()


@pytest.mark.parametrize("names", [FAMILIES[:5], FAMILIES[5:]], ids="-".join)
def test_a_family_moves_to_other_ranks_and_back_to_transformers(names: list[str], tmp_path: Path) -> None:
    run_ranks(_save_and_move, 4, tmp_path, names, timeout_seconds=120, init=False)
    for name in names:
        four, two = (open_checkpoint(tmp_path / name, tag) for tag in ("four", "two"))
        found = list(compare_tensors(four, two))
        assert {each.verdict for each in found} == {"equal"}
        assert {each.what for each in found} == {"weight", "exp_avg", "exp_avg_sq", "step"}
        plain: Any = build(name)
        trained = dict(plain.named_parameters())
        for file in ("four.bin", "two.bin"):
            plain.load_state_dict(torch.load(tmp_path / name / file, weights_only=True), strict=True)
        exported = get_fp32_state_dict_from_zero_checkpoint(tmp_path / name, "four")
        assert exported.keys() == plain.state_dict().keys()
        for parameter, value in plain.state_dict().items():
            assert torch.equal(exported[parameter], value.float() if value.is_floating_point() else value)
        with double_throughout(name):
            assert _trained(name).keys() == trained.keys()
            for parameter, value in _trained(name).items():
                torch.testing.assert_close(trained[parameter].detach(), value, rtol=1e-10, atol=1e-10)


def _trained(name: str) -> dict[str, torch.Tensor]:
    """The weights after the same steps of one process."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        ids = tokens(seed=step)
        optimizer.zero_grad()
        loss_of(logits_of(model, ids), ids).backward()
        optimizer.step()
    return {parameter: value.detach() for parameter, value in model.named_parameters()}


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "both": (1, {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}}),
    "layers": (3, {"tensor_parallel": {"autotp_size": 4}}),
    "experts": (0, {"expert_parallel": {"enabled": True, "autoep_size": 4}}),
    "neither": (2, {}),
    "sharded": (3, {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}}),
}
"""Stage, and what a Mixtral is cut and spread by."""


def _move_experts(rank: int, world_size: int, folder: Path) -> None:
    before = None
    for place, (stage, blocks) in PLACES.items():
        with double_throughout("mixtral"):
            model = build("mixtral")
            settings = config(1, 2, **zero(stage, stage3_gather_16bit_weights_on_model_save=True), **blocks)
            settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
            engine = make_engine(model, settings)
            if before is None:
                for step in range(2):
                    ids = tokens(seed=step)
                    engine.backward(loss_of(engine(input_ids=ids, use_cache=False).logits, ids))
                    engine.step()
            else:
                engine.load_checkpoint(folder, before)
            engine.save_checkpoint(folder, place)
            engine.save_16bit_model(folder, f"{place}.bin")
            engine.destroy()
            before = place


def test_layers_that_are_cut_and_experts_that_are_spread_are_one_model(tmp_path: Path) -> None:
    run_ranks(_move_experts, 4, tmp_path, timeout_seconds=120)
    first, *others = (open_checkpoint(tmp_path, place) for place in PLACES)
    for other in others:
        found = list(compare_tensors(first, other))
        assert {each.verdict for each in found} == {"equal"}
        assert {each.what for each in found} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    weights = [torch.load(tmp_path / f"{place}.bin", weights_only=True) for place in PLACES]
    build("mixtral").load_state_dict(weights[0], strict=True)
    for name, value in weights[0].items():
        assert all(torch.equal(each[name], value) for each in weights[1:])
