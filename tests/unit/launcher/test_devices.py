from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import devices
from deepspeed.launcher.devices import (
    VISIBLE_DEVICES,
    count_devices,
    devices_from_slurm,
    hides_all,
    likely_accelerator,
    parse_visible_devices,
    visible_devices_name,
)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ([], "cpu"),
        (["null", "nvidiactl", "dri/card0"], "cpu"),
        (["nvidia0", "dri/renderD128"], "cuda"),
        (["kfd", "dri/renderD128"], "cuda"),
        (["dri/renderD128"], "xpu"),
        (["davinci0"], "npu"),
        (["accel/accel0"], "hpu"),
        (["cambricon_dev0"], "mlu"),
    ],
)
def test_device_files_tell_the_accelerator(tmp_path: Path, files: list[str], name: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert likely_accelerator({}, tmp_path, "linux") == name


def test_the_environment_overrides_device_files(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert likely_accelerator({"DS_ACCELERATOR": " CPU "}, tmp_path, "linux") == "cpu"
    assert likely_accelerator({"CUDA_VISIBLE_DEVICES": ""}, tmp_path, "linux") == "cpu"
    assert likely_accelerator({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path, "linux") == "cuda"
    assert likely_accelerator({}, tmp_path, "darwin") == "mps"


def test_a_cpu_machine_is_not_counted_and_of_another_all_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        def device_name(self) -> str:
            return "cuda"

        def device_count(self) -> int:
            return 2 - ("CUDA_VISIBLE_DEVICES" in os.environ)

    class Room:
        get_accelerator = Two

    asked: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(devices.importlib, "import_module", lambda name: asked.append(name) or Room)
    assert count_devices({"DS_ACCELERATOR": "cpu"}) is None
    assert not asked
    assert count_devices({"DS_ACCELERATOR": "cuda"}) == 2
    assert asked == ["deepspeed.accelerator"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_machine_that_only_looked_like_having_an_accelerator_runs_on_its_cpu() -> None:
    code = "from deepspeed.launcher.devices import count_devices; print(count_devices({'DS_ACCELERATOR': 'xpu'}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"DS_ACCELERATOR": "cpu"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n"


def test_deciding_what_to_start_on_a_cpu_machine_does_not_import_torch() -> None:
    code = (
        "import sys; from deepspeed.launcher import runner, launch;"
        "args = runner.parse_args(['t.py']);"
        "print(runner.select_resources(args, None, {'DS_ACCELERATOR': 'cpu'}), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'localhost': [0]} False\n"


def test_the_table_of_variables_agrees_with_the_accelerators() -> None:
    from deepspeed.accelerator.cpu import CpuAccelerator
    from deepspeed.accelerator.cuda import CudaAccelerator
    from deepspeed.accelerator.mps import MpsAccelerator
    from deepspeed.accelerator.others import OTHERS
    from deepspeed.accelerator.select import SUPPORTED_ACCELERATORS

    assert set(VISIBLE_DEVICES) == set(SUPPORTED_ACCELERATORS)
    assert {name: VISIBLE_DEVICES[name] for name in OTHERS} == {name: row.visible_devices for name, row in OTHERS.items()}
    assert CpuAccelerator({}).visible_devices_envs() == [VISIBLE_DEVICES["cpu"]]
    assert CudaAccelerator().visible_devices_envs() == [VISIBLE_DEVICES["cuda"]]
    assert MpsAccelerator().visible_devices_envs() in ([VISIBLE_DEVICES["mps"]], [])


def test_visible_devices_are_indices_or_names() -> None:
    assert parse_visible_devices("0,2") == [0, 2]
    assert parse_visible_devices(" 1 , GPU-8f3a,") == [1, "GPU-8f3a"]


def test_the_variable_follows_the_accelerator_and_an_unknown_one_gets_cudas() -> None:
    assert visible_devices_name({"DS_ACCELERATOR": "npu"}) == "ASCEND_RT_VISIBLE_DEVICES"
    assert visible_devices_name({"DS_ACCELERATOR": "klxpu"}) == "CUDA_VISIBLE_DEVICES"


def test_an_empty_or_negative_variable_hides_every_device() -> None:
    assert [hides_all(value) for value in ("", " ", "-1", "0", None)] == [True, True, True, False, False]


def test_devices_that_slurm_handed_out_are_those_it_names() -> None:
    given = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert devices_from_slurm({**given, "SLURM_STEP_GPUS": "6,7"}) == [2, 3]
    assert devices_from_slurm(given) == []
    assert devices_from_slurm({"SLURM_GPUS_ON_NODE": "2"}) == []
