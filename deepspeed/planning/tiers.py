"""What rests in host memory and in files, and what the way there takes: `places` with bytes.

    masters, optimizer state   device | host | files, with buffers and staging in host memory     `offload.sub_groups`
    this rank's gradients      device | host, with staging on the device                          `zero.host_gradients`
    weights (stage 3)          device | host | files beyond `max_in_cpu`, with buffers            `offload.parameter_plan`

On a CPU host memory is the device's: "cpu" moves nothing there, and buffers count as the host's. Called by `states`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepspeed.engine.parameter_tier import PlannedGroup
from deepspeed.offload.parameter_plan import BucketShard, ParameterPlan, plan_parameters
from deepspeed.offload.sub_groups import aligned, plan_sub_groups
from deepspeed.offload.write_behind import WINDOW_NBYTES, WINDOWS
from deepspeed.planning.places import Places
from deepspeed.planning.terms import Term
from deepspeed.zero.extents import extents_of
from deepspeed.zero.residence import OnHost

__all__ = ["Tiers"]

_STAGED = 2  # sub-groups of `zero.delivery`: one is filled while the other is copied
_BUFFERS = "a smaller sub_group_size or buffer_count"


class Tiers(Places):
    """Where the parts of one engine rest, with bytes."""

    def has_masters(self, group: PlannedGroup, away: ParameterPlan, number: int) -> bool:
        """Whether what the optimizer steps is other memory than the model's values (`zero.flat`, `engine.tiers`)."""
        kind = group.kind
        is_tiered = kind.is_sharded and (self.weight == "host" or any(at == number for at, _ in away.offsets))
        return kind.param_dtype != kind.master_dtype or is_tiered or self.state != "device"

    # -- weights ------------------------------------------------------------------------------------------------------

    def away(self, groups: Sequence[PlannedGroup]) -> ParameterPlan:
        """Which shards of parameters rest in a file."""
        zero = self.config.zero_optimization
        block = zero.offload_param
        if zero.stage < 3 or block is None or block.device != "nvme":
            return ParameterPlan({}, 0, 0, 0)
        return plan_parameters(
            list(_shards(groups)),
            max_in_cpu=block.max_in_cpu,
            buffer_size=block.buffer_size,
            buffer_count=block.buffer_count,
        )

    def weight_terms(self, away: ParameterPlan) -> Iterator[Term]:
        """The file of parameters and what it is read and written through."""
        if not away.offsets:
            return
        yield Term("weights", away.file_nbytes, "nvme", lower="a larger max_in_cpu")
        buffers = away.buffer_count * away.buffer_nbytes
        yield Term("read buffers", buffers, "host", lower="a smaller offload_param.buffer_count")
        yield Term("write windows", WINDOWS * WINDOW_NBYTES, "host", "update")

    # -- masters and state --------------------------------------------------------------------------------------------

    def state_terms(
        self, groups: Sequence[PlannedGroup], state_nbytes: Mapping[int, Sequence[int]], away: ParameterPlan
    ) -> Iterator[Term]:
        """Buffers and staging of masters and state.

        Args:
            groups: all of them.
            state_nbytes: of the number of each trained group, bytes per element of each state tensor.
            away: which shards of parameters rest in a file.
        """
        numel = sum(groups[number].layout.shard_numel for number in state_nbytes)
        if self.state == "device" or not numel:
            return
        limit = OnHost.most_numel
        if self.state == "nvme":
            block = self.config.zero_optimization.offload_optimizer
            assert block is not None  # that is what makes it nvme
            sub_groups = plan_sub_groups(
                numel,
                1 + max(map(len, state_nbytes.values()), default=0),
                sub_group_size=self.config.zero_optimization.sub_group_size,
                buffer_count=block.buffer_count,
                reads_ahead=block.pipeline_read,
                writes_behind=block.pipeline_write,
            )
            limit = sub_groups.numel
            batches = _batches(groups, list(state_nbytes), away, limit)
            widest = max(groups[n].kind.master_dtype.itemsize + sum(nbytes) for n, nbytes in state_nbytes.items())
            buffers = min(sub_groups.buffers, len(batches)) * aligned(max(batches) * widest)
            yield Term("state buffers", buffers, "host", lower=_BUFFERS)
        if self.is_apart and self.weight == "device":
            batches = _batches(groups, list(state_nbytes), away, limit)
            size = max(groups[number].kind.param_dtype.itemsize for number in state_nbytes)
            yield Term("staged weights", min(_STAGED, len(batches)) * max(batches) * size, "host", lower=_BUFFERS)


def _batches(groups: Sequence[PlannedGroup], trained: Sequence[int], away: ParameterPlan, most: int) -> list[int]:
    """Elements of what is stepped together: `zero.master` cuts extents, `zero.walk` joins the slices."""
    batches = [0]
    for number in trained:
        group = groups[number]
        gone = [bucket for at, bucket in away.offsets if at == number]
        for extent in extents_of(group.layout, group.axis.rank, is_sharded=group.kind.is_sharded, away=gone):
            for start in range(extent.start, extent.stop, most):
                numel = min(most, extent.stop - start)
                if batches[-1] and batches[-1] + numel > most:
                    batches.append(0)
                batches[-1] += numel
    return batches


def _shards(groups: Sequence[PlannedGroup]) -> Iterator[BucketShard]:
    """As `engine.parameter_tier.RestingPlaces`."""
    for number, group in enumerate(groups):
        for position, bucket in enumerate(group.layout.buckets if group.kind.is_sharded else ()):
            start, stop = group.layout.shard_range(bucket)
            member = group.members[group.layout.slots[bucket.first_slot].index]
            yield BucketShard(number, position, member.unit, stop - start, group.kind.param_dtype.itemsize, member.name)
