"""Documented members of `PipelineEngine` that only answer, delegate or refuse.

Does not live here: batches (`engine.pipeline`), questions that all engines answer (`engine.members`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from deepspeed.config.batch import BatchSizes
from deepspeed.data import RepeatingLoader
from deepspeed.engine.cut_weights import parts_together
from deepspeed.engine.members import CompatibleMembers
from deepspeed.engine.stage_weights import StageWeights
from deepspeed.engine.whole_weights import WholeWeights
from deepspeed.errors import ArgumentError, PipelineError

if TYPE_CHECKING:
    from deepspeed.engine.pipeline_data import BatchSource
    from deepspeed.pipe.module import PipelineModule
    from deepspeed.pipe.traffic import Place

__all__ = ["PipelineMembers"]

_ONLY_TRAIN_BATCH = "Only train_batch() is accessible in pipeline mode."


class PipelineMembers(CompatibleMembers):
    """Mixin of `PipelineEngine`."""

    module: PipelineModule
    training_dataloader: Any
    _place: Place
    _source: BatchSource
    _iterator: Iterator[Any] | None
    _forgets: bool

    first_output_send = True
    pipe_recv_buf = None
    """Clients set these two when shapes change; shapes may change anyway, so nothing reads them."""

    # -- where am I ---------------------------------------------------------------------------------------------------

    @property
    def grid(self) -> Any:
        """The groups of this rank, with the getters of Megatron (`pipe.grid.PipelineParallelGrid`)."""
        return self.module._grid

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self._place.stages

    @property
    def stage_id(self) -> int:
        """The stage of this rank."""
        return self._place.stage

    def get_pipeline_parallel_rank(self) -> int:
        """The stage of this rank."""
        return self.stage_id

    def is_first_stage(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank makes the loss."""
        return self.stage_id == self.num_stages - 1

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch; may be set, on all ranks alike."""
        return self._parts.batch.accumulation

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        if count < 1:
            raise ArgumentError(f"micro_batches = {count}: a batch needs at least 1.")
        micro = self._parts.batch.micro
        self._set_batch(BatchSizes(micro * count * self.dp_world_size, micro, count))

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self._parts.batch.micro

    def set_batch_fn(self, batch_fn: Callable[[Any], Any] | None) -> None:
        """Let `batch_fn` turn what the iterator gives into (inputs, labels)."""
        self._source.batch_fn = batch_fn

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Where `train_batch()` without an iterator takes its micro-batches from."""
        self._iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take them from `loader`, again and again."""
        self.training_dataloader = loader
        self._iterator = None

    def _own_iterator(self) -> Iterator[Any] | None:
        if self._iterator is None and self.training_dataloader is not None:
            self._iterator = iter(RepeatingLoader(self.training_dataloader))
        return self._iterator

    def reset_activation_shape(self) -> None:
        """Describe activations anew from the next batch on. Not needed when shapes change: that is noticed."""
        self._forgets = True

    def set_has_attention_mask(self, value: bool) -> None:
        """Accepted: every tensor is sent as what it is, masks of bools too."""

    def get_additional_losses(self) -> Any:
        """What the module says."""
        return self.module.get_additional_losses()

    # -- refused ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a stage is no model."""
        raise PipelineError(_ONLY_TRAIN_BATCH)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `forward`."""
        raise PipelineError(_ONLY_TRAIN_BATCH)

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `forward`."""
        raise PipelineError(_ONLY_TRAIN_BATCH)

    def no_sync(self) -> NoReturn:
        """Refuse: a batch is reduced once as it is."""
        raise PipelineError(f"{_ONLY_TRAIN_BATCH} Its gradients are reduced once per batch, so no_sync() has nothing to do.")

    def coalesce_grad_reduction(self) -> NoReturn:
        """Refuse, as `no_sync`."""
        raise PipelineError(f"{_ONLY_TRAIN_BATCH} Its gradients are reduced once per batch as it is.")

    # -- the whole model ----------------------------------------------------------------------------------------------

    def _weights_of(self, state_dict: Mapping[str, Any]) -> StageWeights:
        parts = self._parts
        own = {name: value for name, value in state_dict.items() if name not in parts.stage.stored_elsewhere}
        if parts.mesh.axis("expert").rank > 0:  # another rank brings the rest
            own = {name: value for name, value in own.items() if parts.of_experts(name)}
        weights = WholeWeights(self.module, own, parts.partition.sharded, getattr(state_dict, "_metadata", None))
        return StageWeights(parts_together(weights, parts), parts.mesh, parts.device)
