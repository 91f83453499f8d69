"""What goes wrong on one rank of a pipeline is raised on all, with its place and cause, within seconds."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.comm.watch import WATCH
from deepspeed.errors import ConfigError, PipelineDataEndedError, PipelineError, UnbuiltFeatureError
from tests.support.engines import config, masters, zero
from tests.support.pipelines import Whole, layers, make_pipeline, own, token_batches, token_loss, train_pipeline
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

pytestmark = pytest.mark.alone  # limits of seconds

SGD = functools.partial(torch.optim.SGD, lr=0.05)
SECONDS = 12.0
ENV = {"DEEPSPEED_WATCH_SECONDS": "0.8"}


def _micro_batches(count: int, rank: int = 0) -> list[Any]:
    return next(own(token_batches(1, count, 2), rank))


# -- data -------------------------------------------------------------------------------------------------------------


def _ended(rank: int, _world_size: int) -> str:
    described = layers(2)
    engine = make_pipeline(described, 2, config(4, 2), optimizer=SGD)
    data = engine.get_data_parallel_rank()
    is_short = data == 1  # one replica alone runs out
    with pytest.raises(PipelineDataEndedError) as caught:
        engine.train_batch(iter(_micro_batches(2 if is_short else 4)))
    assert isinstance(caught.value, StopIteration)
    assert engine.global_steps == 0
    batches = token_batches(2, 4, 2)
    wanted = train_reference(Whole(described), SGD, batches).losses
    assert [engine.train_batch(iter(step)).item() for step in own(batches, data)] == pytest.approx(wanted, abs=FP64_ROUNDING)
    return str(caught.value)


def test_data_that_end_early_stop_all_ranks_before_any_work_and_the_engine_goes_on() -> None:
    for text in run_ranks(_ended, 4):
        assert "stage 0 (rank 1): the data iterator ended after 2 of 4 micro-batches" in text
        assert "stage 1 (rank 3): the data iterator ended after 2 of 4 micro-batches" in text
        assert "rank 0" not in text


def _failing_data(rank: int, _world_size: int) -> str:
    def broken() -> Iterator[Any]:
        yield _micro_batches(1)[0]
        raise KeyError("no such file")

    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=SGD)
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(broken() if rank == 1 else iter(_micro_batches(2)))
    assert not isinstance(caught.value, StopIteration)
    engine.train_batch(iter(_micro_batches(2)))
    return str(caught.value)


def test_data_that_fail_on_one_stage_are_named_on_all() -> None:
    for text in run_ranks(_failing_data, 2):
        assert "stage 1 (rank 1): the data iterator failed: KeyError: 'no such file'" in text
        assert "stage 0" not in text


def _no_data(rank: int, _world_size: int) -> str:
    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=SGD)
    with pytest.raises(PipelineError) as caught:
        engine.train_batch()
    return str(caught.value)


def test_a_batch_without_any_data_is_refused_on_all_ranks() -> None:
    for text in run_ranks(_no_data, 2):
        assert "there is no data: give train_batch() a data_iter, or initialize() training_data" in text


def _triple(rank: int, _world_size: int) -> str:
    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=SGD)
    batch = _micro_batches(2)
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter([(tokens, torch.ones_like(tokens), labels) for tokens, labels in batch]))
    engine.set_batch_fn(lambda given: (given[0], given[2]))
    engine.train_batch(iter([(tokens, None, labels) for tokens, labels in batch]))
    return str(caught.value)


def test_a_batch_of_three_is_refused_on_all_ranks() -> None:
    for text in run_ranks(_triple, 2):
        assert "it gave a tuple of 3, and (inputs, labels) are needed" in text
        assert "engine.set_batch_fn" in text


# -- layers -----------------------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Fails at its third call: in the forward, in the backward, or as a process."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and self.how == "forward":
            raise ValueError("a bad value")
        if self.calls == 3 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3 and self.how == "backward":
            x = x * 1
            x.register_hook(_refuse)
        return x


def _refuse(gradient: Tensor) -> Tensor:
    raise ValueError("a bad gradient")


def _bad_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    loss = token_loss(outputs, labels)
    return torch.stack([loss, loss])


def _failing_stage(rank: int, _world_size: int, how: str) -> tuple[str, float, str]:
    described = layers(3, tied=False)
    described.insert(3, Fragile(how))
    engine = make_pipeline(
        described,
        3,
        config(6, 2),
        optimizer=SGD,
        loss_fn=_bad_loss if how == "loss" else token_loss,
        partition_method=[1, 1, 1, 1, 1, 1, 1],
    )
    began = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter(_micro_batches(6)))
    seconds = time.monotonic() - began
    with pytest.raises(PipelineError) as again:
        engine.train_batch(iter(_micro_batches(6)))
    return str(caught.value), seconds, str(again.value)


@pytest.mark.parametrize(
    ("how", "place", "cause"),
    [
        ("forward", "stage 1 (rank 1) failed in the forward of micro-batch 2", "ValueError: a bad value"),
        ("backward", "stage 1 (rank 1) failed in the backward of micro-batch 2", "ValueError: a bad gradient"),
        ("loss", "stage 2 (rank 2) failed in the forward of micro-batch 0", "loss_fn gave a tensor of shape (2,)"),
    ],
)
def test_an_exception_in_one_stage_is_raised_on_all_with_stage_rank_and_cause(how: str, place: str, cause: str) -> None:
    for text, seconds, again in run_ranks(_failing_stage, 3, how, env=ENV):
        assert place in text
        assert cause in text
        assert seconds < SECONDS
        assert "this engine stopped in an earlier batch" in again


def test_a_killed_rank_ends_the_others_within_seconds() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_failing_stage, 3, "kill", env=ENV)
    assert time.monotonic() - began < 3 * SECONDS
    kinds = {failure.rank: failure for failure in caught.value.failures}
    assert kinds[1].kind == "died"


def _interrupted(rank: int, _world_size: int) -> None:
    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        raise KeyboardInterrupt

    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=SGD, loss_fn=loss_fn)
    with contextlib.suppress(KeyboardInterrupt):
        engine.train_batch(iter(_micro_batches(2)))
    engine.train_batch(iter(_micro_batches(2)))


def test_an_interrupted_batch_is_the_last_of_its_engine_and_the_others_learn_that_its_rank_has_ended() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_interrupted, 2, env=ENV)
    of_rank = {failure.rank: failure for failure in caught.value.failures}
    assert of_rank[0].kind == of_rank[1].kind == "raised"
    why = "PipelineError: this engine stopped in an earlier batch: stage 1 (rank 1), forward of micro-batch 0: Keyboard"
    assert why in of_rank[1].text
    assert "PipelineError: stage 0 (rank 0) failed in the backward of micro-batch 0" in of_rank[0].text


def _failed_alone(rank: int, _world_size: int, schedule: str, kind: type[BaseException]) -> None:
    calls = 0

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise kind("once")
        return token_loss(outputs, labels)

    described = layers(2)
    settings = config(3, 2, wall_clock_breakdown=True, pipeline={"schedule": schedule})
    engine = make_pipeline(described, 1, settings, optimizer=SGD, loss_fn=loss_fn)
    batches = token_batches(3, 3, 1)
    is_told = issubclass(kind, Exception)
    text = "failed in the forward of micro-batch 2: ValueError: once" if is_told else "once"
    with pytest.raises(PipelineError if is_told else kind, match=text):
        train_pipeline(engine, batches[:1])
    reference = train_reference(Whole(described), SGD, batches[1:])
    assert train_pipeline(engine, batches[1:]) == pytest.approx(reference.losses, abs=FP64_ROUNDING)
    assert relative_difference(masters(engine), reference.weights) <= FP64_ROUNDING


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_failed_batch_of_one_rank_leaves_nothing_to_the_next(schedule: str, kind: type[BaseException]) -> None:
    run_ranks(_failed_alone, 1, schedule, kind)


def _no_graph(rank: int, _world_size: int) -> str:
    engine = make_pipeline(
        layers(2), 2, config(2, 2), optimizer=SGD, loss_fn=lambda out, labels: token_loss(out.detach(), labels)
    )
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter(_micro_batches(2)))
    return str(caught.value)


def test_a_loss_without_a_graph_is_refused_instead_of_training_nothing() -> None:
    for text in run_ranks(_no_graph, 2, env=ENV):
        assert "stage 1 (rank 1) failed in the forward of micro-batch 0" in text
        assert "loss_fn gave a loss without a graph" in text
        assert "detach()" in text


def _told_at_the_start(rank: int, _world_size: int) -> None:
    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=SGD)
    engine.train_batch(iter(_micro_batches(2)))
    if rank == 1:
        WATCH.tell_failure("rank 1 lost its data")
        return
    with pytest.raises(PipelineError, match="rank 1 lost its data"):
        engine.train_batch(iter(_micro_batches(2)))
    with pytest.raises(PipelineError, match="this engine stopped in an earlier batch: rank 1 lost its data"):
        engine.eval_batch(iter(_micro_batches(2)))


def test_a_failure_that_is_heard_while_a_batch_begins_is_an_error_of_the_pipeline() -> None:
    run_ranks(_told_at_the_start, 2, env=ENV)


class Refusing(nn.Module):
    """Fails in evaluation alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("a bad evaluation")
        return x


EVALUATIONS: dict[str, Callable[[Any, Iterator[Any]], Any]] = {
    "inference": lambda engine, data: engine.inference_batch(data, num_micro_batches=1),
    "each loss": lambda engine, data: engine.eval_batch(data, reduce_output=None, num_micro_batches=1),
    "mean of outputs": lambda engine, data: engine.eval_batch(data, compute_loss=False, num_micro_batches=1),
    "loss of the last stage": lambda engine, data: engine.eval_batch(data, bcast_loss=False, num_micro_batches=1),
}


def _failing_evaluation(rank: int, _world_size: int, how: str) -> str:
    described = layers(3, tied=False)
    described.insert(5, Refusing())
    engine = make_pipeline(described, 2, config(2, 2), optimizer=SGD, partition_method=[1, 0, 0, 0, 0, 1, 0])
    data = engine.get_data_parallel_rank()
    engine.train_batch(iter(_micro_batches(2, data)))
    with pytest.raises(PipelineError) as caught:
        EVALUATIONS[how](engine, iter(_micro_batches(1, data)))
    with pytest.raises(PipelineError, match="this engine stopped in an earlier batch"):
        engine.train_batch(iter(_micro_batches(2, data)))
    return str(caught.value)


@pytest.mark.parametrize("how", EVALUATIONS)
def test_an_exception_in_an_evaluation_is_raised_by_stages_that_were_done_with_it(how: str) -> None:
    for text in run_ranks(_failing_evaluation, 4, how, env=ENV):
        assert "stage 1 (rank " in text
        assert "failed in the forward of micro-batch 0: ValueError: a bad evaluation" in text


def _failing_update(rank: int, _world_size: int) -> str:
    class Faulty(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if rank == 0:
                raise MemoryError("no room for the moments")
            return super().step(closure)

    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=lambda params: Faulty(params, lr=0.1))
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter(_micro_batches(2)))
    return str(caught.value)


def test_an_exception_in_the_update_of_one_stage_is_raised_by_all_in_the_same_batch() -> None:
    for text in run_ranks(_failing_update, 2, env=ENV):
        assert "stage 0 (rank 0) failed in the update: MemoryError: no room for the moments" in text


# -- refusals ---------------------------------------------------------------------------------------------------------


def _refusals(rank: int, _world_size: int) -> None:
    def build(error: type[Exception], text: str, **blocks: Any) -> None:
        with pytest.raises(error, match=text):
            make_pipeline(layers(2), 2, config(2, 2, **blocks), optimizer=SGD)

    for stage in (2, 3):
        build(ConfigError, f"stage = {stage} with a PipelineModule: .* Use stage 0 or 1", **zero(stage))
    build(ConfigError, "managed_gradient_accumulation", managed_gradient_accumulation=False)
    every_step = {"select_strategy": "step", "select_interval": 2, "update_interval": 2}
    build(UnbuiltFeatureError, "zenflow", **zero(1, zenflow=every_step, offload_optimizer={"device": "cpu"}))

    for schedule in ("1f1b", "gpipe", "zero_bubble"):
        with pytest.raises(ConfigError, match=f'"{schedule}" with .*num_chunks=2.* Set "schedule": "interleaved"'):
            make_pipeline(layers(2), 2, config(2, 2, pipeline={"schedule": schedule}), optimizer=SGD, num_chunks=2)
    build(ConfigError, '"interleaved" with .*num_chunks=1.* Build PipelineModule', pipeline={"schedule": "interleaved"})

    engine = make_pipeline(layers(2), 2, config(2, 2), optimizer=SGD)
    calls: list[Callable[[], Any]] = [
        lambda: engine(torch.ones(1)), lambda: engine.backward(torch.ones(1)), engine.step, engine.no_sync,
        engine.coalesce_grad_reduction,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PipelineError, match=r"Only train_batch\(\) is accessible in pipeline mode\."):
            call()
    with torch.no_grad(), pytest.raises(PipelineError, match="needs gradients"):
        engine.train_batch(iter(_micro_batches(2)))
    with pytest.raises(PipelineError, match="reduce_output='median'"):
        engine.eval_batch(iter(_micro_batches(2)), reduce_output="median")  # type: ignore[arg-type]


def test_what_a_pipeline_cannot_do_is_refused_with_the_reason() -> None:
    run_ranks(_refusals, 2)
