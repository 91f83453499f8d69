"""State that changes hands."""

from __future__ import annotations

import torch

from deepspeed.zero.zenflow.moments import MOMENTS, change_hands

GROUP = {"betas": (0.9, 0.999), "bias_correction": True}


def state(step: float, **moments: list[float]) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(step), **{key: torch.tensor(values) for key, values in moments.items()}}


def corrected(moments: torch.Tensor, beta: float, step: float) -> torch.Tensor:
    return moments.double() / (1 - beta**step)


def test_what_a_moment_stands_for_is_kept_and_what_stays_is_not_touched() -> None:
    rest = state(2.0, exp_avg=[1.0, 2.0, 3.0, 4.0], exp_avg_sq=[1.0, 2.0, 3.0, 4.0])
    own = state(8.0, exp_avg=[10.0, 30.0], exp_avg_sq=[10.0, 30.0])
    before, after = torch.tensor([0, 2]), torch.tensor([2, 3])
    taken = change_hands(rest, own, before, after, GROUP)
    assert float(taken["step"]) == 8.0
    for key, beta in zip(MOMENTS, GROUP["betas"], strict=True):  # type: ignore[arg-type]
        assert taken[key][0] == 30.0
        torch.testing.assert_close(corrected(taken[key][1], beta, 8), corrected(torch.tensor(4.0), beta, 2))
        torch.testing.assert_close(corrected(rest[key][0], beta, 2), corrected(torch.tensor(10.0), beta, 8))
        assert rest[key][1] == 2.0


def test_nothing_is_converted_where_nothing_is_corrected_or_both_count_alike() -> None:
    for steps, correction in (((3.0, 3.0), True), ((2.0, 8.0), False)):
        rest = state(steps[0], exp_avg=[1.0, 2.0], exp_avg_sq=[1.0, 2.0])
        own = state(steps[1], exp_avg=[5.0], exp_avg_sq=[5.0])
        group = {**GROUP, "bias_correction": correction}
        taken = change_hands(rest, own, torch.tensor([0]), torch.tensor([1]), group)
        assert taken["exp_avg"].tolist() == taken["exp_avg_sq"].tolist() == [2.0]
        assert rest["exp_avg"][0] == rest["exp_avg_sq"][0] == 5.0
