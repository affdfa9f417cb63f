"""How a host notices that another one is gone, and ends with a sentence.

Every host sends a beat through the connections of the `meeting`. A connection that closes, or is silent for too long, is
a host that died. A collective in C++ cannot be interrupted, so a thread then prints a sentence and ends the process.
Everything on disk is written at once or not at all: that is as safe as it is abrupt.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pols_jax.training.hosts.meeting import Line
from pols_jax.training.hosts.places import Place

# A host that is silent for longer is taken for dead: a power cut, a broken network, a machine that is frozen.
_SILENCE_SECONDS = 60.0
_BEAT_SECONDS = 5.0
# A host that ends with an error says so. The others may be about to end for the same reason, with their own sentence and
# a checkpoint to finish: they have this long.
_GRACE_SECONDS = 20.0


class Watch:
    """Watches the other hosts through what `meet` returned, and ends this process when one of them is gone."""

    def __init__(
        self, place: Place, lines: dict[int, Line], *, end: Callable[[str, int], None] | None = None
    ):
        self._place, self._lines = place, lines
        self._end = end or end_process
        self._lock = threading.Lock()
        self._finished: set[int] = set()
        self._all_finished = threading.Event()
        self._concluded = threading.Event()
        self._conclusion = ("", 1)
        self.is_leaving = False  # this host ends by itself: the watch must not end it before
        for index in lines:
            threading.Thread(target=self._read, args=(index,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def leave(self, sentence: str, exit_code: int) -> None:
        """Tells the others that this host ends with an error."""
        self.is_leaving = True
        self._send({"left": self._place.process_id, "sentence": sentence, "exit_code": exit_code})

    def finish(self, timeout: float) -> bool:
        """Tells the others that this host is done, and waits until all are; returns whether they are."""
        self._send({"finished": self._place.process_id})
        self._mark_finished(self._place.process_id)
        return self._all_finished.wait(timeout)

    def end_if_lost(self, *, within: float) -> None:
        """Ends the process if another host is found to be gone within some seconds."""
        if self._concluded.wait(within):
            self._end(*self._conclusion)

    def _send(self, message: dict[str, Any], *, but: int | None = None) -> None:
        for index, line in self._lines.items():
            if index != but:
                line.send(message)

    def _beat(self) -> None:
        while not self._all_finished.wait(_BEAT_SECONDS):
            self._send({})

    def _read(self, index: int) -> None:
        while not self._all_finished.is_set():
            try:
                message = self._lines[index].receive(_SILENCE_SECONDS)
            except OSError as error:
                how = f"it was silent for {_SILENCE_SECONDS:g} seconds"
                self._lost(index, how if isinstance(error, TimeoutError) else "its connection closed")
                return
            if "lost" in message:
                self._lost(message["lost"], message["how"])
            elif "left" in message:
                self._send(message, but=index)
                code = 2 if message["exit_code"] == 2 else 1
                sentence = f"The host with --process-id {message['left']} ended: {message['sentence']}"
                self._conclude(sentence, code, grace=_GRACE_SECONDS)
            elif "finished" in message:
                self._mark_finished(message["finished"])
            elif "all_finished" in message:
                self._all_finished.set()

    def _mark_finished(self, index: int) -> None:
        with self._lock:
            self._finished.add(index)
            if self._place.process_id == 0 and len(self._finished) == self._place.num_processes:
                self._send({"all_finished": True})
                self._all_finished.set()

    def _lost(self, index: int, how: str) -> None:
        if self._all_finished.is_set():
            return
        self._send({"lost": index, "how": how}, but=index)
        self._conclude(
            f"The host with --process-id {index} died ({how}), and the training cannot go on without it; start all hosts "
            "again with the same --run-dir to go on from the last checkpoint.",
            1,
            grace=0.0,
        )

    def _conclude(self, sentence: str, exit_code: int, *, grace: float) -> None:
        if self._concluded.is_set():
            return
        self._conclusion = (sentence, exit_code)
        self._concluded.set()
        if not self._all_finished.wait(grace) and not self.is_leaving:
            self._end(sentence, exit_code)


def end_process(sentence: str, exit_code: int) -> None:
    """Prints a sentence and ends the process at once, from any thread."""
    # A progress bar hides the cursor, and stands in the line.
    prefix = "\n\x1b[?25h" if sys.stderr.isatty() else ""
    with contextlib.suppress(Exception):
        print(f"{prefix}{sentence}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(exit_code)


def open_relay(place: Place) -> int:
    """Forwards a local port to the coordinator's; returns the port.

    JAX's client aborts the process, with a dump of the stack, at the moment its connection to the first host breaks. A
    client that connects through the relay notices nothing, and the watch has the time to end the process with a sentence.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept_for_ever, args=(listener, place), daemon=True).start()
    return listener.getsockname()[1]


def _accept_for_ever(listener: socket.socket, place: Place) -> None:
    while True:
        near, _ = listener.accept()
        threading.Thread(target=_forward, args=(near, place), daemon=True).start()


def _forward(near: socket.socket, place: Place) -> None:
    deadline = time.monotonic() + 60.0
    while True:
        try:
            far = socket.create_connection((place.host, place.port), timeout=10.0)
            break
        except OSError:  # JAX's service on the first host is about to start
            if time.monotonic() > deadline:
                return near.close()
            time.sleep(0.1)
    far.settimeout(None)
    for connection in (near, far):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_pump, args=(far, near), daemon=True).start()
    _pump(near, far)
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)  # but `near` stays open when `far` closes: that is the purpose
    return None


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(2**16):
            target.sendall(part)
