"""Output layers over several hosts: processes of this machine train, store, measure and resume what one process does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from host_program import MESHES

from pols_jax.errors import ConfigError
from pols_jax.training.checkpoint_reading import StoredCheckpoint
from pols_jax.training.checkpoints import newest_step
from pols_jax.training.class_parallel import mesh_of
from pols_jax.training.config import RunConfig

ROOT = Path(__file__).parents[2]
TRAIN = [
    "train.py",
    "--preset",
    "glyphs",
    "--characters",
    "0030-0039",
    "--width",
    "0.05",
    "--batch-size",
    "32",
    "--learning-rate",
    "0.01",
    "--optimizer",
    "momentum",
    "--steps",
    "16",
    "--evaluate-every",
    "8",
    "--checkpoint-every",
    "2",
]
NOTHING_ELSE = ["--normalizer", "none", "--no-evaluate"]
HEADS = {
    "sharded": ["--loss", "batch_cross_entropy", "--head", "sharded", "--mesh", "data=2,class=2"],
    "sampled": ["--loss", "noise_contrastive_estimation", "--head", "sampled", "--num-noise", "5"],
}


def start(*words, devices=2):
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def start_two(*words):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", 2, "--process-id")
    if words[0] == "host_program.py":
        return [start(ROOT / "tests" / words[0], *words[1:], place[1], i) for i in range(2)]
    return [start(*words, *place, i) for i in range(2)]


def ended(*processes, code=0):
    said = []
    for process in processes:
        said.append(process.communicate(timeout=900)[0])
        assert process.returncode == code, said[-1]
    return said


def stored(run_dir, step):
    checkpoint = StoredCheckpoint(run_dir, step)
    return {name: checkpoint.array(name).read() for name in checkpoint.meta["arrays"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder, what one host with four devices found, and what each of two hosts with two found."""
    folder = tmp_path_factory.mktemp("found")
    for name in ("one", "two"):
        (folder / name).mkdir()
    ended(*start_two("host_program.py", folder / "two"))
    ended(start(ROOT / "tests" / "host_program.py", folder / "one", devices=4))
    names = ("one/found-0.json", "two/found-0.json", "two/found-1.json")
    one, *two = (json.loads((folder / name).read_text()) for name in names)
    return folder, one, two


def assert_same_training(found, name):
    """Two hosts have the losses and the checkpoint of one."""
    folder, one, two = found
    for each in two:
        # Between hosts sums are added in another order: one rounding error of float32 per sum.
        np.testing.assert_allclose(each[name]["losses"], one[name]["losses"], rtol=1e-5)
        np.testing.assert_allclose(
            each[name]["validation"]["loss"], one[name]["validation"]["loss"], rtol=1e-5
        )
    assert_same_checkpoint(*(stored(folder / host / name, 4) for host in ("one", "two")))


def assert_same_checkpoint(expected, arrays, *, rtol=1e-4, atol=1e-6):
    """Up to rounding errors of sums in another order, carried through a few steps."""
    assert expected.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(array, expected[name], rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.slow
def test_two_hosts_train_store_and_read_what_one_host_does_on_every_mesh(found):
    _, one, two = found
    held = {"4x1": 94, "2x2": 48, "1x4": 48}  # half of 96 rows, 2 of them padding, if there are class parts
    for mesh in MESHES:
        assert_same_training(found, mesh)
        for host, each in enumerate(two):
            np.testing.assert_allclose(each[mesh]["losses"][:4], one["4x1"]["losses"], rtol=1e-5)
            assert each[mesh]["rows held"] == held[mesh]
            assert each[mesh]["rows written"] == {"4x1": (94, 0)}.get(mesh, (48, 46))[host]


@pytest.mark.slow
def test_two_hosts_draw_the_classes_of_one_host_and_train_its_model_step_for_step(found):
    assert_same_training(found, "sampled")
    folder, _, _ = found
    last = stored(folder / "two" / "sampled", 4)["opt_state.head.last"]
    assert 0 < np.count_nonzero(last == 4) < np.count_nonzero(last) < len(last) == 94, "a step touches a few"


def wait_for_checkpoint(run_dir, hosts):
    deadline = time.monotonic() + 600
    while not newest_step(run_dir) and time.monotonic() < deadline:
        assert all(host.poll() is None for host in hosts), [host.communicate()[0] for host in hosts]
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_a_killed_host_ends_the_other_and_both_resume_bit_for_bit(head, tmp_path):
    command = [*TRAIN, *HEADS[head], *NOTHING_ELSE, "--run-dir"]
    ended(*start_two(*command, tmp_path / "whole"))
    hosts = start_two(*command, tmp_path / "killed")
    wait_for_checkpoint(tmp_path / "killed", hosts)
    hosts[1].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    (sentence,) = ended(hosts[0], code=1)
    assert time.monotonic() - killed_at < 60
    assert "The host with --process-id 1 died" in sentence
    assert "Traceback" not in sentence
    hosts[1].communicate()
    assert newest_step(tmp_path / "killed") < 16
    ended(*start_two(*command, tmp_path / "killed"))
    assert_same_checkpoint(*(stored(tmp_path / name, 16) for name in ("whole", "killed")), rtol=0, atol=0)


@pytest.mark.slow
def test_two_hosts_measure_as_one_host_does(tmp_path):
    run_dir = tmp_path / "run"
    said = ended(*start_two(*TRAIN, *HEADS["sharded"], "--normalizer", "affine", "--run-dir", run_dir))
    assert "Next:" in said[0], "the first host measures and says what comes next"
    by_two, thresholds = measures(run_dir)
    ended(start("eval_slc.py", run_dir, "--quiet", devices=4))
    by_one, same_thresholds = measures(run_dir)
    assert by_two.keys() == by_one.keys()
    for name, value in by_one.items():
        assert by_two[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
    for name, array in same_thresholds.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(thresholds[name], array, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_more_and_with_fewer_hosts(tmp_path):
    command = [*TRAIN, *HEADS["sharded"], *NOTHING_ELSE, "--run-dir"]
    starts = {"one": lambda run_dir: [start(*command, run_dir, devices=4)]}
    starts["two"] = lambda run_dir: start_two(*command, run_dir)
    ended(*starts["one"](tmp_path / "whole"))
    expected = stored(tmp_path / "whole", 16)
    for first, second in (("one", "two"), ("two", "one")):
        run_dir = tmp_path / f"{first}-{second}"
        hosts = starts[first](run_dir)
        wait_for_checkpoint(run_dir, hosts)
        hosts[-1].send_signal(signal.SIGTERM)
        for said in ended(*hosts, code=143):
            assert "Stopped at step" in said
        assert newest_step(run_dir) < 16
        ended(*starts[second](run_dir))
        assert_same_checkpoint(expected, stored(run_dir, 16))


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_hosts_is_one_sentence_on_each(tmp_path):
    hosts = start_two(*TRAIN, "--head", "sharded", "--mesh", "data=3,class=2", "--run-dir", tmp_path / "run")
    for said in ended(*hosts, code=2):
        assert "does not fit 4 devices of 2 hosts; data x class may be 4x1, 2x2, 1x4" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_does_not_fit_the_hosts_is_found_before_anything_is_connected(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = RunConfig(head="sharded", mesh="data=3,class=2")
    with pytest.raises(
        ConfigError, match=r"--mesh: .* does not fit 8 devices of 2 hosts; .* may be 8x1, 4x2"
    ):
        mesh_of(config)


def measures(run_dir):
    record = json.loads((run_dir / "slc.json").read_text())
    flat = {
        f"{name}.{key}": each
        for name in ("slc", "all_logits", "normalized")
        for key, each in (record[name] or {}).items()
    }
    with np.load(run_dir / "thresholds.npz") as arrays:
        return flat | {"accuracy": record["accuracy"]}, dict(arrays)
