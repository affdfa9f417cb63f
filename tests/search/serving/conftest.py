"""One server over the pictures of the digits, for all tests of the server."""

import contextlib
import http.client
import json
import shutil
import urllib.parse

import pytest

from pols_jax.search.serving import Collection, Server, make_app
from pols_jax.search.serving.guard import LOOPBACK
from pols_jax.search.serving.live import Feed, FolderIndex, FolderWatcher
from pols_jax.search.serving.running import listen


class Client:
    """Asks a server, one connection per question."""

    def __init__(self, address):
        self.address = address
        self.host, self.port = urllib.parse.urlsplit(address).netloc.split(":")

    def connect(self):
        return http.client.HTTPConnection(self.host, int(self.port), timeout=20)

    def ask(self, path, method="GET", body=None, headers=None, **parameters):
        """Returns status, headers and content."""
        if parameters:
            path += "?" + urllib.parse.urlencode({name.rstrip("_"): v for name, v in parameters.items()})
        connection = self.connect()
        with contextlib.closing(connection):
            headers = headers or {}
            chunked = "Transfer-Encoding" in headers
            connection.request(method, path, body=body, headers=headers, encode_chunked=chunked)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def json(self, path, status=200, **options):
        """Returns the content of an answer that must have a status."""
        got, headers, content = self.ask(path, **options)
        assert got == status, content
        assert headers["content-type"] == "application/json"
        return json.loads(content)


@pytest.fixture(scope="session")
def make_client():
    """Makes who asks, from an address."""
    return Client


@pytest.fixture(scope="session")
def live(bank, pictures, tmp_path_factory):
    """A copy of the pictures in a folder that is watched, and its index."""
    folder = tmp_path_factory.mktemp("live") / "camera"
    shutil.copytree(pictures, folder)
    return folder, FolderIndex(bank, str(folder), folder.parent / "index")


@pytest.fixture(scope="session")
def collection(bank, live):
    folder, index = live
    return Collection(bank, index.update()[0], name="digits", folder=str(folder))


@pytest.fixture(scope="session")
def client(collection, live):
    """A server, and who asks it."""
    feed = Feed()
    collection.warm_up()
    watcher = FolderWatcher(live[1], collection, feed, seconds=0.1)
    app = make_app(collection, feed=feed, hosts=LOOPBACK)
    with watcher, Server(app, listen("127.0.0.1", 0), on_stop=feed.close) as server:
        yield Client(server.address)
