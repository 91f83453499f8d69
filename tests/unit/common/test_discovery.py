from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.common.discovery import (
    Placement,
    discover,
    first_slurm_host,
    in_aml,
    in_aws_sm,
    in_dlts,
    parse_port,
    slurm_tasks_per_node,
)
from deepspeed.errors import CommError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[07-08]",
}

# (variables, rank, world size, local rank, local world size, address, port)
TABLE = {
    "alone": ({}, 0, 1, 0, 1, "127.0.0.1", 29500),
    "torchrun": (TORCHRUN, 5, 8, 1, 4, "node-a", 1234),
    "deepspeed launcher": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "6000"},
        *(1, 2, 1, 2, "h", 6000),
    ),
    "rank and size only": ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 2, None, None, None, 29500),
    "all on one host": ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, 1, 2, None, 2, "127.0.0.1", 29500),
    "standard wins over a scheduler": ({**OPEN_MPI, **TORCHRUN}, 5, 8, 1, 4, "node-a", 1234),
    "Open MPI": ({**OPEN_MPI, "MASTER_ADDR": "h"}, 3, 4, 1, 2, "h", 29500),
    "Open MPI without address": (OPEN_MPI, 3, 4, 1, 2, None, 29500),
    "Open MPI on one host": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 3, 4, 1, 4, "127.0.0.1", 29500),
    "Open MPI under AzureML": ({**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 3, 4, 1, 2, "10.0.0.4", 29500),
    "Open MPI under BatchAI": ({**OPEN_MPI, "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"}, 3, 4, 1, 2, "10.0.0.4", 29500),
    "Open MPI under SageMaker": ({**OPEN_MPI, "SM_HOSTS": '["algo-1", "algo-2"]'}, 3, 4, 1, 2, "algo-1", 29500),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "h"},
        *(2, 4, 0, None, "h", 29500),
    ),
    "MPICH": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        *(1, 2, 1, 2, "127.0.0.1", 29500),
    ),
    "Cray PALS": (
        {"PMIX_RANK": "6", "WORLD_SIZE": "8", "PALS_LOCAL_RANKID": "2", "LOCAL_SIZE": "4", "MASTER_ADDR": "h"},
        *(6, 8, 2, 4, "h", 29500),
    ),
    "Slurm on several hosts": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_NODEID": "2"},
        *(3, 4, 1, 2, "node07", 29500),
    ),
    "Slurm on one host": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"},
        *(3, 4, 1, 4, "127.0.0.1", 29500),
    ),
    "Slurm": (SLURM, 3, 4, 1, None, "node07", 29500),
    "Slurm with an address": ({**SLURM, "MASTER_ADDR": "h", "MASTER_PORT": "1"}, 3, 4, 1, None, "h", 1),
    "srun with a PMI plug-in": ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, 3, 4, 1, None, "node07", 29500),
    "mpirun inside Slurm": (
        # the step counts mpirun's two helpers, not the eight ranks
        {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "PMI_RANK": "7", "PMI_SIZE": "8", "MASTER_ADDR": "h"},
        *(7, 8, None, None, "h", 29500),
    ),
    "a batch script is no rank": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 0, 1, 0, 1, "127.0.0.1", 29500),
    "one rank half told": ({"WORLD_SIZE": "1"}, 0, 1, 0, 1, "127.0.0.1", 29500),
}


@pytest.mark.parametrize("case", TABLE)
def test_each_launcher_is_understood(case: str) -> None:
    environ, *expected = TABLE[case]
    place = discover(environ)
    assert [
        place.rank,
        place.world_size,
        place.local_rank,
        place.local_world_size,
        place.master_addr,
        place.master_port,
    ] == expected


def test_the_given_port_counts_when_the_variables_say_none() -> None:
    assert discover({}, default_port="6000").master_port == 6000
    assert discover({"MASTER_PORT": "7000"}, default_port=6000).master_port == 7000


@pytest.mark.parametrize(
    ("environ", "missing"),
    [({"RANK": "1"}, "WORLD_SIZE is missing"), ({"WORLD_SIZE": "2"}, "RANK is missing"), ({"RANK": "x"}, "whole number")],
)
def test_missing_or_broken_variables_are_named(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(CommError, match=missing):
        discover(environ)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(CommError, match=r"RANK=2 with WORLD_SIZE=2"):
        discover({"RANK": "2", "WORLD_SIZE": "2"})


def test_without_discovery_a_scheduler_of_several_ranks_is_refused_and_one_of_one_ignored() -> None:
    with pytest.raises(CommError, match=r"Open MPI says this is rank 3 of 4, but auto_mpi_discovery=False"):
        discover(OPEN_MPI, use_schedulers=False)
    alone = {name: "0" if name.endswith("RANK") else "1" for name in OPEN_MPI}
    assert discover(alone, use_schedulers=False).world_size == 1


@pytest.mark.parametrize("port", ["", "http", 0, 65536, -1, "12.5"])
def test_a_port_must_be_a_port(port: int | str) -> None:
    with pytest.raises(CommError, match="distributed_port="):
        parse_port("distributed_port", port)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-5]", "node3"),
        ("node[03,07-09],other[1-2]", "node03"),
        ("rack[0-1]node[2-3]", "rack0node2"),
        ("a-[1-2]-b,c", "a-1-b"),
        ("n[10]", "n10"),
    ],
)
def test_the_first_host_of_a_slurm_node_list_is_found(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize(("text", "tasks"), [("", []), ("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,10(x2)", [1, 10, 10])])
def test_the_tasks_of_each_slurm_node_are_counted(text: str, tasks: list[int]) -> None:
    assert slurm_tasks_per_node(text) == tasks


_names = st.text(string.ascii_lowercase, min_size=1, max_size=6)


@given(prefix=_names, first=st.integers(0, 999), more=st.integers(1, 9), others=st.lists(_names, max_size=3))
def test_the_first_host_of_any_range_is_its_lowest(prefix: str, first: int, more: int, others: list[str]) -> None:
    nodes = ",".join([f"{prefix}[{first:03d}-{first + more:03d}]", *others])
    assert first_slurm_host(nodes) == f"{prefix}{first:03d}"


@given(
    world_size=st.integers(1, 64),
    rank=st.integers(0, 63),
    local_rank=st.integers(0, 7),
    local_world_size=st.integers(1, 8),
    port=st.integers(1, 65535),
)
def test_a_placement_survives_being_written_to_variables(
    world_size: int, rank: int, local_rank: int, local_world_size: int, port: int
) -> None:
    place = Placement(rank % world_size, world_size, local_rank, local_world_size, "h", port, "x")
    assert discover(place.as_environ()).as_environ() == place.as_environ()


def test_clouds_are_told_by_their_own_variables() -> None:
    assert in_aml({"AZUREML_EXPERIMENT_ID": "1"})
    assert in_aws_sm({"SM_TRAINING_ENV": "{}"})
    assert in_dlts({"DLTS_JOB_ID": "1"})
    assert [in_aml({}), in_aws_sm({}), in_dlts({})] == [False, False, False]
