"""Features: what a backbone makes of the images of a split, computed once."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from pols_jax.data import (
    ArraySplit,
    Batch,
    Dataset,
    Split,
    StreamSplit,
    augment_batch,
    evaluation_batches,
    find_augmentation,
    sample_batch,
    stream_batches,
)
from pols_jax.memory import check_fits
from pols_jax.models import Classifier
from pols_jax.training.config import RunConfig
from pols_jax.training.hosts import gather_from_hosts
from pols_jax.training.learning import DATA_AXIS
from pols_jax.training.network import make_model
from pols_jax.training.placement import replicate

# 1,024 images of 90 x 90 pixels, or 167 of 224 x 224: 2 GB in the first layer of vgg16.
_BATCH_PIXELS = 2**23


def fitting_batch(image_shape: tuple[int, ...], *, most: int = 1024) -> int:
    """How many images go through a network together when nothing is learned: fewer if they are large.

    Examples:
      >>> fitting_batch((28, 28, 1)), fitting_batch((224, 224, 3))
      (1024, 167)
    """
    return max(1, min(most, _BATCH_PIXELS // math.prod(image_shape[:2])))


def split_features(
    model: Classifier, variables: Any, split: Split, *, batch_size: int = 1024, advance: Any = lambda: None
) -> tuple[Float[np.ndarray, "examples features"], Int[np.ndarray, " examples"]]:
    """Computes the features ``[n, d]`` and labels ``[n]`` of a split, each example once, on the devices of all hosts.

    They are in the order of the split; pictures that cannot be decoded are left out. ``advance`` is called after every
    batch. All hosts get all features.
    """
    count = jax.process_count()
    batch_size = count * _for_all_devices(-(-min(batch_size, len(split)) // count))
    batches = evaluation_batches(
        split, batch_size=batch_size, process_index=jax.process_index(), process_count=count
    )
    if count == 1:
        return _features(model, variables, batches, advance)
    features, labels, where = (
        np.concatenate(np.swapaxes(gather_from_hosts(np.stack(arrays)), 0, 1).reshape(-1, *arrays[0].shape))
        for arrays in zip(*_batch_features(model, variables, batches, advance), strict=True)
    )
    return features[where], labels[where]


def feature_dataset(
    config: RunConfig,
    dataset: Dataset,
    variables: Any,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Dataset:
    """Puts features in the place of the images of a data set, for a run that trains its output layer alone.

    Args:
      config: The run; its ``feature_passes`` says how often the training images are looked at with new distortions, beside
        the look at them as they are.
      dataset: The images.
      variables: The variables of the backbone.
      report: Called with the number of batches that are done and of all batches.

    Returns:
      Features of the training and validation splits, float32, in memory; the test split is left empty. Features that do
      not fit in memory are a `ConfigError`.
    """
    model = make_model(config, dataset.num_classes)
    one_image = jax.ShapeDtypeStruct((1, *dataset.image_shape), np.float32)
    num_features = jax.eval_shape(model.backbone.apply, variables, one_image).shape[1]
    device = jax.local_devices()[0]
    copies = jax.local_device_count() if device.platform == "cpu" else 1  # its devices share the memory
    check_fits(
        4 * copies * num_features * (1 + config.feature_passes) * len(dataset.train),
        device,
        what=f"{num_features:,} features of each image of {dataset.name}",
        advice="use fewer --feature-passes, or train everything",
    )
    batch_size = fitting_batch(dataset.image_shape)
    num_batches = -(-len(dataset.train) // _for_all_devices(batch_size)) * (1 + config.feature_passes)
    num_batches += -(-len(dataset.validation) // _for_all_devices(batch_size))
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        report(done, max(done, num_batches))

    train, validation = (
        split_features(model, variables, split, batch_size=batch_size, advance=advance)
        for split in (dataset.train, dataset.validation)
    )
    if config.feature_passes:
        more = _features(model, variables, _augmented_batches(config, dataset, batch_size), advance)
        train = tuple(np.concatenate(arrays) for arrays in zip(train, more, strict=True))
    nothing = np.zeros((0, num_features)), np.zeros(0, np.int32)
    return Dataset(
        dataset.name,
        dataset.class_names,
        (num_features,),  # type: ignore[arg-type]
        *(
            ArraySplit(features.astype(np.float32), labels)
            for features, labels in (train, validation, nothing)
        ),
        provenance=dataset.provenance,
    )


def _features(
    model: Classifier, variables: Any, batches: Iterator[Batch], advance: Callable[[], None]
) -> tuple[Float[np.ndarray, "examples features"], Int[np.ndarray, " examples"]]:
    found = _batch_features(model, variables, batches, advance)
    features, labels, where = map(np.concatenate, zip(*found, strict=True))
    return features[where], labels[where]


def _batch_features(
    model: Classifier, variables: Any, batches: Iterator[Batch], advance: Callable[[], None]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Features, labels and the mask of each batch, on the devices of this host."""
    num_devices = jax.local_device_count()
    variables = replicate(variables)
    apply = jax.pmap(model.backbone.apply, axis_name=DATA_AXIS, devices=jax.local_devices())
    for batch in batches:
        images = np.asarray(batch.images)
        outputs = apply(variables, images.reshape((num_devices, -1, *images.shape[1:])))
        yield np.concatenate(np.asarray(outputs)), np.asarray(batch.labels), np.asarray(batch.where)
        advance()


def _augmented_batches(config: RunConfig, dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Passes over the training images, distorted as in training."""
    train, batch_size = dataset.train, _for_all_devices(min(batch_size, len(dataset.train)))
    num_batches = config.feature_passes * -(-len(train) // batch_size)
    options = {"seed": config.seed, "augment": find_augmentation(config.augment, dataset)}
    if isinstance(train, StreamSplit):
        batches = stream_batches(train, seed=config.seed, batch_size=batch_size)
        distorted = jax.jit(functools.partial(augment_batch, **options))
        yield from (distorted(next(batches), step) for step in range(num_batches))
        return
    sample = jax.jit(functools.partial(sample_batch, batch_size=batch_size, **options))
    images, labels = jax.device_put((train.images, train.labels))
    yield from (sample(images, labels, step) for step in range(num_batches))


def _for_all_devices(batch_size: int) -> int:
    """The next multiple of the number of local devices."""
    num_devices = jax.local_device_count()
    return -(-batch_size // num_devices) * num_devices
