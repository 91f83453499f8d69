"""Which optimizers may train when each rank holds a shard of every flat buffer (ZeRO stages 1 to 3).

    optimizer            what a rank hands it at stages 1 to 3              says so
    element-wise         ranges that cut and join parameters                `optim.is_elementwise`
    sums are enough      its part of each parameter; sums over all parts    `needs_parameter_sums` (`ops.sums`): LAMB
    whole tensors        with one rank: whole parameters; else refused      the table below, or `elementwise = False`
    nobody knows         refused, unless `zero_allow_untested_optimizer`    none of the above

Two classes suit no engine at any stage, because of how they are called: see `_UNUSABLE`.

Not here: the ranges (`zero.master`), what an optimizer computes (`deepspeed.ops`). Called by `engine.basic_optimizer`.
"""

from __future__ import annotations

from deepspeed.errors import ArgumentError
from deepspeed.optim.elementwise import is_elementwise

__all__ = ["check_shardable"]

_UNUSABLE = {
    "LBFGS": "it evaluates the loss several times in one step(), through a closure, and an engine steps without one",
    "SparseAdam": "it steps sparse gradients alone, and an engine keeps gradients dense",
}

_WHOLE_TENSORS = {
    "Muon": "it orthogonalizes the momentum of whole matrices",
    "MuonWithAuxAdam": "it orthogonalizes the momentum of whole matrices",
    "Adafactor": "it keeps one statistic per row and per column of a matrix",
    "Shampoo": "it preconditions each dimension of a whole tensor",
    "DistributedShampoo": "it preconditions each dimension of a whole tensor",
    "SOAP": "it preconditions each dimension of a whole tensor",
    "LAMB": "its trust ratio is that of a whole tensor",
    "Lamb": "its trust ratio is that of a whole tensor",
    "LARS": "its trust ratio is that of a whole tensor",
    "NovoGrad": "its second moment is one number per whole tensor",
}
"""Class name -> reason. By name, because most of them live in packages that need not be installed."""


def check_shardable(optimizer: object, *, stage: int, shard_world_size: int, allows_untested: bool) -> bool:
    """Refuse an optimizer whose numbers would be wrong on shards.

    Args:
        optimizer: a torch optimizer; its class is what counts.
        stage: the ZeRO stage.
        shard_world_size: ranks that hold different shards.
        allows_untested: `zero_allow_untested_optimizer`.

    Returns:
        Whether slices may cut and join parameters: what `zero.master.MasterWeights` takes as `is_elementwise`. A class that
        nobody knows and `allows_untested` vouches for counts as element-wise where several ranks hold shards, and is
        given whole parameters everywhere else.

    Raises:
        ArgumentError: the optimizer cannot train here; the text has the reason and what to use instead. All ranks raise
            together, because it depends on the class and the config alone.
    """
    name = type(optimizer).__name__
    unusable = _listed(optimizer, _UNUSABLE)
    if unusable:
        raise ArgumentError(
            f"optimizer {name}: {unusable}. Use an optimizer with a plain step() on dense gradients, such as AdamW or SGD."
        )
    if is_elementwise(optimizer):
        return True
    if stage == 0 or getattr(optimizer, "needs_parameter_sums", False):
        return False
    reason = _listed(optimizer, _WHOLE_TENSORS)
    if not reason and getattr(optimizer, "elementwise", None) is not None:
        reason = "its class says so (elementwise = False)"
    if reason:
        if shard_world_size > 1:
            raise ArgumentError(
                f"optimizer {name} at zero_optimization.stage {stage} on {shard_world_size} ranks: it needs whole tensors "
                f"({reason}), but a rank holds a shard of each. Use stage 0, or an element-wise optimizer such as AdamW."
            )
        return False
    if not allows_untested:
        raise ArgumentError(
            f"optimizer {name} at zero_optimization.stage {stage}: this library does not know it, and it must be "
            "element-wise, because each rank steps 1-D ranges of flattened parameters, some cut in the middle. If the new "
            "value of an element depends on that element's own value, gradient and history alone, set "
            '"zero_allow_untested_optimizer": true (or elementwise = True on the class); if not, use stage 0.'
        )
    return shard_world_size > 1


def _listed(optimizer: object, reasons: dict[str, str]) -> str:
    """The reason under the name of the class, or of one it inherits from; empty when there is none."""
    return next((reasons[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in reasons), "")
