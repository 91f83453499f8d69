"""Models of ours for the tests of Transformers' `ModelTesterMixin`; laid into the client's folder as `tests/test_held.py`.

The mix-in's tests are the client's. What holds them there are the folders of models, which its source distribution lacks.
"""

import unittest

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from .test_modeling_common import ModelTesterMixin

_SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}


class _Tester:
    """What the mix-in asks of a model's tester: a configuration, inputs, and whether it trains."""

    is_training = True

    def __init__(self, config):
        self._config = config

    def prepare_config_and_inputs_for_common(self):
        return self._config(), {"input_ids": torch.randint(0, 80, (2, 7), generator=torch.Generator().manual_seed(0))}


class LlamaHeldTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (LlamaModel, LlamaForCausalLM)

    def setUp(self):
        self.model_tester = _Tester(lambda: LlamaConfig(**_SIZES, pad_token_id=0))


class GPT2HeldTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (GPT2LMHeadModel,)

    def setUp(self):
        self.model_tester = _Tester(
            lambda: GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, bos_token_id=98, eos_token_id=98)
        )


class BertHeldTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (BertForMaskedLM,)

    def setUp(self):
        self.model_tester = _Tester(lambda: BertConfig(**_SIZES))
