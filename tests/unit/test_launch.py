"""`megarlhf.cluster.launch` on dictionaries: every launcher, which one wins, and the errors.

The dictionaries are what the launchers set (Slurm 22.05, Open MPI 4.1, MPICH 4.0, torch 2.13), shortened.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time

import pytest

from megarlhf.cluster import launch
from megarlhf.cluster.launch import Rendezvous, expand_nodes, rendezvous
from megarlhf.config import UserError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "node7", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
BATCH = {  # in a batch script, outside any step
    "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node1",
}  # fmt: skip
SRUN = {  # the fourth of 3 + 1 tasks
    **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURMD_NODENAME": "node2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}  # fmt: skip
DAEMON = {  # mpirun's own step in the same job: one daemon a node
    **SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "3",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MASTER = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29511"}


def test_torchrun():
    assert rendezvous(TORCHRUN) == Rendezvous("torchrun", 3, 4, 1, 2, None, "node7", 29500)


def test_variables_set_by_hand():
    env = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert rendezvous(env) == Rendezvous("env", 3, 4, 1, 2, None, "node7", 29500)


def test_slurm_step():
    found = rendezvous(SRUN)
    assert found == Rendezvous("slurm", 3, 4, 0, 1, "node2", "node1", 20000 + 42 * 37)
    assert rendezvous({**SRUN, **MASTER}) == dataclasses.replace(found, master_addr="10.1.2.3", master_port=29511)


def test_slurm_address_is_rank_0s_node_not_that_of_srun():
    """The step may run on other nodes than the job's first, and srun on a login node."""
    env = {**SRUN, "SLURM_STEP_NODELIST": "gpu-b[09-10]", "SLURM_JOB_NODELIST": "gpu-a[1-8],gpu-b[09-10]"}
    assert rendezvous(env).master_addr == "gpu-b09"


def test_slurm_step_on_one_node_needs_no_name():
    env = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"}
    assert rendezvous(env).master_addr == "127.0.0.1"


def test_slurm_ports_of_steps_and_neighbouring_jobs_differ():
    jobs = [
        {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(900, 920) for step in range(20)
    ]
    ports = {rendezvous(env).master_port for env in jobs}
    assert len(ports) == len(jobs)
    assert min(ports) >= 20000 and max(ports) < 32768


@pytest.mark.parametrize("pmi", [{"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11"}, {"PMIX_RANK": "3"}])
def test_srun_with_pmi_is_still_slurm(pmi):
    assert rendezvous({**SRUN, **pmi}) == rendezvous(SRUN)


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["openmpi", "hydra"])
def test_mpirun(variables):
    alone = Rendezvous("mpi", 3, 4, 1, 2, None, None, None)
    assert rendezvous(variables) == alone
    assert rendezvous({**variables, **MASTER}) == Rendezvous("mpi", 3, 4, 1, 2, None, "10.1.2.3", 29511)
    # inside a Slurm job the ranks inherit SLURM_PROCID from mpirun's daemons, or from the batch script
    assert rendezvous({**DAEMON, **variables}) == alone
    assert rendezvous({**BATCH, **variables}) == alone


@pytest.mark.parametrize("outer", [BATCH, SRUN, OPEN_MPI, HYDRA], ids=["batch", "srun", "openmpi", "hydra"])
def test_torchrun_wins(outer):
    found = rendezvous({**outer, **TORCHRUN})
    assert dataclasses.replace(found, node=None) == rendezvous(TORCHRUN)


def test_single_process():
    alone = Rendezvous("single", 0, 1, 0, 1, None, "127.0.0.1", None)
    assert rendezvous({}) == alone
    assert rendezvous(MASTER) == alone  # left over in the shell
    in_batch = rendezvous({**BATCH, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"})
    assert in_batch == dataclasses.replace(alone, node="node1")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_job_of_several_tasks_without_srun(step):
    """A batch script, and the interactive step in which salloc may open its shell."""
    with pytest.raises(UserError, match="job 42 has 4 tasks.*srun"):
        rendezvous({**BATCH, **step})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "The Slurm job around has 8 tasks.*srun"),
        ({"SLURM_PROCID": "3", "SLURM_JOB_ID": "42"}, "SLURM_PROCID=3 .*SLURM_STEP_ID is missing"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 .*SLURM_STEP_ID is missing"),
        ({"SLURM_JOB_ID": "42", "SLURM_NTASKS_PER_NODE": "8"}, "job 42 has 8 tasks.*srun"),
        ({"SLURM_JOB_ID": "42", "SLURM_GPUS_ON_NODE": "8"}, "job 42 has 8 GPUs on this node.*srun"),
        (
            {"SLURM_JOB_ID": "42", "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"},
            "job 42 has 2 GPUs on this node",
        ),
    ],
)
def test_one_process_where_slurm_gave_room_for_several(env, message):
    with pytest.raises(UserError, match=message):
        rendezvous(env)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_GPUS_ON_NODE": "1"},
        {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "3"},
        {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "8"},
    ],
)
def test_one_process_where_one_was_meant(env):
    assert rendezvous(env).launcher == "single"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({**SRUN, "WORLD_SIZE": "4"}, "WORLD_SIZE is set but RANK is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is not a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE=four is not a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE is empty"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 must not exceed WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        ({n: v for n, v in TORCHRUN.items() if n != "MASTER_ADDR"}, "RANK is set but MASTER_ADDR is not"),
        ({n: v for n, v in OPEN_MPI.items() if n[-5:] != "_SIZE"}, "OMPI_COMM_WORLD_RANK is set but .*_SIZE is not"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK is set but MPI_LOCALRANKID is not"),
        ({n: v for n, v in SRUN.items() if n != "SLURM_STEP_NUM_TASKS"}, "SLURM_STEP_NUM_TASKS is not"),
        ({n: v for n, v in SRUN.items() if n != "SLURM_STEP_NODELIST"}, "SLURM_STEP_NODELIST is missing"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two is not of Slurm's form"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 must be less than the 2 nodes"),
        ({**SRUN, "MASTER_PORT": "$PORT"}, r"MASTER_PORT=\$PORT is not a whole number"),
    ],
)  # fmt: skip
def test_errors_name_the_variable(env, message):
    with pytest.raises(UserError, match=message) as error:
        rendezvous(env)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("inner", [SRUN, OPEN_MPI, HYDRA], ids=["srun", "openmpi", "hydra"])
def test_rank_exported_once_for_all_ranks(inner):
    """`export RANK=$SLURM_PROCID` in the batch script instead of in the task."""
    by_hand = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MASTER}
    with pytest.raises(UserError, match="RANK=0 contradicts .*=3 of .*=4"):
        rendezvous({**inner, **by_hand})
    assert rendezvous({**inner, **by_hand, "RANK": "3"}).rank == 3


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("node1", "node1"),
        ("node[1-3,7]", "node1 node2 node3 node7"),
        ("n[08-11],login", "n08 n09 n10 n11 login"),
        ("rack[0-1]node[1-2]", "rack0node1 rack0node2 rack1node1 rack1node2"),
        ("a-b.c,x[5]-ib", "a-b.c x5-ib"),
    ],
)
def test_expand_nodes(nodelist, names):
    assert expand_nodes(nodelist) == names.split()


@pytest.mark.parametrize("nodelist", ["", "node[1-", "node[a-b]", "node1,", "node[]", "node1]"])
def test_expand_nodes_refuses(nodelist):
    with pytest.raises(UserError, match="not a Slurm node list"):
        expand_nodes(nodelist)


def test_environment_is_read_back():
    found = Rendezvous("slurm", 3, 4, 1, 2, "node2", "node1", 21554)
    assert rendezvous(found.environment()) == dataclasses.replace(found, launcher="env", node=None)


def test_an_address_that_does_not_resolve_fails_within_seconds():
    found = rendezvous({**SRUN, "MASTER_ADDR": "no-such-host.invalid"})
    start = time.monotonic()
    with pytest.raises(
        UserError, match="rank 3 on node2: MASTER_ADDR 'no-such-host.invalid' does not resolve.*set MASTER_ADDR"
    ):
        launch.check_address(found, timeout=5)
    assert time.monotonic() - start < 10


def test_rank_0_refuses_a_taken_port_and_a_foreign_address():
    rank0 = Rendezvous("slurm", 0, 2, 0, 1, "node1", "127.0.0.1", 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used .*set MASTER_PORT"):
            launch.check_address(dataclasses.replace(rank0, master_port=port))
    launch.check_address(dataclasses.replace(rank0, master_port=port))
    # an address reserved for documentation (RFC 5737): no machine has it
    with pytest.raises(UserError, match=r"192\.0\.2\.1 is not an address of this node"):
        launch.check_address(dataclasses.replace(rank0, master_addr="192.0.2.1", master_port=port))


def test_waiting_for_rank_0_is_bounded():
    rank1 = Rendezvous("slurm", 1, 2, 0, 1, "node2", "127.0.0.1", 0)
    with socket.socket() as rank0:
        rank0.bind(("127.0.0.1", 0))
        rank1 = dataclasses.replace(rank1, master_port=rank0.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(UserError, match="rank 0 does not answer at 127.0.0.1:.*Connection refused.*MASTER_ADDR"):
            launch.await_rank0(rank1, timeout=1)
        assert time.monotonic() - start < 5
        rank0.listen()
        launch.await_rank0(rank1, timeout=1)


def test_resolve_of_one_process_and_no_torch():
    code = (
        "import sys; from megarlhf.cluster import launch; print(launch.resolve()); "
        "sys.exit(bool({'torch', 'megatron', 'mpi4py'} & set(sys.modules)))"
    )
    unset = ("RANK", "WORLD_SIZE", "SLURM", "OMPI", "PMI", "MPI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "launcher='single', rank=0, world_size=1" in done.stdout and "None" not in done.stdout
