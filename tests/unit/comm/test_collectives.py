"""In a world of one; values over several ranks are in tests/ranks/test_comm.py."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm.recorder import RECORDER
from deepspeed.comm.world import reset_world
from deepspeed.errors import CommError

# name -> leading parameters of the documented signature
SIGNATURES = {
    "all_reduce": "tensor op group async_op",
    "all_reduce_coalesced": "tensors op group async_op",
    "inference_all_reduce": "tensor op group async_op",
    "reduce": "tensor dst op group async_op",
    "reduce_scatter": "output input_list op group async_op",
    "reduce_scatter_tensor": "output_tensor tensor op group async_op",
    "reduce_scatter_fn": "output_tensor tensor op group async_op",
    "all_gather": "tensor_list tensor group async_op",
    "all_gather_into_tensor": "output_tensor tensor group async_op",
    "all_gather_coalesced": "output_tensors input_tensors group async_op",
    "all_gather_object": "object_list obj group",
    "allgather_fn": "output_tensor input_tensor group async_op",
    "all_to_all_single": "output tensor output_split_sizes input_split_sizes group async_op",
    "all_to_all": "output_tensor_list input_tensor_list group async_op",
    "broadcast": "tensor src group async_op",
    "broadcast_object_list": "object_list src group device",
    "gather": "tensor gather_list dst group async_op",
    "scatter": "tensor scatter_list src group async_op",
    "send": "tensor dst group tag",
    "recv": "tensor src group tag",
    "isend": "tensor dst group tag",
    "irecv": "tensor src group tag",
    "batch_isend_irecv": "p2p_op_list",
    "barrier": "group async_op device_ids",
    "monitored_barrier": "group timeout wait_all_ranks",
}


@pytest.fixture(autouse=True)
def _accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    reset_world()


@pytest.fixture
def _world() -> None:
    comm.init_distributed(verbose=False)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_documented_signature_holds_with_the_shared_tail(name: str) -> None:
    parameters = list(inspect.signature(getattr(comm, name)).parameters)
    assert parameters == [*SIGNATURES[name].split(), "prof", "log_name", "debug"]


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name not in ("batch_isend_irecv",)])
def test_a_call_before_there_is_a_group_says_what_to_call(name: str) -> None:
    tensor = torch.ones(2)
    arguments = {
        name: [tensor] if "list" in name or name.endswith("tensors") else tensor
        for name in SIGNATURES[name].split()
        if name not in ("op", "group", "async_op", "tag", "device", "device_ids", "timeout", "wait_all_ranks")
        and "split" not in name
    }
    arguments |= {place: 0 for place in ("dst", "src") if place in arguments}
    with pytest.raises(AssertionError, match=rf"{name}\(\) needs the process group.*init_distributed\(\)") as caught:
        getattr(comm, name)(**arguments)
    assert isinstance(caught.value, CommError)


@pytest.mark.usefixtures("_world")
def test_the_shared_tail_is_accepted_and_ignored_while_the_log_is_off() -> None:
    tensor = torch.ones(2)
    assert comm.all_reduce(tensor, prof=True, log_name="x", debug="y") is None
    assert comm.all_reduce(tensor, comm.ReduceOp.MAX, None, True, log_name="x").wait() is not None
    assert not comm.has_comm_data()


@pytest.mark.usefixtures("_world")
def test_an_argument_that_torch_refuses_stays_torchs_error() -> None:
    with pytest.raises(TypeError):
        comm.all_reduce("not a tensor")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        comm.all_reduce(torch.ones(1), no_such_argument=1)  # type: ignore[call-arg]


@pytest.mark.usefixtures("_world")
def test_a_failing_backend_names_collective_rank_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "broadcast", fail)
    for enabled in (False, True):
        comm.configure(enabled=enabled)
        with pytest.raises(
            CommError, match=r"broadcast failed on rank 0, in the group of ranks \[0\]: Connection"
        ) as caught:
            comm.broadcast(torch.ones(1), 0, group=None, log_name="weights")
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.usefixtures("_world")
def test_calls_are_recorded_with_the_bytes_of_their_payload() -> None:
    comm.configure(enabled=True)
    tensor = torch.ones(6)
    comm.all_reduce(tensor)
    comm.all_reduce(tensor, log_name="gradients")
    comm.all_gather_into_tensor(torch.empty(6), tensor)
    comm.all_gather([torch.empty(6)], tensor)
    comm.reduce_scatter_tensor(torch.empty(6), tensor)
    comm.all_reduce_coalesced([tensor, torch.ones(2, dtype=torch.bfloat16).float()])
    comm.barrier()
    assert {name: list(sizes) for name, sizes in RECORDER.comms_dict.items()} == {
        "all_reduce": [24],
        "gradients": [24],
        "all_gather_into_tensor": [24],
        "all_gather": [24],
        "reduce_scatter_tensor": [24],
        "all_reduce_coalesced": [32],
        "barrier": [0],
    }
    assert comm.get_comm_operation_count() == 7


@pytest.mark.usefixtures("_world")
def test_only_the_named_operations_are_recorded_when_asked_so() -> None:
    comm.configure(enabled=True, prof_all=False, prof_ops=["broadcast"])
    tensor = torch.ones(1)
    comm.all_reduce(tensor)
    comm.broadcast(tensor, 0)
    comm.all_reduce(tensor, prof=True, log_name="asked for")
    assert comm.get_logged_comm_ops() == ["broadcast", "asked for"]


@pytest.mark.usefixtures("_world")
def test_an_asynchronous_call_is_recorded_once_when_it_has_been_waited_for() -> None:
    comm.configure(enabled=True)
    work = comm.all_reduce(torch.ones(1), async_op=True)
    assert not comm.has_comm_data()
    work.wait()
    work.wait()
    assert work.is_completed()
    assert comm.get_comm_operation_count() == 1


@pytest.mark.usefixtures("_world")
def test_debug_appends_the_caller() -> None:
    comm.configure(enabled=True, debug=True)
    comm.all_reduce(torch.ones(1))
    comm.all_reduce(torch.ones(1), debug="somebody")
    assert comm.get_logged_comm_ops() == [
        "all_reduce | [Caller Func: test_debug_appends_the_caller]",
        "all_reduce | [Caller Func: somebody]",
    ]


@pytest.mark.usefixtures("_world")
def test_the_summary_is_logged_or_returned(caplog: pytest.LogCaptureFixture) -> None:
    comm.configure(enabled=True)
    comm.all_reduce(torch.ones(4))
    summary = comm.log_summary(show_straggler=True, return_dict=True)
    assert summary is not None
    figures = summary["all_reduce"][16]
    assert figures["count"] == 1
    assert figures["straggler_ms"] == 0  # the only rank is the fastest
    with caplog.at_level("INFO", logger="DeepSpeed"):
        assert comm.log_summary() is None
    assert "all_reduce" in caplog.text
