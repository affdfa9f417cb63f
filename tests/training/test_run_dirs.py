"""One process trains in a directory, stale locks are no obstacle, and every start has a directory of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from pols_jax.errors import ConfigError, RunError
from pols_jax.training import run_dirs
from pols_jax.training.run_dirs import check_unlocked, locked, run_directory


@pytest.fixture
def other_process(tmp_path):
    """Another process that holds the lock of ``tmp_path / "run"``; it takes the lock as we do, without our imports."""
    (tmp_path / "run").mkdir()
    program = (
        "import fcntl, json, os, socket, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(json.dumps({'pid': os.getpid(), 'host': socket.gethostname()})); file.flush()\n"
        "print('locked', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run" / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_directory_in_use_is_one_sentence_with_the_process_and_nothing_is_touched(other_process, tmp_path):
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    sentence = rf"Process {other_process.pid} on '{socket.gethostname()}' trains in .*run; wait until it has ended, or name"
    with pytest.raises(RunError, match=sentence) as raised, locked(tmp_path / "run"):
        pytest.fail("two processes hold one lock")
    assert raised.value.exit_code == 2
    with pytest.raises(RunError, match=sentence):
        check_unlocked(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_the_lock_of_a_killed_process_is_no_obstacle(other_process, tmp_path):
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    assert (tmp_path / "run" / "lock").exists()
    check_unlocked(tmp_path / "run")
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / "lock").read_text())["pid"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


def test_whoever_holds_a_lock_may_take_it_again_and_another_thread_may_not(tmp_path):
    said = []

    def other_thread():
        try:
            with locked(tmp_path):
                said.append("locked")
        except RunError as error:
            said.append(str(error))

    with locked(tmp_path), locked(tmp_path):
        check_unlocked(tmp_path)
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert f"Process {os.getpid()} on" in said[0]
    with locked(tmp_path):
        pass


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(tmp_path):
    read, write = os.pipe()
    with locked(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; this child does not use it
        child = os.fork()
        if child == 0:
            os.read(read, 1)  # lives on
            os._exit(0)
    # The parent closed its file; had the child kept its copy, the lock would still be held.
    try:
        with locked(tmp_path):
            pass
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)


def test_who_waits_for_a_lock_does_not_end_up_with_a_removed_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dirs, "_PATIENCE_SECONDS", 20.0)
    inside, order = threading.Lock(), []

    def train(number):
        for _ in range(5):
            with locked(tmp_path):
                assert inside.acquire(blocking=False), "two hold one lock"
                order.append(number)
                inside.release()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 20


def test_a_directory_that_cannot_be_locked_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "lock").mkdir(parents=True)
    for wrong in ("file", "run"):
        with pytest.raises(ConfigError, match=r"--run-dir .* cannot be"), locked(tmp_path / wrong):
            pass


def test_a_file_system_without_locks_asks_whether_the_other_process_runs(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(run_dirs.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_dirs.fcntl, "flock", no_locks)
    monkeypatch.setattr(run_dirs, "_PATIENCE_SECONDS", 0.0)
    owner = {"pid": os.getppid(), "host": socket.gethostname()}
    (tmp_path / "lock").write_text(json.dumps(owner))
    with pytest.raises(RunError, match=f"Process {os.getppid()} on"), locked(tmp_path):
        pass
    (tmp_path / "lock").write_text(json.dumps(owner | {"pid": 2**22 + 1}))  # above any process id
    with locked(tmp_path):
        pass


def test_starts_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20250101-000000")
    with run_directory(None, name="mnist", root=tmp_path / "runs") as first:
        (first / "config.json").write_text("{}")
        with run_directory(None, name="mnist", root=tmp_path / "runs") as second:
            assert [first.name, second.name] == ["mnist-20250101-000000", "mnist-20250101-000000-2"]
            assert first.is_dir()
            assert second.is_dir()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [first.name], (
        "what stays empty goes again"
    )


def test_refused_input_leaves_no_directory(tmp_path):
    with pytest.raises(ConfigError), run_directory(None, name="mnist", root=tmp_path / "runs"):
        raise ConfigError("--batch-size is wrong.")
    assert list(tmp_path.iterdir()) == []


def test_a_given_directory_is_taken_as_it_is(tmp_path):
    with run_directory(tmp_path / "mine", name="mnist") as run_dir:
        assert run_dir == tmp_path / "mine"
    assert not Path(run_dir).exists()
