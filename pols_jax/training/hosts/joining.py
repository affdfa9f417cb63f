"""Joining the hosts of one training, and ending together."""

import atexit
import contextlib
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from pols_jax.errors import (
    CheckpointError,
    ConfigError,
    HostError,
    InterruptedRunError,
    PolsError,
    reason_of,
)
from pols_jax.training.hosts.agreement import (
    Session,
    check_same_settings,
    largest_of_hosts,
    same_on_all_hosts,
)
from pols_jax.training.hosts.meeting import meet
from pols_jax.training.hosts.places import DEFAULT_TIMEOUT, Place, check_host, find_place
from pols_jax.training.hosts.watching import Watch, end_process, open_relay

# JAX aborts the process in C++ when a host is silent for this long; the watch is meant to notice long before.
_JAX_SILENCE_SECONDS = 600
# A device of a CPU blocks a thread in every collective in which it waits, and others in products of matrices.
_THREADS_PER_CPU_DEVICE = 8

_watch: Watch | None = None  # of the hosts that this process has joined


@contextlib.contextmanager
def joined(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Iterator[None]:
    """Joins this process with the other hosts of the training, if there are any; to be used before JAX has started.

    If the body raises, the other hosts are told why and end as well. When it ends, all hosts are waited for.

    Raises:
      ConfigError: if the flags, or the variables that SLURM sets, cannot be used.
      HostError: if a host does not come in time, or was started with flags that do not fit.
    """
    if not 0 < timeout < math.inf:
        raise ConfigError(f"--host-timeout must be a positive number of seconds, got {timeout}.")
    place = find_place(coordinator, num_processes, process_id, timeout=timeout)
    give_threads(1 if place is None else place.num_processes)
    if place is None or place.num_processes == 1:
        yield
        return
    check_host(place.host)
    Session.timeout = timeout
    global _watch
    _watch = watch = Watch(place, meet(place, timeout=timeout, say=_say))
    with peers_told():
        _say(f"All {place.num_processes} hosts are there.")
        _start_jax(place, timeout)
        try:
            yield
        except InterruptedRunError:  # on all hosts, because they agree on the step to stop at
            _finish(watch, timeout)
            raise
        _finish(watch, timeout)


def give_threads(num_processes: int = 1, *, num_cores: int | None = None) -> None:
    """Makes the thread pools of XLA's CPU backend large enough for collectives; to be called before JAX has started.

    A device of a CPU waits for the other devices inside a thread of a pool that has about one thread per core, and it can
    wait in several collectives at once. When all threads wait, none is left for the work that they wait for: the program
    hangs, and XLA aborts it after a while. One device of one process waits for nobody, and nothing is changed.
    """
    num_devices = _num_cpu_devices()
    if num_processes == num_devices == 1:
        return
    asked = os.environ.get("NPROC", "")
    # What XLA does by itself: a thread per core, unless NPROC says otherwise.
    usual = int(asked) if asked.isdecimal() else num_cores or os.cpu_count() or 1
    needed = _THREADS_PER_CPU_DEVICE * num_devices
    os.environ["NPROC"] = str(max(usual, 16, needed))


def _num_cpu_devices() -> int:
    forced = re.search(r"--xla_force_host_platform_device_count=([0-9]+)", os.environ.get("XLA_FLAGS", ""))
    return max(int(forced[1]) if forced else 1, getattr(jax.config, "jax_num_cpu_devices", 1))


def _start_jax(place: Place, timeout: float) -> None:
    relayed = place if place.process_id == 0 else place._replace(host="127.0.0.1", port=open_relay(place))
    _reach_without_proxy(relayed.host)
    device_ids = None if place.local_device_ids is None else list(place.local_device_ids)
    try:
        jax.distributed.initialize(
            relayed.address,
            place.num_processes,
            place.process_id,
            local_device_ids=device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=int(max(timeout, 60.0)),
            heartbeat_timeout_seconds=_JAX_SILENCE_SECONDS,
        )
    except RuntimeError as error:
        raise HostError(
            f"JAX could not connect the hosts at {place.address} ({reason_of(error)})."
        ) from error
    if jax.local_devices()[0].platform == "cpu":
        # A program for several hosts that comes from the cache can start its sums in another order than the other host, and
        # gloo then aborts both: every host compiles its own.
        jax.config.update("jax_enable_compilation_cache", False)
    check_same_settings({})  # before a program for all devices is compiled
    connect_devices()


def connect_devices() -> None:
    """Runs one small program of every kind that needs all hosts.

    On a CPU, devices connect in their first common program, and only within 30 seconds. The first step of a network can
    take one host that much longer to compile than another; these programs cannot.
    """
    jax.pmap(lambda x: lax.psum(x, "data"), axis_name="data")(np.ones(jax.local_device_count(), np.float32))
    largest_of_hosts(0)
    same_on_all_hosts(0)


def _reach_without_proxy(host: str) -> None:
    """Keeps gRPC from looking for a host behind the proxy that is meant for the web."""
    if any(name.lower().endswith("_proxy") for name in os.environ):
        known = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # noqa: SIM112
        os.environ["no_grpc_proxy"] = f"{known},{host}" if known else host  # noqa: SIM112
        jax.config.update("jax_check_proxy_envs", False)  # the warning that has become untrue


def _finish(watch: Watch, timeout: float) -> None:
    if not watch.finish(timeout):
        raise HostError(f"Another host did not finish within {timeout:g} seconds of this one.")
    # All hosts are done: what JAX may still wait for must not hold this one up.
    timer = _later(_end_now, 0)
    jax.distributed.shutdown()
    timer.cancel()


@contextlib.contextmanager
def peers_told() -> Iterator[None]:
    """Tells the other hosts if the body raises, so that they do not wait for this one in vain.

    An error that comes from the death of another host is not raised: the process ends with the sentence about that host.
    """
    watch = _watch
    if watch is None:
        yield
        return
    try:
        yield
    except InterruptedRunError:
        raise
    except BaseException as error:
        if watch.is_leaving:  # told already, further inside
            raise
        if not isinstance(error, PolsError) or isinstance(error, CheckpointError):
            # A collective, or a wait of Orbax, fails when another host is gone. The watch knows, or will in a moment.
            watch.end_if_lost(within=5.0)
        code = error.exit_code if isinstance(error, PolsError) else 1
        sentence = reason_of(error)
        if isinstance(error, KeyboardInterrupt):
            code, sentence = 128 + signal.SIGINT, "It was stopped."
        watch.leave(sentence, code)
        # JAX would wait for the other hosts before this process ends, and so would Orbax.
        atexit.register(_end_now, code)
        _later(end_process, sentence, code)
        raise


def _end_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _later(function: Callable[..., None], *args: Any) -> threading.Timer:
    """Calls a function in some seconds, unless the process ends before."""
    timer = threading.Timer(20.0, function, args)
    timer.daemon = True
    timer.start()
    return timer


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
