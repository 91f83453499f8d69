"""Runs of TRL's trainers on gloo ranks, with us or without: words of the licence, tiny models, no hub.

        sft, dpo, ...(a run, its folder)  ->  the trainer     trained  ->  what it logged, and what it saved

A reference is the same trainer under DDP. References come before other runs of a process: what is left of a configuration
of ours is seen by Transformers as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.clients import VOCABULARY, tiny_llama, tiny_llama_config, whole_weights
from tests.support.trainer import arguments, auto_config

UPDATES = 4
_TEXT = Path(__file__).parents[2] / "LICENSE"
_ROWS = 24
_TIMES = ("runtime", "per_second", "step_time", "flos")  # nothing that two runs have in common


class Run(NamedTuple):
    """One training. `stage` None is the reference; at stage 3, parameters up to `persistent_numel` elements stay whole."""

    trainer: str
    stage: int | None
    persistent_numel: int | str = "auto"

    @property
    def config(self) -> dict[str, Any] | None:
        """The configuration of ours."""
        if self.stage is None:
            return None
        return auto_config(self.stage, stage3_param_persistence_threshold=self.persistent_numel)


class Trained(NamedTuple):
    """What a rank has after a run."""

    rows: list[dict[str, float]]
    """Metrics of each update, and of the whole."""

    saved: dict[str, Tensor]
    """The weights that the trainer has saved, on rank 0; nothing elsewhere."""

    weights: dict[str, Tensor]
    """The whole weights of the model, on every rank."""

    wrapper: str
    """The class of what the client trained the model in."""


def save_models(folder: Path) -> None:
    """Write the models that runs start from: a causal one, and one that scores."""
    from transformers import LlamaForSequenceClassification

    tiny_llama().save_pretrained(folder / "causal")
    torch.manual_seed(0)
    LlamaForSequenceClassification(tiny_llama_config(num_labels=1)).save_pretrained(folder / "scoring")


def trained(run: Run, folder: Path) -> Trained:
    """Do the run in this rank; `folder` has the models and gets what is written. All ranks call it."""
    own = folder / "-".join(map(str, run))
    trainer = _TRAINERS[run.trainer](run, folder, own)
    trainer.train()
    trainer.save_model(str(own / "saved"))
    rows = [_metrics(row) for row in trainer.state.log_history]
    saved = _saved(own / "saved") if dist.get_rank() == 0 else {}
    return Trained(rows, saved, whole_weights(trainer.model), type(trainer.model_wrapped).__name__)


def assert_same_training(got: Trained, expected: Trained) -> None:
    """Fail unless the expected run was one of DDP, the other one of ours, and metrics and saved weights agree.

    Metrics agree to 1e-5 (`CURVE_TOLERANCE`), of themselves where they are sums over tokens; norms as in `trainer`. Adam
    turns rounding of a gradient near zero into a step of the full rate, in few elements: weights agree in the mean.
    """
    assert (got.wrapper, expected.wrapper) == ("DeepSpeedEngine", "DistributedDataParallel")
    assert len(got.rows) == len(expected.rows) > UPDATES
    assert expected.rows[0]["loss"] != expected.rows[UPDATES - 1]["loss"]
    for ours, theirs in zip(got.rows, expected.rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4 if name == "grad_norm" else 1e-5, abs=1e-5), name
    assert expected.weights.keys() != set()
    for ours, theirs in ((got.saved, expected.saved), (got.weights, expected.weights)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].shape == tensor.shape, name
            assert (ours[name] - tensor).abs().mean() <= 1e-5, name


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if not any(part in name for part in _TIMES)}


def _saved(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


# -- what is trained on -----------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """A word-level tokenizer of `VOCABULARY` words, made from the licence."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]  # the ids that `tiny_llama_config` gives them
    trainer = trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    words.train_from_iterator([_TEXT.read_text()], trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def _passages(first: int, shortest: int, spread: int) -> list[str]:
    """Passages of `shortest` words and up to `spread` - 1 more, from word `first` of the licence on."""
    words = _TEXT.read_text().split()
    starts = range(first, first + 10 * _ROWS, 10)
    return [" ".join(words[start : start + shortest + row % spread]) for row, start in enumerate(starts)]


def _dataset(own: Path, columns: Mapping[str, Sequence[str]]) -> Any:
    """On disk, where all ranks find what one of them adds."""
    from datasets import Dataset, load_from_disk  # type: ignore[import-untyped]

    if dist.get_rank() == 0:
        Dataset.from_dict(dict(columns)).save_to_disk(own / "data")
    dist.barrier()
    return load_from_disk(own / "data")


def _preferences(own: Path) -> Any:
    columns = {"prompt": _passages(0, 3, 2), "chosen": _passages(4, 5, 3), "rejected": _passages(300, 4, 4)}
    return _dataset(own, columns)


# -- trainers ---------------------------------------------------------------------------------------------------------


def _settings(run: Run, own: Path, **settings: Any) -> Any:
    # TRL asks for bf16 unless told otherwise; gradient checkpointing is on, as it is by default.
    ours = {"max_steps": UPDATES, "gradient_accumulation_steps": 2, "bf16": False, "seed": 1}
    return arguments(own, run.config, **{**ours, **settings})


def _sft(run: Run, folder: Path, own: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = _settings(run, own, cls=SFTConfig, max_length=16)
    data = _dataset(own, {"text": _passages(0, 8, 5)})
    return SFTTrainer(str(folder / "causal"), args, train_dataset=data, processing_class=tokenizer())


def _dpo(run: Run, folder: Path, own: Path, *, peft_config: Any = None, **settings: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = _settings(run, own, cls=DPOConfig, **settings)
    words = {"processing_class": tokenizer(), "peft_config": peft_config}
    return DPOTrainer(str(folder / "causal"), args=args, train_dataset=_preferences(own), **words)


def _dpo_precomputed(run: Run, folder: Path, own: Path) -> Any:
    return _dpo(run, folder, own, precompute_ref_log_probs=True)


def _dpo_synced(run: Run, folder: Path, own: Path) -> Any:
    return _dpo(run, folder, own, sync_ref_model=True, ref_model_sync_steps=2)


def _dpo_adapters(run: Run, folder: Path, own: Path) -> Any:
    from peft import LoraConfig

    return _dpo(run, folder, own, peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def _reward(run: Run, folder: Path, own: Path) -> Any:
    from trl import RewardConfig, RewardTrainer

    args = _settings(run, own, cls=RewardConfig)
    words = {"processing_class": tokenizer()}
    return RewardTrainer(str(folder / "scoring"), args, train_dataset=_preferences(own), **words)


def _likes_articles(completions: list[str], **_: Any) -> list[float]:
    """The reward of a completion: its share of words that are on a list."""
    return [sum(word in ("the", "of", "to", "or", ",") for word in each.split()) / 4 for each in completions]


def _grpo(run: Run, folder: Path, own: Path, **settings: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = _settings(run, own, cls=GRPOConfig, num_generations=4, max_completion_length=8, beta=0.1, **settings)
    data = _dataset(own, {"prompt": _passages(0, 3, 2)})
    words = {"processing_class": tokenizer()}
    return GRPOTrainer(str(folder / "causal"), _likes_articles, args=args, train_dataset=data, **words)


def _grpo_by_layers(run: Run, folder: Path, own: Path) -> Any:
    return _grpo(run, folder, own, ds3_gather_for_generation=False)


_TRAINERS: dict[str, Callable[[Run, Path, Path], Any]] = {
    "sft": _sft,
    "dpo": _dpo,
    "dpo, log-probabilities computed before": _dpo_precomputed,
    "dpo, reference follows": _dpo_synced,
    "dpo of adapters": _dpo_adapters,
    "reward": _reward,
    "grpo": _grpo,
    "grpo, generating layer by layer": _grpo_by_layers,
}
TRAINERS = tuple(_TRAINERS)
"""Names of trainings that there are."""
