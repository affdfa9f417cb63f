"""Several hosts: where a process stands, who is waited for, what has to be the same, and what a dead one ends."""

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

from pols_jax.cli import running as cli, train
from pols_jax.errors import ConfigError, HostError
from pols_jax.training.checkpoints import Checkpoints
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.fitting import RunOptions, shared_settings
from pols_jax.training.hosts import agreement, joined, joining, watching
from pols_jax.training.hosts.agreement import check_same_settings, differences
from pols_jax.training.hosts.joining import give_threads
from pols_jax.training.hosts.meeting import Line, meet
from pols_jax.training.hosts.places import Place, check_host, find_place
from pols_jax.training.hosts.watching import Watch

SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[001-004]",
}


@pytest.mark.parametrize(
    ("coordinator", "num_processes", "process_id", "sentence"),
    [
        ("localhost", 2, 0, "--coordinator must be HOST:PORT"),
        ("localhost:", 2, 0, "--coordinator must be HOST:PORT"),
        (":1234", 2, 0, "--coordinator must be HOST:PORT"),
        ("", 2, 0, "--coordinator must be HOST:PORT"),
        ("localhost:http", 2, 0, "--coordinator must be HOST:PORT"),
        ("localhost:0", 2, 0, "--coordinator must be HOST:PORT"),
        ("localhost:70000", 2, 0, "--coordinator must be HOST:PORT"),
        ("localhost:-1", 2, 0, "--coordinator must be HOST:PORT"),
        ("http://localhost:1", 2, 0, "--coordinator must be HOST:PORT"),
        ("::1:1234", 2, 0, "--coordinator must be HOST:PORT"),
        ("localhost:1234", None, 0, "--coordinator needs --num-processes"),
        ("localhost:1234", 2, None, "--coordinator needs --process-id"),
        ("localhost:1234", None, None, "--coordinator needs --num-processes"),
        ("localhost:1234", 0, 0, "--num-processes must be at least 1, got 0"),
        ("localhost:1234", -2, 0, "--num-processes must be at least 1, got -2"),
        ("localhost:1234", 2, 2, "--process-id must be from 0 to 1 with --num-processes 2, got 2"),
        ("localhost:1234", 2, -1, "--process-id must be from 0 to 1"),
        (None, 2, 0, "need --coordinator"),
        (None, None, 1, "need --coordinator"),
        (None, 1, 1, "need --coordinator"),
    ],
)
def test_flags_that_do_not_say_where_a_host_stands_are_wrong_input(
    coordinator, num_processes, process_id, sentence
):
    with pytest.raises(ConfigError) as raised:
        find_place(coordinator, num_processes, process_id, environ={})
    assert sentence in str(raised.value)


def test_an_address_may_be_a_name_an_ipv4_or_an_ipv6_address():
    for text in ("node-1.cluster:80", "10.0.0.1:65535", "[::1]:1234"):
        place = find_place(text, 2, 1, environ={})
        assert place is not None
        assert place.address == text


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"SLURM_NTASKS": "abc"}, "SLURM_NTASKS is 'abc', which is not a number"),
        ({"SLURM_NTASKS": ""}, "SLURM_NTASKS is ''"),
        ({"SLURM_NTASKS": "-4"}, "SLURM_NTASKS is '-4'"),
        ({"SLURM_NTASKS": "4(x2)"}, "SLURM_NTASKS is '4(x2)'"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID is 'one'"),
        ({"SLURM_LOCALID": "\x1b[1m"}, r"SLURM_LOCALID is '\x1b[1m'"),
        ({"SLURM_JOB_ID": "4711_3"}, "SLURM_JOB_ID is '4711_3'"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID is 4, but SLURM_NTASKS is 4"),
        (
            {"SLURM_STEP_NODELIST": ""},
            "SLURM_NTASKS is 4, but SLURM_STEP_NODELIST is not set; start with srun",
        ),
    ],
)
def test_variables_of_slurm_that_cannot_be_used_are_wrong_input(variables, sentence):
    with pytest.raises(ConfigError) as raised:
        find_place(None, None, None, environ=SLURM | variables)
    assert sentence in str(raised.value)
    assert "--num-processes 1" in str(raised.value), "it says how to train without SLURM"


def test_a_shell_of_slurm_that_was_not_started_by_srun_is_told_so():
    with pytest.raises(ConfigError, match="SLURM_PROCID is not set; start with srun"):
        find_place(None, None, None, environ={"SLURM_NTASKS": "4"})


def test_slurm_gives_the_place(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    place = find_place(None, None, None)
    assert place is not None
    assert (place.host, place.num_processes, place.process_id) == ("node001", 4, 2)
    assert place.local_device_ids == (0,)


def test_a_coordinator_under_slurm_needs_no_other_flag():
    assert find_place("node001:1234", None, None, environ=SLURM) == Place("node001", 1234, 4, 2)


def test_one_host_is_alone_without_flags_with_one_task_and_wherever_it_says_so():
    assert find_place(None, None, None, environ={}) is None
    assert find_place(None, None, None, environ=SLURM | {"SLURM_NTASKS": "1"}) is None
    assert find_place(None, 1, None, environ=SLURM | {"SLURM_NTASKS": "abc"}) is None


def test_a_pod_that_jax_cannot_find_is_wrong_input():
    with pytest.raises(ConfigError, match="JAX cannot find them"):
        find_place(None, None, None, environ={"TPU_WORKER_HOSTNAMES": "a,b"})


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "\udce4"])
def test_a_host_that_does_not_exist_is_wrong_input(host):
    with pytest.raises(ConfigError, match="cannot be found"):
        check_host(host)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_the_time_to_wait_is_a_positive_number(timeout):
    with (
        pytest.raises(ConfigError, match="--host-timeout must be a positive number"),
        joined(timeout=timeout),
    ):
        pass


def test_several_devices_on_a_cpu_get_more_threads_than_cores_and_one_alone_gets_none(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setattr(joining, "_num_cpu_devices", lambda: 1)
    give_threads(num_processes=1)
    assert os.environ["NPROC"] == "2"
    give_threads(num_processes=2)
    assert os.environ["NPROC"] == "16"
    monkeypatch.setattr(joining, "_num_cpu_devices", lambda: 8)
    give_threads(num_processes=1)
    assert os.environ["NPROC"] == "64"
    monkeypatch.setenv("NPROC", "not a number")
    give_threads(num_processes=1, num_cores=96)
    assert os.environ["NPROC"] == "96"


def test_the_devices_of_a_cpu_are_counted_before_jax_starts(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=12 --xla_b")
    assert joining._num_cpu_devices() == 12


@pytest.mark.parametrize(
    ("flags", "variables", "sentence"),
    [
        ("--coordinator localhost --num-processes 2 --process-id 0", {}, "--coordinator must be HOST:PORT"),
        ("--coordinator no-such-host.invalid:1234 --num-processes 2 --process-id 0", {}, "cannot be found"),
        ("--coordinator localhost:1234", {}, "--coordinator needs --num-processes"),
        ("--num-processes 2", {}, "need --coordinator"),
        ("--host-timeout 0", {}, "--host-timeout must be a positive number"),
        ("", {"SLURM_NTASKS": "abc"}, "SLURM_NTASKS is 'abc'"),
        ("", {"SLURM_NTASKS": "2"}, "start with srun"),
    ],
)
def test_the_command_line_says_it_in_one_sentence_with_exit_code_2(
    flags, variables, sentence, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    assert cli.run(train.main) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ the meeting


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def meeting(pool):
    """Starts to meet in a thread; closes the connections at the end."""
    futures = []

    def start(place, timeout=20.0, say=print):
        futures.append(pool.submit(meet, place, timeout=timeout, say=say))
        return futures[-1]

    yield start
    for future in futures:
        if future.exception(60) is None:
            for line in future.result().values():
                line.close()


def all_meet(meeting, places, timeout=20.0):
    said = [[] for _ in places]
    futures = [meeting(place, timeout, said[i].append) for i, place in enumerate(places)]
    return futures, said


def test_hosts_meet_in_any_order_and_the_port_is_free_for_jax_afterward(meeting):
    port = free_port()
    places = [Place("127.0.0.1", port, 3, index) for index in (2, 0, 1)]
    futures, said = all_meet(meeting, places)
    lines = [future.result(30) for future in futures]
    assert [sorted(line) for line in lines] == [[0], [1, 2], [0]]
    assert f"of 3 hosts at 127.0.0.1:{port}: the " in said[1][0]
    assert "Waiting for 1 of 3 hosts" in said[0][0]
    with socket.create_server(("127.0.0.1", port)):  # while the connections are open
        pass


def test_a_missing_host_is_named_at_once_and_after_the_time_out_in_a_sentence(meeting):
    port = free_port()
    futures, said = all_meet(meeting, [Place("127.0.0.1", port, 3, 0), Place("127.0.0.1", port, 3, 1)], 2.0)
    with pytest.raises(
        HostError, match=r"host with --process-id 2 did not come to .* within 2 seconds.*--host-timeout"
    ) as raised:
        futures[0].result(30)
    assert raised.value.exit_code == 1
    with pytest.raises(HostError, match="host with --process-id 2 did not come"):
        futures[1].result(30)
    assert said[0][0].startswith("Waiting for 2 of 3 hosts")
    assert "--process-id 1, 2" in said[0][0]
    assert any("Waiting for 1 of 3 hosts" in line and "--process-id 2" in line for line in said[0])


def test_a_missing_first_host_is_a_sentence():
    place = Place("127.0.0.1", free_port(), 2, 1)
    with pytest.raises(HostError, match=r"No first host \(--process-id 0\) was found at .* within 1 seconds"):
        meet(place, timeout=1.0, say=print)


def test_a_port_in_use_is_wrong_input():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=r"cannot listen at --coordinator .* in use") as raised:
            meet(Place("127.0.0.1", port, 2, 0), timeout=5.0, say=print)
    assert raised.value.exit_code == 2


def test_hosts_that_count_differently_are_told_so(meeting):
    port = free_port()
    futures, _ = all_meet(meeting, [Place("127.0.0.1", port, 2, 0), Place("127.0.0.1", port, 3, 1)])
    for future in futures:
        with pytest.raises(HostError, match="--num-processes is 2 on the first host and 3 on") as raised:
            future.result(30)
        assert raised.value.exit_code == 2


def test_two_hosts_with_the_same_id_are_told_so_and_the_right_one_is_still_waited_for(meeting):
    port = free_port()
    first = meeting(Place("127.0.0.1", port, 3, 0))
    twins = [meeting(Place("127.0.0.1", port, 3, 1)) for _ in range(2)]
    refused, _ = wait(twins, timeout=20, return_when=FIRST_COMPLETED)
    (error,) = (future.exception() for future in refused)
    assert isinstance(error, HostError)
    assert "--process-id 1 is taken" in str(error)
    assert error.exit_code == 2
    meeting(Place("127.0.0.1", port, 3, 2)).result(30)
    assert sorted(first.result(30)) == [1, 2]


def test_a_stranger_at_the_port_does_not_disturb_the_meeting(meeting):
    port = free_port()
    first = meeting(Place("127.0.0.1", port, 2, 0))
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\x00\n", b"[]\n", b'{"process_id": 1}\n', b""):
        stranger = connect_when_there(port)
        stranger.sendall(noise)
        stranger.close()
    assert sorted(meeting(Place("127.0.0.1", port, 2, 1)).result(30)) == [0]
    assert sorted(first.result(30)) == [1]


def connect_when_there(port):
    for _ in range(100):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")


# ------------------------------------------------------------------------------------------------ the watch


class Trio:
    """Three hosts in one process: their watches, the connections, and how each of them ended."""

    def __init__(self):
        self.ended = {index: [] for index in range(3)}
        self.has_ended = {index: threading.Event() for index in range(3)}
        pairs = {index: socket.socketpair() for index in (1, 2)}
        self.sockets = pairs
        place = Place("127.0.0.1", 1, 3, 0)
        lines = {0: {index: Line(pair[0]) for index, pair in pairs.items()}}
        lines |= {index: {0: Line(pair[1])} for index, pair in pairs.items()}
        self.watches = [
            Watch(place._replace(process_id=index), lines[index], end=self._end(index)) for index in range(3)
        ]

    def _end(self, index):
        def end(sentence, code):
            self.ended[index].append((sentence, code))
            self.has_ended[index].set()

        return end

    def close(self):
        for watch in self.watches:
            watch._all_finished.set()
        for pair in self.sockets.values():
            for end in pair:
                end.close()


@pytest.fixture
def trio():
    hosts = Trio()
    yield hosts
    hosts.close()


def test_a_host_that_dies_ends_all_others_with_a_sentence(trio):
    trio.sockets[2][1].shutdown(socket.SHUT_RDWR)  # as when its process is killed
    for index in (0, 1):
        assert trio.has_ended[index].wait(10)
        ((sentence, code),) = trio.ended[index]
        assert "The host with --process-id 2 died (its connection closed)" in sentence
        assert "again with the same --run-dir" in sentence
        assert code == 1


def test_a_host_that_is_silent_is_taken_for_dead(monkeypatch):
    monkeypatch.setattr(watching, "_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(watching, "_BEAT_SECONDS", 60.0)
    trio = Trio()
    assert trio.has_ended[0].wait(10)
    assert "silent for 0.5 seconds" in trio.ended[0][0][0]
    trio.close()


def test_hosts_that_beat_are_not_taken_for_dead(monkeypatch):
    monkeypatch.setattr(watching, "_SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(watching, "_BEAT_SECONDS", 0.1)
    trio = Trio()
    time.sleep(2.0)
    assert trio.ended == {0: [], 1: [], 2: []}
    trio.close()


@pytest.mark.parametrize(("exit_code", "expected"), [(2, 2), (1, 1), (130, 1)])
def test_a_host_that_ends_with_an_error_tells_the_others_why(trio, monkeypatch, exit_code, expected):
    monkeypatch.setattr(watching, "_GRACE_SECONDS", 0.2)
    trio.watches[1].leave("The disk is full.", exit_code)
    for index in (0, 2):
        assert trio.has_ended[index].wait(10)
        assert trio.ended[index] == [("The host with --process-id 1 ended: The disk is full.", expected)]
    assert trio.ended[1] == []


def test_hosts_that_end_for_the_same_reason_end_with_their_own_sentence(trio, monkeypatch):
    monkeypatch.setattr(watching, "_GRACE_SECONDS", 1.0)
    for watch in trio.watches:
        watch.leave("--batch-size 3 cannot be split.", 2)
    time.sleep(2.0)
    assert trio.ended == {0: [], 1: [], 2: []}


def test_hosts_that_are_done_wait_for_each_other_and_may_then_close(trio):
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(watch.finish, 10.0) for watch in trio.watches]
        assert [future.result() for future in futures] == [True, True, True]
    trio.sockets[1][1].shutdown(socket.SHUT_RDWR)
    time.sleep(0.3)
    assert trio.ended == {0: [], 1: [], 2: []}


def test_a_host_that_is_done_alone_does_not_wait_for_ever(trio):
    assert not trio.watches[2].finish(0.3)


# ------------------------------------------------------------------------------------------------ the settings


class FakeStore:
    """The key-value store of `jax.distributed`, for threads."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: no such key")
            return self.values[key]


def compare(pool, settings, monkeypatch, timeout=10.0):
    """What each host raises; None stands for a host that does not come."""
    monkeypatch.setattr(agreement.Session, "timeout", timeout)
    monkeypatch.setattr(agreement.Session, "next_key", lambda: "key")
    monkeypatch.setattr(agreement, "_STEP_OF_WAITING_SECONDS", 0.1)
    store = FakeStore()
    futures = [
        pool.submit(check_same_settings, each, store=store, num_processes=len(settings), process_id=index)
        for index, each in enumerate(settings)
        if each is not None
    ]
    return [future.exception(30) for future in futures]


def test_hosts_with_the_same_settings_go_on(pool, monkeypatch):
    settings = {"--seed": 0, "--loss": ["cross_entropy"], "--width": 0.1, "--mesh": None}
    assert compare(pool, [settings] * 3, monkeypatch) == [None, None, None]


def test_hosts_with_different_settings_all_end_with_the_flags_and_values(pool, monkeypatch):
    same = {"--seed": 0, "--steps": 9, "--loss": ["a"]}
    errors = compare(pool, [same, same, same | {"--seed": 1, "--loss": ["a", "b"]}], monkeypatch)
    for error in errors:
        assert isinstance(error, HostError)
        assert error.exit_code == 2
        assert "--seed is 0 on host 0 and 1 on host 2" in str(error)
        assert '--loss is ["a"] on host 0 and ["a", "b"] on host 2' in str(error)
        assert "--steps" not in str(error)


def test_a_host_that_does_not_come_to_the_comparison_is_a_sentence(pool, monkeypatch):
    (error,) = compare(pool, [{"--seed": 0}, None], monkeypatch, timeout=0.5)
    assert isinstance(error, HostError)
    assert error.exit_code == 1
    assert "The host with --process-id 1 did not get as far as this one within 0.5 seconds" in str(error)


def test_many_differences_are_counted_and_long_values_cut():
    one = {f"--flag-{i}": "x" * 200 for i in range(20)}
    sentence = differences({0: one, 1: dict.fromkeys(one, "y")})
    assert sentence is not None
    assert "and 14 more" in sentence
    assert "x" * 61 not in sentence


def test_a_setting_that_only_one_version_has_is_a_difference():
    assert "--new is not set on host 0 and 1 on host 1" in (differences({0: {}, 1: {"--new": "1"}}) or "")


CONFIG = RunConfig(characters="0030-0039", width=0.05, batch_size=32, steps=12)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "--seed"),
        ({"steps": 13}, "--steps"),
        ({"loss": ("cross_entropy", "max_margin")}, "--loss"),
        ({"learning_rate": (0.1, 0.01)}, "--learning-rate"),
        ({"evaluate_every": 3}, "--evaluate-every"),
        ({"head": "blockwise"}, "--head"),
        ({"sweep_steps": 5}, "--sweep-steps"),
    ],
)
def test_every_setting_of_an_experiment_is_compared(digits, change, name, tmp_path):
    experiment = Experiment.of_run(CONFIG)
    changed = dataclasses.replace(experiment, **change)
    ours, theirs = (shared_settings(each, digits, tmp_path, RunOptions()) for each in (experiment, changed))
    assert [key for key in ours if ours[key] != theirs[key]] == [name]


def test_data_run_directory_checkpoints_and_options_are_compared_and_quiet_is_not(digits, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            7, {"params": {"head": {"kernel": np.eye(2), "bias": np.zeros(2)}}}, config=CONFIG.to_json()
        )
        checkpoints.wait()
    other_data = dataclasses.replace(digits, provenance={**digits.provenance, "content_sha256": "other"})
    ours = shared_settings(CONFIG, digits, tmp_path, RunOptions())
    theirs = shared_settings(
        CONFIG, other_data, tmp_path / "elsewhere", RunOptions(checkpoint_every=5, quiet=True)
    )
    assert {key for key in ours if ours[key] != theirs[key]} == {
        "--checkpoint-every",
        "--run-dir",
        "the newest checkpoint in --run-dir",
        "the data of --dataset",
    }
    assert ours["the newest checkpoint in --run-dir"] == 7


def test_two_processes_with_different_seeds_end_before_the_first_step(tmp_path):
    port, root = free_port(), Path(__file__).parents[2]
    command = [sys.executable, str(root / "train.py"), "--characters", "0030-0039", "--width", "0.05"]
    command += ["--batch-size", "32", "--steps", "2", "--run-dir", str(tmp_path / "run"), "--quiet"]
    command += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    hosts = [
        subprocess.Popen(
            [*command, "--process-id", str(index), "--seed", str(index)],
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for host in hosts:
        _, said = host.communicate(timeout=240)
        assert host.returncode == 2, said
        assert f"Waiting for 1 of 2 hosts at 127.0.0.1:{port}" in said
        assert "The hosts have different settings: --seed is 0 on host 0 and 1 on host 1;" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
