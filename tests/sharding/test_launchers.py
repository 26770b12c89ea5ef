"""What launchers tell their processes, as mappings; no process is started."""

import jax
import pytest

from sharding import launchers
from sharding.launchers import LaunchError, Processes, find_processes

LWS = {"LWS_LEADER_ADDRESS": "group-0.svc", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "node0:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
JOB = {
    "JAX_COORDINATOR_ADDRESS": "job-0.pods",
    "JAX_NUM_PROCESSES": "2",
    "JOB_COMPLETION_INDEX": "1",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (LWS, Processes(coordinator="group-0.svc:8476", count=2, index=1)),
        (JAX, Processes(coordinator="node0:1234", count=4, index=3)),
        (JOB, Processes(coordinator="job-0.pods:8476", count=2, index=1)),
        (MPI, Processes(count=8, index=5, method="ompi", local_devices=(1,))),
        (SLURM, Processes(count=2, index=1, method="slurm", local_devices=tuple(range(8)))),
        # A port of its own; the same said twice; the devices of a process by name.
        (
            LWS | {"JAX_COORDINATOR_ADDRESS": "group-0.svc:99", "JAX_PROCESS_ID": "1"},
            Processes(coordinator="group-0.svc:99", count=2, index=1),
        ),
        (
            SLURM | {"JAX_LOCAL_DEVICE_IDS": "2,3"},
            Processes(count=2, index=1, method="slurm", local_devices=(2, 3)),
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "3"},
            Processes(count=2, index=1, method="slurm", local_devices=(3,)),
        ),
        # mpirun inside an allocation: Slurm counts what it started itself.
        (SLURM | MPI, Processes(count=8, index=5, method="ompi", local_devices=(1,))),
        (
            {"JAX_COORDINATOR_ADDRESS": "[fe80::1]:7", "JAX_NUM_PROCESSES": "1"}
            | {"JAX_PROCESS_ID": "0"},
            Processes(coordinator="[fe80::1]:7", count=1, index=0),
        ),
    ],
)
def test_launchers_are_understood(environment, found):
    assert find_processes(environment) == found


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, r"no launcher .* known here .*Slurm\): give --coordinator.* or set JAX_COORD"),
        (without(LWS, "LWS_GROUP_SIZE"), "LWS_WORKER_INDEX.* is set but LWS_GROUP_SIZE is not"),
        (without(LWS, "LWS_WORKER_INDEX"), "is set but LWS_WORKER_INDEX is not"),
        (without(LWS, "LWS_LEADER_ADDRESS"), "LWS_WORKER_INDEX.* names the coordinator"),
        (LWS | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE='two' must be a number"),
        (LWS | {"LWS_WORKER_INDEX": "2"}, "LWS_WORKER_INDEX=2 must be from 0 to 1"),
        (LWS | {"LWS_GROUP_SIZE": "0"}, "LWS_GROUP_SIZE=0 must be at least 1"),
        (LWS | {"LWS_LEADER_ADDRESS": "a:b"}, "LWS_LEADER_ADDRESS='a:b' is not an address"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": ":1"}, "JAX_COORDINATOR_ADDRESS=':1' is not an address"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "h:70000"}, "'h:70000' is not an address"),
        (LWS | {"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID=0 contradicts LWS_WORKER_INDEX=1"),
        (JOB | {"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID=0 contradicts JOB_COMPLETION_INDEX=1"),
        (LWS | MPI, "LWS_WORKER_INDEX=1 of LeaderWorkerSet contradicts OMPI_COMM_WORLD_RANK=5"),
        (without(JAX, "JAX_PROCESS_ID"), "is set but JAX_PROCESS_ID is not"),
        (without(JOB, "JAX_NUM_PROCESSES"), "JOB_COMPLETION_INDEX is set but JAX_NUM_PROCESSES"),
        (without(JOB, "JAX_COORDINATOR_ADDRESS"), "an indexed Job does not tell"),
        (without(MPI, "OMPI_MCA_orte_hnp_uri"), "Open MPI sets OMPI_MCA_orte_hnp_uri where"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "set JAX_COORDINATOR_ADDRESS to host:port"),
        (without(SLURM, "SLURM_GPUS_ON_NODE"), "one process on this host and none of JAX_LOCAL"),
        (without(MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "set JAX_LOCAL_DEVICE_IDS"),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "all"}, "JAX_LOCAL_DEVICE_IDS='all' must be numbers"),
    ],
)
def test_what_is_missing_or_contradictory_is_named(environment, message):
    with pytest.raises(LaunchError, match=message):
        find_processes(environment)


def test_options_count_alone():
    found = find_processes(LWS, coordinator="host:7", count=3, index=2)
    assert found == Processes(coordinator="host:7", count=3, index=2)
    assert not found.leads and find_processes({}, coordinator="h", count=1, index=0).leads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "h:1", "count": 2}, "--process is missing.*belong together"),
        ({"index": 1}, "--coordinator is missing"),
        ({"coordinator": "h:1", "count": 2, "index": 2}, "--process=2 must be from 0 to 1"),
        ({"coordinator": "h:1", "count": 2, "index": -1}, "--process=-1 must be from 0 to 1"),
        ({"coordinator": "h:x", "count": 2, "index": 0}, "--coordinator='h:x' is not an address"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(LaunchError, match=message):
        find_processes(LWS, **options)


def test_jax_is_asked_where_it_finds_the_coordinator(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    for environment in (LWS, SLURM):
        launchers.initialize(find_processes(environment))
    told, asked = calls
    assert told["coordinator_address"] == "group-0.svc:8476"
    assert told["cluster_detection_method"] == "deactivate" and told["local_device_ids"] is None
    assert asked["coordinator_address"] is None and asked["cluster_detection_method"] == "slurm"
    assert asked["local_device_ids"] == list(range(8))
    with pytest.raises(LaunchError, match="JAX joined as process 1 of 2, but this is process 5"):
        launchers.initialize(find_processes(MPI))
