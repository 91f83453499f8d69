"""`deepspeed.zero.states`: the life cycle of one unit, checked first and committed last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.zero.published import ZeroParamStatus
from deepspeed.zero.states import Piece, ShardState, Unit, UnitStateError, gather_by_all_reduce, one_at_a_time
from tests.support.sharded import shard


def _unit(module: nn.Module | None = None, *, is_late: bool = False) -> Unit:
    """The first unit; `is_late`: it is gathered as between ranks, into memory of its own."""
    unit: Unit = shard(module or nn.Linear(3, 2), is_late=is_late).coordinator.pool.units[0]
    return unit


def _gathered(module: nn.Module, *, is_late: bool = False) -> Unit:
    unit = _unit(module, is_late=is_late)
    unit.gather()
    unit.wait()
    return unit


def test_a_unit_goes_from_sharded_to_gathered_and_back() -> None:
    module = nn.Linear(3, 2)
    values = module.weight.detach().clone()
    unit = _unit(module)
    assert unit.state is ShardState.SHARDED
    assert module.weight.shape == torch.Size([0])
    unit.gather()
    assert unit.state is ShardState.GATHERING
    assert vars(module.weight)["ds_status"] is ZeroParamStatus.INFLIGHT
    unit.wait()
    assert unit.state is ShardState.GATHERED
    assert torch.equal(module.weight, values)
    assert vars(module.weight)["ds_status"] is ZeroParamStatus.AVAILABLE
    unit.release()
    assert unit.state is ShardState.SHARDED
    assert module.weight.shape == torch.Size([0])
    assert vars(module.weight)["ds_status"] is ZeroParamStatus.NOT_AVAILABLE
    assert not unit.buffers


def test_a_kept_unit_has_memory_of_its_own() -> None:
    unit = _unit()
    unit.gather()
    unit.wait()
    unit.keep()
    assert unit.state is ShardState.KEPT
    assert [p.untyped_storage().nbytes() for p in unit.params] == [4 * p.numel() for p in unit.params]


@pytest.mark.parametrize(
    ("before", "step"),
    [
        ((), "wait"),
        ((), "release"),
        ((), "keep"),
        (("gather",), "gather"),
        (("gather",), "release"),
        (("gather", "wait"), "gather"),
        (("gather", "wait"), "wait"),
        (("gather", "wait", "keep"), "release"),
    ],
)
def test_a_step_out_of_order_changes_nothing(before: tuple[str, ...], step: str) -> None:
    unit = _unit()
    for earlier in before:
        getattr(unit, earlier)()
    state, buffers = unit.state, unit.buffers
    with pytest.raises(UnitStateError, match=rf"{step}\(\) while {state.value}; allowed now"):
        getattr(unit, step)()
    assert unit.state is state
    assert unit.buffers is buffers


def test_a_gather_that_fails_leaves_the_shard_and_the_state() -> None:
    class Fails:
        def wait(self) -> None:
            raise RuntimeError("peer closed")

    unit = _unit(is_late=True)
    unit.launch = lambda piece, into: Fails()
    shard_before = unit.pieces[0].flat.values.clone()
    unit.gather()
    with pytest.raises(RuntimeError, match="peer closed"):
        unit.wait()
    assert unit.state is ShardState.GATHERING
    assert all(p.shape == torch.Size([0]) for p in unit.params)
    assert torch.equal(unit.pieces[0].flat.values, shard_before)

    def refuse(piece: Piece, into: Tensor) -> Any:
        raise RuntimeError("no memory")

    unit = _unit(is_late=True)
    unit.launch = refuse
    with pytest.raises(RuntimeError, match="no memory"):
        unit.gather()
    assert unit.state is ShardState.SHARDED


def test_a_unit_has_one_piece_per_kind() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3).double())
    module[0].bias.requires_grad_(False)
    unit = _unit(module)
    assert unit.name == "0 to 1"
    assert sorted(piece.numel for piece in unit.pieces) == [16, 16, 16]
    assert unit.numel == 48
    assert unit.trained_pieces == 2
    assert "sharded" in repr(unit)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_view_that_somebody_holds_keeps_its_values_after_release(is_late: bool) -> None:
    module = nn.Linear(3, 2)
    unit = _gathered(module, is_late=is_late)
    view, values = module.weight.detach()[0], module.weight.detach()[0].clone()
    unit.release()
    unit.gather()
    unit.wait()
    assert torch.equal(view, values)


def test_all_reduce_brings_every_bit_of_the_shard() -> None:
    module = nn.Linear(4, 1, bias=False)
    module.weight.data = torch.tensor([[-0.0, float("nan"), float("-inf"), 1e-45]])
    unit = _unit(module, is_late=True)
    unit.launch = gather_by_all_reduce
    unit.gather()
    unit.wait()
    want = torch.tensor([[-0.0, float("nan"), float("-inf"), 1e-45]])
    assert torch.equal(module.weight.detach().view(torch.int32), want.view(torch.int32))


def test_one_at_a_time_waits_before_the_next_gather_starts() -> None:
    log: list[str] = []

    class Logs:
        def __init__(self, name: str) -> None:
            self.name = name
            log.append(f"launch {name}")

        def wait(self) -> None:
            log.append(f"wait {self.name}")

    unit = _unit(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3).double()), is_late=True)
    unit.launch = one_at_a_time(lambda piece, into: Logs(str(into.dtype)))
    unit.gather()
    assert [entry.split()[0] for entry in log] == ["launch", "wait", "launch", "wait"]


# -- a rank alone: views of its shards ----------------------------------------------------------------------------------


def test_a_rank_alone_shows_its_shards_where_they_lie() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3).double())
    values = [p.detach().clone() for p in module.parameters()]
    unit = _gathered(module)
    shards = [piece.flat.read_values(0, piece.numel).data_ptr() for piece in unit.pieces]
    assert [buffer.data_ptr() for buffer in unit.buffers] == shards
    assert all(torch.equal(p, value) for p, value in zip(module.parameters(), values, strict=True))
    assert len({buffer.untyped_storage()._cdata for buffer in unit.buffers}) == len(unit.pieces)
    unit.release()
    assert [p.numel() for p in module.parameters()] == [0] * 4
    assert not unit.buffers


def test_a_unit_that_is_separated_keeps_its_values_while_the_shards_change() -> None:
    module = nn.Linear(3, 2)
    values = module.weight.detach().clone()
    unit = _gathered(module)
    unit.separate()
    unit.pieces[0].flat.read_values(0, unit.numel).zero_()
    assert torch.equal(module.weight, values)
    unit.release()
    unit.gather()
    unit.wait()
    assert torch.equal(module.weight, torch.zeros(2, 3))


def test_what_is_not_a_view_of_shards_is_not_copied_again() -> None:
    unit = _gathered(nn.Linear(3, 2), is_late=True)
    buffers, versions = unit.buffers, [param._version for param in unit.params]
    unit.separate()
    unit.age()
    assert unit.buffers is buffers
    assert [param._version for param in unit.params] == versions
    assert unit.epoch == 1


def test_parameters_that_have_shown_shards_count_as_written_to_when_those_change() -> None:
    unit = _gathered(nn.Linear(3, 2))
    versions = [param._version for param in unit.params]
    unit.release()
    unit.age()
    assert [param._version - before for param, before in zip(unit.params, versions, strict=True)] == [1, 1]
    unit.age()
    assert [param._version - before for param, before in zip(unit.params, versions, strict=True)] == [1, 1]
    unit.gather()
    unit.wait()  # and it is no write that would be lost
    assert unit.epoch == 2


def test_ageing_hides_no_write_that_would_be_lost() -> None:
    module = nn.Linear(3, 2)
    unit = _gathered(module)
    unit.release()
    with torch.no_grad():
        module.weight.zero_()
    unit.age()
    unit.gather()
    with pytest.raises(UsageError, match="'weight' was written to while it was empty"):
        unit.wait()
