"""Attention is recognised by its projections; what is not understood is said, not guessed."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
from torch import nn

from deepspeed.tensor_parallel.attention import PartConfig, UnclearError, attention_of


class Separate(nn.Module):
    def __init__(self, heads: int = 4, key_heads: int = 2, head_dim: int = 3, width: int = 8) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim)
        self.k_proj, self.v_proj = (nn.Linear(width, key_heads * head_dim) for _ in range(2))
        self.o_proj = nn.Linear(heads * head_dim, width)


def _in(block: nn.Module) -> nn.Module:
    return nn.ModuleDict({"attention": block})


def test_counts_are_read_from_widths() -> None:
    found = attention_of(_in(Separate()), "attention")
    assert found is not None
    assert (found.query_heads, found.key_heads, found.head_dim) == (4, 2, 3)
    assert found.columns == ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    assert (found.row, found.norms) == ("attention.o_proj", ())


def test_norms_of_single_heads_stay_whole_and_norms_of_all_heads_are_not_understood() -> None:
    block = Separate()
    block.q_norm = nn.LayerNorm(3)
    found = attention_of(_in(block), "attention")
    assert found is not None
    assert found.norms == ("attention.q_norm",)
    block.q_norm = nn.LayerNorm(12)
    with pytest.raises(UnclearError, match=r"'q_norm' with parameters of shapes.*not for single heads"):
        attention_of(_in(block), "attention")


def test_what_is_not_understood_says_why() -> None:
    sinks = Separate()
    sinks.sinks = nn.Parameter(sinks.q_proj.weight[:4, 0].detach())
    with pytest.raises(UnclearError, match=r"has a parameter 'sinks' of its own"):
        attention_of(_in(sinks), "attention")
    narrow = Separate()
    narrow.o_proj = nn.Linear(24, 8)
    with pytest.raises(UnclearError, match=r"no projection of its 12 outputs"):
        attention_of(_in(narrow), "attention")
    fused = nn.Module()
    fused.num_heads, fused.qkv, fused.proj = 4, nn.Linear(8, 36), nn.Linear(12, 8)
    with pytest.raises(UnclearError, match=r"fused projection 'qkv' in an order that is not known"):
        attention_of(_in(fused), "attention")
    found = attention_of(_in(fused), "attention", sections=True)
    assert found is not None
    assert (found.layout, found.query_heads, found.head_dim) == ("sections", 4, 3)
    assert attention_of(nn.ModuleDict({"mlp": nn.Linear(2, 2)}), "") is None


def test_a_config_for_a_part_is_the_whole_ones_but_for_the_counts() -> None:
    whole = SimpleNamespace(num_attention_heads=8, hidden_size=16)
    part = PartConfig(whole, {"num_attention_heads": 2})
    assert (part.num_attention_heads, part.hidden_size) == (2, 16)
    part.hidden_size = 32
    assert whole.hidden_size == 32
    for again in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert (again.num_attention_heads, again.hidden_size) == (2, 32)
    with pytest.raises(AttributeError):
        _ = part.missing
