"""The output layer: all logits, or only the ones that were asked for.

The output matrix is stored as **[k, d]**, one contiguous row per class, so that the logit of one class is one
gathered row and one dot product: its cost does not depend on the number of classes. Most libraries store [d, k]: give
such a kernel as ``kernel.T``. A square one that is the wrong way round cannot be told from a right one.

The rows may be spread over devices: device s of C along the class axis then has the rows from ``s k / C`` on.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from pols_jax.losses.checks import accumulation_dtype, as_class_ids, check_output_layer
from pols_jax.losses.device_axes import vary_alike

__all__ = ["ClassHead", "all_logits", "class_logits", "pad_classes", "padding_bias", "prior_bias"]

# Up to this many examples the product is formed as kernel @ features.T, see `all_logits`.
_FEW_EXAMPLES = 32


def all_logits(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"] | None = None,
) -> Float[Array, "*batch classes"]:
    """Computes the logits of every class: ``features @ kernel.T + bias``.

    Products of 16-bit numbers are accumulated and returned in float32: the value of a single logit is compared
    with a threshold, and rounding it to 16 bits would blur that.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]`` (not ``[d, k]``).
      bias: One number per class, shape ``[k]``; none if None.

    Examples:
      >>> import jax.numpy as jnp
      >>> features = jnp.array([[1.0, 2.0]])
      >>> kernel = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> all_logits(features, kernel, jnp.array([0.0, 0.0, 0.5]))
      Array([[1. , 2. , 3.5]], dtype=float32)
    """
    features, kernel, bias = check_output_layer(features, kernel, bias)
    dtype = accumulation_dtype(*jax.tree.leaves((features, kernel, bias)))
    batch_shape = features.shape[:-1]
    rows = features.reshape((-1, features.shape[-1]))
    num_examples: Any = rows.shape[0]  # not a number yet in a program that is exported for any batch
    if not isinstance(num_examples, int) or num_examples > _FEW_EXAMPLES:
        logits = _contract(rows, kernel, dtype)
    else:
        # XLA for CPU fuses the bias into the product of one example and leaves its fast path (25 times slower).
        # The barrier keeps them apart. kernel @ features.T reads the kernel in the order it is stored.
        logits = lax.optimization_barrier(_contract(kernel, rows, dtype)).T
    if bias is not None:
        logits = logits + bias.astype(dtype)[None, :]
    return logits.reshape((*batch_shape, kernel.shape[0]))


def class_logits(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"] | None,
    class_ids: Int[ArrayLike, "..."],
    *,
    class_axis_name: str | None = None,
) -> Float[Array, "..."]:
    """Computes the logits of the asked classes only, by gathering their rows of the kernel.

    ``class_ids`` may be traced, so that one compiled program serves every class.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]`` (not ``[d, k]``).
      bias: One number per class, shape ``[k]``; none if None.
      class_ids: One class id, or a vector of ``c`` class ids.
      class_axis_name: In ``shard_map``, the mesh axis that the rows of ``kernel`` and ``bias`` are spread over. The ids
        count over all devices. A device that has none of the rows computes nothing: it takes part in one sum.

    Returns:
      Logits, shape ``[...]`` for one id and ``[..., c]`` for a vector of ids. An id outside ``[0, k)`` gives NaN,
      never the logit of another class.

    Raises:
      TypeError: if an argument has the wrong dtype.
      ValueError: if the shapes do not fit, or if an id that is known while tracing (Python or NumPy integers) is
        outside ``[0, k)``.

    Examples:
      >>> import jax.numpy as jnp
      >>> features = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> kernel = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> bias = jnp.array([0.0, 0.0, 0.5])
      >>> class_logits(features, kernel, bias, 2)
      Array([3.5, 7.5], dtype=float32)
      >>> class_logits(features, kernel, bias, jnp.array([2, 0]))
      Array([[3.5, 1. ],
             [7.5, 3. ]], dtype=float32)
    """
    if class_axis_name is None:
        return _gathered_logits(features, kernel, bias, class_ids)
    return _logits_of_shards(features, kernel, bias, class_ids, class_axis_name)


def _gathered_logits(features, kernel, bias, class_ids, row_dtype=None):
    """`class_logits`, with the gathered rows (and not the whole kernel) cast to another dtype."""
    features, kernel, bias = check_output_layer(features, kernel, bias)
    num_classes = kernel.shape[0]
    class_ids = _check_class_ids(class_ids, num_classes)
    asked = jnp.atleast_1d(class_ids)
    exists = (asked >= 0) & (asked < num_classes)
    rows = kernel.at[asked].get(mode="clip").astype(row_dtype or kernel.dtype)
    logits = all_logits(features, rows, None if bias is None else bias.at[asked].get(mode="clip"))
    exists = jnp.broadcast_to(exists, logits.shape)
    logits = jnp.where(exists, logits, jnp.full_like(logits, jnp.nan))
    return logits if class_ids.ndim else logits[..., 0]


def _logits_of_shards(features, kernel, bias, class_ids, class_axis_name):
    """`class_logits`, on the devices that have the rows."""
    features, kernel, bias = check_output_layer(features, kernel, bias)
    num_rows, num_shards = kernel.shape[0], lax.axis_size(class_axis_name)
    class_ids = _check_class_ids(class_ids, num_rows * num_shards)
    exists = (class_ids >= 0) & (class_ids < num_rows * num_shards)
    rows = class_ids - num_rows * lax.axis_index(class_axis_name)
    is_here = (rows >= 0) & (rows < num_rows)
    shape = (*features.shape[:-1], *class_ids.shape)

    def dot_products():
        logits = _gathered_logits(features, kernel, bias, rows)
        return jnp.where(jnp.broadcast_to(is_here, shape), logits, 0.0)

    def nothing():
        arrays = features, kernel, bias
        zeros = jnp.zeros(shape, accumulation_dtype(*jax.tree.leaves(arrays)))
        return vary_alike((zeros, *arrays, rows))[0]

    logits = lax.psum(lax.cond(jnp.any(is_here), dot_products, nothing), class_axis_name)
    return jnp.where(jnp.broadcast_to(exists, shape), logits, jnp.nan)


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
        jnp.pad(bias, (0, num_rows), constant_values=padding_bias(dtype=bias.dtype)),
    )


def padding_bias(*, dtype: DTypeLike) -> float:
    """Returns the bias of a row of padding: very negative, but far enough from the end of the range to be added to.

    Examples:
      >>> padding_bias(dtype="float32")
      -1e+30
    """
    return max(-1e30, float(jnp.finfo(dtype).min) / 4)


def prior_bias(num_classes: int) -> float:
    """Returns ``-log(k - 1)``, the logit of a class that has one chance in k.

    A sigmoid-type loss (binary cross-entropy, noise-contrastive estimation) sums over k classes. Started at zero,
    every class says "one in two", and at large k the first steps only teach the biases that this is wrong. Started
    here, the k sigmoids of an example sum to one.

    Args:
      num_classes: The number of classes k, at least 2.

    Examples:
      >>> round(prior_bias(1001), 4)
      -6.9078
    """
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
    return -math.log(num_classes - 1)


class ClassHead(nn.Module):
    """The output layer as a Flax module, with parameters ``kernel`` [k, d] and ``bias`` [k].

    ``flax.linen.Dense`` stores its kernel as [d, k]: to take its parameters over, transpose it.

    Attributes:
      num_classes: The number of classes k.
      bias_init: The value every bias starts from; `prior_bias` for sigmoid-type losses at large k.
      dtype: The dtype that features and kernel are multiplied in (bfloat16 for mixed precision); their own if None.
        Logits are float32 or wider in either case.
      param_dtype: The dtype the parameters are stored in.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> head = ClassHead(num_classes=1000)
      >>> features = jnp.ones((2, 8))
      >>> variables = head.init(jax.random.key(0), features)
      >>> variables["params"]["kernel"].shape
      (1000, 8)
      >>> head.apply(variables, features).shape
      (2, 1000)
      >>> head.apply(variables, features, 7, method="class_logits").shape
      (2,)
    """

    num_classes: int
    bias_init: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def parameters(self, num_features: int) -> tuple[Array, Array]:
        """Returns the kernel [k, d] and the bias [k] as they are stored."""
        kernel_init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        kernel = self.param("kernel", kernel_init, (self.num_classes, num_features), self.param_dtype)
        bias_init = nn.initializers.constant(self.bias_init)
        bias = self.param("bias", bias_init, (self.num_classes,), self.param_dtype)
        return kernel, bias

    def __call__(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch classes"]:
        """Computes the logits of every class, see `all_logits`."""
        kernel, bias = self.parameters(features.shape[-1])
        return all_logits(self._cast(features), self._cast(kernel), bias)

    def class_logits(
        self, features: Float[Array, "*batch features"], class_ids: Int[ArrayLike, "..."]
    ) -> Float[Array, "..."]:
        """Computes the logits of the asked classes only, see `class_logits` in this module."""
        kernel, bias = self.parameters(features.shape[-1])
        return _gathered_logits(self._cast(features), kernel, bias, class_ids, row_dtype=self.dtype)

    def _cast(self, array):
        return array if self.dtype is None else array.astype(self.dtype)


def _contract(left, right, dtype):
    """Returns ``left @ right.T``, accumulated in dtype."""
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _check_class_ids(class_ids, num_classes):
    """Returns ids as an int32 array, or raises; only ids that need not be waited for are compared with the classes."""
    if not isinstance(class_ids, jax.Array):
        ids = np.asarray(class_ids)
        # NumPy has no integers that are large enough for some of Python's.
        is_integer = np.issubdtype(ids.dtype, np.integer) or all(type(i) is int for i in ids.flat)
        outside = [i for i in ids.flat if not 0 <= i < num_classes] if is_integer else []
        if outside:
            raise ValueError(f"class_ids must be in [0, {num_classes}), got {outside[0]}.")
    class_ids = as_class_ids(class_ids, name="class_ids")
    if class_ids.ndim > 1:
        raise ValueError(f"class_ids must be one id or a vector of ids, got shape {class_ids.shape}.")
    return class_ids
