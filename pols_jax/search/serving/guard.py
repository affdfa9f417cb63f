"""What every request passes first, and every answer last: who may ask, how many at once, and what a browser may do."""

import dataclasses
from collections.abc import Collection as Items

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pols_jax.schema import encode
from pols_jax.search.serving.answers import ErrorAnswer

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""What this machine calls itself."""

MAX_AT_ONCE = 256
"""More requests at the same time are turned away."""

# Nothing but the page's own files, and pictures that it makes of what is uploaded.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def error_response(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer that says what is wrong."""
    return JSONResponse(
        encode(ErrorAnswer(sentence)), status, headers={"cache-control": "no-store"} | (headers or {})
    )


@dataclasses.dataclass
class Guard:
    """Refuses requests that come from elsewhere, and adds the headers that keep a browser safe.

    A web site can give its own name the address of this machine, and then ask whatever listens there: the name that it
    asked for gives it away.

    Attributes:
      app: What answers.
      hosts: The names that the server may be asked by; any if None.
    """

    app: ASGIApp
    hosts: Items[str] | None = None
    _num_requests: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        app = self.app if refusal is None else refusal
        self._num_requests += 1
        try:
            await app(scope, receive, send_with_headers)
        finally:
            self._num_requests -= 1

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and _name(host) not in self.hosts:
            known = "http://" + ", http://".join(sorted(self.hosts))
            return error_response(
                400, f"This server is asked by another name than its own; ask it by one of {known}."
            )
        if origin is not None and origin.partition("://")[2] != host:
            return error_response(403, "Pages of other sites may not ask this server.")
        if self._num_requests >= MAX_AT_ONCE:
            return error_response(
                503, "Too many requests at once; try again in a second.", {"retry-after": "1"}
            )
        return None


def _name(host: str) -> str:
    """The name in a Host header, without the port.

    Examples:
      >>> _name("localhost:8000"), _name("[::1]:8000"), _name("")
      ('localhost', '::1', '')
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name.strip("[]").lower()
