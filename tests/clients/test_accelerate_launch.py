"""`accelerate launch` with us on one machine: flags and files reach the engine, and the losses are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.accelerate_jobs import launched, losses_of_one_process, told_by
from tests.support.clients import assert_same_curve

FREE_PORT = ("--main_process_port", "0")


def assert_trained(folder: Path, stage: int) -> None:
    for each in told_by(folder, 2):
        assert (each["kind"], each["ranks"], each["stage"]) == ("DEEPSPEED", 2, stage)
        assert_same_curve(each["losses"], losses_of_one_process())


def test_flags_start_ranks_with_an_engine(tmp_path: Path) -> None:
    options = ["--use_deepspeed", "--zero_stage", "3", "--gradient_clipping", "0.5"]
    status, output = launched(tmp_path, [*options, "--num_processes", "2", "--num_machines", "1", *FREE_PORT])
    assert status == 0, output
    assert_trained(tmp_path, 3)


def _yaml(folder: Path, block: dict[str, Any], mixed_precision: str | None = "no") -> str:
    """A file as `accelerate config` writes it."""
    file = folder / "accelerate.yaml"
    told = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": block,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
        "debug": False,
        "downcast_bf16": "no",
    }
    if mixed_precision is not None:  # a config file of ours has its own, and Accelerate refuses a second word
        told["mixed_precision"] = mixed_precision
    file.write_text(yaml.safe_dump(told))
    return str(file)


def test_fields_of_a_yaml_file_start_the_same(tmp_path: Path) -> None:
    block = {
        "deepspeed_multinode_launcher": "standard",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero_stage": 2,
    }
    status, output = launched(tmp_path, ["--config_file", _yaml(tmp_path, block), *FREE_PORT])
    assert status == 0, output
    assert_trained(tmp_path, 2)


def test_a_config_file_of_ours_named_in_a_yaml_file_is_followed(tmp_path: Path) -> None:
    config = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    block = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    file = _yaml(tmp_path, block, mixed_precision=None)
    status, output = launched(tmp_path, ["--config_file", file, *FREE_PORT], ["--dummy"])
    assert status == 0, output
    assert_trained(tmp_path, 1)


def test_the_exit_status_of_a_failing_script_comes_through(tmp_path: Path) -> None:
    options = ["--use_deepspeed", "--zero_stage", "2", "--num_processes", "2", "--num_machines", "1", *FREE_PORT]
    status, output = launched(tmp_path, options, ["--fail-on", "1"])
    assert status != 0
    assert "exitcode  : 7" in output
