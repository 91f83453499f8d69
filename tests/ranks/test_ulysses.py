"""A transformers model whose sequences lie on several ranks computes what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.sequence.data import own_part, pad_batch
from deepspeed.sequence.hugging_face import UlyssesSPAttentionHF
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.sequence.registry import restore_transformers
from tests.support.ranks import run_ranks
from tests.support.ulysses import batch, llama, token_loss, whole_run

pytest.importorskip("transformers")

TOLERANCE = 1e-10  # double precision; sums over ranks and heads come in another order
STEPS = 10


def _close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def _parts_run(model: Any, batches: list[dict[str, torch.Tensor]], unit: Any) -> dict[str, Any]:
    """As `whole_run`, each rank with its tokens and the mean of gradients over sequence ranks."""
    group, size, rank = (
        unit.get_sequence_parallel_group(),
        unit.get_sequence_parallel_world_size(),
        unit.get_sequence_parallel_rank(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {"losses": []}
    for each in batches:
        part = own_part(each, rank, size)
        labels = part.pop("shift_labels")
        logits = model(**part).logits
        loss = mean_over_sequence(token_loss(logits, labels), (labels != -100).sum(), group)
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            comm.all_reduce(param.grad)
            param.grad /= size
        seen.setdefault("logits", logits.detach())
        seen.setdefault("gradients", {name: param.grad.clone() for name, param in model.named_parameters()})
        seen["losses"].append(loss.item())
        optimizer.step()
    seen["weights"] = {name: param.detach().clone() for name, param in model.named_parameters()}
    return seen


def _training(rank: int, world_size: int, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        settings = {key: case[key] for key in ("heads", "kv_heads", "attention", "sliding_window") if key in case}
        batches = [batch(case["length"], seed=seed, packed=case.get("packed", ())) for seed in range(case.get("steps", 2))]
        if case.get("padded"):
            batches = [pad_batch({**each, "attention_mask": torch.ones_like(each["input_ids"])}, 8) for each in batches]
        theirs = whole_run(llama(**settings), batches)
        model = llama(**settings)
        unit = UlyssesSPAttentionHF.register_with_transformers(model, settings.get("attention"), world_size, 2)
        try:
            ours = _parts_run(model, batches, unit)
        finally:
            restore_transformers()
        try:
            own = own_part({**batches[0], "logits": theirs["logits"]}, rank, world_size)["logits"]
            torch.testing.assert_close(ours["logits"], own, rtol=0, atol=TOLERANCE)
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=0, abs=TOLERANCE)
            _close(ours["gradients"], theirs["gradients"])
            _close(ours["weights"], theirs["weights"])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_two_ranks_train_as_one_process_does() -> None:
    cases: list[dict[str, Any]] = [
        {"length": 12, "steps": STEPS},
        {"length": 12, "kv_heads": 1, "steps": STEPS},
        {"length": 12, "kv_heads": 4},
        {"length": 13},  # one rank has a token more
        {"length": 12, "attention": "eager", "kv_heads": 1},
        {"length": 16, "packed": (5, 4, 7), "attention": "eager"},
        {"length": 16, "packed": (5, 4, 7), "steps": STEPS},
        {"length": 13, "packed": (6, 7)},
        {"length": 13, "padded": True},
        {"length": 13, "heads": 3, "kv_heads": 3},  # heads that do not divide
        {"length": 9, "heads": 6, "kv_heads": 3},  # a key head that both ranks use, unequally often
    ]
    run_ranks(_training, 2, cases)


def test_four_ranks_train_as_one_process_does() -> None:
    cases: list[dict[str, Any]] = [
        {"length": 12, "kv_heads": 1, "steps": STEPS},
        {"length": 12, "kv_heads": 2},
        {"length": 14, "kv_heads": 4, "packed": (3, 11)},
    ]
    run_ranks(_training, 4, cases)


def test_one_rank_changes_nothing() -> None:
    run_ranks(_training, 1, [{"length": 12, "steps": STEPS}])
