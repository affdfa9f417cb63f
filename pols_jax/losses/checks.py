"""Arguments at trace time: an error names the one that is wrong and says what it should be; and the dtype of their sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

_LARGEST_ID = 2**31 - 1


def as_class_ids(ids: Int[ArrayLike, "..."], *, name: str) -> Int[Array, "..."]:
    """Returns class ids as int32; -1, which is no class, for a number that int32 does not have.

    ``jnp.asarray`` would cut the number 2^32 + 2 down to 2, another class. (So does ``jax.jit`` with a 64-bit NumPy
    array among its arguments, before anything in it can look.)

    Examples:
      >>> as_class_ids([5, 2**32 + 2], name="labels")
      Array([ 5, -1], dtype=int32)
    """
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {ids.dtype}.")
    if jnp.iinfo(ids.dtype).max <= _LARGEST_ID:
        return jnp.asarray(ids, jnp.int32)
    where = np.where if isinstance(ids, np.ndarray) else jnp.where
    exist = (ids >= 0) & (ids <= _LARGEST_ID)
    return jnp.asarray(where(exist, ids.astype(np.int32), np.int32(-1)))


def check_logits_and_labels(
    logits: ArrayLike, labels: ArrayLike, *, rank: int | None = None, name: str = "logits"
) -> tuple[Float[Array, "*batch classes"], Int[Array, "*batch"]]:
    """Returns logits and labels as arrays, or raises for a wrong dtype, rank or shape.

    Examples:
      >>> check_logits_and_labels(jnp.ones((2, 3)), jnp.array([0.0, 1.0]))
      Traceback (most recent call last):
      TypeError: labels must be integers, got dtype float32.
    """
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating-point numbers, got dtype {logits.dtype}.")
    if rank is not None and logits.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, examples and classes, got shape {logits.shape}.")
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"{name} must have shape [..., k] with at least one class, got shape {logits.shape}."
        )
    return logits, check_labels(labels, logits.shape, name=name)


def check_labels(labels: ArrayLike, shape: tuple[int, ...], *, name: str) -> Int[Array, "*batch"]:
    """Returns labels as int32, see `as_class_ids`, or raises for a wrong dtype or shape.

    Examples:
      >>> check_labels([0, 1, 2], (2, 5), name="logits")
      Traceback (most recent call last):
      ValueError: labels must have the shape of logits without its last axis, (2,), got shape (3,).
    """
    labels = as_class_ids(labels, name="labels")
    if labels.shape != shape[:-1]:
        raise ValueError(
            f"labels must have the shape of {name} without its last axis, {shape[:-1]}, got shape {labels.shape}."
        )
    return labels


def check_output_layer(
    features: ArrayLike, kernel: ArrayLike, bias: ArrayLike | None
) -> tuple[
    Float[Array, "*batch features"], Float[Array, "classes features"], Float[Array, " classes"] | None
]:
    """Returns features, kernel and bias as arrays, or raises if they do not fit each other.

    Examples:
      >>> _ = check_output_layer(jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.ones(3))
      Traceback (most recent call last):
      ValueError: kernel must be [k, d], one row per class, and looks transposed: features have 4 columns and kernel
          has shape (4, 3); give kernel.T.
    """
    features, kernel = jnp.asarray(features), jnp.asarray(kernel)
    bias = None if bias is None else jnp.asarray(bias)
    for name, array in (("features", features), ("kernel", kernel), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating-point numbers, got dtype {array.dtype}.")
    if kernel.ndim != 2 or kernel.shape[0] < 1:
        raise ValueError(
            f"kernel must have shape [k, d], one row per class and at least one, got shape {kernel.shape}."
        )
    num_classes, num_features = kernel.shape
    if features.ndim and features.shape[-1] == num_classes != num_features:
        raise ValueError(
            "kernel must be [k, d], one row per class, and looks transposed: features have "
            f"{num_classes} columns and kernel has shape {kernel.shape}; give kernel.T."
        )
    if bias is not None and bias.shape != (num_classes,):
        raise ValueError(f"bias must have shape [{num_classes}] as kernel has rows, got shape {bias.shape}.")
    if features.ndim < 1 or features.shape[-1] != num_features:
        raise ValueError(
            f"features must have shape [..., {num_features}] to fit kernel of shape {kernel.shape}, "
            f"got shape {features.shape}."
        )
    return features, kernel, bias


def check_positive(name: str, value: Any) -> None:
    """Raises for a number that is not positive. Only Python and NumPy numbers are checked: a JAX array may have no value yet.

    Examples:
      >>> check_positive("margin", -1.0)
      Traceback (most recent call last):
      ValueError: margin must be positive, got -1.0.
    """
    if isinstance(value, int | float | np.number) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}.")


def check_noise_probs(noise_probs: ArrayLike, num_classes: int) -> Float[Array, " classes"]:
    """Returns a distribution over the classes as an array, or raises if it is not one.

    Examples:
      >>> check_noise_probs(jnp.array([0.5, 0.25]), num_classes=2)
      Traceback (most recent call last):
      ValueError: noise_probs must sum to one, got 0.75.
    """
    noise_probs = jnp.asarray(noise_probs)
    if not jnp.issubdtype(noise_probs.dtype, jnp.floating):
        raise TypeError(f"noise_probs must be floating-point numbers, got dtype {noise_probs.dtype}.")
    if noise_probs.shape != (num_classes,):
        raise ValueError(f"noise_probs must have shape [{num_classes}], got shape {noise_probs.shape}.")
    if not isinstance(noise_probs, Tracer):
        # In NumPy: under jit, the sum of a constant would be traced and have no value.
        values = np.asarray(noise_probs, np.float64)
        if not values.min() >= 0:
            raise ValueError(f"noise_probs must not be negative, got {values.min()}.")
        # Probabilities rounded to 16 bits are off by less than this; a distribution that is wrong is off by more.
        if not abs(values.sum() - 1.0) < 1e-2:
            raise ValueError(f"noise_probs must sum to one, got {values.sum()}.")
    return noise_probs


def accumulation_dtype(*arrays: Float[Array, "..."]) -> jnp.dtype:
    """Returns the widest dtype of the arrays, or float32 if that is wider.

    The value of a single logit is compared with a threshold, and a loss adds up many of them: 16 bits would blur both.
    (``jnp.promote_types`` would refuse to mix bfloat16 and float32 where a program asks for strict promotion.)

    Examples:
      >>> accumulation_dtype(jnp.ones(3, jnp.bfloat16))
      dtype('float32')
    """
    widest = max((array.dtype for array in arrays), key=lambda dtype: jnp.finfo(dtype).bits)
    return widest if jnp.finfo(widest).bits > 32 else jnp.dtype(jnp.float32)
