"""Local stand-ins for what the clients' tests take from the hub: folders of the same names, where clients look first.

`write(folder)` lays them; a test started in `folder` finds `bert-base-cased`, `nyu-mll/glue` and so on there. Models are
built from configurations with seed 0, and the data is made up.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_WORDS = [f"word{number}" for number in range(60)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
_METRIC = '''"""Stand-in for the metric of GLUE's MRPC: the share of right answers."""
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="accuracy", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(int(p == r) for p, r in zip(predictions, references)) / len(references)}
'''


def write(folder: Path) -> None:
    """Lay every stand-in under `folder`."""
    _write_model(folder / "bert-base-cased", "bert")
    _write_model(folder / "sshleifer" / "tiny-gpt2", "gpt2")
    _write_model(folder / "hf-internal-testing" / "tiny-random-LlamaForCausalLM", "llama")
    _write_mrpc(folder / "nyu-mll" / "glue")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(_METRIC)


def _write_model(folder: Path, family: str) -> None:
    """Weights, configuration and tokenizer of a model of two layers."""
    import torch
    from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM

    torch.manual_seed(0)
    classes = {"bert": BertForSequenceClassification, "gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
    model = classes[family](_config(family))
    if family == "bert":
        _teach_then_turn(model)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _teach_then_turn(model: Any) -> None:
    """Train the model on the pairs, then turn its last layer the wrong way, by little.

    The clients train at a rate of 2e-5 that falls to zero in 18 steps, and want more right answers after a later epoch than
    after the first. Adam moves each weight by about the rate in a step: 1.0e-4 in the first epoch, 1.9e-4 in all; 1.3e-4
    lies between.
    """
    import torch

    chance, tokenizer = random.Random(0), _tokenizer()
    pairs = [_pair(chance, number) for number in range(96)]
    firsts, seconds = ([pair[key] for pair in pairs] for key in ("sentence1", "sentence2"))
    batch = tokenizer(firsts, seconds, padding=True, return_tensors="pt")
    labels = torch.tensor([pair["label"] for pair in pairs])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(60):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.classifier.weight.copy_(-1.3e-4 * model.classifier.weight.sign())
        model.classifier.bias.zero_()


def _config(family: str) -> Any:
    from transformers import BertConfig, GPT2Config, LlamaConfig

    vocabulary = 256 if family == "llama" else 128  # the Ulysses test has numbers of tokens from 101 to 228
    if family == "gpt2":
        return GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    sizes = {"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    if family == "bert":  # without dropout the made-up rule is learnt in the few epochs that the tests run
        return BertConfig(**sizes, num_attention_heads=4, hidden_dropout_prob=0.0, max_position_embeddings=64)
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)


def _tokenizer() -> Any:
    """Words to numbers, split at blanks, pairs as BERT lays them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(_SPECIAL + _WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", words["[SEP]"]), ("[CLS]", words["[CLS]"]))
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, bos_token="<s>", eos_token="</s>", **names
    )


def _write_mrpc(folder: Path) -> None:
    """Pairs of sentences with label 1 where the first one's words are of the first half of the vocabulary, else 0."""
    folder.mkdir(parents=True)
    chance = random.Random(0)
    for split, rows in (("train", 96), ("validation", 32), ("test", 8)):
        lines = [json.dumps(_pair(chance, number)) for number in range(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "validation", "test")]
    configs = json.dumps([{"config_name": "mrpc", "data_files": files}])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")


def _pair(chance: random.Random, number: int) -> dict[str, Any]:
    label = chance.randrange(2)
    half = _WORDS[:30] if label else _WORDS[30:]
    first, second = (" ".join(chance.choices(words, k=chance.randrange(4, 9))) for words in (half, _WORDS))
    return {"sentence1": first, "sentence2": second, "label": label, "idx": number}
