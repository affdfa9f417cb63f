"""Checks of arguments, at trace time: an error names the argument and says what it should be."""

from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


def check_logits_and_labels(
    logits: ArrayLike, labels: ArrayLike, *, rank: int | None = None
) -> tuple[Float[Array, "*batch classes"], Int[Array, "*batch"]]:
    """Returns logits [..., k] and labels [...] as arrays, or raises for a wrong dtype, rank or shape."""
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating-point numbers, got dtype {logits.dtype}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got dtype {labels.dtype}.")
    if rank is not None and logits.ndim != rank:
        raise ValueError(f"logits must have shape [m, k], got shape {logits.shape}.")
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"logits must have shape [..., k] with at least one class, got shape {logits.shape}."
        )
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of logits without its last axis, {logits.shape[:-1]}, "
            f"got shape {labels.shape}."
        )
    return logits, labels


def check_positive(name: str, value: Any) -> None:
    """Raises for a Python number that is not positive; a traced one cannot be checked."""
    if isinstance(value, int | float) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}.")


def check_noise_probs(noise_probs: ArrayLike, num_classes: int) -> Float[Array, " classes"]:
    """Returns a distribution over the classes as an array, or raises if it is not one."""
    noise_probs = jnp.asarray(noise_probs)
    if not jnp.issubdtype(noise_probs.dtype, jnp.floating):
        raise TypeError(f"noise_probs must be floating-point numbers, got dtype {noise_probs.dtype}.")
    if noise_probs.shape != (num_classes,):
        raise ValueError(f"noise_probs must have shape [{num_classes}], got shape {noise_probs.shape}.")
    if not isinstance(noise_probs, Tracer):
        # A float32 sum over 2^18 classes is off by less than this; a distribution that is wrong is off by more.
        if not abs(float(noise_probs.sum()) - 1.0) < 1e-3:
            raise ValueError(f"noise_probs must sum to one, got {float(noise_probs.sum())}.")
        if float(noise_probs.min()) < 0:
            raise ValueError(f"noise_probs must not be negative, got {float(noise_probs.min())}.")
    return noise_probs
