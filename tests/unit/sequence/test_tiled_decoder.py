"""A Hugging Face decoder in tiles: the numbers of the model as it was, without its logits."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness.live_bytes import LiveBytes
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sequence.tiled_decoder import tile_decoder

ROUNDING = 1e-12
"""fp64, sums in another order; no value is much beyond one."""


def _model(kind: str = "Llama", **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, "pad_token_id": 0, **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def _batch(tokens: int = 13) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, 37, (2, tokens), generator=generator)
    labels = input_ids.masked_fill(torch.rand(2, tokens, generator=generator) < 0.3, -100)
    mask = torch.ones_like(input_ids)
    mask[1, -3:] = 0
    return {"input_ids": input_ids, "labels": labels, "attention_mask": mask}


def _outcome(model: nn.Module, **batch: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Phi"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_decoder_in_tiles_has_the_loss_and_gradients_that_it_had(kind: str, tie: bool) -> None:
    model = _model(kind, tie_word_embeddings=tie)
    batch = _batch()
    variants: list[dict[str, Any]] = [batch, {**batch, "num_items_in_batch": torch.tensor(11)}]
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    variants.append({**batch, "shift_labels": shifted})
    expected = [_outcome(model, **each) for each in variants]
    logits = model(batch["input_ids"]).logits
    assert tile_decoder(model, mlp_tiles=3, loss_tiles=5) is model
    for each, (loss, grads) in zip(variants, expected, strict=True):
        # its loss upcasts logits to fp32, so fp64 ends there
        found, of_found = _outcome(model, **each)
        torch.testing.assert_close(found.double(), loss.double(), rtol=0, atol=1e-6)
        assert len(of_found) == len(grads)
        for one, other in zip(of_found, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    torch.testing.assert_close(model(batch["input_ids"]).logits, logits, rtol=0, atol=ROUNDING)
    assert model(**batch).logits is None


def test_no_logits_are_made_and_checkpointing_works() -> None:
    model, batch = _model(vocab_size=2000).float(), _batch(64)
    _, expected = _outcome(model, **batch)
    tile_decoder(model, mlp_tiles=4, loss_tiles=16)
    model.train()
    model.gradient_checkpointing_enable()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with LiveBytes() as live:
        model(**batch, use_cache=False).loss.backward()
    for param, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, other, rtol=1e-4, atol=1e-6)  # fp32
    assert live.peak_nbytes < 2 * 64 * 2000 * 4  # of the logits


def test_the_signature_stays_and_copies_are_their_own() -> None:
    model = _model()
    before = list(inspect.signature(model.forward).parameters)
    tile_decoder(tile_decoder(model, mlp_tiles=2, loss_tiles=2), mlp_tiles=3, loss_tiles=3)
    assert list(inspect.signature(model.forward).parameters) == before
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        twin.model.layers[0].mlp.down_proj.weight.zero_()
    batch = _batch()
    uniform = twin(**batch).loss
    torch.testing.assert_close(uniform.float(), torch.tensor(37.0).log(), rtol=1e-6, atol=0)
    assert abs(model(**batch).loss.item() - uniform.item()) > 1e-4


def test_each_part_may_be_left_alone() -> None:
    model, batch = _model(), _batch()
    loss, _ = _outcome(model, **batch)
    tile_decoder(model, loss_tiles=0, mlp_tiles=2)
    assert model(**batch).logits is not None
    tile_decoder(model, mlp_tiles=0, loss_tiles=2)
    torch.testing.assert_close(model(**batch).loss.double(), loss.double(), rtol=0, atol=1e-6)


def test_models_whose_logits_are_not_the_heads_are_refused() -> None:
    capped = _model("Gemma2", final_logit_softcapping=0.05, head_dim=4)
    with pytest.raises(ArgumentError, match="it scales or caps them"):
        tile_decoder(capped)
    with pytest.raises(ArgumentError, match="has no base_model"):
        tile_decoder(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="has no list of layers"):
        tile_decoder(nn.Linear(2, 2), loss_tiles=0)


def test_a_router_is_not_tiled_and_its_loss_is_refused() -> None:
    model = _model("Mixtral", num_local_experts=4, num_experts_per_tok=2).float()
    with pytest.raises(ArgumentError, match="has no list of layers"):
        tile_decoder(model, loss_tiles=0)
    tile_decoder(model, mlp_tiles=0, loss_tiles=3)
    batch = _batch()
    assert model(**batch).loss.requires_grad
    with pytest.raises(UsageError, match="output_router_logits asks for a loss of the router"):
        model(**batch, output_router_logits=True)
