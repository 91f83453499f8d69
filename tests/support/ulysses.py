"""A tiny Llama, batches for it, and the steps of one plain process: what sequence-parallel training is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 23


def llama(heads: int = 4, kv_heads: int = 2, attention: str = "sdpa", **settings: Any) -> Any:
    """A decoder of two layers in double precision, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8 * heads,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        attn_implementation=attention,
        use_cache=False,
        **settings,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).double()


def batch(length: int, samples: int = 2, seed: int = 0, packed: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Whole sequences; some labels do not count. `packed`: lengths of the samples that each row is made of."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (samples, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 3] = -100
    positions = torch.cat([torch.arange(each) for each in packed or (length,)]).expand(samples, length).contiguous()
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def shifted(whole: dict[str, Tensor]) -> Tensor:
    return F.pad(whole["labels"][:, 1:], (0, 1), value=-100)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens that count, in the precision of the logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole_run(model: nn.Module, batches: list[dict[str, Tensor]], rate: float = 0.1) -> dict[str, Any]:
    """Plain SGD in this process: logits and gradients of the first step, all losses, the weights after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    seen: dict[str, Any] = {"losses": []}
    for each in batches:
        mask = each.get("attention_mask")
        logits = model(input_ids=each["input_ids"], position_ids=each["position_ids"], attention_mask=mask).logits
        loss = token_loss(logits, shifted(each))
        optimizer.zero_grad()
        loss.backward()
        seen.setdefault("logits", logits.detach())
        seen.setdefault(
            "gradients", {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        )
        seen["losses"].append(loss.item())
        optimizer.step()
    seen["weights"] = {name: param.detach().clone() for name, param in model.named_parameters()}
    return seen
