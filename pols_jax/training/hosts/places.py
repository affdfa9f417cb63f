"""Where a process stands among the hosts of one training: from flags, SLURM or a TPU pod."""

import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from jax._src import clusters

from pols_jax.errors import ConfigError

DEFAULT_TIMEOUT = 600.0
"""How many seconds hosts wait for one another, unless --host-timeout says otherwise."""

_SLURM_NUMBERS = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")


class Place(NamedTuple):
    """Where this process stands among the hosts of one training; ``local_device_ids`` None is all of the machine."""

    host: str
    port: int
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None

    @property
    def address(self) -> str:
        """The coordinator's address, as a flag has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_place(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    environ: Mapping[str, str] = os.environ,
) -> Place | None:
    """Finds where this process stands among the hosts, from the flags, or else from SLURM or the TPU pod.

    Returns:
      The place; None for a host that trains alone, as --num-processes 1 does wherever it is.

    Raises:
      ConfigError: if flags or variables are missing, or cannot be used.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError(f"--num-processes must be at least 1, got {num_processes}.")
    if num_processes == 1 and coordinator is None and process_id in (None, 0):
        return None
    if coordinator is None and (num_processes is not None or process_id is not None):
        raise ConfigError(
            "--num-processes and --process-id need --coordinator HOST:PORT, the address of the first host."
        )
    slurm = _read_slurm(environ) if None in (coordinator, num_processes, process_id) else None
    if coordinator is None:
        if slurm is None and "," not in environ.get("TPU_WORKER_HOSTNAMES", ""):
            return None
        return _detect(timeout)
    host, port = _split_address(coordinator)
    if slurm is not None:
        num_processes = slurm[0] if num_processes is None else num_processes
        process_id = slurm[1] if process_id is None else process_id
    if num_processes is None or process_id is None:
        missing = "--num-processes" if num_processes is None else "--process-id"
        raise ConfigError(
            f"--coordinator needs {missing} as well: how many hosts there are, and which one this is."
        )
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process-id must be from 0 to {num_processes - 1} with --num-processes {num_processes}, got {process_id}."
        )
    return Place(host, port, num_processes, process_id)


def _split_address(coordinator: str) -> tuple[str, int]:
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", coordinator)
    if parts is None or not 0 < int(parts[3]) < 2**16:
        raise ConfigError(
            f"--coordinator must be HOST:PORT, with a port from 1 to 65535, got {coordinator!r}."
        )
    return parts[1] or parts[2], int(parts[3])


def check_host(host: str) -> None:
    """Raises a `ConfigError` unless a host of that name can be found."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a name"
        raise ConfigError(f"The host {host} of --coordinator cannot be found ({reason}).") from None


def _read_slurm(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """The number of tasks of a SLURM step and the index of this one; None without SLURM, or with one task."""
    alone = "or train on this host alone with --num-processes 1"
    if "SLURM_NTASKS" not in environ:
        return None
    numbers = {name: environ[name] for name in _SLURM_NUMBERS if name in environ}
    for name, text in numbers.items():
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise ConfigError(f"{name} is {text!r}, which is not a number; start with srun, {alone}.")
    num_tasks = int(numbers["SLURM_NTASKS"])
    if num_tasks <= 1:
        return None
    for name in (*_SLURM_NUMBERS, "SLURM_STEP_NODELIST"):
        if not environ.get(name):
            raise ConfigError(
                f"SLURM_NTASKS is {num_tasks}, but {name} is not set; start with srun, {alone}."
            )
    index = int(numbers["SLURM_PROCID"])
    if index >= num_tasks:
        raise ConfigError(
            f"SLURM_PROCID is {index}, but SLURM_NTASKS is {num_tasks}; start with srun, {alone}."
        )
    return num_tasks, index


def _detect(timeout: float) -> Place:
    """Finds the place as ``jax.distributed.initialize`` does without arguments."""
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address = count = index = device_ids = None
    reason = ""
    try:
        address, count, index, device_ids = detect(None, None, None, None, None, int(timeout))
    except Exception as error:  # whatever the environment of a cluster can hold
        reason = f" ({type(error).__name__}: {str(error)[:200]})"
    if address is None or count is None or index is None:
        raise ConfigError(
            f"Several hosts are announced by SLURM or the TPU pod, but JAX cannot find them{reason}; pass --coordinator, "
            "--num-processes and --process-id, or train on this host alone with --num-processes 1."
        )
    host, port = _split_address(address)
    return Place(host, port, count, index, None if device_ids is None else tuple(device_ids))
