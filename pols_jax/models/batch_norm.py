"""Batch normalization over all devices and over real examples only.

N devices must train the same model as one, also when the last batch is padded and the padding is spread unevenly
over the devices. The mean of the devices' means is then the wrong mean, so sums and counts are added up over the
devices and divided once.
"""

import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

AxisName = str | tuple[str, ...]


class BatchNorm(nn.Module):
    """Normalizes every channel by the mean and variance of the whole batch, then scales and shifts it.

    Statistics are computed in float32 (or wider) whatever the compute dtype, the variance as the mean squared
    distance from the mean: subtracting the squared mean from the mean square would lose a small variance beside a
    large mean. Parameters are ``scale`` and ``bias``; the collection ``batch_stats`` holds the running ``mean`` and
    ``var``, which evaluation uses. The running variance is the biased one (divided by the count n, not n - 1).

    Attributes:
      axis_name: The device axes that the batch is split over, or None. They are ignored in ``init``, which needs no
        devices.
      momentum: The share of the running average that a training step keeps.
      epsilon: Added to the variance before its root is taken.
      dtype: The dtype of the result; the input's own if None.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> norm = BatchNorm(epsilon=0.0)
      >>> x = jnp.array([[1.0], [3.0], [99.0]])
      >>> variables = norm.init(jax.random.key(0), x)
      >>> where = jnp.array([True, True, False])  # the last row is padding
      >>> y, updates = norm.apply(variables, x, train=True, where=where, mutable=["batch_stats"])
      >>> y[:2, 0]
      Array([-1.,  1.], dtype=float32)
      >>> updates["batch_stats"]["mean"]  # a tenth of the way from 0 to 2
      Array([0.2], dtype=float32)
    """

    axis_name: AxisName | None = None
    momentum: float = 0.9
    epsilon: float = 1e-5
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch *space channels"],
        *,
        train: bool = False,
        where: Bool[Array, " batch"] | None = None,
    ) -> Float[Array, "batch *space channels"]:
        """Normalizes ``x``.

        Args:
          x: Activations, shape ``[m, ..., c]``.
          train: Whether to use the statistics of this batch, and to update the running ones, instead of using the
            running ones.
          where: True for real examples, shape ``[m]``; None if all are real. A masked row has no part in the
            statistics. If every row on every device is masked, the running statistics stay as they are.

        Returns:
          Normalized activations, shape ``[m, ..., c]``. Masked rows are normalized too and mean nothing.
        """
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)

        wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
        if train:
            mean, var, count = self._batch_statistics(wide, where)
            if not self.is_initializing():
                rate = jnp.where(count > 0, jnp.float32(1 - self.momentum), jnp.float32(0))
                for running, batch in ((running_mean, mean), (running_var, var)):
                    running.value += rate * (batch.astype(jnp.float32) - running.value)
        else:
            mean, var = running_mean.value, running_var.value

        def per_channel(values):
            return values.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + channels)

        factor = per_channel(scale) * lax.rsqrt(per_channel(var) + self.epsilon)
        normalized = (wide - per_channel(mean)) * factor + per_channel(bias)
        return normalized.astype(self.dtype or x.dtype)

    def _batch_statistics(self, x, where):
        """Returns mean [c], biased variance [c] and the number [] of values behind each."""
        axes = tuple(range(x.ndim - 1))
        where = None if where is None else where.reshape((-1,) + (1,) * (x.ndim - 1))
        num_examples = jnp.asarray(x.shape[0]) if where is None else jnp.sum(where)
        count = self._over_devices(num_examples.astype(x.dtype) * math.prod(x.shape[1:-1]))
        divisor = jnp.maximum(count, 1)
        mean = self._over_devices(jnp.sum(x, axes, where=where)) / divisor
        distance = x - mean.reshape((1,) * (x.ndim - 1) + mean.shape)
        var = self._over_devices(jnp.sum(jnp.square(distance), axes, where=where)) / divisor
        return mean, var, count

    def _over_devices(self, total):
        if self.axis_name is None or self.is_initializing():
            return total
        return lax.psum(total, self.axis_name)
