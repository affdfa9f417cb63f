"""`train.py` as a user runs it: wrong input, several hosts, and signals."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import pytest
from PIL import Image

from pols_jax.cli import running as cli, train
from pols_jax.data import load
from pols_jax.training import experiments
from pols_jax.training.checkpoints import Checkpoints, newest_step
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import Learner

ROOT = Path(__file__).parents[2]
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
    "--normalizer",
    "none",
    "--quiet",
]
CONFIG = RunConfig(characters="0030-0039", width=0.05, batch_size=32, learning_rate=0.01)


def start(*flags, devices=1):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "train.py"), *map(str, flags)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--steps 1000000000000", "--steps must be at most 2,147,483,647"),
        ("--steps abc", "--steps must be a whole number, got 'abc'"),
        ("--steps", "--steps needs a value"),
        ("--seed 1099511627776", "--seed must be at most 2,147,483,647"),
        ("--seed 1 --seed 2", "--seed is given twice; give it once."),
        ("--loss max_margin --loss all", "--loss is given twice; give it once, followed by all its values."),
        ("--loss", "--loss needs at least one value"),
        ("--learning-rate nan", "--learning-rate must be a finite number"),
        ("--learning-rate swep", "--learning-rate must be a number or sweep, got 'swep'"),
        ("--width inf", "--width must be a finite number, got inf"),
        ("--dtype float64", "--dtype must be float32 or bfloat16"),
        ("--quiet yes", "--quiet takes no value, got 'yes'"),
        ("--run-dir=", "--run-dir must not be empty"),
        ("--stepps 3", "There is no flag named '--stepps'; did you mean --steps"),
        ("-s 3", "There is no flag named '-s'"),
        ("steps", "pols train takes flags only, got 'steps'"),
        ("--preset", "--preset needs a value"),
        ("--optimizer adan", "did you mean adam"),
        (
            "--characters 0030-0039 --model alexnet",
            "--model alexnet needs images of at least 63 x 63 pixels, and those of glyphs are 32 x 32",
        ),
        (
            "--characters 0030-0039 --batch-size 100000000",
            "--batch-size 100000000 and 10 classes needs at least",
        ),
        ("--characters 0030-0039 --hidden-sizes 1000000 1000000", "choose a smaller --batch-size, --width"),
        ("--learning-rate -0.1", "--learning-rate must be positive"),
        ("--batch-size 100", "8 devices; the nearest sizes are 96 and 104"),
        ("--resume", "--resume needs the --run-dir"),
        ("--train head", "--train head needs --init-from"),
        ("--train tail", "--train must be all or head, got 'tail'"),
        ("--characters 0030-0039 --init-from nowhere", "--init-from nowhere is not there"),
        ("--dataset cifar10 --data-dir nowhere", "cifar10"),
        ("--augment crops", "There is no augmentation named 'crops'; did you mean crop or crop-flip"),
        ("--workers -1", "--workers must not be negative, got -1"),
        ("--dataset folder:nowhere", "nowhere is not a directory, seen from"),
        ("--preset photos", "PATH is not a directory, seen from"),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of 40 x 28 pixels, without splits; broken ones among them, which only decoding would find."""
    root = tmp_path_factory.mktemp("photos")
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for i in range(8):
            Image.new("L", (40, 28), 16 * i + len(name)).save(root / name / f"{i}.png")
        data = (root / name / "0.png").read_bytes()
        (root / name / "0.png").write_bytes(data[: len(data) // 2])
    return root


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--dataset {}", "for the pictures in that folder, write folder:{}."),
        (
            "--dataset folder:{} --model alexnet",
            "at least 63 x 63 pixels, and those of folder:{} are 28 x 28",
        ),
        ("--dataset folder:{} --batch-size 100000000", "--batch-size 100000000 and 2 classes needs at least"),
        ("--dataset folder:{} --channels 2", "--channels must be 1 or 3, got 2"),
        ("--dataset folder:{}/cat", "has 0 class folders, at least 2 are needed; put the pictures of each"),
        ("--dataset folder:{} --max-classes 3", "has no option max_classes; it has: image_size, channels"),
    ],
)
def test_wrong_input_about_folders_is_found_before_a_picture_is_decoded(
    flags, sentence, folder, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.format(folder).split()])
    assert cli.run(train.main) == 2
    said = capsys.readouterr()
    assert sentence.format(folder) in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Decoding" not in said.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("side", "model", "augment", "shape"),
    [(28, "mlp", "none", (28, 28, 1)), (90, "cnn", "crop", (32, 32, 1))],
)
def test_a_folder_starts_with_what_suits_its_pictures_and_the_run_remembers_it(
    side, model, augment, shape, monkeypatch, tmp_path, capsys
):
    for i in range(24):
        path = tmp_path / "photos" / f"class {i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (side + 10, side), 8 * i).save(path)
    seen = []
    monkeypatch.setattr(experiments, "run_experiment", lambda *words, **options: seen.append(words) or stop())
    words = ["--dataset", f"folder:{tmp_path / 'photos'}", "--run-dir", str(tmp_path / "run")]
    for more in ([], ["--steps", "7", "--no-augment"], ["--model", "mlp"], ["--preset=photos"]):
        with pytest.raises(RuntimeError, match="enough"):
            train.main([*words, *more])
    (first, dataset, _), (second, *_), (third, *_), (fourth, *_) = seen
    assert (first.model, first.augment) == (model, augment)
    assert (first.image_size, first.channels) == (shape[0], shape[2])
    assert dataset.image_shape == shape
    assert second == dataclasses.replace(first, steps=7, augment="none")
    assert all(run.image_size == shape[0] and run.channels == shape[2] for run in first.runs())
    # Who names the network gets it at its full width, and who names the preset gets that.
    assert (third.model, third.width, third.augment, third.image_size) == ("mlp", 1.0, "none", min(side, 32))
    assert (fourth.model, fourth.width, fourth.augment, fourth.image_size) == (
        "cnn",
        0.125,
        "crop",
        min(side, 32),
    )


def stop():
    raise RuntimeError("enough")


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


def test_sigterm_saves_exits_with_143_and_resume_needs_no_other_flags(tmp_path):
    run_dir = tmp_path / "run"
    flags = (
        "--loss",
        "batch_cross_entropy",
        "--steps",
        100_000,
        "--evaluate-every",
        20,
        "--run-dir",
        run_dir,
    )
    process = start(*SMALL, *flags)
    wait_for(lambda: newest_step(run_dir) is not None, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143, output
    assert "saved in" in output
    stopped_at = newest_step(run_dir)
    assert f"Stopped at step {stopped_at}" in output

    process = start("--run-dir", run_dir, "--resume", "--no-evaluate")
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


def test_two_hosts_with_two_devices_each_train_the_same_model_as_one_host_with_eight(tmp_path):
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
    train.main([*SMALL, *map(str, flags), "--run-dir", str(tmp_path / "one")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = [
        start(
            *SMALL,
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
