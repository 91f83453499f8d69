"""Models that transformers builds while a stage-3 configuration is live: loaded, initialised, with other embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clients import VOCABULARY, Sentences, tiny_llama, tiny_llama_config
from tests.support.ranks import run_ranks
from tests.support.trainer import Update, arguments, assert_same_run, auto_config, updates

_EMBEDDINGS = {"model.embed_tokens.weight", "lm_head.weight"}
_MORE, _STEPS = 7, {"max_steps": 4}


def _whole(model: Any) -> dict[str, torch.Tensor]:
    """The whole weights of a model, on every rank, whether its parameters are sharded or not."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def _train(model: Any, made: Any) -> list[Update]:
    from transformers import Trainer

    run = Trainer(model, made, train_dataset=Sentences())
    run.train()
    return updates(run)


def _whole_names(model: Any) -> set[str]:
    """The parameters that no rank holds a part of only."""
    return {name for name, param in model.named_parameters() if param.numel() or not hasattr(param, "ds_id")}


def _reference(folder: str, weights: dict[str, torch.Tensor], **settings: Any) -> list[Update]:
    """The curve without us from the same weights."""
    from transformers import LlamaForCausalLM

    made = arguments(folder, None, **_STEPS)
    model = LlamaForCausalLM(tiny_llama_config(**settings))
    model.load_state_dict(weights, strict=False)
    return _train(model, made)


def _builds(rank: int, world_size: int, folder: str, stage: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    made = arguments(folder, auto_config(stage), **_STEPS)  # before the model: it makes the configuration live
    loaded = LlamaForCausalLM.from_pretrained(f"{folder}/saved")
    torch.manual_seed(5 + rank)  # the first rank's draws count, here and for new embeddings
    fresh = AutoModelForCausalLM.from_config(tiny_llama_config(tie_word_embeddings=True))
    resized = LlamaForCausalLM.from_pretrained(f"{folder}/saved")
    grown = resized.resize_token_embeddings(VOCABULARY + _MORE, mean_resizing=False)
    assert grown.num_embeddings == VOCABULARY + _MORE
    models = {"loaded": loaded, "fresh": fresh, "resized": resized}
    whole = {name: _whole_names(model) for name, model in models.items()}
    weights = {name: _whole(model) for name, model in models.items()}
    curves = {"loaded": _train(loaded, made)}
    for name in ("fresh", "resized"):
        curves[name] = _train(models[name], arguments(folder, auto_config(stage), **_STEPS))
    expected = {
        "loaded": _reference(folder, weights["loaded"]),
        "fresh": _reference(folder, weights["fresh"], tie_word_embeddings=True),
        "resized": _reference(folder, weights["resized"], vocab_size=VOCABULARY + _MORE),
    }
    return {"whole": whole, "weights": weights, "curves": curves, "expected": expected}


@pytest.mark.parametrize("stage", [2, 3])
def test_models_built_under_a_live_configuration_are_those_without(stage: int, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "saved")
    results = run_ranks(_builds, 2, str(tmp_path), stage, init=False)
    saved = dict(tiny_llama().named_parameters())
    for result in results:
        if stage == 3:  # new embeddings stay whole until the engine is made: the client wants their shape
            assert result["whole"] == {"loaded": set(), "fresh": set(), "resized": _EMBEDDINGS}
        weights = result["weights"]
        assert weights["loaded"].keys() == saved.keys()
        for name, weight in saved.items():
            torch.testing.assert_close(weights["loaded"][name], weight.detach(), rtol=0, atol=0)
            kept = weights["resized"][name][: len(weight)]
            torch.testing.assert_close(kept, weight.detach(), rtol=0, atol=0)
        _check_fresh(weights["fresh"])
        assert weights["resized"]["lm_head.weight"].shape == (VOCABULARY + _MORE, 32)
        assert weights["resized"]["lm_head.weight"][VOCABULARY:].std() == pytest.approx(0.02, rel=0.2)
        for name, got in result["curves"].items():
            print(name)  # shown where the comparison fails
            assert_same_run(got, result["expected"][name])


def _check_fresh(weights: dict[str, torch.Tensor]) -> None:
    """What the client's initialisation says: norms are 1, everything else is normal with deviation 0.02."""
    assert "lm_head.weight" not in weights  # tied
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:  # of at least 512 elements: their deviation is within 10 % of the truth by three times its own
            assert weight.std().item() == pytest.approx(0.02, rel=0.1), name
