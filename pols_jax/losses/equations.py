r"""The seven losses of single-logit classification.

Single-logit classification asks "is it class c?" and looks at the logit of c alone. That works when the *Principle
of Logit Separation* (PoLS) holds: every true logit, of any example, is larger than every false logit of any example.
A loss is *aligned* with the principle when driving it down forces the principle to hold. Five of these losses are
aligned, two are not.

======================================  =======  ==================================================================
loss                                    aligned  needs, over all classes
======================================  =======  ==================================================================
`cross_entropy`                         no       logsumexp
`max_margin`                            no       largest false logit
`self_normalization`                    yes      logsumexp
`noise_contrastive_estimation`          yes      weighted softplus sum
`binary_cross_entropy`                  yes      softplus sum
`batch_cross_entropy`                   yes      logsumexp
`batch_max_margin`                      yes      largest false logit
======================================  =======  ==================================================================

The first five give one value per example, over any leading axes. The two batch losses give one value per batch,
because they compare logits of different examples. `make_loss` gives all seven the same form.

Each equation stands once, in the statistics of `pols_jax.losses.class_stats`. What is given as logits decides where these
come from: an array, or `LinearLogits`, of which the statistics are taken class block by class block, without all the logits.

Reference: Keren, Sabato and Schuller, *Fast Single-Class Classification and the Principle of Logit Separation*.
Equation and section numbers below are that paper's.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from pols_jax.errors import unknown_name
from pols_jax.losses.checks import (
    check_labels,
    check_logits_and_labels,
    check_output_layer,
    check_positive,
)
from pols_jax.losses.class_stats import DenseStats
from pols_jax.losses.global_batch import AxisName, GlobalBatch, Where
from pols_jax.losses.linear_logits import LinearLogits
from pols_jax.losses.linear_stats import LinearStats
from pols_jax.losses.noise import Noise

Logits = Float[Array, "*batch classes"] | LinearLogits
"""What a loss takes: an array of logits, or an output layer that stands for it."""


def cross_entropy(logits: Logits, labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Computes the cross-entropy of the softmax (Eq. 1). Not aligned.

        log(sum_j exp(z_j)) - z_y

    Not aligned: adding a number to all logits of one example changes nothing, so the loss cannot tell whether the
    true logits of one example are larger than the false logits of another.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> cross_entropy(jnp.array([[2.0, 1.0]]), jnp.array([0]))
      Array([0.3133], dtype=float32)
    """
    true_logit, (peak, log_sum) = _class_stats(logits, labels).logsumexp()
    return (peak - true_logit) + log_sum


def max_margin(
    logits: Logits, labels: Int[Array, "*batch"], *, margin: ArrayLike = 1.0
) -> Float[Array, "*batch"]:
    """Computes the multiclass max-margin loss of Crammer and Singer (Eq. 2). Not aligned.

        max(0, margin - z_y + max_{j != y} z_j)

    Not aligned for the same reason as `cross_entropy`: it sees only differences within one example.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      margin: By how much the true logit has to be larger than the false ones; positive.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> max_margin(jnp.array([[2.0, 1.5], [0.0, 3.0]]), jnp.array([0, 1]))
      Array([0.5, 0. ], dtype=float32)
    """
    check_positive("margin", margin)
    true_logit, max_false_logit = _class_stats(logits, labels).max_false_logit()
    return jax.nn.relu(margin - true_logit + max_false_logit)


def self_normalization(
    logits: Logits, labels: Int[Array, "*batch"], *, alpha: ArrayLike = 0.1
) -> Float[Array, "*batch"]:
    """Computes cross-entropy plus a penalty on the normalizer (Section IV-A; Devlin et al.). Aligned.

        log Z - z_y + alpha (log Z)^2,    where Z = sum_j exp(z_j)

    Aligned: at the minimum Z = 1 for every example, so the true logit tends to 0 and the false ones to minus infinity.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      alpha: The weight of the penalty; positive.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> self_normalization(jnp.array([[2.0, 1.0]]), jnp.array([0]), alpha=0.1)
      Array([0.8484], dtype=float32)
    """
    check_positive("alpha", alpha)
    true_logit, (peak, log_sum) = _class_stats(logits, labels).logsumexp()
    return (peak - true_logit) + log_sum + alpha * (peak + log_sum) ** 2


def noise_contrastive_estimation(
    logits: Logits,
    labels: Int[Array, "*batch"],
    *,
    num_noise: ArrayLike,
    noise_probs: Float[ArrayLike, " classes"] | None = None,
) -> Float[Array, "*batch"]:
    """Computes the noise-contrastive estimation loss (Eq. 3; Mnih and Teh). Aligned.

        log(1 + exp(-s_y)) + t sum_j q_j log(1 + exp(s_j)),    where s_j = z_j - log(t q_j)

    with ``t = num_noise`` and ``q = noise_probs``.

    The expectation over the noise classes is computed exactly, over all classes and the true one included.

    Aligned: at the minimum every true logit is 0 and every false logit tends to minus infinity, whatever q > 0 is.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      num_noise: How many noise classes stand against each true one, t; positive.
      noise_probs: The distribution q of the noise classes, shape ``[k]``; uniform if None. With rows of `LinearLogits`
        over devices it is that of all k classes, and zero for rows of padding; `LinearLogits` give it no gradient.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> noise_contrastive_estimation(jnp.array([[2.0, 1.0]]), jnp.array([0]), num_noise=2)
      Array([3.5671], dtype=float32)
    """
    stats = _class_stats(logits, labels)
    noise = Noise.of(num_noise=num_noise, noise_probs=noise_probs, num_classes=stats.num_classes)
    true_score, softplus_sum = stats.noise_softplus_sum(noise)
    return jax.nn.softplus(-true_score) + softplus_sum


def binary_cross_entropy(logits: Logits, labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Computes one logistic loss per class, summed over the classes (Section IV-C). Aligned.

        log(1 + exp(-z_y)) + sum_{j != y} log(1 + exp(z_j))

    Aligned: each true logit is pushed up and each false logit down, by itself.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> binary_cross_entropy(jnp.array([[2.0, 1.0]]), jnp.array([0]))
      Array([1.4402], dtype=float32)
    """
    true_logit, softplus_sum = _class_stats(logits, labels).false_softplus_sum()
    return jax.nn.softplus(-true_logit) + softplus_sum


def batch_cross_entropy(
    logits: Logits,
    labels: Int[Array, "*batch"],
    *,
    where: Where | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    """Computes the batch cross-entropy: one softmax over all logits of the batch (Definition 2). Aligned.

        KL(P, Q) = log(1/m sum_{i,j} exp(z_ij)) - 1/m sum_i z_{i, y_i}

    where P is 1/m on each true entry and Q is the softmax over all m k logits. The closed form needs no epsilon, and its
    minimum is 0.

    Aligned: it is blind only to a number added to all logits of the batch, so within a batch every true logit has to be
    larger than every false one; random batches carry that over to the whole set.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`. All leading axes together are one batch of m examples.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      where: Which examples are real, or how much each counts, shape ``[...]``; all once if None. A weight of w counts as
        w copies of the example. An example that is masked, or has the weight 0, changes neither value nor gradient.
      axis_name: The device axes that the batch is split over, under ``pmap`` or ``shard_map``. The loss is then that of the whole batch, on every
        device, and the ``pmean`` of the devices' gradients is its gradient. Under an auto-sharded ``jit`` it is that of
        the whole batch by itself.

    Returns:
      One loss for the batch, shape ``[]``; 0 if no example is real.

    Examples:
      >>> import jax.numpy as jnp
      >>> batch_cross_entropy(jnp.array([[3.0, 0.0], [0.0, 3.0]]), jnp.array([0, 1]))
      Array(0.0486, dtype=float32)
    """
    logits, labels, batch = _real_examples(logits, labels, where=where, axis_name=axis_name)
    true_logit, parts = _class_stats(logits, labels).logsumexp()
    peak, log_mean = batch.logmeanexp(parts)
    return batch.mean(peak - true_logit) + log_mean


def batch_max_margin(
    logits: Logits,
    labels: Int[Array, "*batch"],
    *,
    margin: ArrayLike = 1.0,
    where: Where | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    """Computes the batch max-margin loss: one margin over the whole batch (Definition 3). Aligned.

        1/m max(0, margin - min_i z_{i, y_i} + max_{i, j != y_i} z_ij)
        + 1/m sum_i max(0, margin - z_{i, y_i} + max_{j != y_i} z_ij)

    Aligned by its first term. The second, `max_margin`, gives a gradient to more than two logits of the batch.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`. All leading axes together are one batch of m examples.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      margin: By how much a true logit has to be larger than the false ones; positive.
      where: Which examples are real, or how much each counts, see `batch_cross_entropy`.
      axis_name: The device axes that the batch is split over, see `batch_cross_entropy`.

    Returns:
      One loss for the batch, shape ``[]``; 0 if no example is real.

    Examples:
      >>> import jax.numpy as jnp
      >>> float(batch_max_margin(jnp.array([[3.0, 1.0], [0.0, 1.0]]), jnp.array([0, 1])))
      0.5
    """
    check_positive("margin", margin)
    logits, labels, batch = _real_examples(logits, labels, where=where, axis_name=axis_name)
    true_logit, max_false_logit = _class_stats(logits, labels).max_false_logit()
    of_batch = jax.nn.relu(margin - batch.min(true_logit) + batch.max(max_false_logit))
    of_examples = jax.nn.relu(margin - true_logit + max_false_logit)
    return of_batch / batch.size(of_batch.dtype) + batch.mean(of_examples)


LOSSES: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        "cross_entropy": cross_entropy,
        "max_margin": max_margin,
        "self_normalization": self_normalization,
        "noise_contrastive_estimation": noise_contrastive_estimation,
        "binary_cross_entropy": binary_cross_entropy,
        "batch_cross_entropy": batch_cross_entropy,
        "batch_max_margin": batch_max_margin,
    }
)
"""Every loss by its name, in the order of the paper's tables: first the two that are not aligned."""

ALIGNED: frozenset[str] = frozenset(LOSSES) - {"cross_entropy", "max_margin"}
"""The names of the five losses that are aligned with the Principle of Logit Separation."""


class MeanLoss(Protocol):
    """What `make_loss` returns: the loss of a whole batch, as a training step wants it."""

    def __call__(
        self,
        logits: Logits,
        labels: Int[Array, "*batch"],
        *,
        where: Where | None = None,
        axis_name: AxisName | None = None,
    ) -> Float[Array, ""]:
        """Computes the loss over the real examples of the batch, over all devices."""
        ...


def make_loss(name: str, **hyperparameters: Any) -> MeanLoss:
    """Gives the loss of that name the one form that a training step wants.

    The result maps logits and labels to one number: the mean of a per-example loss over the batch, or the batch loss
    itself. It takes ``where``, a mask or weights (a weight of w counts as w copies of the example), and ``axis_name``,
    the device axes that the batch is split over; both as in `batch_cross_entropy`. A batch of no examples gives 0.

    Args:
      name: A key of `LOSSES`.
      **hyperparameters: The keyword arguments of that loss, such as ``margin`` or ``alpha``.

    Raises:
      ValueError: if there is no loss of that name.
      TypeError: if the loss does not have one of the hyperparameters, or needs one that is not given.

    Examples:
      >>> import jax.numpy as jnp
      >>> loss = make_loss("max_margin", margin=2.0)
      >>> logits, labels = jnp.array([[2.0, 1.5], [0.0, 3.0]]), jnp.array([0, 1])
      >>> float(loss(logits, labels))
      0.75
      >>> float(loss(logits, labels, where=jnp.array([True, False])))
      1.5
    """
    if name not in LOSSES:
        raise ValueError(unknown_name("loss", name, LOSSES))
    loss = LOSSES[name]
    _check_hyperparameters(loss, hyperparameters)
    is_batch_loss = "where" in inspect.signature(loss).parameters

    def mean_loss(logits, labels, *, where=None, axis_name=None):
        if is_batch_loss:
            return loss(logits, labels, where=where, axis_name=axis_name, **hyperparameters)
        logits, labels, batch = _real_examples(logits, labels, where=where, axis_name=axis_name)
        return batch.mean(loss(logits, labels, **hyperparameters))

    return mean_loss


def is_correct(logits: Logits, labels: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
    """Tells which examples have their true logit above all others; a tie counts as wrong.

    Args:
      logits: Logits, shape ``[..., k]``, or `LinearLogits`.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.

    Returns:
      One boolean per example, shape ``[...]``. A label outside ``[0, k)`` is wrong.

    Examples:
      >>> import jax.numpy as jnp
      >>> is_correct(jnp.array([[2.0, 1.5], [4.0, 3.0]]), jnp.array([0, 1])).tolist()
      [True, False]
    """
    true_logit, max_false_logit = _class_stats(logits, labels).max_false_logit()
    return true_logit > max_false_logit


def _class_stats(logits: Logits, labels) -> DenseStats | LinearStats:
    """The statistics of what is given: from all the logits, or class block by class block."""
    logits, labels = _checked(logits, labels)
    return LinearStats(logits, labels) if isinstance(logits, LinearLogits) else DenseStats(logits, labels)


def _real_examples(
    logits: Logits, labels, *, where, axis_name
) -> tuple[Logits, Int[Array, "*batch"], GlobalBatch]:
    """What is given, with zeros in the rows that are not real, and the batch that they are part of.

    Not even a NaN in a row that is not real reaches a gradient then.
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


def _check_hyperparameters(loss, given):
    parameters = inspect.signature(loss).parameters
    known = {n: p for n, p in parameters.items() if n not in ("logits", "labels", "where", "axis_name")}
    for name in given:
        if name not in known:
            takes = " and ".join(known) or "no hyperparameters"
            raise TypeError(f"{loss.__name__} has no hyperparameter {name!r}; it takes {takes}.")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            raise TypeError(f"{loss.__name__} needs the hyperparameter {name!r}.")
