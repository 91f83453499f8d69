"""Which optimizers may be handed flat slices instead of parameters.

An optimizer is element-wise when the new value of an element depends on that element's own value, gradient and history
alone (and on counters that all elements share). Then cutting a flat buffer anywhere gives the same numbers.

Not here: the slices (`zero.master`), what that means at each ZeRO stage (`shardable`, which calls this).
"""

from __future__ import annotations

from torch import optim

_ELEMENTWISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


def is_elementwise(optimizer: object) -> bool:
    """Whether `optimizer` may step flat slices.

    True for the classes of torch.optim listed above, exactly: a subclass may compute anything. Any class can answer for
    itself with an attribute `elementwise`, as ours do. False is always safe.
    """
    declared = getattr(optimizer, "elementwise", None)
    return type(optimizer) in _ELEMENTWISE if declared is None else bool(declared)
