"""The noise of noise-contrastive estimation: how often each class is expected among it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pols_jax.losses.checks import accumulation_dtype, check_noise_probs, check_positive


class Noise(NamedTuple):
    """Noise classes: class j is expected ``num_noise * probs[j]`` times among them.

    Attributes:
      num_noise: The number of noise classes.
      probs: Their distribution, shape ``[k]``; shape ``[1]`` if all classes have the same probability.

    Examples:
      >>> counts, log_counts = Noise.of(num_noise=4, noise_probs=None, num_classes=8).counts()
      >>> counts.tolist(), log_counts.tolist()
      ([0.5], [-0.693147])
    """

    num_noise: Float[Array, ""]
    probs: Float[Array, " classes"]

    @classmethod
    def of(
        cls, *, num_noise: ArrayLike, noise_probs: Float[ArrayLike, " classes"] | None, num_classes: int
    ) -> "Noise":
        """Checks a loss's arguments; uniform if ``noise_probs`` is None."""
        check_positive("num_noise", num_noise)
        if noise_probs is None:
            probs = jnp.full((1,), 1.0 / num_classes, dtype=float)  # one number stands for all classes
        else:
            probs = check_noise_probs(noise_probs, num_classes)
        return cls(jnp.asarray(num_noise), probs)

    def part(self, start: ArrayLike, size: int) -> "Noise":
        """The noise of ``size`` classes from ``start`` on."""
        if self.probs.shape == (1,):
            return self._replace(probs=jnp.broadcast_to(self.probs, (size,)))
        return self._replace(probs=lax.dynamic_slice_in_dim(self.probs, jnp.asarray(start), size))

    def of_classes(self, class_ids: Int[Array, " asked"]) -> "Noise":
        """The noise of some classes."""
        return self._replace(probs=self.probs.at[class_ids].get(mode="clip"))

    def counts(self) -> tuple[Float[Array, " classes"], Float[Array, " classes"]]:
        """How often each class is expected, ``t q``, and the logarithm.

        A class that is never noise contributes nothing. Its logarithm is a large negative number instead of minus
        infinity, so that no product of zero and infinity arises.
        """
        dtype = accumulation_dtype(self.probs)
        counts = self.num_noise.astype(dtype) * self.probs.astype(dtype)
        never = counts == 0
        return counts, jnp.where(never, -1e30, jnp.log(jnp.where(never, 1.0, counts)))
