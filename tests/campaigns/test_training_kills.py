"""Training that is killed without warning, again and again, ends as if nothing had happened."""

import multiprocessing
import random
import signal
import time

import pytest

from pols_jax.data import load
from pols_jax.training.checkpoint_reading import StoredCheckpoint, newest_step
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.progress import MetricsLog

# A look at the validation split, and so a checkpoint, every other step: one is being written most of the time.
CONFIG = RunConfig(
    characters="0030-0039", width=0.05, batch_size=32, steps=160, evaluate_every=2, learning_rate=0.01
)
OPTIONS = RunOptions(quiet=True)
KILLS = 60
KILLS_PER_RUN = 10
SECONDS = 600  # by then, something hangs


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts a training in a process of its own, forked from one that has imported everything and computed nothing."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    # Most of a start would go into compiling; the run that nobody disturbs fills the cache.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pols_jax.training.fitting"])
    dataset = load("glyphs", **CONFIG.options())

    def start_one(run_dir):
        process = context.Process(target=fit, args=(CONFIG, dataset, run_dir), kwargs={"options": OPTIONS})
        process.start()
        return process

    return start_one


def result(run_dir):
    """All that a run leaves: the bits of its last checkpoint, as their checksums, and what it measured."""
    records = MetricsLog(run_dir / "metrics.jsonl").records()
    measured = [(record["step"], record["validation"]) for record in records]
    return StoredCheckpoint(run_dir, CONFIG.steps).meta["arrays"], measured


def being_written(run_dir):
    return any((run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp"))


def kill_at(process, run_dir, moment, delay):
    """Kills the process after its start, after its first new checkpoint, or while it writes the next one."""
    deadline = time.monotonic() + SECONDS

    def wait_until(condition):
        while process.is_alive() and not condition():
            assert time.monotonic() < deadline, "the training hangs"
            time.sleep(0.0005)

    found = newest_step(run_dir)
    if moment != "start":
        wait_until(lambda: newest_step(run_dir) != found)
    if moment == "save":
        wait_until(lambda: being_written(run_dir))
    process.join(delay)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def what_is_wrong(run_dir):
    """A kill may lose what was not yet saved, and may not spoil what was."""
    step = newest_step(run_dir)
    return None if step is None else StoredCheckpoint(run_dir, step).problem()


@pytest.mark.campaign
def test_training_survives_kills(tally, start, tmp_path):
    """Kills of training

    SIGKILL at random moments: after the start, between checkpoints, and most often while one is written. Then the run is
    resumed, and ends with the same bits as one that was not disturbed.
    """
    undisturbed = start(tmp_path / "undisturbed")
    undisturbed.join(SECONDS)
    assert undisturbed.exitcode == 0
    expected, rng, torn_saves = result(tmp_path / "undisturbed"), random.Random(0), 0
    while tally.tries < KILLS:
        run_dir = tmp_path / str(tally.tries)
        run_dir.mkdir()
        problems = []
        for kill in range(KILLS_PER_RUN):
            moment = ("save", "save", "start", "checkpoint", "save")[kill % 5]
            delay = rng.uniform(0, {"start": 3, "checkpoint": 0.4, "save": 0.02}[moment])
            if kill_at(start(run_dir), run_dir, moment, delay):
                problems.append(what_is_wrong(run_dir))
                torn_saves += moment == "save" and being_written(run_dir)
        last = start(run_dir)
        last.join(SECONDS)
        if last.exitcode != 0:
            last.kill()
            problems[-1] = f"{run_dir}: the resumed run ended with {last.exitcode}"
        elif result(run_dir) != expected:
            problems[-1] = f"{run_dir}: the resumed run ended with other bits"
        for problem in problems:
            tally.tried(problem)
    assert torn_saves >= KILLS // 4, f"only {torn_saves} kills came while a checkpoint was being written"
    print(f"{torn_saves} kills came while a checkpoint was being written")
