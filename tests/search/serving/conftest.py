"""One tiny run, its test pictures as files, and one server over them, for all tests of the server."""

import contextlib
import http.client
import json
import shutil
import urllib.parse

import pytest
from PIL import Image

from pols_jax.data import load
from pols_jax.evaluation.measuring import evaluate
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.serving import Collection, Server, make_app
from pols_jax.search.serving.guard import LOOPBACK
from pols_jax.search.serving.live import Feed, FolderIndex, FolderWatcher
from pols_jax.search.serving.running import listen
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit


@pytest.fixture(scope="session")
def dataset():
    return load("glyphs", characters="0030-0039")


@pytest.fixture(scope="session")
def run_dir(dataset, tmp_path_factory):
    """The run of `tests/search/test_search.py`: its programs are compiled once."""
    config = RunConfig(
        characters="0030-0039",
        width=0.2,
        loss="batch_cross_entropy",
        batch_size=64,
        steps=100,
        evaluate_every=100,
    )
    directory = tmp_path_factory.mktemp("runs") / "digits"
    fit(config, dataset, directory, options=RunOptions(quiet=True))
    evaluate(directory, dataset=dataset, quiet=True)
    return directory


@pytest.fixture(scope="session")
def bank(run_dir):
    return ClassBank.open(run_dir)


@pytest.fixture(scope="session")
def pictures(dataset, tmp_path_factory):
    """A folder with the test pictures, one file each, named after their class."""
    folder = tmp_path_factory.mktemp("served") / "pictures"
    folder.mkdir()
    for i, (image, label) in enumerate(zip(dataset.test.images, dataset.test.labels, strict=True)):
        name = dataset.class_names[label].replace(" ", "_").lower()
        Image.fromarray(image[..., 0]).save(folder / f"{name}_{i:02d}.png")
    return folder


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
