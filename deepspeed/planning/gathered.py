"""How much of a sharded model is whole at once at ZeRO stage 3: one pass over the units, by the rules of `zero.prefetch`.

    uses     u0 u1 ... un | un ... u1 u0        forward, then backward; after the update nothing is whole
    at each  the unit and what is gathered ahead join; then the unit stays or goes (`should_keep`)

Called by `states`.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.zero.prefetch import GatherSettings, should_keep

__all__ = ["most_gathered_numel"]


def most_gathered_numel(numels: Sequence[int], settings: GatherSettings) -> tuple[int, bool]:
    """The most elements that are whole at once, and whether all units stay from forward to backward.

    Args:
        numels: elements of each unit, in order of use.
        settings: the budgets.
    """
    uses = [*range(len(numels)), *reversed(range(len(numels)))]
    live: set[int] = set()
    most, stays = 0, True
    for place, unit in enumerate(uses):
        live.add(unit)
        live |= _ahead(uses[place + 1 :], live, numels, settings)
        live_numel = sum(numels[each] for each in live)
        most = max(most, live_numel)
        is_forward = place < len(numels)
        if not should_keep(_distance(uses, place, numels), live_numel, settings):
            live.discard(unit)
            stays = stays and not is_forward
    return most, stays


def _distance(uses: Sequence[int], place: int, numels: Sequence[int]) -> int | None:
    """Elements used between this use of a unit and its next; None: there is none."""
    between = 0
    for later in uses[place + 1 :]:
        if later == uses[place]:
            return between
        between += numels[later]
    return None


def _ahead(coming: Sequence[int], live: set[int], numels: Sequence[int], settings: GatherSettings) -> set[int]:
    """Units that are gathered ahead, as far as the budget and the limit of what is live allow."""
    budget = 0 if settings.is_sequential else settings.prefetch_numel
    chosen: set[int] = set()
    for unit in coming:
        if unit in live or unit in chosen:
            continue
        waiting = sum(numels[each] for each in chosen) + numels[unit]
        if waiting > budget or sum(numels[each] for each in live) + waiting > settings.max_live_numel:
            break
        chosen.add(unit)
    return chosen
