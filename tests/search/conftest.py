"""What the tests of search share: a small evaluated run over ten digits, and its test pictures as files."""

import pytest
from PIL import Image

from pols_jax.data import load
from pols_jax.evaluation.measuring import evaluate
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit


@pytest.fixture(scope="session")
def digits():
    return load("glyphs", characters="0030-0039")


@pytest.fixture(scope="session")
def digits_run(digits, tmp_path_factory):
    config = RunConfig(
        characters="0030-0039",
        width=0.2,
        loss="batch_cross_entropy",
        batch_size=64,
        steps=100,
        evaluate_every=100,
    )
    directory = tmp_path_factory.mktemp("runs") / "run"
    fit(config, digits, directory, options=RunOptions(quiet=True))
    evaluate(directory, dataset=digits, quiet=True)
    return directory


@pytest.fixture(scope="session")
def digit_pictures(digits, tmp_path_factory):
    """A folder with the test pictures, one file each, named after their class."""
    folder = tmp_path_factory.mktemp("pictures")
    for i, (image, label) in enumerate(zip(digits.test.images, digits.test.labels, strict=True)):
        name = digits.class_names[label].replace(" ", "_").lower()
        Image.fromarray(image[..., 0]).save(folder / f"{name}_{i:02d}.png")
    return folder
