"""What a loss is fed with: what is given as logits decides where its statistics come from."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pols_jax.losses.checks import (
    check_block_size,
    check_labels,
    check_logits_and_labels,
    check_output_layer,
)
from pols_jax.losses.class_stats import ClassStats, DenseStats
from pols_jax.losses.global_batch import GlobalBatch
from pols_jax.losses.linear_logits import LinearLogits
from pols_jax.losses.linear_stats import LinearStats

Logits = Float[Array, "*batch classes"] | LinearLogits
"""What a loss takes: an array of logits, or an output layer that stands for it."""


def class_stats(logits: Logits, labels) -> ClassStats:
    """The statistics of what is given: from all the logits, or class block by class block.

    Examples:
      >>> type(class_stats(jnp.zeros((2, 3)), jnp.array([0, 1]))).__name__
      'DenseStats'
    """
    logits, labels = checked(logits, labels)
    return LinearStats(logits, labels) if isinstance(logits, LinearLogits) else DenseStats(logits, labels)


def class_stats_of_batch(logits: Logits, labels, where, axis_name) -> tuple[ClassStats, GlobalBatch]:
    """The statistics of the real examples, and the batch that they are part of.

    Examples:
      >>> _, batch = class_stats_of_batch(jnp.zeros((2, 3)), jnp.array([0, 1]), jnp.array([True, False]), None)
      >>> float(batch.size(jnp.float32))
      1.0
    """
    logits, labels = checked(logits, labels)
    batch = GlobalBatch.of(labels, where, axis_name)
    return class_stats(*without_padding(logits, labels, batch)), batch


def checked(logits, labels) -> tuple[Logits, Int[Array, "*batch"]]:
    """What was given, as arrays of the right shapes; an error that names the argument if they are not.

    Examples:
      >>> checked(jnp.zeros((2, 3)), [0, 1])[1]
      Array([0, 1], dtype=int32)
    """
    if not isinstance(logits, LinearLogits):
        return check_logits_and_labels(logits, labels)
    features, kernel, bias = check_output_layer(logits.features, logits.kernel, logits.bias)
    check_block_size(logits.block_size)
    labels = check_labels(labels, features.shape, name="features")
    return dataclasses.replace(logits, features=features, kernel=kernel, bias=bias), labels


def without_padding(logits: Logits, labels, batch: GlobalBatch):
    """Replaces the rows that are not real by zeros, so that not even a NaN in them reaches a gradient.

    Examples:
      >>> labels = jnp.array([0, 7])
      >>> batch = GlobalBatch.of(labels, jnp.array([True, False]), None)
      >>> [part.tolist() for part in without_padding(jnp.array([[1.0], [jnp.nan]]), labels, batch)]
      [[[1.0], [0.0]], [0, 0]]
    """
    is_real, labels = batch.where[..., None], jnp.where(batch.where, labels, 0)
    if isinstance(logits, LinearLogits):
        return dataclasses.replace(logits, features=jnp.where(is_real, logits.features, 0.0)), labels
    return jnp.where(is_real, logits, 0.0), labels
