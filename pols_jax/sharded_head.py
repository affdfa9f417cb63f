"""An output layer whose rows are spread over devices: a mesh for it, padding to equal parts, one logit from it.

Device s of C along the class axis has the rows from ``s k / C`` on of kernel and bias. The losses of such a layer are
those of `pols_jax.linear_losses`, with ``class_axis_name``.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from pols_jax import heads
from pols_jax.checks import check_output_layer
from pols_jax.device_axes import vary_alike
from pols_jax.precision import accumulation_dtype

DATA_AXIS = "data"
"""The mesh axis that the batch is split over."""

CLASS_AXIS = "class"
"""The mesh axis that the rows of the kernel are split over."""


def make_mesh(num_data: int, num_class: int) -> Mesh:
    """Arranges the devices in ``num_data`` parts of the batch times ``num_class`` parts of the classes.

    Neighbouring devices share a part of the batch: what the class parts exchange in a step is all over the batch.

    Args:
      num_data: Into how many parts the batch is split.
      num_class: Into how many parts the classes are split.

    Returns:
      A mesh with the axes `DATA_AXIS` and `CLASS_AXIS`.

    Raises:
      ValueError: if the product is not the number of devices.

    Examples:
      >>> dict(make_mesh(2, 4).shape)
      {'data': 2, 'class': 4}
    """
    num_devices = jax.device_count()
    if num_data < 1 or num_class < 1 or num_data * num_class != num_devices:
        fitting = ", ".join(
            f"{num_devices // c}x{c}" for c in range(1, num_devices + 1) if num_devices % c == 0
        )
        raise ValueError(
            f"A mesh of data={num_data}, class={num_class} does not fit {num_devices} devices; "
            f"data x class may be {fitting}."
        )
    return jax.make_mesh((num_data, num_class), (DATA_AXIS, CLASS_AXIS), axis_types=(AxisType.Auto,) * 2)


def pad_classes(
    kernel: Float[Array, "classes features"], bias: Float[Array, " classes"], *, num_shards: int
) -> tuple[Float[Array, "padded features"], Float[Array, " padded"]]:
    """Adds rows that no loss can see, until the number of classes is a multiple of the number of shards.

    A row of padding is zero, and its bias so negative that its logit is never the largest, adds nothing to a logsumexp
    or a softplus sum, and has the gradient zero. (The noise of noise-contrastive estimation is the exception: give the
    rows of padding the probability zero.) To undo it, take the first k rows.

    Args:
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      num_shards: The number of parts C.

    Returns:
      Kernel and bias with a multiple of C rows.

    Examples:
      >>> import jax.numpy as jnp
      >>> kernel, bias = pad_classes(jnp.ones((5, 2)), jnp.zeros(5), num_shards=4)
      >>> kernel.shape, bias.shape
      ((8, 2), (8,))
    """
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}.")
    num_rows = -kernel.shape[0] % num_shards
    return (
        jnp.pad(kernel, ((0, num_rows), (0, 0))),
        jnp.pad(bias, (0, num_rows), constant_values=padding_bias(bias.dtype)),
    )


def padding_bias(dtype: DTypeLike) -> float:
    """Returns the bias of a row of padding: very negative, but far enough from the end of the range to be added to.

    Examples:
      >>> padding_bias("float32")
      -1e+30
    """
    return max(-1e30, float(jnp.finfo(dtype).min) / 4)


def class_logits(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "rows features"],
    bias: Float[Array, " rows"],
    class_ids: Int[ArrayLike, "..."],
    *,
    class_axis_name: str = CLASS_AXIS,
) -> Float[Array, "..."]:
    """Computes the logits of the asked classes, on the devices that have their rows; for use in ``shard_map``.

    A device that has none of the rows computes nothing: it takes part in one sum over the devices.

    Args:
      features: Features, shape ``[..., d]``, the same on all devices of the class axis.
      kernel: This device's rows.
      bias: One number for each of this device's rows.
      class_ids: One class id or a vector of c ids, counted over all devices.
      class_axis_name: The device axis that the rows are spread over.

    Returns:
      Logits, shape ``[...]`` for one id and ``[..., c]`` for a vector. An id that no device has gives NaN.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> ask = jax.shard_map(
      ...     class_logits,
      ...     mesh=make_mesh(1, 8),
      ...     in_specs=(P(), P("class"), P("class"), P()),
      ...     out_specs=P(),
      ... )
      >>> ask(jnp.ones((2, 1)), jnp.arange(16.0)[:, None], jnp.zeros(16), jnp.int32(11))
      Array([11., 11.], dtype=float32)
    """
    features, kernel, bias = jnp.asarray(features), jnp.asarray(kernel), jnp.asarray(bias)
    check_output_layer(features, kernel, bias)
    class_ids = jnp.asarray(class_ids)
    num_rows, num_shards = kernel.shape[0], lax.axis_size(class_axis_name)
    exists = (class_ids >= 0) & (class_ids < num_rows * num_shards)
    rows = class_ids - num_rows * lax.axis_index(class_axis_name)
    is_here = (rows >= 0) & (rows < num_rows)
    shape = (*features.shape[:-1], *class_ids.shape)

    def dot_products():
        logits = heads.class_logits(features, kernel, bias, rows)
        return jnp.where(jnp.broadcast_to(is_here, shape), logits, 0.0)

    def nothing():
        zeros = jnp.zeros(shape, accumulation_dtype(features, kernel, bias))
        return vary_alike((zeros, features, kernel, bias, rows))[0]

    logits = lax.psum(lax.cond(jnp.any(is_here), dot_products, nothing), class_axis_name)
    return jnp.where(jnp.broadcast_to(exists, shape), logits, jnp.nan)
