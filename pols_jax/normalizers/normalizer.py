"""What is subtracted from one logit: an estimate of the log-normalizer, from a few rows."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pols_jax.class_shares import ClassShare
from pols_jax.heads import all_logits
from pols_jax.losses.checks import accumulation_dtype, check_output_layer
from pols_jax.losses.device_axes import is_on_explicit_mesh, partitioned_by_xla
from pols_jax.losses.linear_logits import LinearLogits
from pols_jax.losses.linear_stats import LinearStats

# Examples that are estimated in one go.
_CHUNK = 2048
# Rows or logits of classes, for several examples at a time.
_MAX_BYTES = 2**25
# In a product of many examples, this many rows take at most the time of one row that is gathered (tried on a CPU).
_PRODUCT_ROWS = 32


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


def is_product_faster(num_examples: int, *, num_classes: int, num_own: int) -> bool:
    """Tells whether all logits of some examples take less time than gathering the own rows of each of them.

    Args:
      num_examples: The number of examples.
      num_classes: The number of classes.
      num_own: How many own rows of classes are read for an example.

    Examples:
      >>> is_product_faster(1, num_classes=1024, num_own=128), is_product_faster(8, num_classes=1024, num_own=128)
      (False, True)
    """
    return num_classes <= num_own * min(num_examples, _PRODUCT_ROWS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Clusters:
    """Which classes each row of a normalizer stands for, and the output layer that has their own rows.

    Attributes:
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      order: The classes, one cluster after the other, shape ``[k]``.
      sizes: The number of classes of each cluster, shape ``[C]``.
      num_own: How many own rows of classes are read for an example.
      first_class: The class of the first row of ``kernel``, if this process has the rows of some classes only.
      scales: What the row of each class is multiplied with, shape ``[k]``; nothing if None.

    Examples:
      >>> clusters = Clusters.of(np.array([1, 0, 1]), jnp.eye(3), None, num_clusters=2, num_own=2)
      >>> clusters.order.tolist(), clusters.sizes.tolist()
      ([1, 0, 2], [1, 2])
    """

    kernel: Float[Array, "classes features"]
    bias: Float[Array, " classes"]
    order: Int[Array, " all_classes"]
    sizes: Int[Array, " rows"]
    num_own: int = dataclasses.field(metadata={"static": True})
    first_class: int = dataclasses.field(default=0, metadata={"static": True})
    scales: Float[Array, " classes"] | None = None

    @classmethod
    def of(
        cls,
        cluster_of: Int[np.ndarray, " classes"],
        kernel: Float[ArrayLike, "classes features"],
        bias: Float[ArrayLike, " classes"] | None,
        *,
        num_clusters: int,
        num_own: int,
        first_class: int = 0,
    ) -> "Clusters":
        """Sorts the classes by their cluster."""
        order = np.argsort(cluster_of, kind="stable").astype(np.int32)
        sizes = np.bincount(cluster_of, minlength=num_clusters).astype(np.int32)
        kernel = jnp.asarray(kernel)
        bias = jnp.zeros(kernel.shape[:1]) if bias is None else jnp.asarray(bias)
        return cls(kernel, bias, jnp.asarray(order), jnp.asarray(sizes), num_own, first_class)

    @property
    def cluster_of(self) -> Int[np.ndarray, " classes"]:
        """The cluster of each class."""
        clusters = np.empty(len(self.order), np.int32)
        clusters[np.asarray(self.order)] = np.repeat(np.arange(len(self.sizes)), np.asarray(self.sizes))
        return clusters

    def log_sums(
        self, features: Float[Array, " features"], estimates: Float[Array, " clusters"], *, in_product: bool
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Opens the clusters with the largest estimates, as long as their classes are at most ``num_own``.

        Args:
          features: The features of an example.
          estimates: What the row of each cluster says.
          in_product: Whether to pick the logits of opened classes from all logits, instead of gathering their rows.

        Returns:
          The logsumexp of the estimates of the clusters that stay closed, and that of the logits of the others' classes.
        """
        ranked = jnp.argsort(-estimates)
        sizes = jnp.where(self.sizes > self.num_own, 0, self.sizes)[ranked]
        sizes = jnp.where(jnp.cumsum(sizes) <= self.num_own, sizes, 0)
        repeat = functools.partial(jnp.repeat, repeats=sizes, total_repeat_length=self.num_own)
        starts, places = jnp.cumsum(self.sizes) - self.sizes, jnp.arange(self.num_own)
        within = places - repeat(jnp.cumsum(sizes) - sizes)
        rows = self.order.at[repeat(starts[ranked]) + within].get(mode="clip") - self.first_class
        closed = jnp.where(sizes > 0, -jnp.inf, estimates[ranked])
        own = jnp.where(places < jnp.sum(sizes), self._logits(features, rows, in_product), -jnp.inf)
        return jax.nn.logsumexp(closed), jax.nn.logsumexp(own)

    def _logits(self, features, rows, in_product) -> Float[Array, " rows"]:
        """The logits of some rows; minus infinity for those that another process has."""
        if in_product:
            logits = all_logits(features, self.kernel.astype(jnp.float32), None).at[rows].get(mode="clip")
        else:
            logits = all_logits(features, self.kernel.at[rows].get(mode="clip").astype(jnp.float32), None)
        if self.scales is not None:
            logits = logits * self.scales.at[rows].get(mode="clip")
        bias = self.bias.at[rows].get(mode="fill", fill_value=-jnp.inf, wrap_negative_indices=False)
        return logits + bias.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Normalizer:
    """An estimate of ``log sum_j exp z_j`` from the features: ``logsumexp(kernel @ features + bias)``.

    With ``clusters``, each row stands for some classes, and the classes of the largest of them are read themselves.

    It is a pytree, and calling it is pure: it may be jitted, vmapped, and passed to a jitted function.

    Attributes:
      kernel: The rows, shape ``[C, d]``; one row makes it affine.
      bias: One number per row, shape ``[C]``.
      fit: How well it fits.
      clusters: The classes that each row stands for; None if the rows stand for themselves.

    Examples:
      >>> import jax.numpy as jnp
      >>> normalizer = Normalizer(jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.zeros(2), Fit(1.0, 0.0, 0))
      >>> normalizer(jnp.array([[0.0, 0.0]]))
      Array([0.6931], dtype=float32)
    """

    kernel: Float[Array, "rows features"]
    bias: Float[Array, " rows"]
    fit: Fit
    clusters: Clusters | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows that a call reads."""
        return self.kernel.shape[0] + (0 if self.clusters is None else self.clusters.num_own)

    def __call__(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch"]:
        """Estimates the log-normalizer of each example.

        Args:
          features: Features, shape ``[..., d]``.

        Returns:
          One number per example, shape ``[...]``; the score of class c is its logit minus this.
        """
        return jnp.logaddexp(*self.log_sums(features))

    def log_sums(
        self, features: Float[Array, "*batch features"]
    ) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
        """The two parts of the estimate: the logsumexp of the rows, and that of the classes that are read themselves."""
        estimates = all_logits(features, self.kernel, self.bias)
        clusters = self.clusters
        if clusters is None or not clusters.kernel.shape[0]:
            log_sum = jax.nn.logsumexp(estimates, axis=-1)
            return log_sum, jnp.full_like(log_sum, -jnp.inf)
        if not is_on_explicit_mesh(clusters):
            return _opened(clusters, features, estimates)
        arrays = (clusters, jnp.asarray(features), estimates)
        return partitioned_by_xla(_opened, arrays, out_spec=PartitionSpec())


@jax.jit
def _opened(clusters: Clusters, features, estimates) -> tuple[Array, Array]:
    """`Clusters.log_sums` of many examples, as many at a time as the memory for their rows or logits allows."""
    num_classes, num_features = clusters.kernel.shape
    examples = (
        jnp.asarray(features).reshape(-1, num_features),
        estimates.reshape(-1, estimates.shape[-1]),
    )
    num_examples, num_own = examples[0].shape[0], clusters.num_own
    # A program for batches of any size takes the examples one by one.
    is_known = isinstance(num_examples, int)
    in_product = is_known and is_product_faster(num_examples, num_classes=num_classes, num_own=num_own)
    numbers = num_classes if in_product else num_own * num_features
    at_once = max(1, _MAX_BYTES // (4 * numbers)) if is_known else None
    log_sums = functools.partial(clusters.log_sums, in_product=in_product)
    parts = lax.map(lambda example: log_sums(*example), examples, batch_size=at_once)
    closed, own = (part.reshape(features.shape[:-1]) for part in parts)
    return closed, own


_log_sums = jax.jit(Normalizer.log_sums)


def estimates(
    normalizer: Normalizer | None,
    features: Float[np.ndarray, "examples features"],
    *,
    share: ClassShare | None = None,
) -> Float[np.ndarray, " examples"]:
    """What a normalizer says about many examples; zeros if there is none.

    Args:
      normalizer: The normalizer.
      features: Features, shape ``[n, d]``.
      share: The classes that this process has the rows of, if it has not all of them.

    Returns:
      One number per example, shape ``[n]``.

    Examples:
      >>> estimates(None, np.ones((2, 3), np.float32)).tolist()
      [0.0, 0.0]
    """
    if normalizer is None:
        return np.zeros(len(features), np.float32)
    parts = [np.zeros(0, np.float32)]
    for start in range(0, len(features), _CHUNK):
        chunk = np.asarray(features[start : start + _CHUNK], np.float32)
        closed, own = jax.device_get(_log_sums(normalizer, chunk))
        if share is not None:
            own = np.logaddexp.reduce(share.gather(own), axis=0)
        parts.append(np.logaddexp(closed, own))
    return np.concatenate(parts)


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
    features, kernel, bias = check_output_layer(features, kernel, bias)
    logits = LinearLogits(features, kernel, bias, block_size=block_size)
    _, parts = LinearStats(logits, jnp.zeros(features.shape[:-1], jnp.int32)).logsumexp()
    return parts.peak + parts.log_sum


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
