"""Sums, means and extremes over a whole batch: over its real examples, and over every device that holds a part."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pols_jax.class_stats import LogSumExp

AxisName = str | Sequence[str]


class GlobalBatch(NamedTuple):
    """The examples that a loss is taken over.

    Attributes:
      where: Which of this device's examples are real (and not padding).
      axis_name: The device axes that the batch is split over; None for one device.

    Examples:
      >>> import jax.numpy as jnp
      >>> batch = GlobalBatch(where=jnp.array([True, True, False]))
      >>> float(batch.mean(jnp.array([1.0, 3.0, 100.0])))
      2.0
    """

    where: Bool[Array, "*batch"]
    axis_name: AxisName | None = None

    @classmethod
    def of(
        cls, labels: Int[Array, "*batch"], where: Bool[Array, "*batch"] | None, axis_name: AxisName | None
    ) -> "GlobalBatch":
        """Checks ``where`` against the labels; None means that every example is real."""
        if where is None:
            return cls(jnp.ones(labels.shape, bool), axis_name)
        where = jnp.asarray(where)
        if where.dtype != bool:
            raise TypeError(f"where must be booleans, got dtype {where.dtype}.")
        if where.shape != labels.shape:
            raise ValueError(f"where must have the shape of labels, {labels.shape}, got shape {where.shape}.")
        return cls(where, axis_name)

    def size(self, dtype: DTypeLike) -> Float[Array, ""]:
        """The number of real examples; 1 if there are none, so that it can be divided by."""
        return jnp.maximum(self._count(dtype), 1.0)

    def sum(self, values: Float[Array, "*batch"]) -> Float[Array, ""]:
        """The sum over the real examples."""
        return self._over_devices(jnp.sum(jnp.where(self.where, values, 0.0)))

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
        is_largest = ((fixed == largest) & self.where).astype(values.dtype)
        share = is_largest / jnp.maximum(self._over_devices(jnp.sum(is_largest)), 1.0)
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

    def _count(self, dtype):
        return self._over_devices(jnp.sum(self.where.astype(dtype)))

    def _over_devices(self, total):
        return total if self.axis_name is None else lax.psum(total, self.axis_name)

    def _max_over_devices(self, fixed):
        largest = jnp.max(lax.stop_gradient(fixed))
        return largest if self.axis_name is None else lax.pmax(largest, self.axis_name)
