"""The end of a network that is trained without all its logits: the loss, and which examples are right.

With a mesh, the rows of the output layer are spread over its class axis and the batch over its data axis. The arrays are
those of the whole model and the whole batch all the same: `LinearOutput` is called in a plain ``jit``, and only what it
does itself is written per device.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from pols_jax.global_batch import AxisName
from pols_jax.linear_losses import MeanLinearLoss
from pols_jax.linear_stats import LinearStats, default_block_size
from pols_jax.sharded_head import CLASS_AXIS, DATA_AXIS


class LinearOutput(NamedTuple):
    """An output layer whose logits are never all there.

    Attributes:
      mean_loss: The loss, from `pols_jax.linear_losses.make_linear_loss`.
      mesh: The devices that the classes are spread over, from `pols_jax.sharded_head.make_mesh`; None for none.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pols_jax.linear_losses import make_linear_loss
      >>> output = LinearOutput(make_linear_loss("max_margin"))
      >>> layer = jnp.array([[3.0, 0.0], [2.0, 0.5]]), jnp.eye(2), jnp.zeros(2), jnp.array([0, 1])
      >>> float(output.loss(*layer, where=jnp.array([True, True])))
      1.25
      >>> output.is_correct(*layer).tolist()
      [True, False]
    """

    mean_loss: MeanLinearLoss
    mesh: Mesh | None = None

    def loss(
        self,
        features: Float[Array, "batch features"],
        kernel: Float[Array, "classes features"],
        bias: Float[Array, " classes"],
        labels: Int[Array, " batch"],
        *,
        where: Bool[Array, " batch"],
        axis_name: AxisName | None = None,
    ) -> Float[Array, ""]:
        """Computes the loss of the batch; ``axis_name`` is for pmap, and has no place on a mesh."""
        if self.mesh is None:
            return self.mean_loss(features, kernel, bias, labels, where=where, axis_name=axis_name)

        def on_device(features, kernel, bias, labels, where):
            layer = features, kernel, bias, labels
            return self.mean_loss(*layer, where=where, axis_name=DATA_AXIS, class_axis_name=CLASS_AXIS)

        return self._on_mesh(on_device, P())(features, kernel, bias, labels, where)

    def is_correct(
        self,
        features: Float[Array, "batch features"],
        kernel: Float[Array, "classes features"],
        bias: Float[Array, " classes"],
        labels: Int[Array, " batch"],
    ) -> Bool[Array, " batch"]:
        """Tells which examples have their true logit as the largest; a tie counts as wrong."""

        def on_device(features, kernel, bias, labels):
            z = LinearStats(
                *(features, kernel, bias, labels),
                statistic="max_false",
                block_size=default_block_size(len(features), *reversed(kernel.shape)),
                class_axis_name=None if self.mesh is None else CLASS_AXIS,
            )
            return z.true > z.max_false()

        if self.mesh is None:
            return on_device(features, kernel, bias, labels)
        return self._on_mesh(on_device, P(DATA_AXIS))(features, kernel, bias, labels)

    def _on_mesh(self, on_device: Callable, out_spec: P) -> Callable:
        def run(*arrays):
            batch, classes = P(DATA_AXIS), P(CLASS_AXIS)
            specs = (batch, classes, classes, batch, batch)[: len(arrays)]
            return jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=out_spec)(*arrays)

        return run
