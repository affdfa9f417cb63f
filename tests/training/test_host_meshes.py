"""Output layers over several hosts: processes of this machine train, store, measure and resume what one process does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from host_program import MESHES

from pols_jax.training.checkpoint_reading import StoredCheckpoint
from pols_jax.training.checkpoints import newest_step

pytestmark = pytest.mark.slow

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
    "--loss",
    "batch_cross_entropy",
    "--head",
    "sharded",
    "--evaluate-every",
    "40",
    "--normalizer",
    "affine",
]


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


def test_two_hosts_train_store_and_read_what_one_host_does_on_every_mesh(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    ended(*start_two("host_program.py", tmp_path / "two"))
    ended(start(ROOT / "tests" / "host_program.py", tmp_path / "one", devices=4))
    one, *two = (
        json.loads((tmp_path / name).read_text())
        for name in ("one/found-0.json", "two/found-0.json", "two/found-1.json")
    )
    held = {"4x1": 94, "2x2": 48, "1x4": 48}  # half of 96 rows, 2 of them padding, if there are class parts
    for mesh in MESHES:
        for host, found in enumerate(two):
            # Between hosts sums are added in another order: one rounding error of float32 per sum.
            np.testing.assert_allclose(found[mesh]["losses"], one[mesh]["losses"], rtol=1e-5)
            np.testing.assert_allclose(found[mesh]["losses"][:4], one["4x1"]["losses"], rtol=1e-5)
            np.testing.assert_allclose(
                found[mesh]["validation"]["loss"], one[mesh]["validation"]["loss"], rtol=1e-5
            )
            assert found[mesh]["rows held"] == held[mesh]
            assert found[mesh]["rows written"] == {"4x1": (94, 0)}.get(mesh, (48, 46))[host]
        expected, arrays = (stored(tmp_path / name / mesh, 4) for name in ("one", "two"))
        assert expected.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_killed_host_ends_the_other_and_both_resume_bit_for_bit_and_measure_as_one_host_does(tmp_path):
    flags = ("--steps", 400, "--mesh", "data=2,class=2", "--checkpoint-every", 40, "--run-dir")
    said = ended(*start_two(*TRAIN, *flags, tmp_path / "whole"))
    assert "Next:" in said[0], "the first host measures and says what comes next"

    hosts = start_two(*TRAIN, *flags, tmp_path / "killed")
    deadline = time.monotonic() + 600
    while not newest_step(tmp_path / "killed") and time.monotonic() < deadline:
        assert all(host.poll() is None for host in hosts), [host.communicate()[0] for host in hosts]
        time.sleep(0.02)
    hosts[1].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    (sentence,) = ended(hosts[0], code=1)
    assert time.monotonic() - killed_at < 60
    assert "The host with --process-id 1 died" in sentence
    assert "Traceback" not in sentence
    hosts[1].communicate()
    assert newest_step(tmp_path / "killed") < 400
    ended(*start_two(*TRAIN, *flags, tmp_path / "killed"))
    expected, arrays = (stored(tmp_path / name, 400) for name in ("whole", "killed"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)

    by_two, thresholds = measures(tmp_path / "whole")
    ended(start("eval_slc.py", tmp_path / "whole", "--quiet", devices=4))
    by_one, same_thresholds = measures(tmp_path / "whole")
    assert by_two.keys() == by_one.keys()
    for name, value in by_one.items():
        assert by_two[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
    for name, array in same_thresholds.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(thresholds[name], array, rtol=1e-5, err_msg=name)


def test_a_mesh_that_does_not_fit_the_hosts_is_one_sentence_on_each(tmp_path):
    hosts = start_two(*TRAIN, "--steps", 4, "--mesh", "data=3,class=2", "--run-dir", tmp_path / "run")
    for said in ended(*hosts, code=2):
        assert "does not fit 4 devices of 2 hosts; data x class may be 4x1, 2x2, 1x4" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def measures(run_dir):
    record = json.loads((run_dir / "slc.json").read_text())
    flat = {
        f"{name}.{key}": each
        for name in ("slc", "all_logits", "normalized")
        for key, each in (record[name] or {}).items()
    }
    with np.load(run_dir / "thresholds.npz") as arrays:
        return flat | {"accuracy": record["accuracy"]}, dict(arrays)
