"""What a loss is fed with: what is given as logits decides where its statistics come from."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pols_jax.losses.checks import check_labels, check_logits_and_labels, check_output_layer
from pols_jax.losses.class_stats import DenseStats
from pols_jax.losses.global_batch import GlobalBatch
from pols_jax.losses.linear_logits import LinearLogits
from pols_jax.losses.linear_stats import LinearStats

Logits = Float[Array, "*batch classes"] | LinearLogits
"""What a loss takes: an array of logits, or an output layer that stands for it."""


def class_stats(logits: Logits, labels) -> DenseStats | LinearStats:
    """The statistics of what is given: from all the logits, or class block by class block.

    Examples:
      >>> type(class_stats(jnp.zeros((2, 3)), jnp.array([0, 1]))).__name__
      'DenseStats'
    """
    logits, labels = _checked(logits, labels)
    return LinearStats(logits, labels) if isinstance(logits, LinearLogits) else DenseStats(logits, labels)


def real_examples(
    logits: Logits, labels, *, where, axis_name
) -> tuple[Logits, Int[Array, "*batch"], GlobalBatch]:
    """What is given, with zeros in the rows that are not real, and the batch that they are part of.

    Not even a NaN in a row that is not real reaches a gradient then.

    Examples:
      >>> logits, mask = jnp.array([[1.0], [jnp.nan]]), jnp.array([True, False])
      >>> logits, labels, batch = real_examples(logits, jnp.array([0, 7]), where=mask, axis_name=None)
      >>> logits.tolist(), labels.tolist(), float(batch.size(jnp.float32))
      ([[1.0], [0.0]], [0, 0], 1.0)
    """
    logits, labels = _checked(logits, labels)
    batch = GlobalBatch.of(labels, where, axis_name)
    is_real, labels = batch.where[..., None], jnp.where(batch.where, labels, 0)
    if isinstance(logits, LinearLogits):
        features = jnp.where(is_real, logits.features, 0.0)
        return dataclasses.replace(logits, features=features), labels, batch
    return jnp.where(is_real, logits, 0.0), labels, batch


def _checked(logits, labels) -> tuple[Logits, Int[Array, "*batch"]]:
    """What is given, as arrays of the right shapes; an error that names the argument if they are not."""
    if not isinstance(logits, LinearLogits):
        return check_logits_and_labels(logits, labels)
    features, kernel, bias = check_output_layer(logits.features, logits.kernel, logits.bias)
    if logits.block_size is not None and logits.block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {logits.block_size}.")
    labels = check_labels(labels, features.shape, name="features")
    return dataclasses.replace(logits, features=features, kernel=kernel, bias=bias), labels
