"""Whole models against published counts and against products of their shapes, on the meta device: nothing is computed.

Of a layer with h wide states and an MLP four times as wide, on s tokens: 24 s h^2 FLOPs for its matrices (3 h^2 in, h^2 out,
2 x 4 h^2 of the MLP, two FLOPs each) and 4 s^2 h for the two products of attention.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.profiling.flops_profiler import get_model_profile
from tests.support.resnet import ResNet50

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")


def _of_layers(layers: int, length: int, width: int) -> int:
    return layers * (24 * length * width**2 + 4 * length**2 * width)


def _counts(model: nn.Module, **kwargs: torch.Tensor) -> tuple[int, int, int]:
    flops, macs, params = get_model_profile(model, kwargs=kwargs, print_profile=False, as_string=False, warm_up=0)
    return flops, macs, params


def _inputs(length: int) -> dict[str, torch.Tensor]:
    """Tokens, and a mask in the form of scores, which transformers takes as it is: it would look into others."""
    tokens = torch.ones(1, length, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "attention_mask": torch.zeros(1, 1, length, length, device="meta")}


def test_gpt2_small() -> None:
    """Published: 291,648,307,200 FLOPs of forward at 1024 tokens (nanoGPT, transformer_sizing.ipynb); a MAC is two.

    The same is 24 B s l h^2 (1 + s / 6h + V / 12lh): Megatron-LM (arXiv:2104.04473), appendix, for forward alone.
    """
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    flops, macs, params = _counts(model, **_inputs(1024))
    assert params == 124_439_808
    assert 2 * macs == 291_648_307_200 == _of_layers(12, 1024, 768) + 2 * 1024 * 768 * 50257  # the head
    assert abs(flops / 291_648_307_200 - 1) < 0.01


def test_bert_base() -> None:
    """Published: 22.5e9 FLOPs at 128 tokens, 109M parameters (TinyBERT, arXiv:1909.10351, table 1); a MAC is two FLOPs.

    The paper is cited from memory; what is exact here are the products of the shapes, which the published number is near.
    """
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig())
    flops, macs, params = _counts(model, **_inputs(128))
    assert params == 109_482_240
    assert 2 * macs == _of_layers(12, 128, 768) + 2 * 768**2  # the pooler reads one token
    assert abs(flops / 22.5e9 - 1) < 0.01


def test_resnet_50() -> None:
    """Published: 4.09 GFLOPS, which are MACs, at 224 x 224 pixels, and 25,557,032 parameters.

    Source: ResNet50_Weights in pytorch.org/vision/master/models/generated/torchvision.models.resnet50.html.
    """
    with torch.device("meta"):
        model = ResNet50()
    flops, macs, params = get_model_profile(model, (1, 3, 224, 224), print_profile=False, as_string=False, warm_up=0)
    assert params == 25_557_032
    assert abs(macs / 4.09e9 - 1) < 0.01
    assert abs(flops / 2 / 4.09e9 - 1) < 0.01


def test_llama_7b() -> None:
    """Published: 32 layers of 4096, 6.7e9 parameters (LLaMA, arXiv:2302.13971, table 2); 2 N + 4 L H Q T FLOPs per token.

    The formula is a third of 6 N + 12 L H Q T (PaLM, arXiv:2204.02311, appendix B: forward and backward, a MAC is two FLOPs,
    causal masks take nothing off). N there are the parameters that multiply: the table of the input embedding does not.
    """
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))
    length = 2048
    flops, macs, params = _counts(model, **_inputs(length))
    assert params == 6_738_415_616
    multiplying = params - 32000 * 4096 - 65 * 4096
    published = length * (2 * multiplying + 4 * 32 * 4096 * length)
    assert 2 * macs == pytest.approx(published, rel=1e-4)  # the table of rotary angles is a product, too
    assert abs(flops / published - 1) < 0.01
