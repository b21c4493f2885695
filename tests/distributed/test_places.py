"""Who a process is, from what schedulers put into the environment."""

import pytest

from grpo.distributed.places import Machine, Place, first_host, found, slurm_port
from grpo.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NODEID": "1", "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_ID": "0",
}  # fmt: skip
PODS = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
PET = PODS | {"WORLD_SIZE": "32", "PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}


def test_one_process_is_alone():
    for alone in ({}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, {"WORLD_SIZE": "1", "RANK": "0"}, SKY):
        assert found(alone) is None
    batch_script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"}
    assert found(batch_script | {"SLURM_NTASKS": "16"}) is None  # sbatch itself: srun has started nothing yet
    assert found({}, 1) is None


def test_torchrun():
    assert found(TORCHRUN) == Place(3, 8, 1, 2, "a", 5, "torchrun", store_runs=True, attempt=2)
    assert found(found(TORCHRUN).variables(), 8) == Place(3, 8, 1, 2, "a", 5, "the environment", True, 2)


def test_srun_without_scontrol():
    assert found(SRUN) == Place(11, 16, 3, 8, "gpu07", slurm_port("77", "0"), "srun")
    one_a_node = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}
    assert found(one_a_node, 128) == Machine(11, 16, 8, "gpu07", slurm_port("77", "0"), "srun")
    assert found(one_a_node).local_rank == 0 and found(one_a_node).ranks == 16
    uneven = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "12,4"}
    assert found(uneven).local_ranks == 4
    assert found(SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "29"}).address == "b"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[007-012,015],login", "gpu007"), ("node3", "node3"), ("a1,a2", "a1"), ("r[1,3]-ib", "r1-ib"), ("", ""),
        ("gpu-a[3]", "gpu-a3"),
    ],
)  # fmt: skip
def test_the_first_machine_of_slurms_short_form(hosts, first):
    assert first_host(hosts) == first


def test_two_jobs_on_one_machine_meet_at_two_ports():
    ports = {slurm_port(str(job), "0") for job in range(1000)}
    assert len(ports) == 1000 and all(1024 < port < 65536 for port in ports)


def test_pods():
    assert found(PODS) == Place(
        2, 4, 0, 1, "job-master-0", 23456, "the environment (RANK and WORLD_SIZE without LOCAL_RANK)"
    )
    assert found(PODS, 32).each == 8 and found(PODS, 32).index == 2
    assert found(PET) == Machine(2, 4, 8, "job-master-0", 23456, "PyTorchJob")
    assert [place.rank for place in found(PET).places(23456)] == list(range(16, 24))
    assert found(PET | {"PET_NPROC_PER_NODE": "auto"}, 8).each == 2


def test_skypilot_belongs_together_where_ranks_are_asked_for():
    assert found(SKY, 16) == Machine(1, 2, 8, "10.0.0.1", 29500, "SkyPilot")
    assert found(SKY | {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}, 8).address == "127.0.0.1"


def test_tasks_of_srun_may_be_runs_of_their_own():
    assert found(SRUN, 1) is None and found(SRUN | {"GRPO_RANKS": "1"}) is None
    assert found(SRUN).rank == 11 and found(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, 1) is None


def test_one_machine():
    machine = found({}, 3)
    assert machine == Machine(0, 1, 3, "127.0.0.1", 0)
    assert [(p.rank, p.local_rank, p.port) for p in machine.places(7)] == [(0, 0, 7), (1, 1, 7), (2, 2, 7)]


@pytest.mark.parametrize(
    ("environ", "asked", "words"),
    [
        (TORCHRUN, 4, ("--ranks 4", "torchrun has started 8")),
        (SRUN, 8, ("srun has started 16", "--ranks 1 for runs of their own")),
        (SKY, 3, ("cannot be divided over 2 machines",)),
        (PODS, 6, ("cannot be divided over 4",)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, None, ("MASTER_ADDR is not set", "torchrun")),
        (TORCHRUN | {"RANK": "x"}, None, ("RANK='x'",)),
        (TORCHRUN | {"RANK": "9"}, None, ("rank 9 of 8",)),
        (TORCHRUN | {"MASTER_PORT": "70000"}, None, ("MASTER_PORT=70000 is no port",)),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, None, ("set MASTER_ADDR",)),
        ({}, 0, ("--ranks 0",)),
    ],
)
def test_what_cannot_be(environ, asked, words):
    with pytest.raises(ConfigError) as raised:
        found(environ, asked)
    assert all(word in str(raised.value) for word in words) and "\n" not in str(raised.value)
