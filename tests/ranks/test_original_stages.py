"""Engines go on from stage files that the original wrote, at any ZeRO stage and on any number of ranks.

The four rows that the two writers saw in a micro-batch are split evenly over the ranks here, so that the global batch, and
with it every step, is the same.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed.checkpoint import open_checkpoint
from tests.support.engines import make_engine, masters
from tests.support.original_net import CLIENT_STATE, FIXTURES, MICRO_BATCHES, Net, batch, full_weights, settings
from tests.support.ranks import run_ranks

PRECISION = {"stage1-fp32": "fp32", "stage1-bf16-fp32acc": "bf16", "stage2-bf16": "bf16", "stage3-bf16": "bf16"}
FIRST_STEP, MORE_STEPS, WRITERS = 3, 2, 2

Outcome = tuple[list[float], list[float], dict[str, Tensor]]


def rows_of(rank: int, world_size: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of the four that the two writers saw in a micro-batch."""
    whole = [torch.cat(parts) for parts in zip(*(batch(step, micro_batch, r) for r in range(WRITERS)), strict=True)]
    return whole[0].chunk(world_size)[rank], whole[1].chunk(world_size)[rank]


def resume(rank: int, world_size: int, stage: int, case: str) -> Outcome:
    """Load, and train on: (mean loss of each micro-batch over the ranks, rates, whole weights in fp32)."""
    torch.manual_seed(1)
    rows = 2 * WRITERS // world_size
    engine = make_engine(Net(), settings(stage, PRECISION[case], rows))
    path, client_state = engine.load_checkpoint(str(FIXTURES / case))
    assert path is not None
    assert path.endswith("step3")
    assert client_state == CLIENT_STATE
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (3, 24, 6)
    losses, rates = [], []
    for step in range(FIRST_STEP, FIRST_STEP + MORE_STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = engine(*rows_of(rank, world_size, step, micro_batch))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        rates.append(engine.get_lr()[0])
    weights = masters(engine)
    weights.update({name: value for name, value in engine.module.named_buffers() if name == "seen"})
    assert engine.module.head.weight is engine.module.emb.weight
    return losses, rates, weights


def _resume_all(rank: int, world_size: int, stages: list[int]) -> dict[tuple[str, int], Outcome]:
    return {(case, stage): resume(rank, world_size, stage, case) for case in PRECISION for stage in stages}


def mean_losses(of_ranks: list[list[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize(("world_size", "stages"), [(2, [0, 1, 2, 3]), (1, [0, 2]), (4, [1, 3])])
def test_training_goes_on_as_the_original_s_own_resume_does(world_size: int, stages: list[int]) -> None:
    """Tolerances. fp32: sums over micro-batches and ranks come in other orders, some rounding errors of 6e-8 relative, which
    Adam's division enlarges where a gradient is small: 1e-5. bf16: a gradient has 8 bits, so a step of at most the rate 0.01
    differs by 2**-8 of it in general and by more where a small gradient is all rounding; two steps: 1e-3 of a weight. Losses
    near 3 follow from such weights and bf16 activations, averaged over 20 tokens: 1e-3.
    """
    outcomes = run_ranks(_resume_all, world_size, stages)
    for case, precision in PRECISION.items():
        tolerance = 1e-5 if precision == "fp32" else 1e-3
        found = {stage: mean_losses([outcome[case, stage][0] for outcome in outcomes]) for stage in stages}
        file = FIXTURES / case / "expected_resume.json"
        if not file.exists():  # the original's resume of this one was not recorded: then all stages must agree
            assert all(losses == pytest.approx(found[stages[0]], rel=tolerance) for losses in found.values())
            continue
        report = json.loads(file.read_text())
        after = load_file(FIXTURES / case / "expected_fp32_after_resume.safetensors")
        for stage in stages:
            assert found[stage] == pytest.approx(mean_losses([r["losses"] for r in report]), rel=tolerance), (case, stage)
            _, rates, weights = outcomes[0][case, stage]
            assert rates == pytest.approx(report[0]["lr_after_step"], rel=1e-12)
            assert weights.keys() >= {"emb.weight", "fc1.bias", "norm.bias", "seen"}
            for name, value in weights.items():
                difference = (value.float() - after[name].float()).abs().max().item()
                assert difference <= tolerance, (case, stage, name)
            if precision == "fp32" and world_size == WRITERS:  # the same rows on the same ranks
                own = [outcome[case, stage][0] for outcome in outcomes]
                assert own == [pytest.approx(r["losses"], rel=1e-6) for r in report]


def _load_only_weights(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    loaded = {}
    for case in ("stage1-fp32", "stage3-bf16"):
        engine = make_engine(Net(), settings(3, PRECISION[case]))
        engine.load_checkpoint(str(FIXTURES / case), load_module_only=True)
        assert engine.global_steps == 0
        loaded[case] = masters(engine)
    return loaded


def test_weights_alone_are_loaded_bit_by_bit_on_three_ranks() -> None:
    for loaded in run_ranks(_load_only_weights, 3):
        for case, weights in loaded.items():
            wanted = load_file(FIXTURES / case / "expected_fp32.safetensors")
            assert weights.keys() >= {"emb.weight", "fc1.weight", "norm.bias"}
            for name, value in weights.items():
                torch.testing.assert_close(value.float(), wanted[name].float(), rtol=0, atol=0)


class Tree(nn.Module):
    """Parameters under given names, in a model of nested modules."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.zeros_like(value)))

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


def _load_trees(rank: int, world_size: int, wanted: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    loaded = {}
    for case, weights in wanted.items():
        engine = make_engine(Tree(weights), settings(2, "fp32"))
        engine.load_checkpoint(str(FIXTURES / case), load_module_only=True)
        loaded[case] = {name: value.float() for name, value in masters(engine).items()}
    return loaded


def test_a_model_with_the_same_names_loads_pipelines_experts_and_tensor_slices() -> None:
    cases = ("pipeline-stage1-bf16", "moe-stage0-fp32", "moe-stage2-bf16", "tp2-stage0-fp32")
    wanted = {case: full_weights(open_checkpoint(FIXTURES / case)) for case in cases}
    for loaded in run_ranks(_load_trees, 2, wanted):
        for case, weights in loaded.items():
            assert weights.keys() == wanted[case].keys()
            for name, value in weights.items():
                assert torch.equal(value, wanted[case][name].float()), (case, name)


def _resume_without_zero(rank: int, world_size: int) -> list[float]:
    engine = make_engine(Net(hidden=21), settings(1, "fp32"))
    path, _ = engine.load_checkpoint(str(FIXTURES / "stage0-fp32"))
    assert path is not None
    losses = []
    for step in range(FIRST_STEP, FIRST_STEP + MORE_STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = engine(*rows_of(rank, world_size, step, micro_batch))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def test_moments_that_the_original_stored_by_number_find_their_parameters() -> None:
    """Without ZeRO the original numbers the optimizer's entries; the engine knows its groups, frozen parameters left out."""
    wanted = json.loads((FIXTURES / "stage0-fp32" / "expected_losses.json").read_text())["losses"]
    found = run_ranks(_resume_without_zero, WRITERS)
    assert found == [pytest.approx(losses, rel=1e-6) for losses in wanted]
