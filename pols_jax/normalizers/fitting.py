"""Fits a normalizer to an output layer: clusters of classes, and a row for each. See docs/normalizer.md."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pols_jax.class_shares import ClassShare
from pols_jax.heads import all_logits
from pols_jax.losses.checks import check_output_layer
from pols_jax.normalizers.normalizer import Clusters, Fit, Normalizer, estimates
from pols_jax.normalizers.row_clusters import cluster_rows

_Rows = tuple[Array, Array]

# Examples, and classes, whose logits are computed in one go.
_CHUNK, _BLOCK = 2048, 8192
# Features of an iterator that are kept: 2 GiB.
_MAX_BYTES = 2**31
# Examples that rows are fitted to, their shares of all clusters, and examples that decide when to stop.
_MAX_FITTED, _MAX_SHARES, _MAX_HELD_OUT = 2**17, 2**26, 10_000
# What the squared error of log Z counts for, beside the shares of the clusters; and beside the doubt of the network, if the
# estimate is too high or too low.
_TOTAL_WEIGHT = 0.1
_TOO_HIGH, _TOO_LOW = 0.3, 0.01
# Clusters are opened if the square of the rows is this many times the classes: half of the rows are then four clusters.
_OPENED = 16
# The average of the rows follows them over this part of the steps.
_AVERAGED = 1 / 4


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
    share: ClassShare | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Normalizer:
    """Fits a normalizer to an output layer. It sees no labels.

    The classes are put into clusters of similar rows, and one row is fitted to what the classes of a cluster add up to.
    Half of the rows that the normalizer may read are these. The other half are rows of the output layer itself: those
    of the classes in the clusters with the largest estimates. With as many rows as classes, or more, the normalizer is
    the output layer, and exact.

    Args:
      features: Features of examples, shape ``[n, d]``, or an iterator of batches of them, like those that will be asked
        about. Of an iterator, as many are taken as fit in 2 GiB.
      kernel: One row per class, shape ``[k, d]`` (not ``[d, k]``); it may be spread over the devices of a mesh.
      bias: One number per class, shape ``[k]``; none if None.
      num_rows: The number of rows that a call may read: 0 for an affine normalizer, which costs nothing once it is
        folded (see `fold`).
      held_out: Features of other examples, which decide when to stop; by default a tenth of ``features``.
      seed: Decides the clusters, and the order of the examples.
      num_steps: Steps of the optimizer.
      batch_size: Examples in a step.
      learning_rate: How far the first step moves an entry of a row, as a share of the size of the kernel's entries; it
        falls to zero along a cosine.
      share: The classes that this process has the rows of, if several processes fit one normalizer together: ``kernel``
        and ``bias`` are theirs. All other arguments are the same on all of them.
      on_progress: Is called with what is being done, how much is done, and how much there is.

    Returns:
      The normalizer. The same arguments give the same bits.

    Raises:
      TypeError: if an array is not of floating-point numbers.
      ValueError: if shapes do not fit, numbers are not finite, or there are too few examples for the rows.

    Examples:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> features, kernel = rng.normal(size=(500, 8)).astype("f"), rng.normal(size=(100, 8)).astype("f")
      >>> normalizer = fit_normalizer(features, kernel, num_rows=50, num_steps=200)
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
    head = _Head(kernel, bias, share, on_progress)
    training = _collected(features, kernel.shape[1])
    is_exact = num_rows >= share.num_classes
    if len(training) < max(2, 0 if is_exact else num_rows):
        raise ValueError(
            f"num_rows={num_rows} rows need at least as many features, got {len(training)}; give more examples."
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(training))
    if held_out is not None:
        testing = _collected(held_out, kernel.shape[1])
        testing = testing[np.sort(rng.permutation(len(testing))[:_MAX_HELD_OUT])]
    else:
        num_held_out = max(1, len(order) // 10)
        testing, order = training[np.sort(order[:num_held_out][:_MAX_HELD_OUT])], order[num_held_out:]
    num_clusters, num_own = rows_of_clusters(share.num_classes, num_rows=num_rows)
    if num_rows > 1:
        order = order[: min(_MAX_FITTED, _MAX_SHARES // num_clusters)]
    training, clusters = training[np.sort(order)], None
    if is_exact:
        rows, wanted = head.whole(), head.log_z(testing)
    elif num_rows <= 1:
        rows, wanted = _affine_rows(training, head.log_z(training)), head.log_z(testing)
    else:
        cluster_of, *start = cluster_rows(
            training, kernel, bias, num_clusters=num_clusters, seed=seed, share=share
        )
        mine = cluster_of[share.classes.start : share.classes.stop]
        if num_own:
            cost, targets = _cost_of_shares, lambda features: head.log_sums(features, mine, num_clusters)[:1]
        else:
            cost, targets = _cost_of_log_z, head.log_z_and_doubt
        fitted, tested = ((features, *targets(features)) for features in (training, testing))
        wanted = np.logaddexp.reduce(np.atleast_2d(tested[1].T))
        step = learning_rate * head.size_of_entries()
        rows = _descend(cost, tuple(start), fitted, tested, step, num_steps, batch_size, seed, on_progress)
        if num_own:
            clusters = Clusters.of(
                cluster_of,
                kernel,
                bias,
                num_clusters=num_clusters,
                num_own=num_own,
                first_class=share.classes.start,
            )
    normalizer = Normalizer(rows[0], rows[1], Fit(0.0, 0.0, len(training)), clusters)
    error = float(np.mean(np.square(estimates(normalizer, testing, share=share) - wanted, dtype=np.float64)))
    variance = max(float(np.var(wanted, dtype=np.float64)), 1e-12)
    return dataclasses.replace(normalizer, fit=Fit(1.0 - error / variance, error**0.5, len(training)))


def rows_of_clusters(num_classes: int, *, num_rows: int) -> tuple[int, int]:
    """Divides the rows of a normalizer: how many clusters there are, and how many own rows of classes are read.

    With so many classes that fewer than four clusters could be opened, all rows are those of clusters.

    Examples:
      >>> rows_of_clusters(2221, num_rows=256), rows_of_clusters(42174, num_rows=256)
      ((128, 128), (256, 0))
    """
    num_clusters = num_rows // 2 if num_rows**2 >= _OPENED * num_classes else num_rows
    return num_clusters, num_rows - num_clusters


class _Head:
    """An output layer, of which this process may have a share, asked class block by class block."""

    def __init__(self, kernel, bias, share: ClassShare, on_progress):
        self._kernel = np.asarray(kernel)  # on the host, wherever the classes are
        self._bias = np.zeros(len(kernel), np.float32) if bias is None else np.asarray(bias)
        self._share, self._on_progress = share, on_progress

    def log_z(self, features: np.ndarray) -> Float[np.ndarray, " examples"]:
        """The logsumexp of all logits of each example."""
        return self.log_z_and_doubt(features)[0]

    def log_z_and_doubt(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logsumexp of all logits, and the probability of all classes but the likeliest."""
        log_sums, peaks = self.log_sums(features, np.zeros(len(self._kernel), np.int32), 1)
        return log_sums[:, 0], -np.expm1(np.minimum(peaks - log_sums[:, 0], 0))

    def log_sums(self, features, cluster_of, num_clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """The logsumexp over the classes of each cluster, minus infinity if it is nothing; and the largest logit."""
        order = np.argsort(cluster_of, kind="stable")
        found = np.empty((len(features), num_clusters), np.float32), np.empty(len(features), np.float32)
        for start in range(0, len(features), _CHUNK):
            chunk = features[start : start + _CHUNK]
            batch = np.zeros((_CHUNK, features.shape[1]), np.float32)
            batch[: len(chunk)] = chunk
            own, largest = np.full((len(chunk), num_clusters), -np.inf, np.float32), np.float32(-np.inf)
            for first in range(0, len(order), _BLOCK):
                block = order[first : first + _BLOCK]
                peak, parts = jax.device_get(_peak_and_parts(batch, self._kernel[block], self._bias[block]))
                clusters, starts = np.unique(cluster_of[block], return_index=True)
                with np.errstate(divide="ignore"):
                    log_sums = np.log(np.add.reduceat(parts[: len(chunk)], starts, axis=1))
                log_sums += peak[: len(chunk), None]
                own[:, clusters] = np.logaddexp(own[:, clusters], log_sums)
                largest = np.maximum(largest, peak[: len(chunk)])
            place = slice(start, start + len(chunk))
            found[0][place] = np.logaddexp.reduce(self._share.gather(own), axis=0)
            found[1][place] = self._share.gather(np.broadcast_to(largest, len(chunk))).max(axis=0)
            self._on_progress("all logits of the examples", start + len(chunk), len(features))
        return found

    def whole(self) -> _Rows:
        """Kernel and bias of all processes."""
        own = self._kernel, self._bias.astype(self._kernel.dtype)
        kernel, bias = (jnp.asarray(self._share.concatenated(array)) for array in own)
        return kernel, bias

    def size_of_entries(self) -> float:
        """The root of the mean square of the kernels of all processes."""
        own = np.sum(np.square(self._kernel.astype(np.float32)), dtype=np.float64)
        total = self._share.sum(np.array([own]))
        return float(np.sqrt(total[0] / (self._share.num_classes * self._kernel.shape[1])))


@jax.jit
def _peak_and_parts(features, kernel, bias) -> tuple[Array, Array]:
    """The largest logit of each example, and the exponentials of all logits relative to it."""
    logits = all_logits(features, kernel, bias)
    peak = jnp.max(logits, axis=-1)
    return peak, jnp.exp(logits - peak[:, None])


def _collected(features, num_features: int) -> Float[np.ndarray, "examples features"]:
    """Features as one array of finite float32 numbers."""
    is_array = hasattr(features, "shape")
    parts, num_bytes = [np.zeros((0, num_features), np.float32)], 0
    for batch in (features,) if is_array else features:
        batch = np.asarray(batch)
        if batch.ndim != 2 or batch.shape[1] != num_features:
            raise ValueError(
                f"features must have shape [n, {num_features}] to fit kernel, got {batch.shape}."
            )
        if not jnp.issubdtype(batch.dtype, jnp.floating):
            raise TypeError(f"features must be floating-point numbers, got dtype {batch.dtype}.")
        parts.append(batch.astype(np.float32))
        if not np.isfinite(parts[-1]).all():
            raise ValueError("features must be finite numbers; some are NaN or infinite.")
        num_bytes += parts[-1].nbytes
        if num_bytes >= _MAX_BYTES:
            break
    return np.concatenate(parts)


def _affine_rows(features: np.ndarray, log_z: np.ndarray) -> _Rows:
    """Least squares of log Z on the features, in double precision."""
    num_features = features.shape[1]
    gram, moment = np.zeros((num_features + 1, num_features + 1)), np.zeros(num_features + 1)
    for start in range(0, len(features), _CHUNK):
        chunk = features[start : start + _CHUNK]
        columns = np.c_[chunk, np.ones(len(chunk))]
        gram += columns.T @ columns
        moment += columns.T @ log_z[start : start + _CHUNK].astype(np.float64)
    solution = np.linalg.lstsq(gram, moment, rcond=None)[0].astype(np.float32)
    return jnp.asarray(solution[None, :-1]), jnp.asarray(solution[-1:])


def _descend(
    cost, start, training, testing, learning_rate, num_steps, batch_size, seed, on_progress
) -> _Rows:
    """Adam on a cost; the average of the last rows, when it costs the held-out examples least.

    Biases are moved as if they were weights of one more feature that is as large as the others.
    """
    import optax  # here, because a normalizer that is there is used without it

    one = float(np.sqrt(np.mean(np.square(training[0]), dtype=np.float64))) or 1.0
    pool, testing = jax.device_put((training, testing))
    optimizer, key = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps)), jax.random.key(seed)
    round_steps = max(1, -(-num_steps // 20))
    follow = min(1.0, 1 / (_AVERAGED * num_steps))

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(carry, first, pool):
        def step(i, carry):
            rows, average, state = carry
            index = jax.random.randint(jax.random.fold_in(key, i), (batch_size,), 0, len(pool[0]))
            gradients = jax.grad(cost)(rows, *(array[index] for array in pool))
            with jax.numpy_dtype_promotion("standard"):  # optax mixes step counts and floats
                updates, state = optimizer.update(gradients, state)
                updates = jax.tree.map(jnp.multiply, updates, (1.0, one))
            rows = optax.apply_updates(rows, updates)
            return rows, jax.tree.map(lambda a, r: a + follow * (r - a), average, rows), state

        return lax.fori_loop(first, jnp.minimum(first + round_steps, num_steps), step, carry)

    compiled_cost = jax.jit(cost)
    carry = (*(jax.tree.map(jnp.copy, start) for _ in range(2)), optimizer.init(start))
    best, least = start, float(compiled_cost(start, *testing))
    for first in range(0, num_steps, round_steps):
        carry = advance(carry, first, pool)
        now = float(compiled_cost(carry[1], *testing))
        if now < least:
            best, least = jax.tree.map(jnp.copy, carry[1]), now
        on_progress(f"{len(start[1])} rows", min(first + round_steps, num_steps), num_steps)
    return best


def _cost_of_shares(rows, features, log_sums) -> Float[Array, ""]:
    """How wrong rows are about clusters: the cross-entropy of their shares of Z, and a part of the squared error of log Z.

    The shares decide which clusters are opened; the error is what is left of those that are not.
    """
    estimates = all_logits(features, *rows)
    shares = jax.nn.softmax(log_sums, axis=-1)
    # A cluster without classes has the share zero, and a row far below the others.
    wrong_shares = -jnp.sum(shares * jax.nn.log_softmax(estimates, axis=-1), axis=-1)
    errors = jax.nn.logsumexp(estimates, axis=-1) - jax.nn.logsumexp(log_sums, axis=-1)
    return jnp.mean(wrong_shares + _TOTAL_WEIGHT * jnp.square(errors))


def _cost_of_log_z(rows, features, log_z, doubt) -> Float[Array, ""]:
    """What errors of log Z cost, if no cluster is opened: their squares, each as much as it may move a rank.

    An example that the network is unsure of loses its rank if its log Z is off by a little, in either direction. One that
    it is sure of does so only if the estimate is too high: that lowers the score of its true class, while all its other
    scores are far too low to matter.
    """
    errors = jax.nn.logsumexp(all_logits(features, *rows), axis=-1) - log_z
    return jnp.mean((doubt + jnp.where(errors > 0, _TOO_HIGH, _TOO_LOW)) * jnp.square(errors))
