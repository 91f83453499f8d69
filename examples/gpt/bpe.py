"""Byte-pair encoding: bytes to token ids and back, trained on the text itself.

        b"def key(self):"   words   b"def"  b" key"  b"("  b"self"  b"):"      frequent pairs inside words are merged
                            tokens   def     _k ey    (     self     ):        until the vocabulary is full

Text is cut into words first (letters, digits, punctuation, line breaks with their indentation); merges never cross
words. The alphabet is the 256 bytes, so any file can be encoded and decoding gives back its exact bytes.
Source: Sennrich et al., arXiv:1508.07909, on bytes as in Radford et al., 2019.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

WORDS = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+|\n[ \t]*|[ \t]+| ?[^\sA-Za-z0-9_]+|\s", re.DOTALL)

Pair = tuple[int, int]


def merge_pair(word: list[int], pair: Pair, token: int) -> list[int]:
    """`word` with each occurrence of `pair`, from the left, replaced by `token`."""
    merged: list[int] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] = token
        else:
            merged.append(symbol)
    return merged


def learn_merges(texts: Iterable[bytes], vocab_size: int) -> list[Pair]:
    """The pairs to merge, most frequent first: merge i makes token 256 + i. Ties go to the lower pair.

    Fewer than `vocab_size - 256` come back when the text runs out of pairs that occur twice.
    """
    counts_by_word = Counter(word for text in texts for word in WORDS.findall(text))
    words = [list(word) for word in counts_by_word]
    counts = list(counts_by_word.values())
    pair_counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += counts[index]
            where[pair].add(index)
    merges: list[Pair] = []
    queue = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(queue)
    while queue and len(merges) < vocab_size - 256:
        negative_count, best = heapq.heappop(queue)
        if -negative_count != pair_counts[best]:
            continue  # an outdated entry; the pair was queued anew when its count changed
        if -negative_count < 2:
            break
        merges.append(best)
        changed: set[Pair] = set()
        for index in where.pop(best):
            before, after = words[index], merge_pair(words[index], best, 255 + len(merges))
            words[index] = after
            for pair in pairwise(before):
                pair_counts[pair] -= counts[index]
                changed.add(pair)
            for pair in pairwise(after):
                pair_counts[pair] += counts[index]
                where[pair].add(index)
                changed.add(pair)
        for pair in changed - {best}:
            heapq.heappush(queue, (-pair_counts[pair], pair))
    return merges


class Tokenizer:
    """Encodes with a list of merges, each distinct word once."""

    def __init__(self, merges: Iterable[Pair]) -> None:
        self.merges = [(int(left), int(right)) for left, right in merges]
        self._token_of_pair = {pair: 256 + i for i, pair in enumerate(self.merges)}
        self._words: dict[bytes, list[int]] = {}
        self._bytes = [bytes([byte]) for byte in range(256)]
        for left, right in self.merges:
            self._bytes.append(self._bytes[left] + self._bytes[right])

    @property
    def vocab_size(self) -> int:
        """Number of tokens: the bytes and one for each merge."""
        return len(self._bytes)

    def encode(self, text: bytes) -> list[int]:
        """Token ids of `text`."""
        return [token for word in WORDS.findall(text) for token in self._encode_word(word)]

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes that `tokens` stand for."""
        return b"".join(self._bytes[token] for token in tokens)

    def _encode_word(self, word: bytes) -> list[int]:
        """Apply the earliest-learnt merge that fits until none does."""
        if word not in self._words:
            tokens = list(word)
            while len(tokens) > 1:
                known = [self._token_of_pair[p] for p in pairwise(tokens) if p in self._token_of_pair]
                if not known:
                    break
                token = min(known)
                tokens = merge_pair(tokens, self.merges[token - 256], token)
            self._words[word] = tokens
        return self._words[word]
