"""Instructions by tick: the published sequences, and what holds for every number of stages and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.pipe import schedule
from deepspeed.pipe.orders import one_f_one_b
from deepspeed.pipe.schedule import DataParallelSchedule, InferenceSchedule, PipeSchedule, TrainSchedule

SHORT = {
    **{"LoadMicroBatch": "L", "ForwardPass": "F", "BackwardPass": "B", "SendActivation": "SA", "RecvActivation": "RA"},
    **{"SendGrad": "SG", "RecvGrad": "RG", "ReduceGrads": "R", "ReduceTiedGrads": "RT", "OptimizerStep": "O"},
}
STAGES, MICRO_BATCHES = st.integers(1, 6), st.integers(1, 9)


def _short(steps: PipeSchedule) -> list[str]:
    return ["+".join(SHORT[each.name] + str(each.kwargs.get("buffer_id", "")) for each in tick) or "-" for tick in steps]


@pytest.mark.parametrize(
    ("of_stage", "expected"),
    [
        (TrainSchedule(4, 2, 0), "L0+F0, SA0, L1+F1, RG0+SA1+B0, L0+F0, RG1+SA0+B1, L1+F1, RG0+SA1+B0, -, RG1+B1+RT+R+O"),
        (
            TrainSchedule(4, 2, 1),
            "-, RA0+L0+F0, B0, SG0+RA1+L1+F1, B1, SG1+RA0+L0+F0, B0, SG0+RA1+L1+F1, B1, SG1+RT+R+O",
        ),
        (TrainSchedule(2, 3, 0), "L0+F0, SA0, L1+F1, SA1, -, RG0+B0, -, RG1+B1+RT+R+O"),
        (TrainSchedule(2, 3, 1), "-, RA0+F0, SA0, RA1+F1, RG0+SA1+B0, SG0, RG1+B1, SG1+RT+R+O"),
        (TrainSchedule(2, 3, 2), "-, -, RA0+L0+F0, B0, SG0+RA1+L1+F1, B1, SG1, RT+R+O"),
        (TrainSchedule(2, 1, 0), "L0+F0, B0, L1+F1, B1+RT+R+O"),
        (InferenceSchedule(3, 2, 0), "L0+F0, L1+SA0+F1, L0+SA1+F0, SA0"),
        (InferenceSchedule(3, 2, 1), "-, L0+RA0+F0, L1+RA1+F1, L0+RA0+F0"),
        (DataParallelSchedule(2, 1, 0), "L0+F0+B0, L0+F0+B0+R+O"),
    ],
)
def test_the_instructions_are_the_published_ones(of_stage: PipeSchedule, expected: str) -> None:
    assert _short(of_stage) == expected.split(", ")


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_forwards_and_backwards_come_in_the_order_of_1f1b(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        view = TrainSchedule(micro_batches, stages, stage)
        computed = [each for tick in view for each in tick if each.name in ("ForwardPass", "BackwardPass")]
        order = list(one_f_one_b(stage, stages, micro_batches))
        assert [each.name[0] for each in computed] == [work.kind for work in order]
        assert [each.kwargs["buffer_id"] for each in computed] == [
            work.micro_batch % view.num_pipe_buffers() for work in order
        ]
        assert len(list(view)) == 2 * (micro_batches + stages - 1)


@given(stages=STAGES, micro_batches=MICRO_BATCHES, trains=st.booleans())
def test_what_a_stage_sends_its_neighbour_receives_in_the_same_tick(stages: int, micro_batches: int, trains: bool) -> None:
    kind = TrainSchedule if trains else InferenceSchedule
    ticks = [[[each.name for each in tick] for tick in kind(micro_batches, stages, stage)] for stage in range(stages)]
    for stage in range(stages):
        for tick, names in enumerate(ticks[stage]):
            if stage + 1 < stages:
                assert ("SendActivation" in names) == ("RecvActivation" in ticks[stage + 1][tick])
                assert ("RecvGrad" in names) == ("SendGrad" in ticks[stage + 1][tick])
            else:
                assert "SendActivation" not in names
                assert "RecvGrad" not in names


def test_a_schedule_says_whose_it_is_and_instructions_what_they_are() -> None:
    view = TrainSchedule(micro_batches=8, stages=4, stage_id=3)
    assert (view.stage, view.num_stages, view.num_micro_batches, view.num_pipe_buffers()) == (3, 4, 8, 2)
    assert (view.is_first_stage, view.is_last_stage) == (False, True)
    assert TrainSchedule(8, 4, 1).num_pipe_buffers() == 3
    forward = schedule.ForwardPass(buffer_id=1)
    assert repr(forward) == "ForwardPass(buffer_id=1)"
    assert (forward.buffer_id, repr(schedule.OptimizerStep())) == (1, "OptimizerStep()")
    assert forward == schedule.ForwardPass(1) != schedule.ForwardPass(0)
    assert forward != schedule.BackwardPass(1)
    assert len({forward, schedule.ForwardPass(1), schedule.LoadMicroBatch(1)}) == 2
