"""What engines save comes out as complete fp32 weights, whatever the stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, main
from tests.ranks.test_save_16bit import Everything
from tests.support.engines import config, make_engine, masters, zero
from tests.support.ranks import run_ranks


def _save_and_export(rank: int, world_size: int, folder: str) -> None:
    for stage in (0, 1, 2, 3):
        model = Everything()
        groups = [{"params": [*model.first.parameters(), model.none]}, {"params": [model.emb.weight]}]
        blocks = {**zero(stage, stage3_param_persistence_threshold=4), "bf16": {"enabled": True}}
        engine = make_engine(model, config(**blocks), optimizer=torch.optim.AdamW(groups, lr=1e-2))
        loss = model.first(model.emb(torch.arange(4) + rank)).square().mean() + 0 * model.none.sum()
        engine.backward(loss)
        engine.step()
        save_dir = Path(folder, str(stage))
        engine.save_checkpoint(save_dir, tag="t")
        trained = masters(engine)
        assert (save_dir / "zero_to_fp32.py").exists() == (stage > 0)
        got = get_fp32_state_dict_from_zero_checkpoint(save_dir)
        assert {value.dtype for value in got.values()} == {torch.float32, torch.int64, torch.bool}
        for name, value in trained.items():
            assert torch.equal(got[name], value), (stage, name)
        assert "emb.weight" in trained
        plain = Everything()
        plain.load_state_dict(got, strict=True)
        start = Everything()
        assert torch.equal(plain.frozen.weight, start.frozen.weight.bfloat16().float())
        assert not torch.equal(plain.head.weight, start.head.weight)
        if rank == 0:
            assert main([str(save_dir), str(save_dir / "out")]) == 0
            written = torch.load(save_dir / "out" / "pytorch_model.bin", weights_only=True)
            assert written.keys() == got.keys()
            assert all(torch.equal(written[name], value) for name, value in got.items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plain_module_loads_what_an_engine_of_any_stage_saved(tmp_path: Path, world_size: int) -> None:
    run_ranks(_save_and_export, world_size, str(tmp_path))
