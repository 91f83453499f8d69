"""Plans of models that ranks share: experts over ranks, parts of layers, and what their collectives send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import ArgumentError
from deepspeed.moe.layer import MoE
from deepspeed.planning import Comparison, plan
from deepspeed.topology import groups

_WIDTH, _VOCABULARY, _LAYERS = 32, 50, 3
_TOKENS = torch.zeros(4, 16, dtype=torch.long)


class Net(nn.Module):
    """A table, blocks of experts, a head."""

    def __init__(self, ep_size: int, k: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCABULARY, _WIDTH)
        expert = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))
        self.layers = nn.ModuleList(MoE(_WIDTH, expert, num_experts=4, ep_size=ep_size, k=k) for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden).square().mean()


def _plan(source: Any, ranks: int, *, batch: Any = None, **blocks: Any) -> Comparison:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **blocks}
    return plan(source, config, ranks, batch=batch, sequence_length=16)


def _bytes(found: Comparison) -> dict[str, int]:
    return {term.name: term.nbytes for term in found.asked.terms}


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


@pytest.mark.parametrize("k", [1, 2])
def test_experts_send_rows_there_and_back_and_dense_gradients_are_summed(k: int) -> None:
    net = Net(ep_size=2, k=k)
    found = _plan(net, 2, batch=((_TOKENS,), {}))
    dense = _numel(net) - sum(_numel(layer.deepspeed_moe.experts) for layer in net.layers)
    dense = -(-dense // 16) * 16  # padded
    rows = k * _TOKENS.numel() // 2  # half of them go to the other rank
    ways = 4  # there and back, in forward and in backward
    assert found.asked.sent_nbytes == 4 * (dense + _LAYERS * ways * rows * _WIDTH)
    assert any("balanced" in note for note in found.notes)
    assert not groups.has_current()
    assert not torch.distributed.is_initialized()


def test_ranks_with_the_same_experts_share_their_states() -> None:
    one, two = (_bytes(_plan(Net(ep_size=2), ranks, batch=((_TOKENS,), {}))) for ranks in (2, 4))
    assert one["weights"] == two["weights"]
    zero = {"zero_optimization": {"stage": 1}}
    alone, shared = (_plan(Net(ep_size=2), ranks, batch=((_TOKENS,), {}), **zero) for ranks in (2, 4))
    assert _bytes(alone)["optimizer state"] > 1.8 * _bytes(shared)["optimizer state"]


def test_experts_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="does not divide 3 data-parallel ranks"):
        _plan(Net(ep_size=2), 3, batch=((_TOKENS,), {}))


def _mixtral() -> Any:
    return pytest.importorskip("transformers").MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
    )


def test_stacked_experts_are_spread_as_auto_ep_does() -> None:
    whole = _bytes(_plan(_mixtral(), 4))
    halves = _plan(_mixtral(), 4, expert_parallel={"enabled": True, "autoep_size": 2})
    experts = 4 * 2 * 4 * 3 * 32 * 64
    assert whole["weights"] - _bytes(halves)["weights"] == experts // 2
    assert halves.numel * 4 == whole["weights"]
    assert "activations" in _bytes(halves)


def _llama(layers: int) -> Any:
    return pytest.importorskip("transformers").LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, vocab_size=64
    )


def test_tensor_ranks_send_two_sums_per_block_and_pass() -> None:
    """Megatron-LM (arXiv:1909.08053), section 3: one all-reduce behind attention and MLP each, and as many in backward."""
    cut = {"tensor_parallel": {"autotp_size": 2}, "gradient_accumulation_steps": 3}
    few, many = (_plan(_llama(layers), 2, **cut).asked.sent_nbytes for layers in (5, 9))
    hidden = 4 * 16 * 32 * 4
    assert many - few == 3 * (9 - 5) * 4 * hidden  # 2 (n - 1) / n = 1
