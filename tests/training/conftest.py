"""A small run that several files of tests look at."""

import pytest

from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit


@pytest.fixture(scope="session")
def finished_run(digits, tmp_path_factory):
    """A run of twelve steps: copy it to change it."""
    config = RunConfig(
        characters="0030-0039", width=0.05, batch_size=32, steps=12, evaluate_every=4, learning_rate=0.01
    )
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    fit(config, digits, run_dir, options=RunOptions(quiet=True))
    return run_dir
