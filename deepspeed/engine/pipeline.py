"""The engine of a model that is cut into stages: one call per batch, the same numbers as one process.

    train_batch(data_iter)
      announce    the first and the last stage take all micro-batches; everybody learns of them          engine.pipeline_data
      carry out   this stage's works in the order of the schedule                                      engine.pipeline_batch
      update      mean over data-parallel ranks, sum over ties, norm over all stages, step              engine.engine, zero.*
      loss        mean over micro-batches and data-parallel ranks, the same tensor on all stages

A `PipelineEngine` is a `DeepSpeedEngine` of this stage's layers over the data-parallel ranks of this stage; what a stage
does not know of the others comes to it with activations, gradients, and a few small collectives per batch.

[Note: failures] What a rank raises inside a batch leaves its neighbours waiting. So it is told to all ranks, which raise it
too (`comm.watch`, told failures), and the engine is of no more use: messages of that batch are still on their way. Ranks
hear of it where they wait, so every batch ends in a collective of all ranks: that of its loss, or one for nothing else. A
rank that is alone drops what the batch has left, and goes on. An interrupt (Ctrl-C) leaves a batch in the same state, but is
not told: all ranks get it, or learn that this one has ended.

Does not live here: building (`engine.build`), doors for other names (`engine.pipeline_members`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.failures import PeerFailedError
from deepspeed.comm.watch import WATCH
from deepspeed.common.pytree import map_tensors, tensors
from deepspeed.common.timing import NullTimer
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.pipeline_batch import BatchRun
from deepspeed.engine.pipeline_data import Announced, BatchSource
from deepspeed.engine.pipeline_losses import LossSums
from deepspeed.engine.pipeline_members import PipelineMembers
from deepspeed.engine.report import BACKWARD, FORWARD, STEP
from deepspeed.errors import NonFiniteError, PipelineError
from deepspeed.pipe.carriers import MessageCarriers
from deepspeed.pipe.orders import OrderName, Work, order_of
from deepspeed.pipe.ties import TiedBuffers
from deepspeed.pipe.traffic import Place, arrivals
from deepspeed.pipe.transport import Transport

if TYPE_CHECKING:
    from deepspeed.engine.parts import EngineParts
    from deepspeed.pipe.module import PipelineModule

__all__ = ["PipelineEngine"]

_NO_TIMER = NullTimer()  # for evaluations


class PipelineEngine(PipelineMembers, DeepSpeedEngine):
    """Trains a `PipelineModule`; made by `deepspeed.initialize`, on every rank. Constructing it is collective.

    Attributes:
        total_loss: sum of the losses of the last batch's micro-batches, mean over data-parallel ranks.
        agg_train_loss: their mean, which `train_batch` returned.
    """

    module: PipelineModule

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        mesh, module = parts.mesh, self.module
        axis = mesh.axis("pipe")
        if parts.config.pipeline.activation_checkpoint_interval:
            module.set_checkpoint_interval(parts.config.pipeline.activation_checkpoint_interval)
        self._place = Place(axis.rank, axis.size, module.num_chunks)
        is_tagged = get_accelerator().communication_backend_name() == "gloo"
        carriers = MessageCarriers(mesh, parts.device, chunks=module.num_chunks, is_tagged=is_tagged)
        self._transport = Transport(carriers, parts.device, is_dynamic=module.dynamic_shape)
        self._source = BatchSource(mesh, parts.device)
        self._tied_buffers = TiedBuffers.of(module.tie_groups, dict(module.tied_modules.items()))
        self._orders: dict[tuple[str, int], list[tuple[Work, ...]]] = {}
        self._iterator: Iterator[Any] | None = None
        self._forgets = False
        self._failure = ""
        self._is_trained = self._any_stage_trains()
        self._losses = LossSums(mesh, parts.device)
        self._batch_losses: Sequence[Tensor] = ()
        self.total_loss: Tensor | None = None
        self.agg_train_loss: Tensor | None = None

    def _any_stage_trains(self) -> bool:
        """Whether some stage has parameters that train. Collective over the stages."""
        pipe = self._parts.mesh.axis("pipe")
        trains = torch.tensor([int(any(p.requires_grad for p in self.module.parameters()))], device=self._parts.device)
        if pipe.size > 1:
            comm.all_reduce(trains, op=comm.ReduceOp.MAX, group=pipe.group)
        return bool(trains)

    # -- training -----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one global batch: `micro_batches` micro-batches, one update. Collective: all ranks call it.

        Args:
            data_iter: gives (inputs, labels) of a micro-batch; read on the first and last stage only. None: the engine's
                own loader, or what `set_dataiterator` gave.

        Returns:
            The mean loss over micro-batches and data-parallel ranks, on every rank.

        Raises:
            PipelineDataEndedError: on all ranks, the iterator of one ended too early; nothing was done.
            PipelineError: gradients are off, there is no optimizer, or a stage failed (on all ranks).
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "train_batch() inside torch.no_grad(): it needs gradients. Call it outside, or eval_batch()."
            )
        optimizer, parts = self.optimizer, self._parts
        if optimizer is None or parts.reducer is None:
            raise PipelineError(
                "train_batch() on an engine without an optimizer. Give initialize() one, or call eval_batch()."
            )
        self._require_present("engine.train_batch()")
        if not self.training:
            self.train()
        batch = self._take(data_iter, self.micro_batches, "training")
        parts.report.throughput.start()
        parts.accumulation.loss_factor(scale_wrt_gas=True)  # losses are as they are; the update divides
        parts.loss_guard.open()
        self._losses.begin()
        run = self._batch_run(batch, self._numbers(len(batch.micro_batches)), defers_weights=self._schedule == "zero_bubble")
        with self._telling(run), self.coalesced():
            self._carry_out(run, self._schedule, len(batch.micro_batches))
        with self._telling(run):
            run.doing = "update"
            self._batch_losses = run.losses
            self._update({})
        parts.accumulation.advance(len(batch.micro_batches))
        parts.report.throughput.stop(global_step=True)
        assert self.agg_train_loss is not None  # _report
        return self.agg_train_loss

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Backward passes inside only accumulate: the update reduces once per batch."""
        with DeepSpeedEngine.coalesce_grad_reduction(self):
            yield

    def _report(self) -> None:
        report = self._parts.report
        self.total_loss = self._losses.total(self._batch_losses)  # after the update: its failures stop all ranks here
        self.agg_train_loss = self.total_loss / self._parts.batch.accumulation
        report.add_loss(self.agg_train_loss, 1.0)
        if report.is_due(self.global_steps):
            report.more = self._losses.others()
        super()._report()

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: Literal["avg", "sum"] | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run micro-batches through the model in evaluation mode, without gradients. Collective: all ranks call it.

        Args:
            data_iter: as for `train_batch`.
            return_logits: return (result, outputs): the last stage's outputs by micro-batch, None on other stages.
            compute_loss: the result is made of losses; else of the last stage's outputs.
            reduce_output: "avg" or "sum" over micro-batches (and the mean over data-parallel ranks); None: a list of one
                result per micro-batch, of this rank alone.
            bcast_loss: give the reduced loss to all stages; else, and for all but a reduced loss, other stages than the last
                get None.
            num_micro_batches: how many; as in training if left out.

        Raises:
            PipelineDataEndedError: on all ranks, the iterator of one ended too early; nothing was done.
            PipelineError: another `reduce_output`, or a stage failed (on all ranks).
        """
        if reduce_output not in ("avg", "sum", None):
            raise PipelineError(f'eval_batch(reduce_output={reduce_output!r}): use "avg", "sum" or None.')
        run = self._evaluate(data_iter, num_micro_batches, has_loss=compute_loss, keeps=return_logits or not compute_loss)
        results: list[Any] = run.losses if compute_loss else run.outputs
        reduced: Any = results
        if reduce_output is not None:
            with self._telling(run):
                run.doing = "reduction of what the evaluation gave"
                count = num_micro_batches or self.micro_batches
                reduced = self._reduced(results, count, reduce_output, of_loss=compute_loss)
        if reduce_output is None or not compute_loss:
            self._meet(run)
        result = reduced if self.is_last_stage() or (compute_loss and bcast_loss and reduce_output is not None) else None
        if not return_logits:
            return result
        return result, run.outputs if self.is_last_stage() else None

    def inference_batch(self, data_iter: Iterator[Any] | None, num_micro_batches: int | None = None) -> list[Any] | None:
        """The last stage's outputs by micro-batch, None on other stages; labels are not looked at. Collective."""
        run = self._evaluate(data_iter, num_micro_batches, has_loss=False, keeps=True)
        self._meet(run)
        return run.outputs if self.is_last_stage() else None

    def _evaluate(self, data_iter: Iterator[Any] | None, count: int | None, *, has_loss: bool, keeps: bool) -> BatchRun:
        count = count or self.micro_batches
        with self._in_eval_mode(), torch.no_grad():
            batch = self._take(data_iter, count, "evaluation")
            numbers = [-1 - place for place in self._places(count)]  # none that training has; the same every time
            run = self._batch_run(batch, numbers, keeps_outputs=keeps, has_loss=has_loss)
            with self._telling(run):
                self._carry_out(run, "inference", count)
        return run

    def _meet(self, run: BatchRun) -> None:
        """[Note: failures]: a stage may be done when a later one fails."""
        with self._telling(run):
            self._losses.meet()

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        """Afterwards every module is in the mode that it was in: some may have been put into evaluation mode for good."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes:  # parents come before their children
                if module.training != mode:
                    module.train(mode)

    def _reduced(self, results: list[Any], count: int, how: Literal["avg", "sum"], *, of_loss: bool) -> Any:
        """The sum or mean over micro-batches; the mean over data-parallel ranks. That of losses is known to all stages."""
        data = self._parts.mesh.data_parallel
        divisor = count if how == "avg" else 1
        if of_loss:
            self._losses.begin()
            total = self._losses.total(results)
            self._parts.report.write_now("Train/Samples/eval_loss", total / count, self.global_samples)
            return total / divisor
        if not self.is_last_stage():
            return None
        total = results[0]
        for other in results[1:]:
            total = _added(total, other)

        def mean(tensor: Tensor) -> Tensor:
            tensor = tensor / (divisor * data.size) if tensor.is_floating_point() else tensor.clone()  # a client may have it
            if data.size > 1:
                comm.all_reduce(tensor, group=data.group)
            return tensor

        return map_tensors(mean, total)

    # -- a batch ------------------------------------------------------------------------------------------------------

    def _take(self, data_iter: Iterator[Any] | None, count: int, mode: str) -> Announced:
        if self._failure:
            raise PipelineError(
                f"this engine stopped in an earlier batch: {self._failure} Messages of that batch are still on their way: "
                "start the job again, from a checkpoint."
            )
        iterator = self._own_iterator() if data_iter is None else data_iter
        forgets, self._forgets = self._forgets, False
        try:
            batch = self._source.take(iterator, count, mode=mode, forgets=forgets)
        except PeerFailedError as error:
            raise self._stopped(error) from error
        if batch.forgets:
            self._transport.forget_forms()
        return batch

    def _batch_run(self, batch: Announced, numbers: Sequence[int], **options: Any) -> BatchRun:
        micro_batches, signatures, _ = batch
        compute = _Compute(self)  # of one batch: an engine that is dropped is freed at once
        return BatchRun(self._place, compute, self._transport, micro_batches, signatures, numbers, **options)

    def _places(self, count: int) -> list[int]:
        """Of each of this rank's micro-batches in a batch: how many of all ranks come before."""
        data = self._parts.mesh.data_parallel
        return [micro_batch * data.size + data.rank for micro_batch in range(count)]

    def _numbers(self, count: int) -> list[int]:
        """Of each micro-batch of the batch that begins: how many the run had before, for `PipelineModule(seed_layers)`."""
        before = self.global_samples // self._parts.batch.micro
        return [before + place for place in self._places(count)]

    def _carry_out(self, run: BatchRun, schedule: OrderName, count: int) -> None:
        orders = self._orders_of(schedule, count)
        run.carry_out(orders[self._place.stage], arrivals(self._place, orders.__getitem__))
        for tied in self._tied_buffers:
            tied.follow_owner()

    def _orders_of(self, schedule: OrderName, count: int) -> list[tuple[Work, ...]]:
        """The order of each stage."""
        known = self._orders.get((schedule, count))
        if known is None:
            _, stages, chunks = self._place
            known = [order_of(schedule, stage, stages, count, chunks) for stage in range(stages)]
            self._orders[schedule, count] = known
        return known

    @property
    def _schedule(self) -> OrderName:
        return self._config.pipeline.schedule

    @contextmanager
    def _telling(self, run: BatchRun) -> Iterator[None]:
        """[Note: failures]."""
        try:
            yield
        except NonFiniteError:  # on all ranks together
            raise
        except PeerFailedError as error:
            raise self._stopped(error) from error
        except Exception as error:  # whatever a layer raises: all ranks are told, and raise
            text = (
                f"stage {self.stage_id} (rank {self.global_rank}) failed in the {run.doing}: {type(error).__name__}: {error}"
            )
            told = WATCH.tell_failure(text)
            self._leave_batch(told)
            raise PipelineError(told) from error
        except BaseException as error:  # an interrupt, an exit: whoever catches it may go on
            self._leave_batch(f"stage {self.stage_id} (rank {self.global_rank}), {run.doing}: {type(error).__name__}.")
            raise

    def _leave_batch(self, why: str) -> None:
        """This rank is out of the batch, and says so where that ends the engine."""
        if self.world_size > 1:
            self._failure = why
        else:
            self._forget_batch()

    def _stopped(self, heard: PeerFailedError) -> PipelineError:
        """What to raise after another rank's failure; the engine is of no more use."""
        self._failure = WATCH.tell_failure(str(heard))
        return PipelineError(self._failure)

    def _forget_batch(self) -> None:
        """The batch was cut short: the next one begins as if it had not been."""
        parts = self._parts
        self.zero_grad()
        parts.accumulation.close_window()
        parts.loss_guard.reset()
        for name in (FORWARD, BACKWARD, STEP):
            parts.report.timers(name).reset()
        parts.report.close_window()


class _Compute:
    """`pipeline_batch.StageCompute` of an engine."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine

    def forward(self, chunk: int, inputs: Any, number: int) -> Any:
        """See `StageCompute`."""
        engine = self._engine
        parts = engine._parts
        if parts.input_dtype is not None and self._engine._place.is_first(chunk):
            inputs = map_tensors(engine._cast_input, inputs)
        timer = parts.report.timers(FORWARD) if engine.training else _NO_TIMER
        with timer, engine._autocast(), parts.products():
            return engine.module.forward_chunk(chunk, inputs, number)

    def loss(self, outputs: Any, labels: Any) -> Tensor:
        """See `StageCompute`."""
        loss_fn = self._engine.module.loss_fn
        source = "the last layer" if loss_fn is None else "loss_fn"
        with self._engine._autocast():
            loss = outputs if loss_fn is None else loss_fn(outputs, labels)
        if torch.is_grad_enabled():
            self._engine._losses.note_others(self._engine.module.get_additional_losses())
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PipelineError(
                f"{source} gave {shown}; a scalar loss is needed. Reduce it, or set PipelineModule(loss_fn=...)."
            )
        if torch.is_grad_enabled() and not loss.requires_grad and self._engine._is_trained:
            raise PipelineError(
                f"{source} gave a loss without a graph: all gradients would be zero. Compute it from the outputs, with "
                "gradients enabled; look for detach(), .item(), argmax and torch.no_grad() in loss_fn and the layers."
            )
        return loss.reshape(())

    def scaled(self, loss: Tensor) -> Tensor:
        """See `StageCompute`."""
        return self._engine._parts.loss_guard.scale(loss)

    def backward(self, autograd: Callable[[], None]) -> None:
        """See `StageCompute`."""
        parts = self._engine._parts
        assert parts.reducer is not None  # train_batch
        with parts.report.timers(BACKWARD):
            parts.reducer.drive(autograd)


def _added(one: Any, other: Any) -> Any:
    """The sum of two outputs of one form."""
    others = tensors(other)
    return map_tensors(lambda tensor: tensor + next(others), one)
