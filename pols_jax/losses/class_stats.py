"""What a loss needs to know about all k logits of an example.

Three kinds of statistic serve all seven losses: a logsumexp, the largest false logit and a softplus sum. A loss asks
for the one that it needs and gets the true logit with it, so that one pass over the classes gives both. It does not know
where the numbers come from: an array of logits (`DenseStats`), or features and an output layer, which have the same methods
(`pols_jax.losses.linear_stats`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from pols_jax.losses.checks import accumulation_dtype
from pols_jax.losses.device_axes import partitioned_by_xla
from pols_jax.losses.noise import Noise


class LogSumExp(NamedTuple):
    """The logarithm of a sum of exponentials, as the two parts ``peak + log_sum``.

    Kept apart because a loss subtracts a logit that is about as large as ``peak``: at logits near 1e4 the sum of
    the parts has lost three digits of ``log_sum``.

    Attributes:
      peak: The largest exponent. Its gradient is stopped; that of ``log_sum`` is the whole gradient.
      log_sum: The logarithm of the sum of the exponentials, taken relative to ``peak``.
    """

    peak: Float[Array, "..."]
    log_sum: Float[Array, "..."]


def _over_sharded_classes(method):
    """Lets XLA place the work of a method where the classes are spread over an axis of an explicit mesh."""

    @functools.wraps(method)
    def run(stats: "DenseStats", *arguments):
        spec = jax.typeof(stats.logits).sharding.spec
        if all(axis is None for axis in spec[-1:]):
            return method(stats, *arguments)
        return partitioned_by_xla(
            lambda logits, labels, *rest: method(DenseStats(logits, labels), *rest),
            (stats.logits, stats.labels, *arguments),
            out_spec=P(*spec[:-1]),
        )

    return run


class DenseStats:
    """Class statistics from an array of logits.

    Args:
      logits: Logits, shape ``[..., k]``, of a floating-point dtype. 16-bit logits are read as float32.
      labels: True classes, int32, shape ``[...]``. A label outside ``[0, k)`` makes the true logit NaN.

    Examples:
      >>> true_logit, max_false_logit = DenseStats(jnp.array([[1.0, 5.0, 2.0]]), jnp.array([1])).max_false_logit()
      >>> float(true_logit[0]), float(max_false_logit[0])
      (5.0, 2.0)
    """

    def __init__(self, logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]):
        self.logits = logits.astype(accumulation_dtype(logits))
        # An index past the end reads NaN. A negative one would count from the end, so it is moved there.
        self.labels = jnp.where(labels < 0, logits.shape[-1], labels)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.logits.shape[-1]

    @_over_sharded_classes
    def true_logit(self) -> Float[Array, "..."]:
        """The true logit alone."""
        return _at(self.logits, self.labels)

    @_over_sharded_classes
    def logsumexp(self) -> tuple[Float[Array, "..."], LogSumExp]:
        """The true logit, and the logsumexp over all classes."""
        peak = lax.stop_gradient(jnp.max(self.logits, axis=-1))
        log_sum = jnp.log(jnp.sum(jnp.exp(self.logits - peak[..., None]), axis=-1))
        return _at(self.logits, self.labels), LogSumExp(peak, log_sum)

    @_over_sharded_classes
    def max_false_logit(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The true logit, and the largest false logit; in a tie the lowest class has the gradient.

        Where there is no false class it is the most negative number of the dtype.
        """
        place = lax.argmax(lax.stop_gradient(self._false_logits()), self.logits.ndim - 1, jnp.int32)
        largest = _at(self.logits, place)
        largest = jnp.where(place == self.labels, jnp.finfo(largest.dtype).min, largest)
        return _at(self.logits, self.labels), largest

    @_over_sharded_classes
    def false_softplus_sum(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The true logit, and the sum of softplus over the false logits."""
        return _at(self.logits, self.labels), _softplus_sum(self._false_logits())

    @_over_sharded_classes
    def noise_softplus_sum(self, noise: Noise) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The true score, and the sum over all classes of ``count * softplus(score)``; ``score = logit - log(count)``."""
        dtype = self.logits.dtype
        counts, log_counts = (x.astype(dtype) for x in noise.part(0, self.num_classes).counts())
        scores = self.logits - jnp.broadcast_to(log_counts, self.logits.shape)
        return _at(scores, self.labels), _weighted_softplus_sum(scores, counts)

    def _false_logits(self):
        """The logits, with the most negative number in the place of each true one."""
        classes = lax.broadcasted_iota(jnp.int32, self.logits.shape, self.logits.ndim - 1)
        is_true = classes == self.labels[..., None]
        return jnp.where(is_true, jnp.finfo(self.logits.dtype).min, self.logits)


def _at(logits, classes):
    """Returns the logit of one class per example; NaN for a class past the end."""
    return jnp.take_along_axis(logits, classes[..., None], axis=-1, mode="fill")[..., 0]


# How many classes share one logarithm in `_softplus_sum`; the argument of the logarithm is less than 2 to this power.
_CLASSES_PER_LOGARITHM = 8


@jax.custom_jvp
def _softplus_sum(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch"]:
    """The sum of softplus over the classes, with one logarithm for eight of them: on a CPU it is what costs most.

    With a = exp(-|x|), softplus(x) = max(x, 0) + log(1 + a), and log(1 + a) + log(1 + b) = log(1 + (a + b + ab)). Nothing
    cancels, so small terms keep all their digits.
    """
    size = logits.shape[-1] // _CLASSES_PER_LOGARITHM
    linear = jnp.zeros((*logits.shape[:-1], size), logits.dtype)
    product = linear  # of all 1 + a so far, minus one
    for i in range(_CLASSES_PER_LOGARITHM):
        block = logits[..., i * size : (i + 1) * size]
        decay = jnp.exp(-jnp.abs(block))
        product = product + decay + product * decay
        linear = linear + jnp.where(block > 0, block, 0.0)
    # Always true but for NaN. Without it XLA for CPU hands the sum to a library together with what is summed, and writes
    # every operand of that to memory first.
    sums = jnp.where(product >= 0, linear + jnp.log1p(product), product)
    rest = jax.nn.softplus(logits[..., _CLASSES_PER_LOGARITHM * size :])
    return jnp.sum(sums, axis=-1) + jnp.sum(rest, axis=-1)


@_softplus_sum.defjvp
def _softplus_sum_jvp(primals, tangents):
    (logits,), (tangent,) = primals, tangents
    return _softplus_sum(logits), jnp.sum(lax.logistic(logits) * tangent, axis=-1)


# Into how many blocks of columns `_weighted_softplus_sum` cuts the logits, to write one sum for all of them.
_WEIGHTED_BLOCKS = 4


@jax.custom_jvp
def _weighted_softplus_sum(
    logits: Float[Array, "*batch classes"], weights: Float[Array, " classes"]
) -> Float[Array, "*batch"]:
    """The weighted sum of softplus over the classes; what is written to memory is a quarter as large as the logits."""
    size = logits.shape[-1] // _WEIGHTED_BLOCKS
    sums = jnp.zeros((*logits.shape[:-1], size), logits.dtype)
    for i in range(_WEIGHTED_BLOCKS):
        columns = slice(i * size, (i + 1) * size)
        block = logits[..., columns]
        softplus = jnp.where(block > 0, block, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(block)))
        sums = sums + softplus * jnp.broadcast_to(weights[columns], block.shape)
    sums = jnp.where(sums >= 0, sums, jnp.nan)  # for the reason given in `_softplus_sum`
    rest = logits[..., _WEIGHTED_BLOCKS * size :]
    rest_weights = jnp.broadcast_to(weights[_WEIGHTED_BLOCKS * size :], rest.shape)
    return jnp.sum(sums, axis=-1) + jnp.sum(jax.nn.softplus(rest) * rest_weights, axis=-1)


@_weighted_softplus_sum.defjvp
def _weighted_softplus_sum_jvp(primals, tangents):
    (logits, weights), (logits_tangent, weights_tangent) = primals, tangents
    weights, weights_tangent = (jnp.broadcast_to(array, logits.shape) for array in (weights, weights_tangent))
    terms = lax.logistic(logits) * weights * logits_tangent + jax.nn.softplus(logits) * weights_tangent
    return _weighted_softplus_sum(*primals), jnp.sum(terms, axis=-1)
