"""Small tools that every room may use: logging, lazy attributes, timers, byte counts, nested containers.

Nothing here knows about training, ranks or devices beyond what callers hand in. Import the module that you need
(`deepspeed.common.logging`, ...); this door loads none of them, so that it costs nothing.
"""

from __future__ import annotations

__all__ = ["lazy", "logging", "memory", "pytree", "timing"]
