"""What the tests of search share: a run over ten digits that was evaluated, its network, and its test pictures as files."""

import pytest
from PIL import Image

from pols_jax.search.class_bank import ClassBank


@pytest.fixture(scope="session")
def run_dir(digits_experiment):
    """A run for all workers: copy it to change it."""
    return digits_experiment / "batch_cross_entropy"


@pytest.fixture(scope="session")
def bank(run_dir):
    return ClassBank.open(run_dir)


@pytest.fixture(scope="session")
def pictures(digits, tmp_path_factory):
    """A folder with the test pictures, one file each, named after their class."""
    folder = tmp_path_factory.mktemp("searched") / "pictures"
    folder.mkdir()
    for i, (image, label) in enumerate(zip(digits.test.images, digits.test.labels, strict=True)):
        name = digits.class_names[label].replace(" ", "_").lower()
        Image.fromarray(image[..., 0]).save(folder / f"{name}_{i:02d}.png")
    return folder
