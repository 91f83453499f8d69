"""Names of a pipeline's layers, and which stage trained which."""

from __future__ import annotations

from deepspeed.checkpoint.original.reading.pipeline import Shape, layer_names, stage_layers

BLOCK: dict[str, Shape] = {"a.weight": (4, 4), "a.bias": (4,)}


def test_layers_are_named_by_number() -> None:
    names = layer_names({0: BLOCK, 12: BLOCK}, {})
    assert names == {0: {k: f"0.{k}" for k in BLOCK}, 12: {k: f"12.{k}" for k in BLOCK}}


def test_a_tied_layer_gets_the_name_that_the_optimizer_knows() -> None:
    trained: dict[str, Shape] = {"tied_modules.emb.weight": (9, 4), "1.a.weight": (4, 4), "1.a.bias": (4,)}
    names = layer_names({0: {"weight": (9, 4)}, 1: BLOCK}, trained)
    assert names[0] == {"weight": "tied_modules.emb.weight"}
    assert names[1] == {"a.weight": "1.a.weight", "a.bias": "1.a.bias"}


def test_two_tied_layers_of_one_shape_are_taken_in_order() -> None:
    trained: dict[str, Shape] = {"tied_modules.one.weight": (9, 4), "tied_modules.two.weight": (9, 4)}
    names = layer_names({0: {"weight": (9, 4)}, 1: {"weight": (9, 4)}}, trained)
    assert names == {0: {"weight": "tied_modules.one.weight"}, 1: {"weight": "tied_modules.two.weight"}}


def test_a_frozen_layer_beside_a_tied_one_keeps_its_number() -> None:
    names = layer_names({0: {"weight": (3, 3)}, 1: {"weight": (9, 4)}}, {"tied_modules.emb.weight": (9, 4)})
    assert names == {0: {"weight": "0.weight"}, 1: {"weight": "tied_modules.emb.weight"}}


EMBEDDING: list[Shape] = [(9, 4)]
LAYER: list[Shape] = [(4, 4), (4,)]


def test_stages_are_told_by_the_shapes_of_their_entries() -> None:
    layers = {0: EMBEDDING, 1: LAYER, 2: LAYER, 3: LAYER}
    entries = [[*EMBEDDING, *LAYER, *LAYER], [*EMBEDDING, *LAYER]]
    assert stage_layers(layers, entries) == [(0, [0, 1, 2]), (1, [3])]
    assert stage_layers(layers, [[*EMBEDDING, *LAYER, *LAYER, *LAYER]]) == [(0, [0, 1, 2, 3])]


def test_no_fit_and_several_fits_are_both_refused() -> None:
    assert stage_layers({0: EMBEDDING, 1: LAYER}, [[*LAYER], [*EMBEDDING]]) is None
    assert stage_layers({0: LAYER, 1: LAYER}, [[*LAYER], [*LAYER, *LAYER, *LAYER]]) == [(0, [0]), (4, [1])]
    assert stage_layers({0: EMBEDDING, 1: []}, [[*EMBEDDING], [*EMBEDDING]]) is not None
    assert stage_layers({0: [], 1: [], 2: []}, [[], []]) is None
