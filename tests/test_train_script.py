"""`train.py` as a user runs it: wrong input, several hosts, and being killed at any moment."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import pytest

import train
from pols_jax import cli
from pols_jax.checkpoints import Checkpoints, newest_step
from pols_jax.config import RunConfig
from pols_jax.data import load
from pols_jax.learning import Learner
from pols_jax.progress import MetricsLog

ROOT = Path(train.__file__).parent
SMALL = [
    "--characters",
    "0030-0039",
    "--width",
    "0.05",
    "--batch-size",
    "32",
    "--learning-rate",
    "0.01",
    "--no-evaluate",
    "--quiet",
]
CONFIG = RunConfig(characters="0030-0039", width=0.05, batch_size=32, learning_rate=0.01)


def start(*flags, devices=1, **options):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, *map(str, flags)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def finish(process, timeout=300):
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def final_params(run_dir, optimizer="adam"):
    dataset = load("glyphs", **CONFIG.options())
    config = RunConfig(**{**CONFIG.to_json(), "optimizer": optimizer, "hidden_sizes": (), "fonts": ()})
    with Checkpoints(run_dir) as checkpoints:
        template = Learner.from_config(config, dataset).init(dataset.image_shape)
        return checkpoints.restore_newest(template).state.params


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--dataset glyfs", "glyphs"),
        ("--loss batch_ce", "batch_cross_entropy"),
        ("--preset glifs", "glyphs"),
        ("--model cn", "cnn"),
        ("--steps 0", "--steps must be positive"),
        ("--learning-rate -0.1", "--learning-rate must be positive"),
        ("--batch-size 100", "8 devices; the nearest sizes are 96 and 104"),
        ("--resume", "--resume needs the --run-dir"),
        ("--dataset cifar10 --data-dir nowhere", "cifar10"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2_and_writes_nothing(
    flags, sentence, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    assert cli.run(train.main) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_below_a_file_is_wrong_input(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ["train.py", *SMALL, "--steps", "1", "--run-dir", str(tmp_path / "file" / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert cli.run(train.main) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_resume_needs_a_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", "--run-dir", str(tmp_path / "none")])
    assert cli.run(train.main) == 2
    assert "no run in" in capsys.readouterr().err


def test_a_flag_that_does_not_exist_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--stepps", "3"])
    with pytest.raises(SystemExit) as raised:
        cli.run(train.main)
    assert raised.value.code == 2
    assert "--steps" in capsys.readouterr().err


def test_help_describes_presets_and_flags(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as raised:
        cli.run(train.main)
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for word in ("--preset", "mnist-quick", "--loss", "--learning-rate", "--coordinator", "--on-nan"):
        assert word in text


def test_sigterm_saves_exits_with_143_and_resume_needs_no_other_flags(tmp_path):
    run_dir = tmp_path / "run"
    flags = (
        "--loss",
        "batch_cross_entropy",
        "--steps",
        100_000,
        "--evaluate-every",
        500,
        "--run-dir",
        run_dir,
    )
    process = start(*flags)
    wait_for(lambda: newest_step(run_dir) is not None, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143, output
    assert "saved in" in output
    stopped_at = newest_step(run_dir)
    assert f"Stopped at step {stopped_at}" in output

    command = [sys.executable, str(ROOT / "train.py"), "--run-dir", str(run_dir), "--resume", "--no-evaluate"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: newest_step(run_dir) > stopped_at, process)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert f"resumed at step {stopped_at}" in output


def wait_for(condition, process, timeout=240):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the run took too long"
        time.sleep(0.05)


def test_two_hosts_with_two_devices_each_train_the_same_model_as_one_host_with_four(tmp_path):
    # Momentum, for the reason given in test_learning.py.
    flags = (
        "--loss",
        "batch_cross_entropy",
        "--steps",
        20,
        "--evaluate-every",
        10,
        "--optimizer",
        "momentum",
    )
    one = start(*flags, "--run-dir", tmp_path / "one", devices=4)
    code, output = finish(one)
    assert code == 0, output
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = [
        start(
            *flags,
            *("--run-dir", tmp_path / "two", "--coordinator", coordinator),
            *("--num-processes", 2, "--process-id", index),
            devices=2,
        )
        for index in range(2)
    ]
    for host in hosts:
        code, output = finish(host)
        assert code == 0, output
    # Between hosts sums are added in another order: one rounding error of float32 per sum, over 20 steps.
    one, two = (final_params(tmp_path / name, "momentum") for name in ("one", "two"))
    chex.assert_trees_all_close(one, two, rtol=2e-4, atol=2e-5)
    assert len((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()) == 2


def killed_until_finished(run_dir, flags, delays):
    """Starts a run again and again, and kills it some seconds after it has saved a new checkpoint; then lets it finish.

    Returns the newest checkpoint that each kill left behind.
    """
    left_behind = []
    for delay in delays:
        found = newest_step(run_dir)
        process = start(*flags, "--run-dir", run_dir)
        wait_for(lambda found=found: newest_step(run_dir) != found, process)
        time.sleep(delay)
        process.kill()
        process.communicate()
        left_behind.append(newest_step(run_dir))
    code, output = finish(start(*flags, "--run-dir", run_dir))
    assert code == 0, output
    return left_behind


@pytest.mark.slow
def test_a_run_that_is_killed_at_twenty_random_moments_ends_with_the_same_bits(tmp_path):
    # A look at the validation split, and so a checkpoint, every 100 steps: one is being written most of the time.
    steps = 20_000
    flags = ("--loss", "batch_cross_entropy", "--steps", steps, "--evaluate-every", 100)
    code, output = finish(start(*flags, "--run-dir", tmp_path / "undisturbed"), timeout=1200)
    assert code == 0, output
    rng = random.Random(0)
    left_behind = killed_until_finished(tmp_path / "killed", flags, [rng.uniform(0, 0.5) for _ in range(20)])
    assert sorted(set(left_behind)) == left_behind, "every start goes on from where the last one was killed"
    assert left_behind[-1] < steps, "the run ended before the last kill"
    chex.assert_trees_all_equal(final_params(tmp_path / "undisturbed"), final_params(tmp_path / "killed"))
    records = MetricsLog(tmp_path / "killed" / "metrics.jsonl").records()
    assert [record["step"] for record in records] == list(range(100, steps + 1, 100))
