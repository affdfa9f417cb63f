"""Indexing that is killed without warning, again and again, ends as if nothing had happened."""

import multiprocessing
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pols_jax.data import load
from pols_jax.search import indexing
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index import FeatureIndex, update_index
from pols_jax.search.index_files import read_info, read_pictures
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit

CONFIG = RunConfig(characters="0030-0039", width=0.05, batch_size=32, steps=2)
KILLS = 20
SECONDS = 300  # by then, something hangs


def index_all(run_dir, folder, out):
    """Writes a new list after every batch: something is being written most of the time."""
    indexing._SECONDS_BETWEEN_COMMITS, indexing._BATCH = 0.0, 16
    update_index(ClassBank.open(run_dir), [str(folder)], out)


def contents(directory):
    tables = [read_pictures(Path(directory), part).to_pylist() for part in read_info(Path(directory)).parts]
    features = np.concatenate([features for _, features in FeatureIndex.open(directory).blocks()])
    return [row for table in tables for row in table], features.tobytes()


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts indexing in a process of its own, forked from one that has imported everything and computed nothing."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pols_jax.search.index", "tensorstore"])

    def start_one(*arguments):
        process = context.Process(target=index_all, args=arguments)
        process.start()
        return process

    return start_one


@pytest.mark.campaign
def test_indexing_survives_kills(tally, start, tmp_path):
    """Kills of indexing

    SIGKILL at random moments after the first list, or a new one, was written. Then indexing is started again, and ends with
    the same pictures in the same order and the same bits of features as one that was not disturbed.
    """
    digits, folder, rng = load("glyphs", **CONFIG.options()), tmp_path / "photos", random.Random(0)
    fit(CONFIG, digits, tmp_path / "run", options=RunOptions(quiet=True))
    folder.mkdir()
    for i in range(1500):
        Image.fromarray(digits.train.images[i % len(digits.train.images), ..., 0]).save(folder / f"{i}.png")
        if i % 100 == 0:
            (folder / f"{i}-broken.png").write_bytes(b"no picture")
    undisturbed = start(tmp_path / "run", folder, tmp_path / "undisturbed")
    undisturbed.join(SECONDS)
    assert undisturbed.exitcode == 0
    expected, out, torn = contents(tmp_path / "undisturbed"), tmp_path / "index", 0
    while tally.tries < KILLS:
        process, deadline = start(tmp_path / "run", folder, out), time.monotonic() + SECONDS
        listed = read_list(out)
        while process.is_alive() and read_list(out) == listed and time.monotonic() < deadline:
            time.sleep(0.0005)
        process.join(rng.uniform(0, 0.06))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            break  # it came to its end before it could be killed
        torn += len(list(out.iterdir())) > 2 + 2 * len(read_info(out).parts)
        index = FeatureIndex.open(out)
        tally.tried(None if len(set(index.paths)) == len(index) else "a picture is there twice")
    last = start(tmp_path / "run", folder, out)
    last.join(SECONDS)
    assert last.exitcode == 0
    assert contents(out) == expected
    assert tally.tries == KILLS
    print(f"{torn} kills came while a part was being written")


def read_list(out):
    try:
        return read_info(out)
    except Exception:
        return None
