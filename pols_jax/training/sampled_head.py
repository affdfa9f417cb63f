"""`--head sampled`: a step of noise-contrastive estimation reads and writes the rows of the true and the drawn classes only.

Every device draws the same classes, as a function of seed and step, and sees the labels of all devices: so all touch the same
rows, average their gradients, and write the same numbers. Nothing that is sent, and nothing that is computed, grows with k.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from pols_jax.losses.global_batch import GlobalBatch
from pols_jax.losses.sampled import Sampler, TouchedClasses, loss_of_touched, touched_classes
from pols_jax.training.row_optimizers import RowOptimizer, Rows, RowState, read_rows

# What distinguishes the key of the noise from the other keys of a step.
_NOISE_KEY = 2**31


class Touched(NamedTuple):
    """What a step reads of the output layer: which classes, and their rows."""

    classes: TouchedClasses
    rows: Rows


@dataclasses.dataclass(frozen=True, eq=False)
class SampledHead:
    """How an output layer is trained from drawn classes, as pure functions; a `Learner` has one with ``--head sampled``.

    Attributes:
      sampler: Draws the noise classes.
      num_noise: How many are drawn in a step, for all examples together.
      optimizer: Updates the rows.
      seed: The seed of the run.
      clip_norm: Shrinks the gradient of backbone and touched rows together, if its norm is larger; None for never.
      class_weights: How often an example of each class counts; None for once.
    """

    sampler: Sampler
    num_noise: int
    optimizer: RowOptimizer
    seed: int
    clip_norm: float | None = None
    class_weights: Float[np.ndarray, " classes"] | None = None

    def touch(
        self,
        head: dict[str, Array],
        state: RowState,
        labels: Int[Array, " batch"],
        step: Int[Array, ""],
        *,
        axis_name: str | None,
    ) -> Touched:
        """Draws the noise classes of a step, and reads their rows and those of the true classes of all devices."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), step), _NOISE_KEY)
        drawn = self.sampler.draw(key, (self.num_noise,))
        num_labels = len(labels)
        if axis_name is not None:
            labels = lax.all_gather(labels, axis_name, tiled=True)
        touched = touched_classes(labels, drawn, num_classes=self.sampler.num_classes)
        if axis_name is not None:
            start = num_labels * lax.axis_index(axis_name)
            touched = touched._replace(true=lax.dynamic_slice_in_dim(touched.true, start, num_labels))
        return Touched(touched, read_rows(self.optimizer, head, state, touched.classes, step))

    def loss(
        self,
        rows: dict[str, Array],
        features: Float[Array, "batch features"],
        labels: Int[Array, " batch"],
        where: Array,
        touched: Touched,
        *,
        dtype: Any,
        axis_name: str | None,
    ) -> Float[Array, ""]:
        """The mean loss of the whole batch, from the rows that are to be differentiated."""
        if self.class_weights is not None:
            where = jnp.where(where, jnp.asarray(self.class_weights)[labels], 0.0)
        losses = loss_of_touched(
            features.astype(dtype),
            rows["kernel"].astype(dtype),
            rows["bias"],
            touched.classes,
            sampler=self.sampler,
            num_noise=self.num_noise,
        )
        return GlobalBatch.of(labels, where, axis_name).mean(losses)

    def clipped(self, gradients: Any) -> Any:
        """Gradients of backbone and rows, with a norm of at most ``clip_norm``."""
        if self.clip_norm is None:
            return gradients
        return optax.clip_by_global_norm(self.clip_norm).update(gradients, optax.EmptyState())[0]
