"""The seven losses from features and an output layer, without the ``[m, k]`` array of logits.

Every loss equals the one of the same name in `pols_jax.losses` on ``all_logits(features, kernel, bias)``, in value and
in the gradients of features, kernel and bias, up to rounding: both evaluate the same formula. Here the statistics that
the formula needs are computed class block by class block (`pols_jax.linear_stats`), so that memory does not grow with
the product of examples and classes.

All seven take ``(features, kernel, bias, labels, *, block_size, axis_name, class_axis_name)`` and their
hyper-parameters:

* ``block_size``: how many classes are looked at in one go; chosen by `default_block_size` if None. It need not divide
  the number of classes.
* ``axis_name``: the device axes that the batch is split over. A loss per example does not depend on the other
  examples, and takes it only so that all seven are called alike.
* ``class_axis_name``: the device axis that the rows of ``kernel`` and ``bias`` are spread over, in equal parts: device s
  of C has the classes from ``s k / C`` on. Labels are those of all k classes. `pad_classes` makes k a multiple of C.

Features and kernel of 16 bits are multiplied as such and accumulated in float32. The derivatives are reverse-mode only.

Under ``shard_map`` leave ``check_vma`` at True, or take the gradient outside of ``shard_map``. Both give the gradients of
the whole loss: ready to use, without ``pmean``.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from pols_jax import losses
from pols_jax.checks import (
    check_logits_and_labels,
    check_noise_probs,
    check_output_layer,
    check_positive,
)
from pols_jax.global_batch import AxisName, GlobalBatch
from pols_jax.linear_stats import LinearStats, Noise, Statistic, default_block_size


def cross_entropy(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, "*batch"],
    *,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    class_axis_name: str | None = None,
) -> Float[Array, "*batch"]:
    """Computes `losses.cross_entropy` without all the logits.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      block_size: How many classes are looked at in one go; chosen if None.
      axis_name: The device axes that the batch is split over; of no consequence here.
      class_axis_name: The device axis that the rows of ``kernel`` and ``bias`` are spread over.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> features, kernel = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [1.0, 0.0]])
      >>> cross_entropy(features, kernel, jnp.zeros(2), jnp.array([0]))
      Array([0.3133], dtype=float32)
    """
    del axis_name
    layer = _check(features, kernel, bias, labels)
    return losses.cross_entropy_formula(_stats(layer, "logsumexp", block_size, class_axis_name))


def max_margin(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, "*batch"],
    *,
    margin: ArrayLike = 1.0,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    class_axis_name: str | None = None,
) -> Float[Array, "*batch"]:
    """Computes `losses.max_margin` without all the logits.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      margin: By how much the true logit has to be larger than the false ones; positive.
      block_size: How many classes are looked at in one go; chosen if None.
      axis_name: The device axes that the batch is split over; of no consequence here.
      class_axis_name: The device axis that the rows of ``kernel`` and ``bias`` are spread over.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> features, kernel = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [1.5, 0.0]])
      >>> max_margin(features, kernel, jnp.zeros(2), jnp.array([0]))
      Array([0.5], dtype=float32)
    """
    del axis_name
    layer = _check(features, kernel, bias, labels)
    z = _stats(layer, "max_false", block_size, class_axis_name)
    return losses.max_margin_formula(z, margin=margin)


def self_normalization(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, "*batch"],
    *,
    alpha: ArrayLike = 0.1,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    class_axis_name: str | None = None,
) -> Float[Array, "*batch"]:
    """Computes `losses.self_normalization` without all the logits.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      alpha: The weight of the penalty on the normaliser; positive.
      block_size: How many classes are looked at in one go; chosen if None.
      axis_name: The device axes that the batch is split over; of no consequence here.
      class_axis_name: The device axis that the rows of ``kernel`` and ``bias`` are spread over.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> features, kernel = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [1.0, 0.0]])
      >>> self_normalization(features, kernel, jnp.zeros(2), jnp.array([0]), alpha=0.1)
      Array([0.8484], dtype=float32)
    """
    del axis_name
    layer = _check(features, kernel, bias, labels)
    z = _stats(layer, "logsumexp", block_size, class_axis_name)
    return losses.self_normalization_formula(z, alpha=alpha)


def noise_contrastive_estimation(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, "*batch"],
    *,
    num_noise: ArrayLike,
    noise_probs: Float[ArrayLike, " all_classes"] | None = None,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    class_axis_name: str | None = None,
) -> Float[Array, "*batch"]:
    """Computes `losses.noise_contrastive_estimation` without all the logits.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      num_noise: How many noise classes stand against each true one, t; positive.
      noise_probs: The distribution q of the noise classes, one number for each class of all devices; uniform over all
        rows if None. Rows of padding have the probability 0. It gets no gradient.
      block_size: How many classes are looked at in one go; chosen if None.
      axis_name: The device axes that the batch is split over; of no consequence here.
      class_axis_name: The device axis that the rows of ``kernel`` and ``bias`` are spread over.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> features, kernel = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [1.0, 0.0]])
      >>> noise_contrastive_estimation(features, kernel, jnp.zeros(2), jnp.array([0]), num_noise=2)
      Array([3.5671], dtype=float32)
    """
    del axis_name
    layer = _check(features, kernel, bias, labels)
    noise = _noise(layer[1].shape[0], num_noise, noise_probs, class_axis_name)
    s = _stats(layer, "softplus_sum", block_size, class_axis_name, noise=noise)
    return losses.noise_contrastive_estimation_formula(s, noise_counts=None)


def binary_cross_entropy(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, "*batch"],
    *,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    class_axis_name: str | None = None,
) -> Float[Array, "*batch"]:
    """Computes `losses.binary_cross_entropy` without all the logits.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      block_size: How many classes are looked at in one go; chosen if None.
      axis_name: The device axes that the batch is split over; of no consequence here.
      class_axis_name: The device axis that the rows of ``kernel`` and ``bias`` are spread over.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> features, kernel = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [1.0, 0.0]])
      >>> binary_cross_entropy(features, kernel, jnp.zeros(2), jnp.array([0]))
      Array([1.4402], dtype=float32)
    """
    del axis_name
    layer = _check(features, kernel, bias, labels)
    z = _stats(layer, "softplus_sum_of_false", block_size, class_axis_name)
    return losses.binary_cross_entropy_formula(z)


def batch_cross_entropy(
    features: Float[Array, "batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, " batch"],
    *,
    where: Bool[Array, " batch"] | None = None,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    class_axis_name: str | None = None,
) -> Float[Array, ""]:
    """Computes `losses.batch_cross_entropy` without all the logits.

    Args:
      features: Features, shape ``[m, d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[m]``.
      where: Which examples are real, shape ``[m]``; all if None. The others change neither value nor gradient.
      block_size: How many classes are looked at in one go; chosen if None.
      axis_name: The device axes that the batch is split over. The loss is then that of the whole batch.
      class_axis_name: The device axis that the rows of ``kernel`` and ``bias`` are spread over.

    Returns:
      One loss for the batch, shape ``[]``; 0 if no example is real.

    Examples:
      >>> import jax.numpy as jnp
      >>> features, kernel = jnp.array([[3.0, 0.0], [0.0, 3.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> batch_cross_entropy(features, kernel, jnp.zeros(2), jnp.array([0, 1]))
      Array(0.0486, dtype=float32)
    """
    layer = _check_batch(features, kernel, bias, labels)
    batch = GlobalBatch.of(layer[-1], where, axis_name)
    z = _stats(_without_padding(layer, batch), "logsumexp", block_size, class_axis_name)
    return losses.batch_cross_entropy_formula(z, batch)


def batch_max_margin(
    features: Float[Array, "batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, " batch"],
    *,
    margin: ArrayLike = 1.0,
    where: Bool[Array, " batch"] | None = None,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    class_axis_name: str | None = None,
) -> Float[Array, ""]:
    """Computes `losses.batch_max_margin` without all the logits.

    Args:
      features: Features, shape ``[m, d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[m]``.
      margin: By how much a true logit has to be larger than the false ones; positive.
      where: Which examples are real, shape ``[m]``; all if None. The others change neither value nor gradient.
      block_size: How many classes are looked at in one go; chosen if None.
      axis_name: The device axes that the batch is split over. The loss is then that of the whole batch.
      class_axis_name: The device axis that the rows of ``kernel`` and ``bias`` are spread over.

    Returns:
      One loss for the batch, shape ``[]``; 0 if no example is real.

    Examples:
      >>> import jax.numpy as jnp
      >>> features, kernel = jnp.array([[3.0, 1.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> float(batch_max_margin(features, kernel, jnp.zeros(2), jnp.array([0, 1])))
      0.5
    """
    layer = _check_batch(features, kernel, bias, labels)
    batch = GlobalBatch.of(layer[-1], where, axis_name)
    z = _stats(_without_padding(layer, batch), "max_false", block_size, class_axis_name)
    return losses.batch_max_margin_formula(z, batch, margin=margin)


LINEAR_LOSSES: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        loss.__name__: loss
        for loss in (
            cross_entropy,
            max_margin,
            self_normalization,
            noise_contrastive_estimation,
            binary_cross_entropy,
            batch_cross_entropy,
            batch_max_margin,
        )
    }
)
"""Every loss by its name, as `losses.LOSSES`."""


class MeanLinearLoss(Protocol):
    """What `make_linear_loss` returns: the loss of a whole batch, as a training step wants it."""

    def __call__(
        self,
        features: Float[Array, "*batch features"],
        kernel: Float[Array, "classes features"],
        bias: Float[Array, " classes"],
        labels: Int[Array, "*batch"],
        *,
        where: Bool[Array, "*batch"] | None = None,
        block_size: int | None = None,
        axis_name: AxisName | None = None,
        class_axis_name: str | None = None,
    ) -> Float[Array, ""]:
        """Computes the loss over the real examples of the batch, over all devices."""
        ...


def make_linear_loss(name: str, **hyperparameters: Any) -> MeanLinearLoss:
    """Gives the loss of that name the one form that a training step wants, as `losses.make_loss` does.

    Args:
      name: A key of `LINEAR_LOSSES`.
      **hyperparameters: The keyword arguments of that loss, such as ``margin`` or ``alpha``.

    Returns:
      ``f(features, kernel, bias, labels, *, where=None, block_size=None, axis_name=None, class_axis_name=None)``,
      which gives one number: the mean of a loss per example over the batch, or the batch loss itself.

    Raises:
      ValueError: if there is no loss of that name.
      TypeError: if the loss does not have one of the hyper-parameters, or needs one that is not given.

    Examples:
      >>> import jax.numpy as jnp
      >>> loss = make_linear_loss("max_margin", margin=2.0)
      >>> features, kernel = jnp.array([[2.0, 1.5], [0.0, 3.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> float(loss(features, kernel, jnp.zeros(2), jnp.array([0, 1])))
      0.75
    """
    losses.make_loss(name, **hyperparameters)  # for its errors: names and hyper-parameters are the same
    loss = LINEAR_LOSSES[name]
    is_batch_loss = "where" in inspect.signature(loss).parameters

    def mean_loss(features, kernel, bias, labels, *, where=None, axis_name=None, **placement):
        if is_batch_loss:
            arrays = features, kernel, bias, labels
            return loss(*arrays, where=where, axis_name=axis_name, **placement, **hyperparameters)
        layer = _check(features, kernel, bias, labels)
        batch = GlobalBatch.of(layer[-1], where, axis_name)
        return batch.mean(loss(*_without_padding(layer, batch), **placement, **hyperparameters))

    return mean_loss


_Layer = tuple[Array, Array, Array, Array]


def _check(features, kernel, bias, labels) -> _Layer:
    features, kernel, bias = jnp.asarray(features), jnp.asarray(kernel), jnp.asarray(bias)
    check_output_layer(features, kernel, bias)
    features, labels = check_logits_and_labels(features, labels, name="features")
    return features, kernel, bias, labels


def _check_batch(features, kernel, bias, labels) -> _Layer:
    layer = _check(features, kernel, bias, labels)
    if layer[0].ndim != 2:
        raise ValueError(f"features must have 2 axes, examples and features, got shape {layer[0].shape}.")
    return layer


def _without_padding(layer: _Layer, batch: GlobalBatch) -> _Layer:
    """Replaces the rows that are not real by zeros, so that not even a NaN in them reaches a gradient."""
    features, kernel, bias, labels = layer
    return jnp.where(batch.where[..., None], features, 0.0), kernel, bias, jnp.where(batch.where, labels, 0)


def _stats(
    layer: _Layer,
    statistic: Statistic,
    block_size: int | None,
    class_axis_name: str | None,
    *,
    noise: Noise | None = None,
) -> LinearStats:
    features, kernel, *_ = layer
    if block_size is None:
        block_size = default_block_size(math.prod(features.shape[:-1]), *reversed(kernel.shape))
    elif block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}.")
    return LinearStats(
        *layer,
        statistic=statistic,
        noise=noise,
        block_size=min(block_size, kernel.shape[0]),
        class_axis_name=class_axis_name,
    )


def _noise(num_rows, num_noise, noise_probs, class_axis_name) -> Noise:
    """The noise of this device's rows."""
    check_positive("num_noise", num_noise)
    num_shards = 1 if class_axis_name is None else lax.axis_size(class_axis_name)
    if noise_probs is None:
        probs = jnp.full((1,), 1.0 / (num_rows * num_shards), dtype=float)  # one number stands for all rows
    else:
        probs = check_noise_probs(noise_probs, num_rows * num_shards)
        if class_axis_name is not None:
            probs = lax.dynamic_slice_in_dim(probs, num_rows * lax.axis_index(class_axis_name), num_rows)
    return Noise(jnp.asarray(num_noise), probs)
