"""Door to `deepspeed.zero.leaf`.

`deepspeed.utils.z3_leaf_module` is published as this module and as the function of that name. An import of the module sets
the name in the package, so the module itself can be called: both uses work, whichever comes first.
"""

from __future__ import annotations

from deepspeed.common.lazy import make_callable
from deepspeed.zero.leaf import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

make_callable(__name__, z3_leaf_module)
