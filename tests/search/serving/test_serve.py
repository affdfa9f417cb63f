"""The command `pols serve`: what it serves, how it ends, and one sentence for what cannot be served."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import threading
import time

import pytest
from random_runs import make_run

from pols_jax import cli
from pols_jax.metrics.thresholds import Rule
from pols_jax.search.index import update_index
from pols_jax.search.pictures import find_pictures
from pols_jax.search.searching import make_queries, search
from pols_jax.search.serving import running


@pytest.fixture(scope="module")
def index_dir(bank, pictures, tmp_path_factory):
    directory = tmp_path_factory.mktemp("indexes") / "pictures.index"
    update_index(bank, [str(pictures)], directory)
    return directory


@pytest.fixture
def serve(make_client, capsys):
    """Runs `pols serve` with some words, does something with a client while it serves, and ends it by a signal."""

    def run(*words, number=signal.SIGTERM, meanwhile=lambda client: None):
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
        client, problems = make_client(f"http://127.0.0.1:{port}"), []

        def ask():
            try:
                for _ in range(600):
                    with contextlib.suppress(ConnectionError):
                        client.json("/api/health")
                        break
                    time.sleep(0.05)
                meanwhile(client)
            except BaseException as error:
                problems.append(error)
            os.kill(os.getpid(), number)

        asking = threading.Thread(target=ask)
        asking.start()
        code = cli.main(["serve", *map(str, words), "--port", str(port)])
        asking.join()
        assert not problems, problems
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_at_once_with_the_exit_code_of_the_signal(
    serve, run_dir, pictures, monkeypatch, number
):
    monkeypatch.setattr(running, "_STOP_SECONDS", 60)
    streams = []

    def listen(client):
        connection = client.connect()
        connection.request("GET", "/api/live?class=%237")
        streams.append((connection, connection.getresponse()))
        assert streams[0][1].readline() == b"retry: 2000\n"
        streams.append(time.monotonic())

    words = (run_dir, "--folder", pictures, "--index", pictures.parent / "index")
    code, out, err = serve(*words, number=number, meanwhile=listen)
    assert (code, err) == (128 + number, "Stopped.\n")
    assert "serves 30 pictures, 10 classes. Ctrl-C ends it." in out
    (connection, stream), started = streams
    assert time.monotonic() - started < 30, "the open stream did not keep it"
    assert b"num_pictures" in stream.read()
    connection.close()


def test_an_index_is_served_with_the_run_that_it_names(serve, bank, index_dir, pictures):
    found = []
    expected = search(
        bank, make_queries(bank, ["digit two"], Rule.parse("f1")), find_pictures([str(pictures)])
    )

    def look(client):
        assert client.json("/api/health")["folder"] is None
        found.extend(hit["name"] for hit in client.json("/api/search", class_="2", threshold="f1")["hits"])

    code, _, _ = serve(index_dir, meanwhile=look)
    assert code == 143
    assert found == [hit.picture.rpartition("/")[2] for hit in expected.best_first()] != []


def test_a_run_alone_answers_uploads_and_a_folder_may_be_empty_at_first(serve, run_dir, pictures, tmp_path):
    picture = (pictures / "digit_seven_07.png").read_bytes()

    def upload(client):
        assert client.json("/api/search", class_="7")["num_hits"] == 0
        assert client.json("/api/decide", method="POST", body=picture, class_="7")["is_class"]

    assert serve(run_dir, meanwhile=upload)[0] == 143

    def fill(client):
        connection = client.connect()
        connection.request("GET", "/api/live?class=7")
        stream = connection.getresponse()
        shutil.copy(pictures / "digit_seven_07.png", tmp_path)
        lines = iter(stream.readline, b"")
        hit = next(json.loads(line[6:]) for line in lines if line.startswith(b"data") and b"score" in line)
        assert hit["name"] == "digit_seven_07.png"
        connection.close()

    assert serve(run_dir, "--folder", tmp_path, meanwhile=fill)[0] == 143


@pytest.fixture
def pols(capsys):
    """Runs a command line that fails; returns its sentence."""

    def run(*words):
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        return err

    return run


def test_what_cannot_be_served_is_one_sentence_and_exit_code_2(
    pols, run_dir, index_dir, pictures, tmp_path, monkeypatch
):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        error = pols("serve", run_dir, "--port", port)
        assert (
            f"Port {port} of 127.0.0.1 cannot be used: Address already in use; choose another with --port"
            in error
        )
    error = pols("serve", index_dir, "--run", make_run(tmp_path / "other"), "--port", 0)
    assert "holds features of another network" in error
    error = pols("serve", run_dir, index_dir, "--port", 0)
    assert "Name one run, or indexes" in error
    assert "--run is for indexes" in pols("serve", run_dir, "--run", run_dir, "--port", 0)
    index = json.loads((index_dir / "feature_index.json").read_text())
    shutil.copytree(index_dir, tmp_path / "moved.index")
    moved = index | {"run_dir": str(tmp_path / "gone")}
    (tmp_path / "moved.index" / "feature_index.json").write_text(json.dumps(moved))
    assert "is no longer in" in pols("serve", tmp_path / "moved.index", "--port", 0)
    (tmp_path / "moved.index" / "feature_index.json").write_text("{")
    assert "feature_index.json cannot be read" in pols("serve", tmp_path / "moved.index", "--port", 0)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    assert "pols serve needs uvicorn: install them with pip install 'pols-jax[serve]'." in pols(
        "serve", run_dir
    )
