"""The HTTP API and the page: requests are checked, work is done in threads, answers are JSON."""

import asyncio
import functools
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection as Items
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pols_jax.errors import ConfigError, DataError, ImageError, PolsError, printable
from pols_jax.metrics.thresholds import Rule
from pols_jax.schema import encode
from pols_jax.search.serving.answers import (
    ClassesAnswer,
    CurveAnswer,
    DecisionAnswer,
    HealthAnswer,
    SearchAnswer,
    ThresholdAnswer,
)
from pols_jax.search.serving.collection import MAX_UPLOAD_BYTES, Collection
from pols_jax.search.serving.endpoints import Endpoint, Parameter, openapi_document, read_parameters
from pols_jax.search.serving.guard import Guard, error_response
from pols_jax.search.serving.live import Feed

_PAGE = Path(__file__).parent / "page"
_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_BODY_SECONDS = 30.0  # for an upload to arrive
_HEARTBEAT_SECONDS = 15.0  # between two signs of life on a stream
_MAX_STREAMS = 64
_MAX_NEW_HITS = 100  # that a stream tells of at once
_THREADS = 4
_MAX_WAITING = 200  # for a thread

_CLASS = Parameter("class", "The name of a class in upper or lower case, or # and its id.", str, 1, 256)
_THRESHOLD = Parameter(
    "threshold",
    "recall=R, precision=P or f1, chosen on the validation split, or a number; by default recall=0.9, or none if the run "
    "was not evaluated.",
    str,
    1,
    64,
    default=None,
)
_REASONS = {
    400: "The request is wrong; the answer says what is.",
    404: "There is no such class, picture or folder.",
    408: "The picture did not arrive in time.",
    409: "The run has no thresholds yet.",
    413: "The picture has too many bytes.",
    415: "What was sent is no picture that can be decoded.",
    503: "Too much is asked at once.",
}
_SAID_BY_STARLETTE = {
    "Not Found": "There is nothing here; /api/openapi.json lists what there is.",
    "Method Not Allowed": "This cannot be asked in this way; /api/openapi.json says how.",
}
ENDPOINTS = (
    Endpoint(
        "/api/classes",
        "Completes the name of a class.",
        (
            Parameter("query", "A part of the name.", str, 0, 256, default=""),
            Parameter("limit", "How many classes to tell.", int, 1, 100, default=12),
        ),
        ClassesAnswer,
    ),
    Endpoint(
        "/api/search",
        "Finds the pictures of a class, best first.",
        (
            _CLASS,
            _THRESHOLD,
            Parameter("limit", "How many hits to tell.", int, 1, 500, default=60),
            Parameter("offset", "How many of the best to leave out.", int, 0, 10**9, default=0),
        ),
        SearchAnswer,
        errors=(404, 409),
    ),
    Endpoint(
        "/api/decide",
        "Tells whether a picture, whose file is the body of the request, is of a class.",
        (_CLASS, _THRESHOLD),
        DecisionAnswer,
        method="POST",
        errors=(404, 408, 409, 413, 415),
    ),
    Endpoint(
        "/api/thresholds",
        "Lists thresholds of a class with the precision and recall that validation found.",
        (_CLASS,),
        CurveAnswer,
        errors=(404, 409),
    ),
    Endpoint(
        "/api/live",
        "Streams the pictures of a class that are new in the watched folder, as server-sent events: start, hit, pictures, "
        "changed, trouble.",
        (_CLASS, _THRESHOLD),
        ("text/event-stream",),
        errors=(404, 409),
    ),
    Endpoint(
        "/api/pictures/{picture}",
        "Shows a picture of the index.",
        (
            Parameter("picture", "The id that a hit has.", str, 1, 30, place="path"),
            Parameter("size", "The most pixels of a side.", int, 16, 1600, default=256),
        ),
        ("image/jpeg", "image/png"),
        errors=(404,),
    ),
    Endpoint("/api/health", "Says what is served.", (), HealthAnswer),
    Endpoint("/api/openapi.json", "This document.", (), dict),
)
"""Everything that can be asked for."""

Values = dict[str, Any]
Answer = Callable[[Request, Values], Awaitable[Response]]


def make_app(collection: Collection, *, feed: Feed | None = None, hosts: Items[str] | None = None) -> Guard:
    """Makes the application.

    Args:
      collection: What is asked.
      feed: What tells of new pictures, if a folder is watched.
      hosts: The names that the server may be asked by; any if None.
    """
    api = _Api(collection, feed)
    routes = [_route(endpoint, getattr(api, endpoint.name)) for endpoint in ENDPOINTS]
    routes += [_page_route(file) for file in sorted(_PAGE.iterdir()) if file.suffix in _PAGE_TYPES]
    handlers = {
        HTTPException: _http_error,
        ClientDisconnect: lambda *_: error_response(400, "The client has gone."),
        Exception: lambda *_: error_response(
            500, "The server could not answer; what went wrong is in its log."
        ),
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, hosts)


def _route(endpoint: Endpoint, answer: Answer) -> Route:
    async def handle(request: Request) -> Response:
        values = read_parameters(endpoint.parameters, request.query_params.multi_items(), request.path_params)
        return await answer(request, values)

    return Route(endpoint.path, handle, methods=[endpoint.method])


def _page_route(file: Path) -> Route:
    content, kind = file.read_bytes(), _PAGE_TYPES[file.suffix]
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    async def handle(request: Request) -> Response:
        return _cached(request, tag) or Response(content, media_type=kind, headers=_cache_headers(tag))

    return Route("/" if file.name == "index.html" else f"/{file.name}", handle, methods=["GET"])


class _Api:
    """What answers: a method for each endpoint, of its name."""

    def __init__(self, collection: Collection, feed: Feed | None):
        self._collection, self._feed = collection, feed
        # Decoding many thumbnails must not keep a search waiting, nor many searches the completion of a name.
        self._workers, self._decoders = ThreadPoolExecutor(_THREADS), ThreadPoolExecutor(_THREADS)
        self._completers = ThreadPoolExecutor(1)
        self._num_waiting = 0

    async def classes(self, request: Request, values: Values) -> Response:
        words = values["query"], values["limit"]
        return _json(await self._work(self._collection.complete, *words, executor=self._completers))

    async def search(self, request: Request, values: Values) -> Response:
        class_id, rule = await self._asked(values)
        call = functools.partial(self._collection.search, limit=values["limit"], offset=values["offset"])
        return _json(await self._work(call, class_id, rule))

    async def thresholds(self, request: Request, values: Values) -> Response:
        class_id, _ = await self._asked(values)
        return _json(await self._work(self._collection.thresholds, class_id))

    async def decide(self, request: Request, values: Values) -> Response:
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            raise HTTPException(
                415, "Send the picture's file itself as the body, not a form (curl --data-binary @FILE)."
            )
        class_id, rule = await self._asked(values)
        content = await _body(request)
        if not content:
            raise HTTPException(
                400, "The request has no body; send the picture's file (curl --data-binary @FILE)."
            )
        try:
            return _json(await self._work(self._collection.decide, content, class_id, rule))
        except ImageError as error:
            raise HTTPException(415, printable(str(error))) from error

    async def pictures(self, request: Request, values: Values) -> Response:
        try:
            path, size = self._collection.picture_path(values["picture"]), values["size"]
        except DataError as error:
            raise HTTPException(404, str(error)) from error
        try:
            status = os.stat(path)
            tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}-{size}"'
            if answer := _cached(request, tag):
                return answer
            content, kind = await self._work(self._collection.thumbnail, path, size, executor=self._decoders)
        except (OSError, ImageError) as error:
            raise HTTPException(
                404, "The file of this picture is gone, or is no picture any longer."
            ) from error
        return Response(content, media_type=kind, headers=_cache_headers(tag))

    async def health(self, request: Request, values: Values) -> Response:
        return _json(await self._work(self._collection.health))

    async def openapi(self, request: Request, values: Values) -> Response:
        return JSONResponse(openapi_document(ENDPOINTS, _REASONS), headers={"cache-control": "no-store"})

    async def live(self, request: Request, values: Values) -> Response:
        if self._feed is None:
            raise HTTPException(404, "No folder is watched; start with pols serve RUN --folder FOLDER.")
        if self._feed.num_listeners >= _MAX_STREAMS or self._feed.is_closed:
            raise HTTPException(503, f"No more than {_MAX_STREAMS} streams can be open at once.")
        class_id, rule = await self._asked(values)
        threshold = await self._work(self._collection.threshold, class_id, rule)
        events = self._events(self._feed, class_id, threshold)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _events(
        self, feed: Feed, class_id: int, threshold: ThresholdAnswer | None
    ) -> AsyncIterator[str]:
        news, seen, trouble = feed.add(), self._collection.view, None
        try:
            yield "retry: 2000\n" + _event("start", {"num_pictures": seen.num_pictures})
            while not feed.is_closed:
                if feed.trouble != trouble and (trouble := feed.trouble):
                    yield _event("trouble", {"error": trouble})
                try:
                    await asyncio.wait_for(news.wait(), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                news.clear()
                before, seen = seen, self._collection.view
                count = {"num_pictures": seen.num_pictures}
                if seen.version != before.version:
                    yield _event("changed", count)
                elif seen.num_pictures > before.num_pictures:
                    try:
                        asked = before, seen, class_id, threshold, _MAX_NEW_HITS
                        hits = await self._work(self._collection.new_hits, *asked)
                    except HTTPException as error:  # too busy, or the index cannot be read
                        hits = []
                        yield _event("trouble", {"error": error.detail})
                    for hit in hits:
                        yield _event("hit", encode(hit))
                    yield _event("pictures", count)
        finally:
            feed.remove(news)

    async def _asked(self, values: Values) -> tuple[int, Rule | None]:
        """The class and the rule that a request names."""
        try:
            rule = None if values.get("threshold") is None else Rule.parse(values["threshold"])
        except ConfigError as error:
            raise HTTPException(400, printable(str(error))) from error
        return await self._work(self._collection.class_id, values["class"], status=404), rule

    async def _work(
        self,
        call: Callable[..., Any],
        *arguments: Any,
        status: int = 409,
        executor: ThreadPoolExecutor | None = None,
    ) -> Any:
        """Does work in a thread; what is wrong with the question becomes an answer."""
        if self._num_waiting >= _MAX_WAITING:
            raise HTTPException(503, "The server is busy; try again in a second.")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(executor or self._workers, call, *arguments)
        except ImageError:  # is said by whoever knows what the picture was for
            raise
        except (ConfigError, DataError) as error:
            raise HTTPException(status, printable(str(error))) from error
        except PolsError as error:  # such as a row of a damaged checkpoint
            raise HTTPException(500, printable(str(error))) from error
        finally:
            self._num_waiting -= 1


def _json(answer: Any) -> JSONResponse:
    return JSONResponse(encode(answer), headers={"cache-control": "no-store"})


def _event(name: str, values: Values) -> str:
    return f"event: {name}\ndata: {json.dumps(values, allow_nan=False)}\n\n"


def _cache_headers(tag: str) -> dict[str, str]:
    return {"etag": tag, "cache-control": "private, no-cache"}  # kept, but asked about


def _cached(request: Request, tag: str) -> Response | None:
    """The answer to a browser that has it already."""
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=_cache_headers(tag))
    return None


async def _body(request: Request) -> bytes:
    too_large = HTTPException(413, f"A picture may have at most {MAX_UPLOAD_BYTES // 2**20} MB.")
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > MAX_UPLOAD_BYTES:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > MAX_UPLOAD_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise HTTPException(408, f"The picture did not arrive within {_BODY_SECONDS:.0f} seconds.") from error
    return bytes(content)


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # The connection stays open: what is left of an upload is taken and thrown away, for a client whose connection is
    # closed while it sends does not get to read the answer.
    sentence = _SAID_BY_STARLETTE.get(error.detail, error.detail)
    return error_response(error.status_code, sentence, dict(error.headers or {}))
