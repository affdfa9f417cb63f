"""Synthetic pictures: any number of classes, few pictures, always the same."""

import numpy as np
import pytest

from pols_jax.data import load
from pols_jax.errors import DataError


def test_a_million_classes_take_no_more_pictures_than_a_thousand():
    small, large = load("synthetic:1000"), load("synthetic:1000000")
    for name in ("train", "validation", "test"):
        assert len(getattr(large, name)) <= max(len(getattr(small, name)), 4096)
    assert small.num_classes == 1000
    assert large.train.labels.max() == 999_999
    assert len(np.unique(large.train.labels)) == 4096
    assert len(np.unique(small.train.labels)) == 1000


def test_a_picture_is_nearest_to_those_of_its_class():
    data = load("synthetic:300", image_size=8)
    train, test = (
        split.images.reshape(len(split), -1).astype(np.float64) for split in (data.train, data.test)
    )
    means = np.stack([train[data.train.labels == c].mean(axis=0) for c in range(300)])
    distances = ((test[:, None] - means[None]) ** 2).sum(axis=2)
    assert np.mean(distances.argmin(axis=1) == data.test.labels) > 0.99
    np.testing.assert_array_equal(data.train.images, load("synthetic:300", image_size=8).train.images)


@pytest.mark.parametrize(
    "name", ["synthetic:", "synthetic:1", "synthetic:ten", "synthetic:-5", "synthetic:9999999999"]
)
def test_what_is_no_number_of_classes_is_one_sentence(name):
    with pytest.raises(DataError, match="synthetic:K needs a number of classes"):
        load(name)
