"""On which lines the keys of a JSON or HJSON text stand.

Lives here: a scanner that knows just enough of the grammar to follow blocks, texts and comments. Does not live here:
values; the parsers read those and drop the lines. Called by `config.load`, only to say where repeated keys are.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Repeat", "key_lines", "repeated_keys"]

_SPACE = re.compile(r"(?:[\s,]+|(?:#|//)[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = re.compile(r"""'''.*?'''|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_KEY = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s:,\[\]{}]+)""")
_LITERAL = re.compile(r"(?:-?\d[\d.eE+-]*|-?Infinity|NaN|true|false|null)(?=[ \t\r]*(?:[,\]}\n]|#|//|/\*|$))")
_REST_OF_LINE = re.compile(r"[^\n]*")


class Repeat(NamedTuple):
    """One key that stands more than once in the same block."""

    path: tuple[str, ...]
    lines: tuple[int, ...]


def repeated_keys(text: str) -> list[Repeat]:
    """List the keys that stand twice or more in one block, in order of their first line. See `key_lines`."""
    places: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for block, path, line in key_lines(text):
        places.setdefault((block, path), []).append(line)
    return [Repeat(path, tuple(lines)) for (_, path), lines in places.items() if len(lines) > 1]


def key_lines(text: str) -> list[tuple[int, tuple[str, ...], int]]:
    """List `(block, path, line)` of every key of a text that the parser has accepted.

    Blocks are numbered, since the blocks of a list share their path. Lines count from 1.
    """
    scanner = _Scanner(text)
    scanner.skip()
    if text.startswith("{", scanner.position):
        scanner.position += 1
    scanner.block(())  # HJSON may leave out the outermost braces
    return scanner.found


class _Scanner:
    """A position in the text, moving forward over one construct per method."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.blocks = 0
        self.found: list[tuple[int, tuple[str, ...], int]] = []

    def block(self, path: tuple[str, ...]) -> None:
        """Pass a block whose brace is already passed."""
        number = self.blocks
        self.blocks += 1
        while not self._at_end("}"):
            line = self.text.count("\n", 0, self.position) + 1
            key = self._take(_KEY)
            inner = (*path, key[1:-1] if key[0] in "\"'" else key)
            self.found.append((number, inner, line))
            self.skip()
            self.position += 1  # the colon
            self._value(inner)

    def skip(self) -> None:
        """Pass white space, commas and comments."""
        self._take(_SPACE)

    def _value(self, path: tuple[str, ...]) -> None:
        self.skip()
        first = self.text[self.position : self.position + 1]
        if first in ("{", "["):
            self.position += 1
            if first == "{":
                self.block(path)
            else:
                while not self._at_end("]"):
                    self._value(path)
        elif first in ('"', "'"):
            self._take(_QUOTED)
        elif not self._take(_LITERAL):  # a text without quotes runs to the end of its line
            self._take(_REST_OF_LINE)

    def _at_end(self, closing: str) -> bool:
        self.skip()
        if not self.text.startswith(closing, self.position):
            return self.position >= len(self.text)
        self.position += 1
        return True

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Pass what the pattern matches here and return it; nothing is a match too."""
        match = pattern.match(self.text, self.position)
        if match is None:
            return ""
        self.position = match.end()
        return match.group()
