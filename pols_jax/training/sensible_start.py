"""A sensible start: the size of the images where none is asked for, and what a user should know before anything long."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from pols_jax.data import Dataset, PictureSizes, steps_per_epoch
from pols_jax.training.config import Experiment
from pols_jax.training.feasibility import num_parameters
from pols_jax.training.learning import known_labels

USUAL_SIZES: Mapping[str, int] = {
    "mlp": 32,
    "cnn": 32,
    "alexnet": 224,
    "vgg16": 224,
    "inception_v3": 299,
    "resnet50": 224,
    "resnet101": 224,
}
"""The size that larger pictures are shrunk to for each network, unless another is asked for."""


def are_small(sizes: PictureSizes) -> bool:
    """Whether pictures are so small that the MLP takes them as they are; a convolutional network is for the others."""
    return (sizes.usual_side or 0) <= USUAL_SIZES["mlp"]


def with_picture_shape(experiment: Experiment, sizes: PictureSizes) -> Experiment:
    """Sets the image size and the channels that were not asked for: those of the pictures, but no larger than usual.

    Examples:
      >>> experiment = with_picture_shape(Experiment(model="cnn"), PictureSizes((480, 600, 600), are_gray=False))
      >>> experiment.image_size, experiment.channels
      (32, 3)
      >>> with_picture_shape(Experiment(model="cnn"), PictureSizes((28, 28), are_gray=True)).image_size
      28
    """
    asked_for = {"image_size": experiment.image_size, "channels": experiment.channels}
    size, _, channels = sizes.shape(largest=USUAL_SIZES[experiment.model], **asked_for)
    return dataclasses.replace(experiment, image_size=size, channels=channels)


def describe_start(experiment: Experiment, dataset: Dataset) -> str:
    """Says what is about to be trained on what, and for how many steps; two sentences.

    Examples:
      >>> from pols_jax.data import load
      >>> print(describe_start(Experiment(), load("glyphs", characters="0030-0039")).partition(" Images")[0])
      glyphs: 80 pictures to learn from, 10 to validate and 30 to test, of 10 classes (8 pictures each).
    """
    num_examples, run = len(dataset.train), experiment.runs()[0]
    count = num_parameters(run, dataset.num_classes, dataset.image_shape)
    devices, num_runs = jax.devices(), len(experiment.runs())
    epochs = experiment.steps / steps_per_epoch(num_examples, experiment.batch_size)
    return (
        f"{dataset.name}: {num_examples:,} pictures to learn from, {len(dataset.validation):,} to validate and "
        f"{len(dataset.test):,} to test, of {dataset.num_classes:,} classes{_class_sizes(dataset)}. "
        f"Images of {' x '.join(map(str, dataset.image_shape))}, --augment {experiment.augment}; {experiment.model} with "
        f"{count:,} parameters, on {len(devices)} x {devices[0].device_kind}; {experiment.steps:,} steps of "
        f"{experiment.batch_size:,}, {epochs:,.3g} epochs"
        + (f", for each of {num_runs} runs." if num_runs > 1 else ".")
    )


def _class_sizes(dataset: Dataset) -> str:
    labels = known_labels(dataset.train)
    if labels is None:
        return ""
    counts = np.bincount(labels, minlength=dataset.num_classes)
    smallest, largest, num_empty = counts[counts > 0].min(), counts.max(), int((counts == 0).sum())
    sizes = (
        f"{largest:,} pictures each" if smallest == largest else f"{smallest:,} to {largest:,} pictures each"
    )
    return f" ({sizes}{f', {num_empty:,} empty' if num_empty else ''})"
