"""What the server refuses, and what nobody can make it do: foreign requests, odd ones, too many, too large, too slow."""

import contextlib
import http.client
import io
import json
import random
import shutil
import socket
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from pols_jax.search.serving import Collection, Server, app as apps, make_app, running
from pols_jax.search.serving.app import ENDPOINTS
from pols_jax.search.serving.collection import MAX_UPLOAD_BYTES
from pols_jax.search.serving.live import Feed, FolderIndex
from pols_jax.search.serving.running import listen


def png(image) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


def test_a_picture_whose_file_is_gone_or_broken_is_one_sentence(make_client, bank, pictures, tmp_path):
    for name in ("digit_one_01.png", "digit_two_02.png"):
        shutil.copy(pictures / name, tmp_path)
    index, _ = FolderIndex(bank, str(tmp_path), tmp_path / "index").update()
    (tmp_path / "digit_one_01.png").unlink()
    (tmp_path / "digit_two_02.png").write_text("no picture")
    with Server(make_app(Collection(bank, index)), listen("127.0.0.1", 0)) as server:
        client = make_client(server.address)
        for number in (0, 1):
            error = client.json(f"/api/pictures/0-{number}", 404)["error"]
            assert error == "The file of this picture is gone, or is no picture any longer."


def test_only_pictures_of_the_index_are_served_and_never_larger_than_asked(client, collection):
    hit = client.json("/api/search", class_="#7")["hits"][0]
    for size in (16, 256):
        status, headers, content = client.ask(f"/api/pictures/{hit['picture']}", size=size)
        assert (status, headers["content-type"]) == (200, "image/png")
        assert max(Image.open(io.BytesIO(content)).size) == min(size, 32)
    etag = {"If-None-Match": headers["etag"]}
    assert client.ask(f"/api/pictures/{hit['picture']}", size=256, headers=etag)[0] == 304
    passwd = "/etc/passwd"
    for picture in (
        "0-3000",
        "99-0",  # the live folder may have a second part by now
        "0-1-2",
        "0--1",
        "-1",
        "0-1e3",
        "٣-٣",
        "..%2F..%2Fetc%2Fpasswd",
        passwd,
        "%2e%2e/x",
        "0-" + "9" * 40,
    ):
        status, _, content = client.ask("/api/pictures/" + urllib.parse.quote(picture, safe="/%"))
        assert status in (400, 404), picture
        assert list(json.loads(content)) == ["error"]


def test_every_answer_carries_the_headers_that_keep_a_browser_safe(client):
    for path in ("/", "/page.js", "/api/health", "/api/nothing", "/api/search", "/api/pictures/0-0"):
        _, headers, _ = client.ask(path)
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_a_foreign_host_or_origin_is_refused(client):
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "localhost@evil.example",
    ):
        error = client.json("/api/health", 400, headers={"Host": host})["error"]
        assert "another name than its own" in error
    for host in ("localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.1:9"):
        assert client.json("/api/health", headers={"Host": host})["status"] == "ok"
    origin = {"Origin": "https://evil.example"}
    assert (
        "other sites"
        in client.json("/api/decide", 403, method="POST", body=b"x", headers=origin, class_="#7")["error"]
    )
    assert client.ask("/api/health", headers={"Origin": client.address})[0] == 200


WRONG = {
    "class is missing": "/api/search",
    "class is given twice": "/api/search?class=a&class=b",
    "no parameter named 'treshold'; did you mean threshold": "/api/search?class=%237&treshold=1",
    "There are no parameters here": "/api/health?x=1",
    "class must have 1 to 256 characters, got 0": "/api/search?class=",
    "class must have 1 to 256 characters, got 257": "/api/search?class=" + "x" * 257,
    "query must have 0 to 256 characters": "/api/classes?query=" + "x" * 300,
    "limit must be a whole number from 1 to 500, got '0'": "/api/search?class=%237&limit=0",
    "limit must be a whole number from 1 to 500, got '501'": "/api/search?class=%237&limit=501",
    "limit must be a whole number from 1 to 500, got '-1'": "/api/search?class=%237&limit=-1",
    "limit must be a whole number from 1 to 500, got 'NaN'": "/api/search?class=%237&limit=NaN",
    "limit must be a whole number from 1 to 500, got '1e2'": "/api/search?class=%237&limit=1e2",
    "limit must be a whole number from 1 to 500, got '٣'": "/api/search?class=%237&limit=%D9%A3",
    "offset must be a whole number": "/api/search?class=%237&offset=" + "9" * 400,
    "The threshold rule 'nan' is not": "/api/search?class=%237&threshold=nan",
    "The threshold rule 'inf' is not": "/api/search?class=%237&threshold=inf",
    "The threshold rule '1e999' is not": "/api/search?class=%237&threshold=1e999",
    "The threshold rule 'recall=2' is not": "/api/search?class=%237&threshold=recall%3D2",
    "The threshold rule 'recall=nan' is not": "/api/search?class=%237&threshold=recall%3Dnan",
    r"The threshold rule '\x00\x1b[2J' is not": "/api/search?class=%237&threshold=%00%1b%5B2J",
    "size must be a whole number from 16 to 1600": "/api/pictures/0-0?size=100000",
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_request_is_one_sentence(client, sentence):
    error = client.json(WRONG[sentence], 400)["error"]
    assert sentence in error.encode().decode("unicode_escape") or sentence in error
    assert "\n" not in error
    assert len(error) < 400


def test_a_wrong_path_or_method_is_one_sentence(client):
    for path in (
        "/nothing",
        "/api",
        "/api/",
        "/api/search/",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page.js/..",
        "/page/../app.py",
        "/%00",
        "//",
        "/api/pictures/",
        "/api/pictures/a/b",
    ):
        assert "openapi.json" in client.json(path, 404)["error"]
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"):
        status, headers, content = client.ask("/api/search", method=method)
        assert (status, set(headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
        assert "openapi.json" in json.loads(content)["error"]
    assert client.ask("/api/decide", class_="#7")[0] == 405
    assert client.ask("/api/health", method="HEAD")[2] == b""


NAMES = ("class", "threshold", "limit", "offset", "query", "size", "", "x", "class[]", "\0")


VALUES = (
    *(
        "#7",
        "7",
        "digit seven",
        "nan",
        "inf",
        "1e308",
        "-1e308",
        "1e-400",
        "recall=0.5",
        "recall=0",
        "f1",
        "F1",
        "0",
        "-0",
    ),
    *(
        "9" * 50,
        "\u202e",
        "\0",
        "😀" * 100,
        "a" * 5000,
        "%",
        "&",
        "=",
        "<script>",
        "../../etc/passwd",
        "\n",
        "१",
        "1_000",
    ),
)


def test_whatever_is_asked_gets_an_answer_and_what_is_wrong_one_sentence(client):
    rng = random.Random(0)
    paths = [endpoint.path.format(picture="0-1") for endpoint in ENDPOINTS if "live" not in endpoint.path]
    statuses = set()
    for _ in range(400):
        given = [(rng.choice(NAMES), rng.choice(VALUES)) for _ in range(rng.randrange(4))]
        path = f"{rng.choice(paths)}?{urllib.parse.urlencode(given)}"
        body = rng.choice([None, b"x", b"\x89PNG\r\n\x1a\n" + rng.randbytes(100), b"GIF89a" + b"\xff" * 100])
        status, _, content = client.ask(path, method=rng.choice(["GET", "GET", "POST", "PUT"]), body=body)
        statuses.add(status)
        assert status in (200, 400, 404, 405, 415), path
        if status != 200:
            error = json.loads(content)["error"]
            assert error.endswith((".", "?"))
            assert "\n" not in error
    assert statuses >= {200, 400, 404, 405}


def test_a_wrong_upload_is_one_sentence(client, digits, monkeypatch):
    image = png(digits.test.images[0, ..., 0])
    huge = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(huge, "PNG")

    def error(status, body, **headers):
        return client.json("/api/decide", status, method="POST", body=body, headers=headers, class_="#7")[
            "error"
        ]

    assert "has no body" in error(400, b"")
    assert "not a picture in one of the formats" in error(415, b"%!PS-Adobe-3.0")
    assert "cannot be decoded" in error(415, image[:60])
    assert "12000 x 12000 pixels, and 100,000,000 are the most" in error(415, huge.getvalue())
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    assert "not a form" in error(415, b"--x\r\nbroken", **form)
    assert "at most 32 MB" in error(413, b"", **{"Content-Length": str(MAX_UPLOAD_BYTES + 1)})


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("query", ["class=%237", "class=nothing"])
def test_a_refused_upload_is_taken_to_its_end_so_that_the_client_reads_why(
    client, monkeypatch, query, chunked
):
    monkeypatch.setattr(apps, "MAX_UPLOAD_BYTES", 1000)
    headers = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(30 * 2**19)}
    with contextlib.closing(client.connect()) as connection:
        for _ in range(2):  # on one connection, and each far more than the buffers between the two hold
            parts = (b"x" * 2**19 for _ in range(30))
            connection.request("POST", f"/api/decide?{query}", parts, headers, encode_chunked=chunked)
            answer = connection.getresponse()
            sentence = json.loads(answer.read())["error"]
            assert (answer.status, sentence[:29]) in [
                (413, "A picture may have at most 0 "),
                (404, "There is no class named 'noth"),
            ]


def test_a_client_that_is_slow_is_let_go_and_keeps_nobody_waiting(client, monkeypatch):
    monkeypatch.setattr(apps, "_BODY_SECONDS", 0.3)
    monkeypatch.setattr(running, "_HEAD_SECONDS", 0.3)

    def answer_to(*parts: bytes) -> bytes:
        with socket.create_connection((client.host, int(client.port)), timeout=20) as connection:
            for part in parts:
                connection.sendall(part)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    head = f"POST /api/decide?class=%237 HTTP/1.1\r\nHost: {client.host}\r\nContent-Length: 100\r\n".encode()
    assert answer_to(b"GET /api/health HTTP/1.1\r\nHo") == b"", "closed"
    assert b" 408 " in answer_to(head + b"\r\nhalf")
    whole = f"GET /api/health HTTP/1.1\r\nHost: {client.host}\r\n\r\n".encode()
    assert answer_to(whole, b"GET /half").startswith(b"HTTP/1.1 200"), "and then closed"
    for garbage in (
        b"\x00\xff\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"x" * 100_000,
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        assert answer_to(garbage + b"\r\n\r\n").startswith((b"HTTP/1.1 400", b"")), garbage[:10]
    assert client.json("/api/health")["status"] == "ok"


def test_many_clients_at_once_get_what_one_gets(client):
    alone = {
        name: client.json("/api/search", class_=f"#{name}", threshold="-1e9")["hits"] for name in range(10)
    }
    with ThreadPoolExecutor(20) as threads:
        asked = [i % 10 for i in range(200)]
        together = threads.map(
            lambda i: client.json("/api/search", class_=f"#{i}", threshold="-1e9")["hits"], asked
        )
        assert all(hits == alone[i] for i, hits in zip(asked, together, strict=True))


def test_too_much_at_once_is_turned_away_and_a_defect_is_one_sentence(
    make_client, collection, monkeypatch, caplog
):
    started, release = threading.Event(), threading.Event()

    class Slow(Collection):
        def health(self):
            started.set()
            release.wait(20)
            raise RuntimeError("a defect")

    monkeypatch.setattr("pols_jax.search.serving.guard.MAX_AT_ONCE", 1)
    slow = Slow(collection.bank)

    with Server(make_app(slow), listen("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        client = make_client(server.address)
        first = threads.submit(client.ask, "/api/health")
        started.wait(20)
        assert "Too many requests" in client.json("/api/classes", 503)["error"]
        release.set()
        status, _, content = first.result()
    assert status == 500
    assert json.loads(content) == {"error": "The server could not answer; what went wrong is in its log."}
    assert "a defect" in caplog.text


def test_an_open_stream_does_not_keep_the_server_from_stopping(make_client, collection, monkeypatch):
    monkeypatch.setattr(running, "_STOP_SECONDS", 60)

    feed = Feed()
    start = None
    with Server(make_app(collection, feed=feed), listen("127.0.0.1", 0), on_stop=feed.close) as server:
        connection = make_client(server.address).connect()
        connection.request("GET", "/api/live?class=%237")
        stream = connection.getresponse()
        assert stream.readline() == b"retry: 2000\n"
        start = time.monotonic()
    assert time.monotonic() - start < 30, "it did not wait until it gave up"
    assert b"start" in stream.read()
    connection.close()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        make_client(server.address).ask("/api/health")
