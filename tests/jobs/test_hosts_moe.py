"""Experts over two hosts of two ranks: rows travel in two hops, and experts learn what they do on one machine, bit for bit.

The router's gradient is a mean over ranks, whose order of sums is the back end's; so one step is compared.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.support.host_jobs import RUNNER, run_on_hosts
from tests.support.hosts import hosts
from tests.support.launching import Job

SCRIPT = """
import hashlib
import torch
import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.topology import groups

torch.manual_seed(0)
experts = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE(8, experts, num_experts=8, ep_size=4, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)

    def forward(self, hidden):
        output, l_aux, _ = self.moe(hidden)
        return output.square().mean() + 0.01 * l_aux


model = Model()
engine, *_ = deepspeed.initialize(
    model=model,
    config={"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}},
)
torch.manual_seed(1 + engine.global_rank)
loss = engine(torch.randn(13, 8))
engine.backward(loss)
engine.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.moe.deepspeed_moe.experts.parameters())
hops = groups.get_current().axis("expert").hops()
way = "straight" if hops is None else f"{hops.inside.ranks} {hops.across.ranks}"
print(f"rank {engine.global_rank}: {hashlib.sha256(weights).hexdigest()} {loss.item()!r} over {way}", flush=True)
"""


def _told(output: str) -> dict[int, tuple[str, str]]:
    """By rank: the digest and the loss, and the way of its rows."""
    found = re.findall(r"rank (\d+): (\w{64} \S+) over (straight|\(.*?\) \(.*?\))", output)
    return {int(rank): (numbers, way) for rank, numbers, way in found}


def test_two_hops_over_hosts_give_the_experts_of_one_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\n")
    words = [str(tmp_path / "train.py")]
    one = tmp_path / "one"
    one.mkdir()
    with Job(one, ["--num_gpus", "4", *words], {"OMP_NUM_THREADS": "1"}, command=RUNNER) as job:
        assert job.wait(90) == 0, job.output
        straight = _told(job.output)
        job.assert_gone(time.monotonic())
    with hosts(2, slots=2) as cluster:
        status, output = run_on_hosts(cluster, tmp_path, words)
    assert status == 0, output
    hopping = _told(output)
    assert {rank: way for rank, (_, way) in hopping.items()} == {
        0: "(0, 1) (0, 2)",
        1: "(0, 1) (1, 3)",
        2: "(2, 3) (0, 2)",
        3: "(2, 3) (1, 3)",
    }
    assert {way for _, way in straight.values()} == {"straight"}
    assert {rank: numbers for rank, (numbers, _) in hopping.items()} == {rank: n for rank, (n, _) in straight.items()}
