"""Value and gradient of the seven losses, against optax's cross-entropy, the authors' batch cross-entropy and PyTorch's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from pols_jax.benchmarking import torch_peer
from pols_jax.benchmarking.records import Recorder
from pols_jax.benchmarking.settings import LossSettings, find_devices
from pols_jax.benchmarking.timing import Variant, compiled, profile
from pols_jax.errors import ProgramError
from pols_jax.losses import LOSSES, make_loss

_NUM_NOISE = 100
# Two libraries that sum 10^7 float32 numbers in different orders agree to this.
_TOLERANCE = 1e-3


def run_losses(settings: LossSettings, recorder: Recorder, *, say: Callable[[str], None]) -> None:
    """Measures value and gradient of every loss."""
    (device,) = find_devices(settings.device)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((settings.batch_size, settings.classes), np.float32)
    labels = rng.integers(settings.classes, size=settings.batch_size, dtype=np.int32)
    arrays = jax.device_put((logits, labels), device)
    case = {"batch_size": settings.batch_size, "num_classes": settings.classes}
    say(f"compiling {len(LOSSES) + 2} programs")
    variants = []
    for name, loss in loss_functions().items():
        program, compile_ms = compiled(jax.jit(jax.value_and_grad(loss)), *arrays)
        variants.append(Variant(name, lambda call, program=program: program(*arrays), case, compile_ms))
    if settings.peer == "torch":
        ours = {variant.name: variant for variant in variants}
        peers = torch_peer.loss_variants(logits, labels, num_noise=_NUM_NOISE, platform=device.platform)
        for name, call in peers.items():
            _check_same(name, ours[name].call(0), call(0))
            variants.append(Variant(f"torch_{name}", call, case))
    say(f"{len(variants)} variants, {settings.repetitions} calls of each")
    recorder.measure(variants, repetitions=settings.repetitions)
    profile(variants, settings.profile, "losses")


def loss_functions() -> dict[str, Callable[..., Array]]:
    """Returns the losses to compare, each mapping logits and labels to one number."""
    ours = {
        name: make_loss(name, **({"num_noise": _NUM_NOISE} if name == "noise_contrastive_estimation" else {}))
        for name in LOSSES
    }

    def optax_cross_entropy(logits, labels):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    return {
        "optax_cross_entropy": optax_cross_entropy,
        "authors_batch_cross_entropy": authors_batch_cross_entropy,
        **ours,
    }


def authors_batch_cross_entropy(
    logits: Float[Array, "batch classes"], labels: Int[Array, " batch"], *, epsilon: float = 1e-6
) -> Float[Array, ""]:
    """Computes the batch cross-entropy as the paper's authors published it, for comparison only.

    Both distributions are built as arrays of m k numbers, and an epsilon keeps their ratio and its logarithm finite. It also
    damps the gradient of a true logit, the more the larger m k is.
    """
    num_examples, num_classes = logits.shape
    target = jax.nn.one_hot(labels, num_classes, dtype=logits.dtype).ravel() / num_examples
    model = jax.nn.softmax(logits.ravel())
    return jnp.sum(target * jnp.log(target / (model + epsilon) + epsilon))


def _check_same(name: str, ours: Any, theirs: Any) -> None:
    """Raises unless both have the same value and gradient: otherwise their times could not be compared."""
    (value, gradient), (their_value, their_gradient) = ours, theirs
    gradient, their_gradient = np.asarray(gradient), np.asarray(their_gradient.cpu())
    close = np.isclose(value, float(their_value), rtol=_TOLERANCE)
    off = np.abs(gradient - their_gradient).max() / np.abs(gradient).max()
    if not (close and off < _TOLERANCE):
        raise ProgramError(f"{name} and its PyTorch counterpart do not compute the same loss.")
