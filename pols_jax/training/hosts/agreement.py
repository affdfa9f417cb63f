"""What the hosts of one training tell each other: their settings, and values that have to be the same.

Settings go through the key-value store of ``jax.distributed``, not through a device: whatever differs, nothing hangs.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from pols_jax.errors import HostError, reason_of
from pols_jax.training.hosts.places import DEFAULT_TIMEOUT

_SHOWN_DIFFERENCES = 6
_STEP_OF_WAITING_SECONDS = 1.0


class Session:
    """What all exchanges of this process share: the time-out, and their number, which makes the keys."""

    timeout: float = DEFAULT_TIMEOUT
    num_exchanges: int = 0

    @classmethod
    def next_key(cls) -> str:
        """The key of the next exchange."""
        cls.num_exchanges += 1
        return f"pols_jax/{cls.num_exchanges}"


def check_same_settings(
    settings: Mapping[str, Any],
    *,
    store: Any = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Raises, on every host, unless all hosts call this with the same settings, number of devices and version of JAX.

    Raises:
      HostError: with exit code 2 if settings differ, naming them and their values; with 1 if a host does not come.
    """
    num_processes = jax.process_count() if num_processes is None else num_processes
    if num_processes == 1:
        return
    process_id = jax.process_index() if process_id is None else process_id
    store, key = store or _shared_store(), Session.next_key()
    machine = {"the number of devices": jax.local_device_count(), "the version of jax": jax.__version__}
    texts = {name: json.dumps(value, default=str) for name, value in {**settings, **machine}.items()}
    if process_id == 0:
        others = {
            index: json.loads(_wait_for(store, f"{key}/{index}", f"the host with --process-id {index}"))
            for index in range(1, num_processes)
        }
        problem = differences({0: texts} | others) or ""
        store.key_value_set(f"{key}/verdict", problem)
        if problem:  # the store is on this host: it stays until the others have read why to end
            with contextlib.suppress(HostError):
                for index in range(1, num_processes):
                    _wait_for(store, f"{key}/{index}/read", "", timeout=10.0)
    else:
        store.key_value_set(f"{key}/{process_id}", json.dumps(texts))
        problem = _wait_for(store, f"{key}/verdict", "the first host")
        if problem:
            store.key_value_set(f"{key}/{process_id}/read", "")
    if problem:
        raise HostError(problem, exit_code=2)


def differences(settings: Mapping[int, Mapping[str, str]]) -> str | None:
    """The sentence about settings, by process id, that are not the same on all hosts; None if they are."""
    names = dict.fromkeys(name for each in settings.values() for name in each)
    phrases = []
    for name in names:
        values = {index: each.get(name, "not set") for index, each in settings.items()}
        first = values[0]
        other = next((index for index, value in values.items() if value != first), None)
        if other is not None:
            phrases.append(
                f"{name} is {_shorten(first)} on host 0 and {_shorten(values[other])} on host {other}"
            )
    if not phrases:
        return None
    more = len(phrases) - _SHOWN_DIFFERENCES
    shown = "; ".join(phrases[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return f"The hosts have different settings: {shown}; start all hosts with the same."


def _shorten(text: str) -> str:
    text = text.strip('"')
    return text if len(text) <= 80 else f"{text[:60]}..."


def from_first_host(value: str) -> str:
    """Returns the first host's value on every host, without a device."""
    if jax.process_count() == 1:
        return value
    store, key = _shared_store(), Session.next_key()
    if jax.process_index() == 0:
        store.key_value_set(key, value)
        return value
    return _wait_for(store, key, "the first host")


def texts_of_hosts(text: str) -> list[str]:
    """The texts of all hosts, by process id, without a device."""
    if jax.process_count() == 1:
        return [text]
    store, key = _shared_store(), Session.next_key()
    store.key_value_set(f"{key}/{jax.process_index()}", text)
    return [
        _wait_for(store, f"{key}/{index}", f"the host with --process-id {index}")
        for index in range(jax.process_count())
    ]


def _shared_store() -> Any:
    store = distributed.global_state.client
    assert store is not None
    return store


def _wait_for(store: Any, key: str, who: str, *, timeout: float | None = None) -> str:
    """Waits for a key in small steps, so that Ctrl-C is heard."""
    timeout = Session.timeout if timeout is None else timeout
    deadline = time.monotonic() + timeout
    while True:
        try:
            return store.blocking_key_value_get(key, int(1000 * _STEP_OF_WAITING_SECONDS))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise HostError(f"The hosts cannot talk to one another ({reason_of(error)}).") from error
        if time.monotonic() > deadline:
            raise HostError(
                f"{who.capitalize()} did not get as far as this one within {timeout:g} seconds; look at "
                "what it does, or wait longer with --host-timeout."
            )


def largest_of_hosts(value: int) -> int:
    """The largest value over all hosts."""
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def same_on_all_hosts(value: int) -> int:
    """The first host's value."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def gather_from_hosts(array: np.ndarray) -> np.ndarray:
    """The arrays of all hosts, of one shape and dtype, along a new first axis; bit for bit, whatever the dtype."""
    array = np.ascontiguousarray(array)
    if jax.process_count() == 1:
        return array[None]
    if not array.size:
        return np.zeros((jax.process_count(), *array.shape), array.dtype)
    # Through a device 64-bit numbers would lose half of their bits.
    gathered = np.ascontiguousarray(multihost_utils.process_allgather(array.reshape(-1).view(np.uint8)))
    return gathered.view(array.dtype).reshape((jax.process_count(), *array.shape))


def sum_of_hosts(array: np.ndarray) -> np.ndarray:
    """The sum over all hosts of their arrays, in the dtype that they have."""
    return gather_from_hosts(array).sum(axis=0, dtype=array.dtype)
