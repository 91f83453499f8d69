"""Large and small numbers as text: `flops_to_string(1.5e9)` is `1.5 GFLOPS`.

Pure. Published functions; `report` uses them.
"""

from __future__ import annotations

from deepspeed.errors import ArgumentError

__all__ = [
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

_SCALES = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """`num` in units of a power of 1000: `1.23 K`; below 1000 nothing stands behind the space.

    Args:
        num: any number.
        units: prefix to use (E, P, T, G, M, K, "", m, u, n); None: the one that leaves 1 to 999 before the point.
        precision: digits after the point; zeros at the end are dropped.

    Raises:
        ArgumentError: another prefix.
    """
    if units is None:
        units = next((each for each, scale in _SCALES.items() if abs(num) >= scale), "n") if num else ""
    if units not in _SCALES:
        raise ArgumentError(f"units={units!r}: needed one of {', '.join(map(repr, _SCALES))}.")
    text = f"{num / _SCALES[units]:.{precision}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """`1.5 GFLOPS`. Also for rates, as is the custom of the field."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """`1.5 GMACs`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """`1.5 GB`."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds as `1.5 ms`."""
    return f"{number_to_string(duration, units, precision)}s"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """`1.5 B`: numbers of parameters have B where others have G."""
    given = "G" if units == "B" else units
    return number_to_string(params_num, given, precision).replace("G", "B").rstrip()
