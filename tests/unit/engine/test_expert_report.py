"""What monitors are told of routers, and when a router has collapsed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from deepspeed.common.logging import logger
from deepspeed.engine.expert_report import ExpertReport
from deepspeed.moe.layer import MoE
from deepspeed.topology.mesh import AxisGroup

ALONE = AxisGroup((0,), 0)


def _net(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=4, **options))  # type: ignore[arg-type]


def test_tokens_of_each_expert_the_dropped_share_and_the_entropy_are_told_by_layer() -> None:
    net = _net(capacity_factor=0.5, min_capacity=1, use_rts=False)
    layer = net[1]
    assert isinstance(layer, MoE)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()  # undecided: every token goes to the first expert, which takes one
    layer(torch.randn(8, 4))
    values = ExpertReport(net, ALONE).values()
    assert [values[f"moe/1/expert_{number}_tokens"] for number in range(4)] == [8, 0, 0, 0]
    assert values["moe/1/dropped_share"] == 7 / 8
    assert values["moe/1/entropy"] == pytest.approx(torch.tensor(4.0).log().item())
    assert len(values) == 6


def test_a_router_that_has_not_run_counts_nothing_and_a_model_without_one_tells_nothing() -> None:
    assert set(ExpertReport(_net(), ALONE).values().values()) == {0.0}
    assert ExpertReport(nn.Linear(2, 2), ALONE).values() == {}


def _told(net: nn.Sequential, reports: int) -> list[str]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logger.addHandler(handler)
    try:
        report = ExpertReport(net, ALONE, window_reports=3)
        for _ in range(reports):
            net[1](torch.randn(64, 4))
            report.values()
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "collapsed" in line]


def test_a_collapsed_router_is_warned_of_once_with_what_to_do() -> None:
    net = _net(drop_tokens=False)
    layer = net[1]
    assert isinstance(layer, MoE)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()
    (line,) = _told(net, 12)
    assert "experts 1, 2, 3 of layer '1' (3 of 4) got none of 192 tokens in the last 3 reported steps" in line
    assert "Add l_aux to the loss with a larger factor" in line


def test_a_router_that_uses_every_expert_is_not_warned_of() -> None:
    assert _told(_net(drop_tokens=False), 12) == []
