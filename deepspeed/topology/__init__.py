"""Where am I among the ranks: named axes, their process groups, and the arithmetic of grids.

`grid` is pure; `mesh` makes the groups; `groups` is the surface of `deepspeed.utils.groups` over the current mesh. Import
the module that you need; this door loads none of them.
"""

from __future__ import annotations

__all__ = ["grid", "groups", "mesh"]
