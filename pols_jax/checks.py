"""Checks of arguments, at trace time: an error names the argument and says what it should be."""

import difflib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


def check_logits_and_labels(
    logits: ArrayLike, labels: ArrayLike, *, rank: int | None = None, name: str = "logits"
) -> tuple[Float[Array, "*batch classes"], Int[Array, "*batch"]]:
    """Returns logits and labels as arrays, or raises for a wrong dtype, rank or shape.

    Args:
      logits: Logits, shape ``[..., k]``.
      labels: True classes, integers, shape ``[...]``.
      rank: The number of axes that ``logits`` must have; any if None.
      name: What the caller calls ``logits``, for the error.

    Returns:
      ``logits`` and ``labels``.

    Raises:
      TypeError: if ``logits`` are not floating-point numbers or ``labels`` not integers.
      ValueError: if the rank is wrong or the shapes do not fit each other.

    Examples:
      >>> import jax.numpy as jnp
      >>> check_logits_and_labels(jnp.ones((2, 3)), jnp.array([0.0, 1.0]))
      Traceback (most recent call last):
      TypeError: labels must be integers, got dtype float32.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating-point numbers, got dtype {logits.dtype}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got dtype {labels.dtype}.")
    if rank is not None and logits.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, examples and classes, got shape {logits.shape}.")
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"{name} must have shape [..., k] with at least one class, got shape {logits.shape}."
        )
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of {name} without its last axis, {logits.shape[:-1]}, "
            f"got shape {labels.shape}."
        )
    return logits, labels


def check_output_layer(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
) -> None:
    """Raises if features, kernel and bias do not fit each other.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.

    Raises:
      TypeError: if an argument is not a floating-point array.
      ValueError: if the shapes do not fit each other.

    Examples:
      >>> import jax.numpy as jnp
      >>> check_output_layer(jnp.ones((2, 4)), jnp.ones((3, 4)), jnp.ones(2))
      Traceback (most recent call last):
      ValueError: bias must have shape [3] as kernel has rows, got shape (2,).
    """
    for name, array in (("features", features), ("kernel", kernel), ("bias", bias)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating-point numbers, got dtype {array.dtype}.")
    if kernel.ndim != 2:
        raise ValueError(f"kernel must have shape [k, d], got shape {kernel.shape}.")
    if bias.shape != kernel.shape[:1]:
        raise ValueError(
            f"bias must have shape [{kernel.shape[0]}] as kernel has rows, got shape {bias.shape}."
        )
    if features.ndim < 1 or features.shape[-1] != kernel.shape[1]:
        raise ValueError(
            f"features must have shape [..., {kernel.shape[1]}] to fit kernel of shape {kernel.shape}, "
            f"got shape {features.shape}."
        )


def check_positive(name: str, value: Any) -> None:
    """Raises for a number that is not positive; an array of JAX is not waited for, and a traced one has no value yet.

    Args:
      name: What the caller calls the number, for the error.
      value: The number.

    Raises:
      ValueError: if it is not positive.

    Examples:
      >>> check_positive("margin", -1.0)
      Traceback (most recent call last):
      ValueError: margin must be positive, got -1.0.
    """
    if isinstance(value, int | float | np.number) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}.")


def check_noise_probs(noise_probs: ArrayLike, num_classes: int) -> Float[Array, " classes"]:
    """Returns a distribution over the classes as an array, or raises if it is not one.

    Args:
      noise_probs: Probabilities, shape ``[k]``. Traced ones have no values yet: only their shape is checked.
      num_classes: The number of classes k.

    Returns:
      ``noise_probs``.

    Raises:
      TypeError: if they are not floating-point numbers.
      ValueError: if the shape is wrong, one is negative, or they do not sum to one.

    Examples:
      >>> import jax.numpy as jnp
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


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the sentence for a name that does not exist, with the nearest ones that do.

    Args:
      kind: What the name should have been the name of.
      name: The name that was asked for.
      known: The names that exist.

    Returns:
      One sentence for an error.

    Examples:
      >>> print(unknown_name("loss", "max_margins", ["cross_entropy", "max_margin"]))
      There is no loss named 'max_margins'; did you mean max_margin?
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    return f"There is no {kind} named {name!r}; did you mean {' or '.join(near)}?"
