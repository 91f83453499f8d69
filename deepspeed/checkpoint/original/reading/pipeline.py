"""The layers of a pipeline: which name each weight has in the whole model.

    layer_00-model_states.pt   weight    ->  tied_modules.emb.weight    a layer whose weights the optimizer knows as tied
    layer_01-model_states.pt   a.weight  ->  1.a.weight                 any other layer
                                             (a tied one keeps its number where no shard names it: ZeRO stage 0)

Pure. Does not live here: reading the files (`stages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["TIED", "layer_names", "stage_layers"]

TIED = "tied_modules."

Shape = tuple[int, ...]


def layer_names(layers: Mapping[int, Mapping[str, Shape]], trained: Mapping[str, Shape]) -> dict[int, dict[str, str]]:
    """For each layer: key in its file -> name in the whole model.

    Args:
        layers: layer number -> key -> shape.
        trained: name -> shape of every parameter that the optimizer's shards name; empty without ZeRO.
    """
    tied: dict[str, dict[str, Shape]] = {}
    for name, shape in trained.items():
        if name.startswith(TIED):
            module, _, key = name.removeprefix(TIED).partition(".")
            tied.setdefault(module, {})[key] = shape
    names: dict[int, dict[str, str]] = {}
    for number, shapes in layers.items():
        is_known = any(f"{number}.{key}" in trained for key in shapes)
        of_layer = None if is_known else next((m for m, keys in tied.items() if _holds(shapes, keys)), None)
        prefix = f"{number}." if of_layer is None else f"{TIED}{of_layer}."
        if of_layer is not None:
            del tied[of_layer]
        names[number] = {key: prefix + key for key in shapes}
    return names


def _holds(shapes: Mapping[str, Shape], keys: Mapping[str, Shape]) -> bool:
    return all(shapes.get(key) == shape for key, shape in keys.items())


def stage_layers(
    layers: Mapping[int, Sequence[Shape]], entries: Sequence[Sequence[Shape | None]]
) -> list[tuple[int, list[int]]] | None:
    """Which layers each stage of a pipeline without ZeRO trains, told by the shapes of its optimizer's entries.

    A stage's entries are those of tied layers that an earlier stage stores, then those of its own layers in order.

    Args:
        layers: layer number -> shapes of its parameters in order.
        entries: for each stage the shapes of its optimizer's entries in order.

    Returns:
        For each stage (entries of earlier stages' layers at its beginning, own layers); None where there is no fit, or more
        than one.
    """
    found = list(_fits(list(layers.items()), list(entries), is_first=True))
    return found[0] if len(found) == 1 else None


def _fits(
    layers: list[tuple[int, Sequence[Shape]]], entries: list[Sequence[Shape | None]], *, is_first: bool
) -> Iterable[list[tuple[int, list[int]]]]:
    if not entries:
        if not layers:
            yield []
        return
    for count in range(1, len(layers) + 1):
        own = [shape for _, shapes in layers[:count] for shape in shapes]
        extra = len(entries[0]) - len(own)
        if extra < 0 or (is_first and extra):
            continue
        if list(entries[0][extra:]) == own:
            numbers = [number for number, _ in layers[:count]]
            for rest in _fits(layers[count:], entries[1:], is_first=False):
                yield [(extra, numbers), *rest]
