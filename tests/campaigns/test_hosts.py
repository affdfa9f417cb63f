"""Several hosts, as processes of this machine: undisturbed, killed, missing, and started with other settings."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import chex
import pytest

from pols_jax.data import load
from pols_jax.errors import CheckpointError
from pols_jax.training.checkpoints import Checkpoints, newest_step
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import Learner

ROOT = Path(__file__).parents[2]
DIGITS = RunConfig(
    characters="0030-0039",
    width=0.1,
    batch_size=32,
    learning_rate=0.01,
    loss="batch_cross_entropy",
    optimizer="momentum",
)
# With too few threads this one hung in one of four runs, and the digits never did.
GLYPHS = RunConfig(
    max_classes=500, batch_size=256, learning_rate=0.01, loss="batch_cross_entropy", optimizer="momentum"
)
FLAGS = ["--learning-rate", "0.01", "--loss", "batch_cross_entropy", "--optimizer", "momentum"]
FLAGS += ["--no-evaluate", "--quiet"]
DIGITS_FLAGS = ("--characters", "0030-0039", "--width", "0.1", "--batch-size", "32")
GLYPHS_FLAGS = ("--max-classes", "500", "--batch-size", "256")
OUTPUT = tempfile.TemporaryDirectory()
# What a user must never see.
TRACES = ("Traceback", "Check failure", "terminate called", "Fatal Python error", "Segmentation")
# Much more than anything takes, also on a machine with other work to do.
LIMIT_SECONDS = 420.0

pytestmark = pytest.mark.campaign


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def each_flag_once(words):
    """A flag that is given twice would be refused: the last one counts."""
    flags = {}
    for word in map(str, words):
        if word.startswith("--"):
            flags.pop(word, None)
            values = flags[word] = []
        else:
            values.append(word)
    return [word for flag, values in flags.items() for word in (flag, *values)]


def start(*flags, devices=2, variables=None, network=DIGITS_FLAGS):
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"} | (variables or {})
    command = [sys.executable, str(ROOT / "train.py"), *each_flag_once([*FLAGS, *network, *flags])]
    with tempfile.NamedTemporaryFile(dir=OUTPUT.name, delete=False) as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return Host(process, Path(output.name))


class Host(NamedTuple):
    """A process, and the file that it writes to."""

    process: subprocess.Popen
    output: Path

    def said(self):
        return self.output.read_bytes().decode(errors="replace")

    def has_ended(self):
        return self.process.poll() is not None


def start_host(index, port, *flags, count=2, **options):
    place = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", count, "--process-id", index)
    return start(*place, *flags, **options)


def outcome(host, *, code, sentences, limit=LIMIT_SECONDS):
    """What is wrong with the end of a process; None if it is what it should be."""
    try:
        host.process.wait(limit)
    except subprocess.TimeoutExpired:
        host.process.kill()
        host.process.wait()
        return f"hung for {limit:g} s: {host.said()[-2000:]}"
    said = host.said()
    missing = [sentence for sentence in sentences if sentence not in said]
    traces = [trace for trace in TRACES if trace in said]
    if host.process.returncode != code or missing or traces:
        return f"exit code {host.process.returncode}, not {code}, without {missing}, with {traces}: {said[-2000:]}"
    return None


def first_problem(*problems):
    return next(filter(None, problems), None)


def final_params(run_dir, config, dataset):
    with Checkpoints(run_dir) as checkpoints:
        template = Learner.from_config(config, dataset).init(dataset.image_shape)
        return checkpoints.restore_newest(template).state.params


def test_two_hosts_with_two_devices_train_the_model_of_one_host_with_four(tally, tmp_path):
    """2 x 2 hosts, undisturbed"""
    dataset = load("glyphs", **GLYPHS.options())
    flags, options = ("--steps", 60, "--evaluate-every", 10), {"network": GLYPHS_FLAGS}
    alone = start(*flags, "--run-dir", tmp_path / "one", devices=4, **options)
    assert outcome(alone, code=0, sentences=[]) is None
    one = final_params(tmp_path / "one", GLYPHS, dataset)
    for i in range(10):
        port, run_dir = free_port(), tmp_path / f"two-{i}"
        hosts = [start_host(index, port, *flags, "--run-dir", run_dir, **options) for index in range(2)]
        problem = first_problem(*[outcome(host, code=0, sentences=[]) for host in hosts])
        if problem is None:
            try:
                # Between hosts sums are added in another order: one rounding error of float32 per sum, which 60 steps of
                # momentum carry on. Weights are about 0.05.
                chex.assert_trees_all_close(one, final_params(run_dir, GLYPHS, dataset), rtol=2e-4, atol=1e-4)
            except AssertionError as error:
                problem = f"other parameters: {str(error)[:500]}"
        tally.tried(problem and f"run {i}: {problem}")


def wait_until(condition, hosts):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition() and time.monotonic() < deadline and not any(host.has_ended() for host in hosts):
        time.sleep(0.05)


KILLS = [
    (signal_number, victim, moment)
    for signal_number, moments in (
        (signal.SIGKILL, ("joined", "started", "saved", "later")),
        (signal.SIGSTOP, ("saved",)),
        (signal.SIGTERM, ("saved",)),
    )
    for victim in (0, 1)
    for moment in moments
]


def test_a_host_that_dies_ends_the_other(tally, tmp_path):
    """Peers killed"""
    rng = random.Random(0)
    for i, (number, victim, moment) in enumerate(KILLS):
        port, run_dir = free_port(), tmp_path / str(i)
        flags = ("--steps", 1_000_000, "--evaluate-every", 10, "--run-dir", run_dir)
        hosts = [start_host(index, port, *flags) for index in range(2)]
        if moment == "joined":
            wait_until(lambda hosts=hosts: all("are there" in host.said() for host in hosts), hosts)
            time.sleep(rng.uniform(0, 5))
        elif moment == "started":
            wait_until((run_dir / "config.json").exists, hosts)
            time.sleep(rng.uniform(0, 5))
        else:
            wait_until(lambda run_dir=run_dir: newest_step(run_dir), hosts)
            time.sleep(rng.uniform(0, 5) if moment == "later" else 0)
        hosts[victim].process.send_signal(number)
        if number == signal.SIGTERM:
            ends = [outcome(host, code=143, sentences=["Stopped at step"]) for host in hosts]
        else:
            died = f"The host with --process-id {victim} died"
            ends = [outcome(hosts[1 - victim], code=1, sentences=[died], limit=100.0)]
        hosts[victim].process.kill()
        hosts[victim].process.wait()
        problem = first_problem(*ends)
        try:
            if newest_step(run_dir) is not None:
                final_params(run_dir, DIGITS, load("glyphs", **DIGITS.options()))
        except CheckpointError as error:
            problem = problem or f"damaged: {error}"
        name = signal.Signals(number).name
        tally.tried(problem and f"{name} to host {victim} when {moment}: {problem}")


def test_hosts_that_do_not_come_are_named(tally, tmp_path):
    """Peers missing"""

    def tried(name, *ends):
        problem = first_problem(*ends)
        tally.tried(problem and f"{name}: {problem}")

    run = ("--run-dir", tmp_path / "run", "--steps", 2)
    wait = (*run, "--host-timeout", 8)
    port = free_port()
    said = [f"Waiting for 1 of 2 hosts at 127.0.0.1:{port}"]
    host = start_host(0, port, *wait)
    tried("no second host", outcome(host, code=1, sentences=[*said, "--process-id 1 did not come to"]))
    host = start_host(1, port, *wait)
    tried("no first host", outcome(host, code=1, sentences=[*said, "No first host"]))
    hosts = [start_host(index, port, *run, "--host-timeout", 60, count=3) for index in (0, 2)]
    why = ["Waiting for", "The host with --process-id 1 did not come to"]
    tried("no third host", *[outcome(host, code=1, sentences=why) for host in hosts])
    hosts = [start_host(index, port, *run, "--host-timeout", 120, count=2 + index) for index in (0, 1)]
    why = ["--num-processes is 2 on the first host and 3 on the one with --process-id 1"]
    tried("other numbers of hosts", *[outcome(host, code=2, sentences=why) for host in hosts])
    first = start_host(0, port, *run, "--host-timeout", 90, count=3)
    twins = [start_host(1, port, *run, "--host-timeout", 90, count=3) for _ in range(2)]
    wait_until(lambda: any(twin.has_ended() for twin in twins), [first])
    twins.sort(key=lambda twin: not twin.has_ended())
    ends = [outcome(twins[0], code=2, sentences=["--process-id 1 is taken by another host"])]
    ends += [outcome(each, code=1, sentences=["--process-id 2 did not come"]) for each in (first, twins[1])]
    tried("the same process id", *ends)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host = start_host(0, taken.getsockname()[1], *wait)
        tried("a port in use", outcome(host, code=2, sentences=["cannot listen at --coordinator"]))
        host = start_host(1, taken.getsockname()[1], *run, "--host-timeout", 20)
        tried("another program at the port", outcome(host, code=1, sentences=["No first host"]))
    for flags, sentence in (
        ("--coordinator 127.0.0.1 --num-processes 2 --process-id 0", "must be HOST:PORT"),
        ("--coordinator no-such-host.invalid:1234 --num-processes 2 --process-id 0", "cannot be found"),
        ("--coordinator 127.0.0.1:1234 --num-processes 2 --process-id 2", "--process-id must be from 0 to 1"),
        (
            "--coordinator 127.0.0.1:1234 --num-processes 0 --process-id 0",
            "--num-processes must be at least 1",
        ),
    ):
        tried(flags, outcome(start(*run, *flags.split()), code=2, sentences=[sentence]))
    variables = {"SLURM_NTASKS": "abc"}
    tried("SLURM", outcome(start(*run, variables=variables), code=2, sentences=["SLURM_NTASKS is 'abc'"]))
    tried("nothing is written", "the run directory exists" if (tmp_path / "run").exists() else None)


OTHER_SETTINGS = [
    ("--seed 0", "--seed 1", "--seed is 0 on host 0 and 1 on host 1"),
    ("--steps 20", "--steps 30", "--steps is 20 on host 0 and 30 on host 1"),
    ("--loss cross_entropy", "--loss max_margin", '--loss is ["cross_entropy"] on host 0 and ["max_margin"]'),
    ("--loss cross_entropy", "--loss cross_entropy max_margin", "--loss is"),
    (
        "--learning-rate 0.1",
        "--learning-rate sweep",
        "--learning-rate is [0.1] on host 0 and sweep on host 1",
    ),
    ("--preset glyphs --optimizer adam", "--preset glyphs", "--optimizer is adam on host 0 and momentum"),
    ("--characters 0030-0039", "--characters 0041-004A", "the data of --dataset is"),
    ("--batch-size 32", "--batch-size 64", "--batch-size is 32 on host 0 and 64 on host 1"),
    ("--evaluate-every 5", "--evaluate-every 10", "--evaluate-every is 5"),
    ("--checkpoint-every 5", "--checkpoint-every 10", "--checkpoint-every is 5"),
    ("--run-dir a", "--run-dir b", "--run-dir is a on host 0 and b on host 1"),
    ("", "devices", "the number of devices is 2 on host 0 and 1 on host 1"),
]


def test_hosts_with_other_settings_end_before_the_first_step(tally, tmp_path):
    """Peers with other settings"""
    for i, (*flags, sentence) in enumerate(OTHER_SETTINGS):
        port, run_dir = free_port(), tmp_path / str(i)
        hosts = []
        for index, text in enumerate(flags):
            other = text.split() if text != "devices" else []
            devices = 1 if text == "devices" else 2
            shared = ("--run-dir", run_dir, "--steps", 8)
            hosts.append(start_host(index, port, *shared, *other, devices=devices))
        problem = first_problem(
            *[outcome(host, code=2, sentences=["different settings", sentence]) for host in hosts],
            "the run directory exists" if run_dir.exists() else None,
        )
        tally.tried(problem and f"{flags}: {problem}")
