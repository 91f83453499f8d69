from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm.recorder import RECORDER
from deepspeed.comm.world import current_world, default_timeout, reset_world
from deepspeed.common import logging as our_logging
from deepspeed.errors import ArgumentError, CommError

PLACEMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*PLACEMENT, "DEEPSPEED_TIMEOUT"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield
    reset_world()


def _listening_ports() -> set[int]:
    import psutil

    listening = (c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    return {connection.laddr.port for connection in listening}


def test_one_process_without_any_variable_is_a_world_of_one() -> None:
    assert not comm.is_initialized()
    comm.init_distributed()
    assert comm.is_initialized()
    assert dist.is_initialized()
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    assert not [name for name in PLACEMENT if name in os.environ]  # children must not think they are ranks


def test_a_world_of_one_takes_no_notice_of_the_port_being_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        comm.init_distributed(distributed_port=port)
        assert comm.get_world_size() == 1
        assert not {29500} & _listening_ports()


def test_a_second_call_keeps_the_group() -> None:
    comm.init_distributed()
    group = dist.group.WORLD
    comm.init_distributed(dist_backend="nccl", timeout=timedelta(seconds=1))
    assert dist.group.WORLD is group


def test_a_group_that_torch_has_already_is_adopted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        comm.init_distributed()
        comm.init_distributed()
    assert [record.getMessage() for record in caplog.records] == [
        "using the process group of 1 rank(s) that torch.distributed has already"
    ]
    assert current_world().placement.source == "torch.distributed"
    assert comm.get_local_rank() == 0


def test_an_adopted_group_needs_no_call_at_all(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    assert comm.is_initialized()
    assert comm.get_world_size() == 1
    assert comm.get_local_rank() == 0


def test_saying_that_a_group_exists_when_none_does_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"dist_init_required=False, but torch.distributed has no process group"):
        comm.init_distributed(dist_init_required=False)


def test_saying_that_a_group_exists_adopts_it(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    comm.init_distributed(dist_init_required=False)
    assert comm.get_rank() == 0


def test_a_group_can_be_taken_down_and_started_again() -> None:
    comm.init_distributed()
    comm.destroy_process_group()
    assert not comm.is_initialized()
    with pytest.raises(CommError):
        comm.get_rank()
    comm.init_distributed(timeout=timedelta(seconds=7))
    assert current_world().timeout == timedelta(seconds=7)


def test_a_group_taken_down_through_torch_can_be_started_again() -> None:
    comm.init_distributed(timeout=timedelta(seconds=7))
    dist.destroy_process_group()
    comm.init_distributed(timeout=timedelta(seconds=8))
    assert current_world().timeout == timedelta(seconds=8)


def test_explicit_rank_size_and_meeting_place_need_no_variables(tmp_path: Path) -> None:
    comm.init_distributed(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert comm.get_world_size() == 1
    assert current_world().placement.source == "the arguments of init_distributed"


def test_the_positional_form_of_clients_is_accepted() -> None:
    comm.init_distributed("gloo", distributed_port="6000", timeout=timedelta(minutes=5))
    assert current_world().placement.master_port == 6000
    assert dist.get_backend() == "gloo"


def test_the_logger_knows_the_rank_until_the_group_is_taken_down() -> None:
    comm.init_distributed(verbose=False)
    assert our_logging._handler.rank == 0
    comm.destroy_process_group()
    assert our_logging._handler.rank is None


def test_verbose_tells_what_was_joined_and_quiet_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        comm.init_distributed(verbose=False)
        assert not caplog.records
        comm.destroy_process_group()
        comm.init_distributed()
    assert "1 rank(s) over gloo, told by no launcher" in caplog.text


@pytest.mark.parametrize(("text", "minutes"), [("", 30), ("5", 5), ("0.5", 0.5)])
def test_the_timeout_is_thirty_minutes_or_what_the_variable_says(
    text: str, minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", text)
    assert default_timeout() == timedelta(minutes=minutes)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_variable_that_is_no_time_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", text)
    with pytest.raises(CommError, match="DEEPSPEED_TIMEOUT="):
        comm.init_distributed()


@pytest.mark.parametrize("timeout", [30, timedelta(0), timedelta(seconds=-1)])
def test_a_timeout_argument_must_be_a_time(timeout: object) -> None:
    with pytest.raises(ArgumentError, match="timeout="):
        comm.init_distributed(timeout=timeout)  # type: ignore[arg-type]


def test_a_backend_that_torch_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(CommError, match=r"dist_backend='nonsense' is not in this build of torch, which has \[.*'gloo'"):
        comm.init_distributed(dist_backend="nonsense")
    assert not comm.is_initialized()


def test_missing_variables_are_named_before_anything_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CommError, match="WORLD_SIZE is missing"):
        comm.init_distributed()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CommError, match="MASTER_ADDR is missing"):
        comm.init_distributed()


def test_ranks_that_do_not_come_are_an_error_that_names_them_and_the_cure() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(CommError, match=r"rank 0 on .* waits for rank 1 of 2, .* Gave up after 1 s"):
        comm.init_distributed(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=timedelta(seconds=1))
    assert not comm.is_initialized()


def test_the_config_block_switches_the_log_on() -> None:
    comm.init_distributed(config={"comms_logger": {"enabled": True}})
    assert RECORDER.enabled


def test_the_launchers_word_is_readable_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = (comm.get_world_rank_from_launcher, comm.get_world_size_from_launcher, comm.get_local_rank_from_launcher)
    assert [ask() for ask in launcher] == [0, 1, 0]
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert [ask() for ask in launcher] == [3, 4, 1]
    assert comm.get_local_rank() == 1


def test_mpi_discovery_sets_the_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommError, match="found no variables of Open MPI"):
        comm.mpi_discovery()
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    comm.mpi_discovery(distributed_port="6000", verbose=False)
    assert {name: os.environ.get(name) for name in PLACEMENT} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": None,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "6000",
    }


def test_clouds_are_translated_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [comm.in_aml(), comm.in_aws_sm(), comm.in_dlts()] == [False, False, False]
    for name, value in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("AZ_BATCH_MASTER_NODE", "10.0.0.4:6000")
    comm.patch_aml_env_for_torch_nccl_backend(verbose=False)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.4", "6105")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0,lo"
    for name in (*PLACEMENT, "AZ_BATCH_MASTER_NODE"):
        os.environ.pop(name, None)
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    comm.patch_aws_sm_env_for_torch_nccl_backend(verbose=False)
    assert (os.environ["MASTER_ADDR"], os.environ["RANK"]) == ("algo-1", "3")


def test_asking_for_the_world_or_taking_it_down_needs_one() -> None:
    for ask in (current_world, comm.destroy_process_group):
        with pytest.raises(CommError, match=r"Call deepspeed.init_distributed\(\)"):
            ask()
