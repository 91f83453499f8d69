"""State that leaves the device: storages shrink, views come back right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.config.offload import OffloadStateTypeEnum
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.zero import absence
from deepspeed.zero.absence import Absence

MOMENTS, MASTERS = OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params


@pytest.fixture
def device_tensors(monkeypatch: pytest.MonkeyPatch) -> dict[OffloadStateTypeEnum, list[Tensor]]:
    """Tensors of this host that count as a device's, so that they are really moved."""
    monkeypatch.setattr(absence, "is_on_host", lambda tensor: False)
    moments = torch.arange(8.0)
    return {MOMENTS: [moments[:4], moments[4:]], MASTERS: [torch.ones(3, dtype=torch.bfloat16)]}


def _offload(gone: Absence, tensors: dict[OffloadStateTypeEnum, list[Tensor]], include: list[str] | None = None) -> None:
    gone.offload(tensors, include, "cpu", pin_memory=False, non_blocking=False)


def test_what_is_away_takes_no_memory_and_every_view_is_right_again(
    device_tensors: dict[OffloadStateTypeEnum, list[Tensor]],
) -> None:
    gone = Absence()
    _offload(gone, device_tensors)
    assert [t.untyped_storage().nbytes() for tensors in device_tensors.values() for t in tensors] == [0, 0, 0]
    gone.reload(non_blocking=False)
    assert torch.equal(device_tensors[MOMENTS][1], torch.arange(4.0, 8.0))
    assert torch.equal(device_tensors[MASTERS][0], torch.ones(3, dtype=torch.bfloat16))
    assert gone.kinds == frozenset()


def test_only_what_is_named_goes_and_a_second_call_adds_to_it(
    device_tensors: dict[OffloadStateTypeEnum, list[Tensor]],
) -> None:
    gone = Absence()
    _offload(gone, device_tensors, ["hp_params"])
    assert gone.kinds == {MASTERS}
    assert device_tensors[MOMENTS][0].untyped_storage().nbytes() == 32
    _offload(gone, device_tensors, ["hp_params", "optim_states"])
    assert gone.kinds == {MASTERS, MOMENTS}
    gone.reload(non_blocking=False)
    assert torch.equal(device_tensors[MOMENTS][0], torch.arange(4.0))


def test_host_tensors_stay_where_they_are() -> None:
    tensor = torch.ones(4)
    gone = Absence()
    _offload(gone, {MOMENTS: [tensor]})
    assert torch.equal(tensor, torch.ones(4))


def test_training_is_refused_while_state_is_away(device_tensors: dict[OffloadStateTypeEnum, list[Tensor]]) -> None:
    gone = Absence()
    gone.require_present("engine.step()")
    _offload(gone, device_tensors, ["optim_states"])
    with pytest.raises(UsageError, match=r"engine.step\(\) while offload_states\(\) keeps optim_states away"):
        gone.require_present("engine.step()")
    gone.reload(non_blocking=False)
    gone.require_present("engine.step()")


def test_unknown_kinds_and_places_are_refused_before_anything_moves(
    device_tensors: dict[OffloadStateTypeEnum, list[Tensor]],
) -> None:
    gone = Absence()
    with pytest.raises(ArgumentError, match="unknown kinds"):
        _offload(gone, device_tensors, ["moments"])
    with pytest.raises(ArgumentError, match="only"):
        gone.offload(device_tensors, None, "nvme", pin_memory=False, non_blocking=False)
    assert gone.kinds == frozenset()
    assert device_tensors[MOMENTS][0].untyped_storage().nbytes() == 32
