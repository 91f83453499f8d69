"""Sizes as people write them. Pure. Called by the commands of this room."""

from __future__ import annotations

import argparse
import re

from deepspeed.errors import ArgumentError

__all__ = ["parse_nbytes", "show_nbytes", "size_option"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_nbytes(text: str | int) -> int:
    """Return the bytes that `text` says: `1048576`, `1024K`, `1M`, `1.5G`; K is 1024.

    Raises:
        ArgumentError: it says no whole number of at least one byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", str(text).strip().upper())
    nbytes = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if nbytes < 1 or nbytes != int(nbytes):
        raise ArgumentError(f"{text!r} is not a size. Give bytes, or a number with K, M, G or T, for example 400M.")
    return int(nbytes)


def size_option(text: str) -> int:
    """`parse_nbytes` as the type of a command-line option.

    Raises:
        argparse.ArgumentTypeError: with the words of `parse_nbytes`.
    """
    try:
        return parse_nbytes(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def show_nbytes(nbytes: int) -> str:
    """Return it in the largest unit that divides it: what `parse_nbytes` reads back."""
    for unit in ("T", "G", "M", "K"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)
