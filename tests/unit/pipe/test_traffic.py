"""Messages follow from orders: each that is needed is made, arrives in the order of sending, and nothing else travels."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.pipe.orders import OrderName, Work, order_of
from deepspeed.pipe.traffic import Line, Message, Place, arrivals, lines

Named = tuple[OrderName, int]
_PLAIN: list[Named] = [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("inference", 1)]
_WITH_CHUNKS: list[Named] = [("interleaved", 2), ("interleaved", 3), ("inference", 2)]
NAMED = st.sampled_from(_PLAIN + _WITH_CHUNKS)


def test_a_middle_stage_passes_activations_on_and_gradients_back() -> None:
    place = Place(stage=1, stages=3)
    forward, backward = Work("F", 5), Work("B", 5)
    assert str(place.needs(forward)) == "activation of micro-batch 5 from stage 0 to stage 1"
    assert str(place.makes(forward)) == "activation of micro-batch 5 from stage 1 to stage 2"
    assert str(place.needs(backward)) == "gradient of micro-batch 5 from stage 2 to stage 1"
    assert str(place.makes(backward)) == "gradient of micro-batch 5 from stage 1 to stage 0"
    assert place.needs(Work("W", 5)) is place.makes(Work("W", 5)) is None


def test_the_ends_take_inputs_and_make_the_loss() -> None:
    first, last = Place(0, 2, chunks=2), Place(1, 2, chunks=2)
    assert first.is_first(0)
    assert not first.is_first(1)
    assert last.is_last(1)
    assert not last.is_last(0)
    assert first.needs(Work("F", 0)) is None
    assert last.makes(Work("F", 0, 1)) is None
    assert last.needs(Work("B", 0, 1)) is None
    assert first.makes(Work("B", 0)) is None


def test_the_last_stage_hands_a_chunk_back_to_the_first() -> None:
    made = Place(1, 2, chunks=2).makes(Work("F", 3, 0))
    assert made == Message(Line("activation", 1, 0), 3, 1)
    assert Place(0, 2, chunks=2).needs(Work("F", 3, 1)) == made


@given(NAMED, st.integers(1, 5), st.integers(1, 9))
def test_what_is_needed_is_what_arrives(named: Named, stages: int, micro_batches: int) -> None:
    name, chunks = named
    orders = [order_of(name, stage, stages, micro_batches, chunks) for stage in range(stages)]
    for stage, order in enumerate(orders):
        place = Place(stage, stages, chunks)
        needed = [message for work in order if (message := place.needs(work)) is not None]
        arriving = arrivals(place, orders.__getitem__)
        assert sorted(needed) == sorted(message for messages in arriving.values() for message in messages)
        for line, messages in arriving.items():
            sender = place._replace(stage=line.source)
            made = [sender.makes(work) for work in orders[line.source]]
            assert list(messages) == [message for message in made if message is not None and message.line == line]


@given(NAMED, st.integers(1, 5), st.integers(1, 9))
def test_a_gradient_answers_each_activation(named: Named, stages: int, micro_batches: int) -> None:
    name, chunks = named
    kinds: dict[Literal["activation", "gradient"], int] = {"activation": 0, "gradient": 0}
    for stage in range(stages):
        for work in order_of(name, stage, stages, micro_batches, chunks):
            made = Place(stage, stages, chunks).makes(work)
            if made is not None:
                kinds[made.line.kind] += 1
    cuts = (stages * chunks - 1) * micro_batches
    assert kinds == {"activation": cuts, "gradient": 0 if name == "inference" else cuts}


def _rounds(order: tuple[Line, ...], stages: int) -> int:
    """How many rounds it takes to open all lines when each stage opens its own in turn and blocks in each; -1: for ever."""
    todo = [[line for line in order if stage in (line.source, line.destination)] for stage in range(stages)]
    rounds = 0
    while any(todo):
        fronts = [own[0] for own in todo if own]
        met = {line for line in fronts if fronts.count(line) == 2}
        if not met:
            return -1
        todo = [own[1:] if own and own[0] in met else own for own in todo]
        rounds += 1
    return rounds


@given(stages=st.integers(1, 12), chunks=st.integers(1, 4))
def test_lines_can_be_opened_one_after_the_other_and_side_by_side(stages: int, chunks: int) -> None:
    order = lines(stages, chunks)
    assert len(set(order)) == len(order)
    assert 0 <= _rounds(order, stages) <= 6  # even and odd, each kind, and the lines that close the circle


@given(named=NAMED, stages=st.integers(1, 5), count=st.integers(1, 9))
def test_every_message_of_every_order_has_its_line(named: Named, stages: int, count: int) -> None:
    name, chunks = named
    opened = set(lines(stages, chunks))
    for stage in range(stages):
        place = Place(stage, stages, chunks)
        made = [place.makes(work) for work in order_of(name, stage, stages, count, chunks)]
        used = {message.line for message in made if message is not None and message.line.destination != stage}
        assert used <= opened
