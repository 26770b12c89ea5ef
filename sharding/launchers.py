"""How the processes of one run find each other: explicit options, or what a launcher tells them.

Known launchers are the LeaderWorkerSet and the indexed Job of Kubernetes, Open MPI and Slurm.
`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` say it without one, or add
what a launcher leaves out.
"""

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence

import jax

PORT = 8476  # of the coordinator, where a launcher names a host alone
_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_LOCAL = "JAX_LOCAL_DEVICE_IDS"
_OPTIONS = "--coordinator, --processes and --process"


class LaunchError(ValueError):
    """What a process was told about the others is missing, malformed or contradictory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """How the processes of one run find each other.

    Attributes:
      count: processes in all.
      index: this one.
      coordinator: host:port of process 0; None where JAX finds it.
      method: by which of its methods JAX finds it; None where `coordinator` says it.
      local_devices: of this host, those that are this process's; None for all that are visible,
        or with a `method` for the one of its rank on the host.
    """

    count: int
    index: int
    coordinator: str | None = None
    method: str | None = None
    local_devices: tuple[int, ...] | None = None

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The variables of one launcher; None for what it does not tell.

    Attributes:
      method: JAX's name of it, where JAX finds the coordinator in the variable `found_in`.
      per_host: processes on a host; the first number counts.
    """

    name: str
    index: str
    count: str | None = None
    address: str | None = None
    method: str | None = None
    found_in: str | None = None
    per_host: tuple[str, ...] = ()

    def present(self, environment: Mapping[str, str]) -> list[str]:
        """Its variables that are set."""
        names = (self.index, self.count, self.address)
        return [name for name in names if name is not None and name in environment]


_LEADER_WORKER_SET = _Launcher(
    name="LeaderWorkerSet",
    index="LWS_WORKER_INDEX",
    count="LWS_GROUP_SIZE",
    address="LWS_LEADER_ADDRESS",
)
_INDEXED_JOB = _Launcher(name="an indexed Job", index="JOB_COMPLETION_INDEX")
_OPEN_MPI = _Launcher(
    name="Open MPI",
    index="OMPI_COMM_WORLD_RANK",
    count="OMPI_COMM_WORLD_SIZE",
    method="ompi",
    found_in="OMPI_MCA_orte_hnp_uri",
    per_host=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
_SLURM = _Launcher(
    name="Slurm",
    index="SLURM_PROCID",
    count="SLURM_NTASKS",
    method="slurm",
    found_in="SLURM_STEP_NODELIST",
    per_host=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
# Of those that are present the first counts; mpirun starts inside an allocation of Slurm.
_LAUNCHERS = (_LEADER_WORKER_SET, _INDEXED_JOB, _OPEN_MPI, _SLURM)


def find_processes(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
) -> Processes:
    """Says who the processes of this run are.

    Options that are given count alone, whatever the environment says.

    Args:
      environment: variables of the process.
      coordinator, count, index: options of the command, or None.

    Raises:
      LaunchError: names what is missing, malformed or contradictory, and the way out.
    """
    given = {"--coordinator": coordinator, "--processes": count, "--process": index}
    if any(value is not None for value in given.values()):
        for name, value in given.items():
            if value is None:
                raise LaunchError(f"{name} is missing: {_OPTIONS} belong together")
        return _checked(
            Processes(count=count, index=index, coordinator=_address("--coordinator", coordinator)),
            "--processes",
            "--process",
        )
    return _from_environment(environment)


def initialize(processes: Processes) -> None:
    """Joins the processes of a run; call it before anything asks for devices.

    Raises:
      LaunchError: JAX counts other processes than the launcher told.
      RuntimeError: the coordinator cannot be reached.
    """
    local = None if processes.local_devices is None else list(processes.local_devices)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    jax.distributed.initialize(
        coordinator_address=processes.coordinator,
        num_processes=processes.count,
        process_id=processes.index,
        local_device_ids=local,
        cluster_detection_method=processes.method or "deactivate",
    )
    joined = (jax.process_count(), jax.process_index())
    if joined != (processes.count, processes.index):
        raise LaunchError(
            f"JAX joined as process {joined[1]} of {joined[0]}, but this is process "
            f"{processes.index} of {processes.count}: give {_OPTIONS}"
        )


def add_process_options(parser: argparse._ActionsContainer) -> None:
    """Adds the explicit options of a command; hand their values to `find_processes`."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; the launcher's if left out"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="processes in all")
    parser.add_argument("--process", type=int, metavar="I", help="this one, from 0")


def _from_environment(environment: Mapping[str, str]) -> Processes:
    launcher = _launcher(environment)
    count_name, count = _number(environment, _COUNT, launcher and launcher.count)
    index_name, index = _number(environment, _INDEX, launcher and launcher.index)
    address, method = _coordinator(environment, launcher)
    if launcher is None and count is None and index is None and address is None:
        known = ", ".join(one.name for one in _LAUNCHERS)
        raise LaunchError(
            f"no launcher of processes is known here (looked for {known}): give {_OPTIONS}, or "
            f"set {_ADDRESS}, {_COUNT} and {_INDEX}"
        )
    whose = "" if launcher is None else f", which {launcher.name} does not tell"
    for name, value in ((_COUNT, count), (_INDEX, index)):
        if value is None:
            present = ", ".join(_present(environment, launcher))
            own = launcher and (launcher.count if name == _COUNT else launcher.index)
            raise LaunchError(f"{present} is set but {own or name} is not: set {name}{whose}")
    if address is None and method is None:
        present = ", ".join(_present(environment, launcher))
        own = launcher and (launcher.address or launcher.found_in)
        hint = f" ({launcher.name} sets {own} where it knows it)" if own else whose
        raise LaunchError(
            f"{present} is set but nothing names the coordinator: set {_ADDRESS} to host:port of "
            f"process 0{hint}"
        )
    return _checked(
        Processes(
            count=count,
            index=index,
            coordinator=address,
            method=method,
            local_devices=_local_devices(environment, launcher),
        ),
        count_name,
        index_name,
    )


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    """The launcher that counts, if any is present; two that disagree are refused."""
    found = [launcher for launcher in _LAUNCHERS if launcher.present(environment)]
    if _OPEN_MPI in found and _SLURM in found:
        found.remove(_SLURM)
    for other in found[1:]:
        first, second = (environment.get(launcher.index) for launcher in (found[0], other))
        if first != second:
            raise LaunchError(
                f"{found[0].index}={first} of {found[0].name} contradicts "
                f"{other.index}={second} of {other.name}: unset one, or give {_OPTIONS}"
            )
    return found[0] if found else None


def _present(environment: Mapping[str, str], launcher: _Launcher | None) -> list[str]:
    names = [name for name in (_ADDRESS, _COUNT, _INDEX) if name in environment]
    return names + ([] if launcher is None else launcher.present(environment))


def _number(
    environment: Mapping[str, str], name: str, launchers: str | None
) -> tuple[str, int | None]:
    """The variable that says a number, and the number; two that disagree are refused."""
    values = {}
    for variable in (name, launchers):
        text = environment.get(variable) if variable is not None else None
        if text is None:
            continue
        if not text.isdecimal():
            raise LaunchError(f"{variable}={text!r} must be a number")
        values[variable] = int(text)
    if len(set(values.values())) > 1:
        (first, one), (second, other) = values.items()
        raise LaunchError(f"{first}={one} contradicts {second}={other}: unset one of them")
    return next(iter(values.items()), (name, None))


def _coordinator(
    environment: Mapping[str, str], launcher: _Launcher | None
) -> tuple[str | None, str | None]:
    """The address of process 0, or the method by which JAX finds it."""
    for variable in (_ADDRESS, launcher and launcher.address):
        if variable is not None and variable in environment:
            return _address(variable, environment[variable]), None
    if launcher is not None and launcher.found_in is not None and launcher.found_in in environment:
        return None, launcher.method
    return None, None


def _address(name: str, text: str) -> str:
    """host:port, with a port if there is none."""
    bare = ":" not in text or text.endswith("]")  # a name, an IPv4 or a bracketed IPv6 address
    host, _, port = (f"{text}:{PORT}" if bare else text).rpartition(":")
    unbracketed = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or unbracketed or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise LaunchError(
            f"{name}={text!r} is not an address: give host:port of process 0, such as node0:{PORT}"
        )
    return f"{host}:{port}"


def _local_devices(
    environment: Mapping[str, str], launcher: _Launcher | None
) -> tuple[int, ...] | None:
    """This process's devices of its host; see `Processes`.

    A process that has its host to itself takes all of them, which JAX's own methods do not do:
    they give every process one.
    """
    if _LOCAL in environment:
        text = environment[_LOCAL]
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            raise LaunchError(f"{_LOCAL}={text!r} must be numbers such as 0,1,2,3") from None
    if launcher is None or launcher.method is None:
        return None
    if _per_host(environment, launcher) != 1:
        rank = {"ompi": "OMPI_COMM_WORLD_LOCAL_RANK", "slurm": "SLURM_LOCALID"}[launcher.method]
        if not environment.get(rank, "").isdecimal():
            raise LaunchError(
                f"{launcher.name} started several processes on a host, but {rank} does not say "
                f"which device this one takes: set {_LOCAL}"
            )
        return (int(environment[rank]),)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return tuple(range(len(visible.split(","))))
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdecimal() and int(gpus):
        return tuple(range(int(gpus)))
    raise LaunchError(
        f"{launcher.name} started one process on this host and none of {_LOCAL}, "
        "CUDA_VISIBLE_DEVICES and SLURM_GPUS_ON_NODE says how many devices it has: set "
        f"{_LOCAL}, such as 0,1,2,3"
    )


def _per_host(environment: Mapping[str, str], launcher: _Launcher) -> int | None:
    """Processes of a host; None where nothing says it."""
    for name in launcher.per_host:
        counts: Sequence[str] = re.findall(r"(?:^|,)(\d+)", environment.get(name, ""))
        if counts:
            return max(int(count) for count in counts)
    return None


def _checked(processes: Processes, count_name: str, index_name: str) -> Processes:
    if processes.count < 1:
        raise LaunchError(f"{count_name}={processes.count} must be at least 1")
    if not 0 <= processes.index < processes.count:
        raise LaunchError(
            f"{index_name}={processes.index} must be from 0 to {processes.count - 1}, because "
            f"{count_name}={processes.count}"
        )
    return processes
