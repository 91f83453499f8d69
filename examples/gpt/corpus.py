"""Text to train on: which files, which of them are kept for validation, and their tokens.

        files -> split by hash of the content -> merges learnt on a part of the training text -> tokens, in one .npz file

One process prepares, all ranks load. The split depends on the files' contents alone, so it is the same in every run and a
copied file never stands on both sides.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bpe import Pair, Tokenizer, learn_merges
from torch import Tensor
from torch.utils.data import Dataset

LEFT_OUT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"))
"""Folders of Python's library that are not it (installed packages), or no prose of a program: tests and tables."""

VALIDATION_SHARE = 0.05
SEPARATOR = b"\n\n\n"
LEARNING_NBYTES = 1_250_000
"""Bytes of training text that merges are learnt on: three seconds' work, and more text hardly changes them."""


@dataclass(frozen=True)
class Corpus:
    """Token ids (1-D, int64) of both parts, and what is needed to read them."""

    training: Tensor
    validation: Tensor
    validation_nbytes: int
    merges: list[Pair]

    @property
    def bits_per_byte_of_nat(self) -> float:
        """Factor from nats per token to bits per byte, on the validation text; bits per byte compare across tokenizers."""
        return len(self.validation) / self.validation_nbytes / float(np.log(2))

    @property
    def vocab_size(self) -> int:
        """Number of kinds of token: the bytes and one for each merge."""
        return 256 + len(self.merges)

    def unigram_entropy(self) -> float:
        """Entropy of the validation tokens' frequencies, in nats per token.

        No model that ignores context can have a lower loss on these tokens, so a loss below it shows that context is used.
        """
        counts_V = torch.bincount(self.validation).double()
        probabilities = counts_V[counts_V > 0] / counts_V.sum()
        return float(-(probabilities * probabilities.log()).sum())

    def save(self, path: Path) -> None:
        """Write everything to one .npz file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            path,
            training=self.training.numpy().astype(np.uint16),
            validation=self.validation.numpy().astype(np.uint16),
            validation_nbytes=self.validation_nbytes,
            merges=np.array(self.merges, dtype=np.uint16).reshape(-1, 2),
        )

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote."""
        with np.load(path) as stored:
            return cls(
                training=torch.from_numpy(stored["training"].astype(np.int64)),
                validation=torch.from_numpy(stored["validation"].astype(np.int64)),
                validation_nbytes=int(stored["validation_nbytes"]),
                merges=[(int(left), int(right)) for left, right in stored["merges"]],
            )


class Windows(Dataset[Tensor]):
    """Consecutive pieces of a text, each with one token more than the context: inputs are [:-1], targets are [1:]."""

    def __init__(self, tokens_N: Tensor, context: int) -> None:
        if len(tokens_N) <= context:
            raise ValueError(
                f"a text of {len(tokens_N)} tokens has no window of context={context} and one more. "
                "Give more text with --data, or a shorter --context."
            )
        self.tokens_N = tokens_N
        self.context = context

    def __len__(self) -> int:
        """Number of whole windows."""
        return (len(self.tokens_N) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        """Window `index`: context + 1 token ids."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        return self.tokens_N[start : start + self.context + 1]


def prepare(data: Path | None, vocab_size: int) -> Corpus:
    """Read, split and tokenize the text: a file, a folder, or None for Python's own standard library."""
    training, validation = split(read_texts(data))
    merges = learn_merges(_spread(training, LEARNING_NBYTES), vocab_size)
    tokenizer = Tokenizer(merges)
    return Corpus(
        training=torch.tensor(tokenizer.encode(training)),
        validation=torch.tensor(tokenizer.encode(validation)),
        validation_nbytes=len(validation),
        merges=merges,
    )


def read_texts(data: Path | None) -> list[bytes]:
    """Contents of the text files, in the order of their hashes; files with a NUL byte are not text.

    None takes the .py files of the standard library of the Python that runs this, without the folders in `LEFT_OUT`.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else data
    if not root.exists():
        raise FileNotFoundError(f"--data {root} does not exist. Give a file or a folder with text.")
    files = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    if data is None:
        files = [path for path in files if path.suffix == ".py" and not LEFT_OUT & set(path.relative_to(root).parts)]
    texts = {text for path in files if (text := path.read_bytes()) and b"\0" not in text}
    if not texts:
        raise ValueError(f"--data {root} holds no text (files that are not empty and have no NUL byte). Give some.")
    return sorted(texts, key=_hash)


def split(texts: list[bytes]) -> tuple[bytes, bytes]:
    """Training and validation text: about one file in twenty is kept for validation, by the hash of its content.

    Where that leaves a side empty (few files), the last twentieth of the joined text is kept instead.
    """
    is_kept = [_hash(text)[0] < 256 * VALIDATION_SHARE for text in texts]
    if any(is_kept) and not all(is_kept):
        training, validation = (
            [text for text, kept in zip(texts, is_kept, strict=True) if kept is side] for side in (False, True)
        )
        return SEPARATOR.join(training), SEPARATOR.join(validation)
    joined = SEPARATOR.join(texts)
    cut = int(len(joined) * (1 - VALIDATION_SHARE))
    return joined[:cut], joined[cut:]


def _hash(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _spread(text: bytes, nbytes: int) -> list[bytes]:
    """Blocks of `text` at even distances, about `nbytes` in all."""
    block = 16384
    stride = block * max(1, round(len(text) / nbytes))
    return [text[start : start + block] for start in range(0, len(text), stride)]
