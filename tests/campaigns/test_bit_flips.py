"""A flipped bit of a checkpoint gives the same answer or an error: never another answer, and never a traceback."""

import shutil

import numpy as np
import pytest

from pols_jax.data import load
from pols_jax.errors import PolsError
from pols_jax.search.class_bank import ClassBank
from pols_jax.training.checkpoint_reading import StoredCheckpoint
from pols_jax.training.checkpoints import Checkpoints
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit

FLIPS = 120
CONFIG = RunConfig(
    characters="0030-0039,0041-005A", width=0.05, batch_size=32, steps=4, evaluate_every=2, learning_rate=0.01
)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1)).astype(np.uint8)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("flips") / "run"
    fit(CONFIG, load("glyphs", **CONFIG.options()), directory, options=RunOptions(quiet=True))
    return directory


def answers(run_dir, images):
    """What a search asks of a run: the rows and the logits of all classes."""
    bank = ClassBank.open(run_dir)
    class_ids = list(range(len(bank.names)))
    rows = [bank.row(class_id) for class_id in class_ids]
    return [row.kernel.tobytes() for row in rows], [row.bias for row in rows], bank.logits(images, class_ids)


def files_of(run_dir, *patterns):
    folder = run_dir / "checkpoints" / str(CONFIG.steps)
    return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def flip_one_bit(rng, files):
    """Flips a random bit of all files together; returns the file and what it was."""
    sizes = np.array([path.stat().st_size for path in files])
    path = files[rng.choice(len(files), p=sizes / sizes.sum())]
    before = path.read_bytes()
    flipped, bit = bytearray(before), int(rng.integers(8 * len(before)))
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    return path, before, bit


def outcome(ask, expected):
    """None if the answer is the same or there is a clear error, and else what is wrong."""
    try:
        found = ask()
    except PolsError as error:
        return None if len(str(error).splitlines()) == 1 else f"an error of several lines: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    same = all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    return None if same else "another answer, in silence"


def flip_and_ask(tally, rng, files, ask, expected, flips=FLIPS):
    for _ in range(flips):
        path, before, bit = flip_one_bit(rng, files)
        wrong = outcome(ask, expected)
        path.write_bytes(before)
        tally.tried(wrong and f"bit {bit} of {path.parent.name}/{path.name}: {wrong}")


@pytest.mark.campaign
def test_flips_in_the_head(tally, run_dir, images):
    """Bit flips in the head"""
    files = files_of(run_dir, "state/params.head.*/*")
    ask = lambda: answers(run_dir, images)  # noqa: E731
    flip_and_ask(tally, np.random.default_rng(0), files, ask, ask())


@pytest.mark.campaign
def test_flips_in_the_backbone(tally, run_dir, images):
    """Bit flips in the backbone"""
    files = files_of(run_dir, "state/params.backbone.*/*", "state/batch_stats.backbone.*/*")
    ask = lambda: answers(run_dir, images)  # noqa: E731
    flip_and_ask(tally, np.random.default_rng(1), files, ask, ask())


@pytest.mark.campaign
def test_flips_in_the_metadata(tally, run_dir, images, tmp_path):
    """Bit flips in the metadata

    Beside the answers, the run must accept another checkpoint, or say why not.
    """
    rng, expected = np.random.default_rng(2), answers(run_dir, images)
    state = {"params": {"head": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(3, np.float32)}}}
    patterns = ("meta/*", "_CHECKPOINT_METADATA", "commit_success.txt", "state/_METADATA", "state/*/.zarray")

    def ask(copy):
        found = answers(copy, images)
        with Checkpoints(copy) as checkpoints:
            checkpoints.save(CONFIG.steps + 1, state, config={})
            checkpoints.wait()
        assert StoredCheckpoint(copy, CONFIG.steps + 1).problem() is None
        return found

    for index in range(FLIPS):
        copy = shutil.copytree(run_dir, tmp_path / str(index))
        # Half of the bits from `meta`: it is small beside the rest.
        files = files_of(copy, *(patterns[:1] if index % 2 else patterns))
        path, _, bit = flip_one_bit(rng, files)
        wrong = outcome(lambda copy=copy: ask(copy), expected)
        tally.tried(wrong and f"bit {bit} of {path.parent.name}/{path.name}: {wrong}")
        shutil.rmtree(copy)
