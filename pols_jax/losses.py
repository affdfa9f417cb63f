r"""The seven losses of single-logit classification, from logits.

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

Each loss comes in two parts: the public function, which takes logits, and its formula (``*_formula``), which takes
the statistics of `pols_jax.class_stats` and is the only place where the equation stands.

Reference: Keren, Sabato and Schuller, *Fast Single-Class Classification and the Principle of Logit Separation*.
Equation and section numbers below are that paper's.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from pols_jax.checks import check_logits_and_labels, check_noise_probs, check_positive, unknown_name
from pols_jax.class_stats import ClassStats, DenseStats
from pols_jax.global_batch import AxisName, GlobalBatch
from pols_jax.precision import accumulation_dtype


def cross_entropy(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    r"""Computes the cross-entropy of the softmax (Eq. 1). Not aligned.

    .. math:: \ell(z, y) = \log \sum_j e^{z_j} - z_y

    Not aligned: adding a number to all logits of one example changes nothing, so the loss cannot tell whether the
    true logits of one example are larger than the false logits of another.

    Args:
      logits: Logits, shape ``[..., k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> cross_entropy(jnp.array([[2.0, 1.0]]), jnp.array([0]))
      Array([0.3133], dtype=float32)
    """
    return cross_entropy_formula(_dense(logits, labels))


def cross_entropy_formula(z: ClassStats) -> Float[Array, "..."]:
    """`cross_entropy`, from class statistics."""
    peak, log_sum = z.logsumexp()
    return (peak - z.true) + log_sum


def max_margin(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"], *, margin: ArrayLike = 1.0
) -> Float[Array, "*batch"]:
    r"""Computes the multiclass max-margin loss of Crammer and Singer (Eq. 2). Not aligned.

    .. math:: \ell(z, y) = \max(0, \gamma - z_y + \max_{j \ne y} z_j)

    Not aligned for the same reason as `cross_entropy`: it sees only differences within one example.

    Args:
      logits: Logits, shape ``[..., k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      margin: By how much the true logit has to be larger than the false ones; positive.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> max_margin(jnp.array([[2.0, 1.5], [0.0, 3.0]]), jnp.array([0, 1]))
      Array([0.5, 0. ], dtype=float32)
    """
    return max_margin_formula(_dense(logits, labels), margin=margin)


def max_margin_formula(z: ClassStats, *, margin: ArrayLike = 1.0) -> Float[Array, "..."]:
    """`max_margin`, from class statistics."""
    check_positive("margin", margin)
    return jax.nn.relu(margin - z.true + z.max_false())


def self_normalization(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"], *, alpha: ArrayLike = 0.1
) -> Float[Array, "*batch"]:
    r"""Computes cross-entropy plus a penalty on the normaliser (Section IV-A; Devlin et al.). Aligned.

    .. math:: \ell(z, y) = \log Z - z_y + \alpha \log^2 Z, \qquad Z = \sum_j e^{z_j}

    Aligned: at the minimum Z = 1 for every example, so the true logit tends to 0 and the false ones to minus infinity.

    Args:
      logits: Logits, shape ``[..., k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      alpha: The weight of the penalty; positive.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> self_normalization(jnp.array([[2.0, 1.0]]), jnp.array([0]), alpha=0.1)
      Array([0.8484], dtype=float32)
    """
    return self_normalization_formula(_dense(logits, labels), alpha=alpha)


def self_normalization_formula(z: ClassStats, *, alpha: ArrayLike = 0.1) -> Float[Array, "..."]:
    """`self_normalization`, from class statistics."""
    check_positive("alpha", alpha)
    peak, log_sum = z.logsumexp()
    return (peak - z.true) + log_sum + alpha * (peak + log_sum) ** 2


def noise_contrastive_estimation(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"],
    *,
    num_noise: ArrayLike,
    noise_probs: Float[ArrayLike, " classes"] | None = None,
) -> Float[Array, "*batch"]:
    r"""Computes the noise-contrastive estimation loss (Eq. 3; Mnih and Teh). Aligned.

    .. math:: \ell(z, y) = \log(1 + e^{-s_y}) + t \sum_j q_j \log(1 + e^{s_j}), \qquad s_j = z_j - \log(t q_j)

    The expectation over the noise classes is computed exactly, over all classes and the true one included.

    Aligned: at the minimum every true logit is 0 and every false logit tends to minus infinity, whatever q > 0 is.

    Args:
      logits: Logits, shape ``[..., k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.
      num_noise: How many noise classes stand against each true one, t; positive.
      noise_probs: The distribution q of the noise classes, shape ``[k]``; uniform if None.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> noise_contrastive_estimation(jnp.array([[2.0, 1.0]]), jnp.array([0]), num_noise=2)
      Array([3.5671], dtype=float32)
    """
    logits, labels = check_logits_and_labels(logits, labels)
    counts, log_counts = expected_noise(logits.shape[-1], num_noise=num_noise, noise_probs=noise_probs)
    dtype = accumulation_dtype(logits)
    scores = logits.astype(dtype) - jnp.broadcast_to(log_counts.astype(dtype), logits.shape)
    return noise_contrastive_estimation_formula(DenseStats(scores, labels), noise_counts=counts)


def noise_contrastive_estimation_formula(
    s: ClassStats, *, noise_counts: Float[Array, " classes"] | None
) -> Float[Array, "..."]:
    """`noise_contrastive_estimation`, from the counts ``t q_j`` and statistics of ``s_j = z_j - log(t q_j)``.

    The counts are None if the statistics have them already.
    """
    return jax.nn.softplus(-s.true) + s.softplus_sum(weights=noise_counts)


def expected_noise(
    num_classes: int, *, num_noise: ArrayLike, noise_probs: Float[ArrayLike, " classes"] | None = None
) -> tuple[Float[Array, " classes"], Float[Array, " classes"]]:
    """Returns how often each class is expected among the noise, and the logarithm, for `noise_contrastive_estimation`.

    A class that is never noise (``q_j = 0``) contributes nothing; the logarithm of its count is a large negative number instead
    of minus infinity, so that no product of zero and infinity arises.

    Args:
      num_classes: The number of classes k.
      num_noise: The number of noise classes t; positive.
      noise_probs: The distribution q, shape ``[k]``; uniform if None.

    Returns:
      The counts ``t q`` and their logarithms, both of shape ``[k]``.

    Raises:
      ValueError: if ``num_noise`` is not positive, or ``noise_probs`` is not a distribution over the k classes.

    Examples:
      >>> counts, log_counts = expected_noise(4, num_noise=4)
      >>> counts.tolist(), log_counts.tolist()
      ([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    """
    check_positive("num_noise", num_noise)
    if noise_probs is None:
        noise_probs = jnp.full((num_classes,), 1.0 / num_classes, dtype=float)
    else:
        noise_probs = check_noise_probs(noise_probs, num_classes)
    return noise_counts_formula(noise_probs=noise_probs, num_noise=num_noise)


def noise_counts_formula(
    *, noise_probs: Float[Array, " classes"], num_noise: ArrayLike
) -> tuple[Float[Array, " classes"], Float[Array, " classes"]]:
    """`expected_noise`, for any part of the classes and without its checks."""
    dtype = accumulation_dtype(noise_probs)
    counts = jnp.asarray(num_noise).astype(dtype) * noise_probs.astype(dtype)
    never = counts == 0
    return counts, jnp.where(never, -1e30, jnp.log(jnp.where(never, 1.0, counts)))


def binary_cross_entropy(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    r"""Computes one logistic loss per class, summed over the classes (Section IV-C). Aligned.

    .. math:: \ell(z, y) = \log(1 + e^{-z_y}) + \sum_{j \ne y} \log(1 + e^{z_j})

    Aligned: each true logit is pushed up and each false logit down, by itself.

    Args:
      logits: Logits, shape ``[..., k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[...]``.

    Returns:
      One loss per example, shape ``[...]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> binary_cross_entropy(jnp.array([[2.0, 1.0]]), jnp.array([0]))
      Array([1.4402], dtype=float32)
    """
    return binary_cross_entropy_formula(_dense(logits, labels))


def binary_cross_entropy_formula(z: ClassStats) -> Float[Array, "..."]:
    """`binary_cross_entropy`, from class statistics."""
    return jax.nn.softplus(-z.true) + z.softplus_sum(false_only=True)


def batch_cross_entropy(
    logits: Float[Array, "batch classes"],
    labels: Int[Array, " batch"],
    *,
    where: Bool[Array, " batch"] | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    r"""Computes the batch cross-entropy: one softmax over all logits of the batch (Definition 2). Aligned.

    .. math:: L(B) = \mathrm{KL}(P_B \| Q_B) = \log \Big(\frac1m \sum_{i,j} e^{z_{ij}}\Big) - \frac1m \sum_i z_{i y_i}

    where :math:`P_B` is 1/m on each true entry and :math:`Q_B` is the softmax over all m k logits. The closed form needs
    no epsilon, and its minimum is 0.

    Aligned: it is blind only to a number added to all logits of the batch, so within a batch every true logit has to be
    larger than every false one; random batches carry that over to the whole set.

    Args:
      logits: Logits, shape ``[m, k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[m]``.
      where: Which examples are real, shape ``[m]``; all if None. The others change neither value nor gradient.
      axis_name: The device axes that the batch is split over. The loss is then that of the whole batch, on every
        device, and the ``pmean`` of the devices' gradients, under ``pmap`` or ``shard_map``, is its gradient.

    Returns:
      One loss for the batch, shape ``[]``; 0 if no example is real.

    Examples:
      >>> import jax.numpy as jnp
      >>> batch_cross_entropy(jnp.array([[3.0, 0.0], [0.0, 3.0]]), jnp.array([0, 1]))
      Array(0.0486, dtype=float32)
    """
    logits, labels = check_logits_and_labels(logits, labels, rank=2)
    batch = GlobalBatch.of(labels, where, axis_name)
    return batch_cross_entropy_formula(DenseStats(*_without_padding(logits, labels, batch)), batch)


def batch_cross_entropy_formula(z: ClassStats, batch: GlobalBatch) -> Float[Array, ""]:
    """`batch_cross_entropy`, from class statistics."""
    peak, log_mean = batch.logmeanexp(z.logsumexp())
    return batch.mean(peak - z.true) + log_mean


def batch_max_margin(
    logits: Float[Array, "batch classes"],
    labels: Int[Array, " batch"],
    *,
    margin: ArrayLike = 1.0,
    where: Bool[Array, " batch"] | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    r"""Computes the batch max-margin loss: one margin over the whole batch (Definition 3). Aligned.

    .. math:: L(B) = \frac1m \max(0, \gamma - \min_i z_{i y_i} + \max_{i, j \ne y_i} z_{ij})
              + \frac1m \sum_i \max(0, \gamma - z_{i y_i} + \max_{j \ne y_i} z_{ij})

    Aligned by its first term. The second, `max_margin`, gives a gradient to more than two logits of the batch.

    Args:
      logits: Logits, shape ``[m, k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[m]``.
      margin: By how much a true logit has to be larger than the false ones; positive.
      where: Which examples are real, shape ``[m]``; all if None. The others change neither value nor gradient.
      axis_name: The device axes that the batch is split over, see `batch_cross_entropy`.

    Returns:
      One loss for the batch, shape ``[]``; 0 if no example is real.

    Examples:
      >>> import jax.numpy as jnp
      >>> float(batch_max_margin(jnp.array([[3.0, 1.0], [0.0, 1.0]]), jnp.array([0, 1])))
      0.5
    """
    logits, labels = check_logits_and_labels(logits, labels, rank=2)
    batch = GlobalBatch.of(labels, where, axis_name)
    z = DenseStats(*_without_padding(logits, labels, batch))
    return batch_max_margin_formula(z, batch, margin=margin)


def batch_max_margin_formula(
    z: ClassStats, batch: GlobalBatch, *, margin: ArrayLike = 1.0
) -> Float[Array, ""]:
    """`batch_max_margin`, from class statistics."""
    over_batch = jax.nn.relu(margin - batch.min(z.true) + batch.max(z.max_false()))
    return over_batch / batch.size(over_batch.dtype) + batch.mean(max_margin_formula(z, margin=margin))


LOSSES: Mapping[str, Callable[..., Array]] = MappingProxyType(
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
"""Every loss by its name, in the order of the paper's tables: first the two that are not aligned."""

ALIGNED: frozenset[str] = frozenset(LOSSES) - {"cross_entropy", "max_margin"}
"""The names of the five losses that are aligned with the Principle of Logit Separation."""


class MeanLoss(Protocol):
    """What `make_loss` returns: the loss of a whole batch, as a training step wants it."""

    def __call__(
        self,
        logits: Float[Array, "*batch classes"],
        labels: Int[Array, "*batch"],
        *,
        where: Bool[Array, "*batch"] | None = None,
        axis_name: AxisName | None = None,
    ) -> Float[Array, ""]:
        """Computes the loss over the real examples of the batch, over all devices."""
        ...


def make_loss(name: str, **hyperparameters: Any) -> MeanLoss:
    """Gives the loss of that name the one form that a training step wants.

    The result maps logits and labels to one number: the mean of a per-example loss over the batch, or the batch loss
    itself. It takes ``where``, which marks the real examples of a padded batch, and ``axis_name``, the device axes
    that the batch is split over; both as in `batch_cross_entropy`.

    Args:
      name: A key of `LOSSES`.
      **hyperparameters: The keyword arguments of that loss, such as ``margin`` or ``alpha``.

    Returns:
      ``f(logits, labels, *, where=None, axis_name=None)``.

    Raises:
      ValueError: if there is no loss of that name.
      TypeError: if the loss does not have one of the hyper-parameters, or needs one that is not given.

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
        logits, labels = check_logits_and_labels(logits, labels)
        batch = GlobalBatch.of(labels, where, axis_name)
        return batch.mean(loss(*_without_padding(logits, labels, batch), **hyperparameters))

    return mean_loss


def _dense(logits, labels) -> DenseStats:
    return DenseStats(*check_logits_and_labels(logits, labels))


def _without_padding(logits, labels, batch: GlobalBatch):
    """Replaces the rows that are not real by zeros, so that not even a NaN in them reaches a gradient."""
    return jnp.where(batch.where[..., None], logits, 0.0), jnp.where(batch.where, labels, 0)


def _check_hyperparameters(loss, given):
    parameters = inspect.signature(loss).parameters
    known = {n: p for n, p in parameters.items() if n not in ("logits", "labels", "where", "axis_name")}
    for name in given:
        if name not in known:
            takes = " and ".join(known) or "no hyper-parameters"
            raise TypeError(f"{loss.__name__} has no hyper-parameter {name!r}; it takes {takes}.")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            raise TypeError(f"{loss.__name__} needs the hyper-parameter {name!r}.")
