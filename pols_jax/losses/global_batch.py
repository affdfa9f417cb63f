"""Sums, means and extremes over a whole batch: over its real examples, and over every device that holds a part."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pols_jax.losses.class_stats import LogSumExp

AxisName = str | Sequence[str]
Where = Bool[ArrayLike, "*batch"] | Float[ArrayLike, "*batch"] | Int[ArrayLike, "*batch"]
"""A mask or weights."""


class GlobalBatch(NamedTuple):
    """The examples that a loss is taken over, all axes of them together.

    Attributes:
      where: Which of this device's examples are real (and not padding).
      weights: How often each of them counts, 0 where it is not real; None if all real ones count once.
      axis_name: The device axes that the batch is split over; None for one device.

    Examples:
      >>> batch = GlobalBatch(where=jnp.array([True, True, False]))
      >>> float(batch.mean(jnp.array([1.0, 3.0, 100.0])))
      2.0
    """

    where: Bool[Array, "*batch"]
    weights: Float[Array, "*batch"] | None = None
    axis_name: AxisName | None = None

    @classmethod
    def of(
        cls,
        labels: Int[Array, "*batch"],
        where: Where | None,
        axis_name: AxisName | None,
    ) -> "GlobalBatch":
        """Checks a mask or weights against the labels; None means that every example is real."""
        if where is None:
            return cls(jnp.ones(labels.shape, bool), None, axis_name)
        if not isinstance(where, jax.Array):
            where = _known_weights(where)
        is_mask = where.dtype == bool
        if not (is_mask or any(jnp.issubdtype(where.dtype, kind) for kind in (jnp.integer, jnp.floating))):
            raise TypeError(f"where must be a mask or weights, got dtype {where.dtype}.")
        where = jnp.asarray(where)
        if where.shape != labels.shape:
            raise ValueError(f"where must have the shape of labels, {labels.shape}, got shape {where.shape}.")
        if is_mask:
            return cls(where, None, axis_name)
        if jnp.issubdtype(where.dtype, jnp.integer):
            where = where.astype(float)
        is_real = ~(where <= 0)  # a weight of NaN is real, and the loss NaN
        return cls(is_real, jnp.where(is_real, where, 0.0), axis_name)

    def size(self, dtype: DTypeLike) -> Float[Array, ""]:
        """The number of real examples, or the sum of the weights; 1 if there are none, so that it can be divided by."""
        count = self._count(dtype)
        return jnp.where(count == 0, 1.0, count)

    def sum(self, values: Float[Array, "*batch"]) -> Float[Array, ""]:
        """The sum over the real examples."""
        return self._over_devices(jnp.sum(self._weighted(jnp.where(self.where, values, 0.0))))

    def mean(self, values: Float[Array, "*batch"]) -> Float[Array, ""]:
        """The mean over the real examples; 0 if there are none."""
        return self.sum(values) / self.size(values.dtype)

    def max(self, values: Float[Array, "*batch"]) -> Float[Array, ""]:
        """The maximum over the real examples, the most negative number if there are none.

        Its gradient goes to the largest values, in equal shares. (``lax.pmax`` by itself has no gradient.)
        """
        values = jnp.where(self.where, values, jnp.finfo(values.dtype).min)
        fixed = lax.stop_gradient(values)
        largest = self._max_over_devices(fixed)
        is_largest = self._weighted(((fixed == largest) & self.where).astype(values.dtype))
        is_largest = lax.stop_gradient(is_largest)
        total = self._over_devices(jnp.sum(is_largest))
        share = is_largest / jnp.where(total == 0, 1.0, total)
        return largest + self._over_devices(jnp.sum(share * (values - fixed)))

    def min(self, values: Float[Array, "*batch"]) -> Float[Array, ""]:
        """The minimum over the real examples, see `max`."""
        return -self.max(-values)

    def logmeanexp(self, parts: LogSumExp) -> LogSumExp:
        """The logarithm of the mean of ``exp`` over the real examples, in two parts; ``(0, 0)`` if there are none."""
        lowest = jnp.finfo(parts.peak.dtype).min
        peak = self._max_over_devices(jnp.where(self.where, parts.peak, lowest))
        any_real = self._count(peak.dtype) > 0
        peak = jnp.where(any_real, peak, 0.0)
        # The mask goes inside the exponential: outside it, an overflow in a masked row would have a NaN gradient.
        exponents = jnp.where(self.where, (parts.peak - peak) + parts.log_sum, lowest)
        mean = self.mean(jnp.exp(exponents))
        return LogSumExp(peak, jnp.log(jnp.where(any_real, mean, 1.0)))

    def _weighted(self, values):
        return values if self.weights is None else values * self.weights.astype(values.dtype)

    def _count(self, dtype):
        return self._over_devices(jnp.sum(self._weighted(self.where.astype(dtype))))

    def _over_devices(self, total):
        return total if self.axis_name is None else lax.psum(total, self.axis_name)

    def _max_over_devices(self, fixed):
        largest = jnp.max(lax.stop_gradient(fixed), initial=jnp.finfo(fixed.dtype).min)
        return largest if self.axis_name is None else lax.pmax(largest, self.axis_name)


def _known_weights(where) -> np.ndarray:
    """Checks weights whose values can be seen; a JAX array may have none yet, and is not waited for."""
    where = np.asarray(where)
    if np.issubdtype(where.dtype, np.integer):
        where = where.astype(np.float64)  # JAX would cut 64-bit integers down to 32 bits
    if where.dtype.kind == "f" and not (np.isfinite(where) & (where >= 0)).all():
        raise ValueError("where must not have weights that are negative, infinite or NaN.")
    return where
