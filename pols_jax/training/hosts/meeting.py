"""How the hosts of one training find each other: the first one listens until all others have come.

Then the port is free for JAX's own service, and the connections stay open, for `watching`.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pols_jax.errors import HostError
from pols_jax.training.hosts.places import Place

_GREETING = "pols-jax hosts"
Say = Callable[[str], None]


class Line:
    """One connection that carries JSON, a line per message."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._received = b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; a peer that is gone is noticed by whoever reads."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any]:
        """Waits for a message; an `OSError` if the connection is closed, silent, or carries something else."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._connection.recv(4096)
            if not part:
                raise ConnectionError("its connection closed")
            self._received += part
            if len(self._received) > 2**20:
                raise ConnectionError("it sends something else")
        line, self._received = self._received.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("it sends something else")
        return message

    def is_closed(self) -> bool:
        """Whether the other side is gone."""
        self._connection.settimeout(0.0)
        try:
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def meet(place: Place, *, timeout: float, say: Say) -> dict[int, Line]:
    """Waits until all hosts are there; ``say`` takes one line about who is waited for, whenever that changes.

    Returns:
      A connection to every other host on the first one, and to the first one on every other.

    Raises:
      HostError: if a host does not come in time; with exit code 2 if the flags of two hosts do not fit together, or the
        first host cannot listen.
    """
    return _gather(place, timeout, say) if place.process_id == 0 else {0: _report(place, timeout, say)}


def _gather(place: Place, timeout: float, say: Say) -> dict[int, Line]:
    """Waits for the others, on the first host."""
    lines: dict[int, Line] = {}
    deadline, said = time.monotonic() + timeout, None
    try:
        with _listen(place) as listener:
            listener.settimeout(0.5)
            while missing := _missing(place, lines):
                if missing != said:
                    said = missing
                    say(_waiting_for(missing, place, timeout))
                    for line in lines.values():
                        line.send({"missing": missing})
                if time.monotonic() > deadline:
                    raise HostError(
                        f"{_ids(missing)} did not come to {place.address} within {timeout:g} seconds; look at why, or wait "
                        "longer with --host-timeout."
                    )
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    _welcome(Line(connection), place, lines)
    except BaseException as error:
        reason = str(error) or "The first host was stopped."
        for line in lines.values():
            line.send({"refused": reason, "exit_code": getattr(error, "exit_code", 1)})
            line.close()
        raise
    # The port is free from here on, for JAX's own service.
    for line in lines.values():
        line.send({"go": True})
    return lines


def _missing(place: Place, lines: dict[int, Line]) -> list[int]:
    for index in [index for index, line in lines.items() if line.is_closed()]:
        lines.pop(index).close()
    return [index for index in range(1, place.num_processes) if index not in lines]


def _welcome(line: Line, place: Place, lines: dict[int, Line]) -> None:
    """Adds a host that fits, and tells one that does not why."""
    try:
        hello = line.receive(5.0)
    except OSError:
        return line.close()
    index, count = hello.get("process_id"), hello.get("num_processes")
    if hello.get("greeting") != _GREETING or not isinstance(index, int):
        return line.close()
    if index in lines:
        problem = f"--process-id {index} is taken by another host; give each host its own."
        line.send({"refused": problem, "exit_code": 2})
        return line.close()
    lines[index] = line
    if count != place.num_processes:
        raise HostError(
            f"--num-processes is {place.num_processes} on the first host and {count} on the one with --process-id "
            f"{index}; start all hosts with the same.",
            exit_code=2,
        )
    return None


def _listen(place: Place) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", place.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", place.port))
    except OSError as error:
        raise HostError(
            f"The first host cannot listen at --coordinator {place.address} ({error.strerror}); name a port that is "
            "free, and give only one host --process-id 0.",
            exit_code=2,
        ) from None


def _report(place: Place, timeout: float, say: Say) -> Line:
    """Goes to the first host, and waits there for the rest."""
    deadline = time.monotonic() + timeout
    say(_waiting_for([0], place, timeout))
    while (left := deadline - time.monotonic()) > 0:
        line = _connect(place, min(left, 10.0))
        if line is not None:
            try:
                _wait_for_the_rest(line, place, timeout, say)
                return line
            except OSError:  # something else listens there, or the first host was stopped
                line.close()
            except BaseException:
                line.close()
                raise
        time.sleep(min(0.3, left))
    raise HostError(
        f"No first host (--process-id 0) was found at {place.address} within {timeout:g} seconds; start it, correct "
        "--coordinator, or wait longer with --host-timeout."
    )


def _wait_for_the_rest(line: Line, place: Place, timeout: float, say: Say) -> None:
    line.send({"greeting": _GREETING, "process_id": place.process_id, "num_processes": place.num_processes})
    while True:
        # The first host has a time-out of its own, and tells.
        message = line.receive(timeout + 10.0)
        if "refused" in message:
            raise HostError(str(message["refused"]), exit_code=2 if message.get("exit_code") == 2 else 1)
        if "missing" in message:
            say(_waiting_for(message["missing"], place, timeout))
        if "go" in message:
            return


def _connect(place: Place, timeout: float) -> Line | None:
    try:
        connection = socket.create_connection((place.host, place.port), timeout=timeout)
    except OSError:
        return None
    # While nobody listens, a connection from a port of this machine can by chance be one to itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        return None
    return Line(connection)


def _ids(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8])) + " ..." * (len(indices) > 8)
    return f"The host{'s' * (len(indices) > 1)} with --process-id {shown}"


def _waiting_for(missing: list[int], place: Place, timeout: float) -> str:
    who = _ids(missing).replace("The", "the", 1)
    return (
        f"Waiting for {len(missing)} of {place.num_processes} hosts at {place.address}: {who} "
        f"(at most {timeout:g} seconds) ..."
    )
