"""Makes one logit as good as all of them, at a cost that does not depend on the number of classes.

The log-probability of class c is ``z_c - log Z``, where ``log Z = log sum_j exp z_j`` needs all logits. A `Normalizer`
estimates log Z from the features alone, with a few rows of its own. Subtracted from one logit, it turns the logit into
an estimate of the log-probability. Fitting it needs features and the output layer, but neither labels nor a new
training: see docs/normalizer.md.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pols_jax.class_shares import ClassShare
from pols_jax.heads import all_logits
from pols_jax.losses.checks import check_output_layer
from pols_jax.losses.linear_logits import LinearLogits
from pols_jax.losses.linear_stats import LinearStats
from pols_jax.losses.precision import accumulation_dtype
from pols_jax.row_clusters import clustered_rows, with_ones

__all__ = ["Fit", "Normalizer", "fit_normalizer", "fold", "log_normalizer"]

# Examples whose log Z is computed in one go.
_CHUNK = 2048
# Features that are kept for a fit: 2 GiB, on the host and on the device.
_MAX_BYTES = 2**31
# What an example counts for, beside how unsure the network is of it, if its estimate is too high and if it is too low: see
# `_Pool`.
_TOO_HIGH, _TOO_LOW = 0.3, 0.01
# The average of the rows follows them over this part of the steps.
_AVERAGED = 1 / 4


class Fit(NamedTuple):
    """How well a normalizer fits, on features that it was not fitted to.

    Attributes:
      r_squared: The share of the variance of log Z that it explains; 1 is perfect.
      error: The root of the mean squared error of log Z, in the unit of a logit.
      num_features: How many examples it was fitted to.
    """

    r_squared: float
    error: float
    num_features: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=("kernel", "bias", "fit"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class Normalizer:
    """An estimate of ``log sum_j exp z_j`` from the features: ``logsumexp(kernel @ features + bias)``.

    It is a pytree, and calling it is pure: it may be jitted, vmapped, and passed to a jitted function.

    Attributes:
      kernel: The rows, shape ``[C, d]``; one row makes it affine.
      bias: One number per row, shape ``[C]``.
      fit: How well it fits.

    Examples:
      >>> import jax.numpy as jnp
      >>> normalizer = Normalizer(jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.zeros(2), Fit(1.0, 0.0, 0))
      >>> normalizer(jnp.array([[0.0, 0.0]]))
      Array([0.6931], dtype=float32)
    """

    kernel: Float[Array, "rows features"]
    bias: Float[Array, " rows"]
    fit: Fit

    @property
    def num_rows(self) -> int:
        """The number of rows C, which is what a call costs."""
        return self.kernel.shape[0]

    def __call__(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch"]:
        """Estimates the log-normalizer of each example.

        Args:
          features: Features, shape ``[..., d]``.

        Returns:
          One number per example, shape ``[...]``; the score of class c is its logit minus this.
        """
        return jax.nn.logsumexp(all_logits(features, self.kernel, self.bias), axis=-1)


def log_normalizer(
    features: Float[Array, "*batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"] | None = None,
    *,
    block_size: int | None = None,
) -> Float[Array, "*batch"]:
    """Computes ``log sum_j exp z_j`` over all classes, class block by class block: what a normalizer estimates.

    Args:
      features: Features, shape ``[..., d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``; none if None.
      block_size: How many classes are looked at in one go; chosen if None.

    Returns:
      One number per example, shape ``[...]``.

    Examples:
      >>> import jax.numpy as jnp
      >>> log_normalizer(jnp.zeros((1, 3)), jnp.ones((4, 3)))
      Array([1.3863], dtype=float32)
    """
    peak, log_sum = _peak_and_log_sum(features, kernel, bias, block_size)
    return peak + log_sum


def _peak_and_log_sum(features, kernel, bias, block_size) -> tuple[Array, Array]:
    """The largest logit of each example, and by how much log Z exceeds it: minus the log of the largest probability."""
    features, kernel, bias = check_output_layer(features, kernel, bias)
    logits = LinearLogits(features, kernel, bias, block_size=block_size)
    _, parts = LinearStats(logits, jnp.zeros(features.shape[:-1], jnp.int32)).logsumexp()
    return parts.peak, parts.log_sum


def fit_normalizer(
    features: Float[ArrayLike, "examples features"] | Iterable[Float[ArrayLike, "batch features"]],
    kernel: Float[ArrayLike, "classes features"],
    bias: Float[ArrayLike, " classes"] | None = None,
    *,
    num_rows: int,
    held_out: Float[ArrayLike, "others features"] | None = None,
    seed: int = 0,
    num_steps: int = 1500,
    batch_size: int = 2048,
    learning_rate: float = 0.06,
    block_size: int | None = None,
    share: ClassShare | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Normalizer:
    """Fits a normalizer to an output layer. It sees no labels.

    The more features, and the more like those that will be asked about, the better: give distorted pictures, several
    times. With as many rows as classes, or more, the normalizer is the output layer itself, and exact.

    Args:
      features: Features of examples, shape ``[n, d]``, or an iterator of batches of them. Of an iterator, as many are
        taken as fit in 2 GiB.
      kernel: One row per class, shape ``[k, d]`` (not ``[d, k]``); it may be spread over the devices of a mesh.
      bias: One number per class, shape ``[k]``; none if None.
      num_rows: The number of rows C: 0 for an affine normalizer, which costs nothing once it is folded (see `fold`).
      held_out: Features of other examples, which decide when to stop; by default a tenth of ``features``.
      seed: Decides the start, and the order of the examples.
      num_steps: Steps of the optimizer.
      batch_size: Examples in a step.
      learning_rate: How far the first step moves an entry of a row, as a share of the size of the kernel's entries; it
        falls to zero along a cosine.
      block_size: How many classes are looked at in one go; chosen if None.
      share: The classes that this process has the rows of, if several processes fit one normalizer together: ``kernel``
        and ``bias`` are theirs. All other arguments are the same on all of them, and so is what they get.
      on_progress: Is called with what is being done, how much is done, and how much there is (0 if unknown).

    Returns:
      The normalizer. The same arguments give the same bits.

    Raises:
      TypeError: if an array is not of floating-point numbers.
      ValueError: if shapes do not fit, numbers are not finite, or there are too few examples for the rows.

    Examples:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> features, kernel = rng.normal(size=(500, 8)).astype("f"), rng.normal(size=(100, 8)).astype("f")
      >>> normalizer = fit_normalizer(features, kernel, num_rows=16, num_steps=200, learning_rate=0.02)
      >>> normalizer.fit.r_squared > 0.5
      True
    """
    if num_rows < 0:
        raise ValueError(f"num_rows must be at least 0, got {num_rows}.")
    kernel, bias = jnp.asarray(kernel), None if bias is None else jnp.asarray(bias)
    check_output_layer(jnp.zeros((1, *kernel.shape[1:]), kernel.dtype), kernel, bias)
    share = share or ClassShare.whole(kernel.shape[0])
    is_finite = all(bool(jnp.all(jnp.isfinite(array))) for array in (kernel, bias) if array is not None)
    if not share.gather(np.array([is_finite])).all():
        raise ValueError("kernel and bias must be finite numbers.")
    targets = _Targets(kernel, bias, block_size, share, on_progress)
    pool = targets.of(features)
    is_exact = num_rows >= share.num_classes
    if len(pool.features) < max(2, 0 if is_exact else num_rows):
        raise ValueError(
            f"num_rows={num_rows} rows need at least as many features, got {len(pool.features)}; give more examples."
        )
    if held_out is not None:
        training, testing = pool, targets.of(held_out)
    else:
        order = np.random.default_rng(seed).permutation(len(pool.features))
        num_held_out = max(1, len(order) // 10)
        training, testing = pool.at(np.sort(order[num_held_out:])), pool.at(np.sort(order[:num_held_out]))
    if is_exact:
        rows = kernel, jnp.zeros(kernel.shape[:1], kernel.dtype) if bias is None else bias
        if not share.is_alone:
            rows = jax.tree.map(lambda array: jnp.asarray(share.concatenated(np.asarray(array))), rows)
    elif num_rows <= 1:
        rows = _affine_rows(training)
    else:
        start = clustered_rows(training.features, kernel, bias, num_rows=num_rows, seed=seed, share=share)
        size = _size_of_entries(kernel, share)
        learning_rate = learning_rate * size
        rows = _descend(start, training, testing, learning_rate, num_steps, batch_size, seed, on_progress)
    return Normalizer(rows[0], rows[1], _quality(rows, testing, len(training.features)))


def fold(
    normalizer: Normalizer,
    kernel: Float[ArrayLike, "classes features"],
    bias: Float[ArrayLike, " classes"] | None = None,
) -> tuple[Float[Array, "classes features"], Float[Array, " classes"]]:
    """Subtracts an affine normalizer from every row of an output layer, so that it costs nothing when it is asked.

    All logits of an example move by the same number: its softmax probabilities stay.

    Args:
      normalizer: A normalizer with one row.
      kernel: One row per class, shape ``[k, d]``, or those rows that are needed.
      bias: One number per class, shape ``[k]``; zero if None.

    Returns:
      Kernel and bias whose logits are normalized scores.

    Raises:
      ValueError: if the normalizer has several rows.

    Examples:
      >>> import jax.numpy as jnp
      >>> normalizer = Normalizer(jnp.array([[1.0, 0.0]]), jnp.array([0.5]), Fit(1.0, 0.0, 0))
      >>> fold(normalizer, jnp.array([[2.0, 1.0]]), jnp.array([1.0]))
      (Array([[1., 1.]], dtype=float32), Array([0.5], dtype=float32))
    """
    if normalizer.num_rows != 1:
        raise ValueError(
            f"Only an affine normalizer can be folded into the rows, and this one has {normalizer.num_rows} rows."
        )
    kernel = jnp.asarray(kernel)
    bias = jnp.zeros(kernel.shape[:1], normalizer.bias.dtype) if bias is None else jnp.asarray(bias)
    dtype = accumulation_dtype(kernel, normalizer.kernel)
    folded = kernel.astype(dtype) - normalizer.kernel.astype(dtype)
    return folded, bias.astype(dtype) - normalizer.bias.astype(dtype)


class _Pool(NamedTuple):
    """Examples with the log Z that a normalizer should give them, and how unsure the network is of each.

    Unsure is the probability of all classes but the likeliest. An example of which the network is unsure loses its rank
    among the others if its log Z is off by a little. One of which it is sure does so only if its estimate is too high: that
    lowers the score of its true class, while all its other scores are far too low to matter.
    """

    features: Float[np.ndarray, "examples features"]
    log_z: Float[np.ndarray, " examples"]
    unsure: Float[np.ndarray, " examples"]

    def at(self, index: slice | Int[np.ndarray, " some"]) -> "_Pool":
        return _Pool(self.features[index], self.log_z[index], self.unsure[index])


def _size_of_entries(kernel, share: ClassShare) -> float:
    """The root of the mean square of the kernels of all processes."""
    if share.is_alone:
        return float(jnp.sqrt(jnp.mean(jnp.square(kernel.astype(jnp.float32)))))
    total = share.sum(np.array([np.sum(np.square(np.asarray(kernel, np.float32)), dtype=np.float64)]))
    return float(np.sqrt(total[0] / (share.num_classes * kernel.shape[1])))


class _Targets:
    """Computes log Z for features as they come."""

    def __init__(self, kernel, bias, block_size, share, on_progress):
        self._kernel, self._bias, self._share, self._on_progress = kernel, bias, share, on_progress
        self._parts = jax.jit(functools.partial(_peak_and_log_sum, block_size=block_size))

    def of(self, features) -> _Pool:
        num_features = self._kernel.shape[1]
        total = len(features) if hasattr(features, "shape") else 0
        empty = np.zeros((0, num_features), np.float32), np.zeros(0, np.float32), np.zeros(0, np.float32)
        parts, num_done = [_Pool(*empty)], 0
        for batch in _chunks(features, num_features):
            if not np.isfinite(batch).all():
                raise ValueError("features must be finite numbers; some are NaN or infinite.")
            padded = np.zeros((_CHUNK, num_features), np.float32)
            padded[: len(batch)] = batch
            peak, log_sum = self._peak_and_log_sum(padded)
            log_z = (peak + log_sum).astype(np.float32)[: len(batch)]
            unsure = -np.expm1(-log_sum.astype(np.float32)[: len(batch)])
            parts.append(_Pool(batch, log_z, unsure))
            num_done += len(batch)
            self._on_progress("all logits of the examples", num_done, total)
            if 4 * num_done * num_features >= _MAX_BYTES and not total:
                break
        return _Pool(*map(np.concatenate, zip(*parts, strict=True)))

    def _peak_and_log_sum(self, features) -> tuple[np.ndarray, np.ndarray]:
        """Over the classes of all processes."""
        if self._share.is_alone:
            return jax.device_get(self._parts(features, self._kernel, self._bias))
        own = np.stack([np.full(len(features), -np.inf), np.zeros(len(features))])
        if self._share.classes:
            own = np.stack(jax.device_get(self._parts(features, self._kernel, self._bias))).astype(np.float64)
        peaks, log_sums = np.moveaxis(self._share.gather(own), 1, 0)
        first = np.argmax(peaks, axis=0)[None]
        peak, rest = peaks.max(axis=0), np.expm1(np.take_along_axis(log_sums, first, axis=0)[0])
        others = np.exp(peaks - peak + log_sums)
        np.put_along_axis(others, first, 0.0, axis=0)  # to keep the digits of a sum that is close to one
        return peak, np.log1p(rest + others.sum(axis=0))


def _chunks(features, num_features: int) -> Iterator[np.ndarray]:
    """Float32 features in chunks of at most `_CHUNK`."""
    for batch in (features,) if hasattr(features, "shape") else features:
        batch = np.asarray(batch)
        if batch.ndim != 2 or batch.shape[1] != num_features:
            raise ValueError(
                f"features must have shape [n, {num_features}] to fit kernel, got {batch.shape}."
            )
        if not jnp.issubdtype(batch.dtype, jnp.floating):
            raise TypeError(f"features must be floating-point numbers, got dtype {batch.dtype}.")
        for start in range(0, len(batch), _CHUNK):
            yield batch[start : start + _CHUNK].astype(np.float32)


def _affine_rows(pool: _Pool) -> tuple[Array, Array]:
    """Least squares of log Z on the features, in double precision."""
    num_features = pool.features.shape[1]
    gram, moment = np.zeros((num_features + 1, num_features + 1)), np.zeros(num_features + 1)
    for start in range(0, len(pool.features), _CHUNK):
        features, log_z, _ = pool.at(slice(start, start + _CHUNK))
        columns = with_ones(features)
        gram += columns.T @ columns
        moment += columns.T @ log_z.astype(np.float64)
    solution = np.linalg.lstsq(gram, moment, rcond=None)[0].astype(np.float32)
    return jnp.asarray(solution[None, :-1]), jnp.asarray(solution[-1:])


def _descend(start, training: _Pool, testing: _Pool, learning_rate, num_steps, batch_size, seed, on_progress):
    """Adam on what errors of log Z cost; the average of the last rows, when it costs the held-out examples least.

    Examples are drawn as often as they may count. Biases are moved as if they were weights of one more feature that is as
    large as the others.
    """
    import optax  # here, because a normalizer that is there is used without it

    one = float(np.sqrt(np.mean(np.square(training.features), dtype=np.float64))) or 1.0
    share = np.cumsum(training.unsure + _TOO_HIGH, dtype=np.float64)
    pool = jax.device_put((*training, (share / share[-1]).astype(np.float32)))
    schedule = optax.cosine_decay_schedule(learning_rate, num_steps)
    optimizer, key = optax.adam(schedule), jax.random.key(seed)
    round_steps = max(1, -(-num_steps // 20))
    follow = min(1.0, 1 / (_AVERAGED * num_steps))

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(carry, first, features, log_z, unsure, share):
        def step(i, carry):
            rows, average, state = carry
            drawn = jax.random.uniform(jax.random.fold_in(key, i), (batch_size,))
            index = jnp.minimum(jnp.searchsorted(share, drawn), len(log_z) - 1)
            batch = features[index], log_z[index], unsure[index]
            gradients = jax.grad(lambda rows: jnp.mean(_costs(rows, *batch) / (batch[2] + _TOO_HIGH)))(rows)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes step counts and floats
                updates, state = optimizer.update(gradients, state)
                updates = jax.tree.map(jnp.multiply, updates, (1.0, one))
            rows = optax.apply_updates(rows, updates)
            return rows, jax.tree.map(lambda a, r: a + follow * (r - a), average, rows), state

        return lax.fori_loop(first, jnp.minimum(first + round_steps, num_steps), step, carry)

    carry = (*(jax.tree.map(jnp.copy, start) for _ in range(2)), optimizer.init(start))
    best, least = start, _mean_cost(start, testing)
    for first in range(0, num_steps, round_steps):
        carry = advance(carry, first, *pool)
        cost = _mean_cost(carry[1], testing)
        if cost < least:
            best, least = jax.tree.map(jnp.copy, carry[1]), cost
        on_progress(f"{len(start[1])} rows", min(first + round_steps, num_steps), num_steps)
    return best


def _errors(rows, features, log_z) -> Float[Array, " examples"]:
    kernel, bias = rows
    return jax.nn.logsumexp(all_logits(features, kernel, bias), axis=-1) - log_z


def _costs(rows, features, log_z, unsure) -> Float[Array, " examples"]:
    """Squared errors of log Z, each as much as it may cost precision."""
    errors = _errors(rows, features, log_z)
    return (unsure + jnp.where(errors > 0, _TOO_HIGH, _TOO_LOW)) * jnp.square(errors)


_compiled_errors, _compiled_costs = jax.jit(_errors), jax.jit(_costs)


def _mean_cost(rows, pool: _Pool) -> float:
    parts = (pool.at(slice(start, start + _CHUNK)) for start in range(0, len(pool.log_z), _CHUNK))
    costs = np.concatenate([_compiled_costs(rows, *part) for part in parts])
    return float(np.mean(costs, dtype=np.float64))


def _quality(rows, pool: _Pool, num_features: int) -> Fit:
    parts = (pool.at(slice(start, start + _CHUNK)) for start in range(0, len(pool.log_z), _CHUNK))
    errors = np.concatenate([_compiled_errors(rows, part.features, part.log_z) for part in parts])
    error = float(np.mean(np.square(errors, dtype=np.float64)))
    variance = max(float(np.var(pool.log_z, dtype=np.float64)), 1e-12)
    return Fit(1.0 - error / variance, error**0.5, num_features)
