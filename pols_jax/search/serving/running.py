"""Listens, serves in a thread, and stops without losing an answer or waiting for a stream that has no end."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pols_jax.errors import ConfigError, HostError, reason_of

_HEAD_SECONDS = 20.0  # for the head of a request to arrive, and for the next one to come
_STOP_SECONDS = 3  # for the answers that are under way
_MAX_CONNECTIONS = 512


def listen(host: str, port: int) -> socket.socket:
    """Takes a port; 0 takes any that is free.

    Raises:
      ConfigError: if it is in use, or the host is none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen(_MAX_CONNECTIONS)
        except OSError:
            taken.close()
            raise
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"Port {port} of {host} cannot be used: {reason_of(error)}; choose another with --port, or 0 for any that is "
            "free."
        ) from error
    return taken


class Server:
    """Serves an application from when it is entered until it is left.

    Args:
      app: The application.
      sock: What `listen` gave.
      on_stop: Is called before the server waits for open answers, so that those without an end can end.

    Attributes:
      address: What to type into a browser.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, *, on_stop: Callable[[], None] = lambda: None):
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=int(_HEAD_SECONDS),
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        host, port = sock.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._on_stop = on_stop
        self._server = uvicorn.Server(config)
        # Not in the main thread: there, signals end the program as they end every other command.
        self._thread = threading.Thread(target=self._server.run, args=([sock],), daemon=True, name="server")

    def wait(self) -> None:
        """Waits for a signal; raises a `HostError` if the server ends by itself, which it should not."""
        self._thread.join()
        raise HostError("The server ended by itself.")

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._on_stop()
        # Answers that are cut off are no news now.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server.should_exit = True
        self._thread.join(timeout=2 * _STOP_SECONDS + 2)


class _Protocol(H11Protocol):
    """Closes a connection whose client begins a request and does not get to the end of its head."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._expect_a_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_a_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect_a_head(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._forget()
        elif self._timer is None:
            self._timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
