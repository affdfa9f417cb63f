"""K-means of the rows of an output layer: which classes one row of a normalizer stands for, and where it starts from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pols_jax.class_shares import ClassShare
from pols_jax.losses.device_axes import is_on_explicit_mesh, partitioned_by_xla

# K-means looks at this many class rows per center; more change little.
_ROWS_PER_CENTER = 64
_KMEANS_ROUNDS = 10
# Rows that are compared with the centers in one go.
_CHUNK = 2048


def cluster_rows(
    features: Float[np.ndarray, "examples features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"] | None,
    *,
    num_clusters: int,
    seed: int,
    share: ClassShare,
) -> tuple[Int[np.ndarray, " classes"], Float[Array, "clusters features"], Float[Array, " clusters"]]:
    """Clusters the class rows. Two rows are near each other if they give the features similar logits.

    A cluster of classes with different logits adds up to more than its mean says: half the variance, as for a normal
    distribution.

    Returns:
      The cluster of each class; and of each cluster the mean of the rows, and the mean of the biases with the log of what its
      classes add up to.

    Examples:
      >>> layer = jnp.array([[5.0, 0.0], [0.0, 5.0], [5.0, 0.0]]), None
      >>> found = cluster_rows(np.eye(2), *layer, num_clusters=2, seed=0, share=ClassShare.whole(3))
      >>> cluster_of, kernel, bias = found
      >>> sorted(kernel.tolist()), sorted(bias.round(2).tolist()), bool(cluster_of[0] == cluster_of[2])
      ([[0.0, 5.0], [5.0, 0.0]], [0.0, 0.69], True)
    """
    rng = np.random.default_rng(seed)
    some = np.sort(rng.choice(len(features), min(len(features), 50_000), replace=False))
    sample = np.c_[features[some], np.ones(len(some))]
    moment = sample.T @ sample / len(sample)
    moment += 1e-6 * np.trace(moment) / len(moment) * np.eye(len(moment))
    metric = jnp.asarray(np.linalg.cholesky(moment), jnp.float32)
    cluster = functools.partial(
        _clustered, metric=metric, key=jax.random.key(seed), num_clusters=num_clusters
    )
    if not share.is_alone:
        found = _clustered_together(kernel, bias, metric, jax.random.key(seed), num_clusters, share)
    elif is_on_explicit_mesh((kernel, bias)):
        found = partitioned_by_xla(cluster, (kernel, bias), out_spec=PartitionSpec())
    else:
        found = cluster(kernel, bias)
    cluster_of, means, biases = jax.device_get(found)
    return cluster_of, jnp.asarray(means), jnp.asarray(biases)  # on one device, wherever the classes are


@functools.partial(jax.jit, static_argnames="num_clusters")
def _clustered(kernel, bias, metric, key, num_clusters: int) -> tuple[Array, Array, Array]:
    """K-means of the class rows, in the metric of their logits."""
    rows = _with_bias(kernel, bias)
    points = rows[_some_classes(key, len(rows), num_clusters)] @ metric
    nearest, *sums = _sums(rows, _centers(points, num_clusters), metric)
    return nearest, *_rows_of(*sums)


def _clustered_together(kernel, bias, metric, key, num_clusters: int, share: ClassShare):
    """Does what `_clustered` does, when each process has some of the rows."""
    rows = np.asarray(_with_bias(kernel, bias))
    some = np.asarray(_some_classes(key, share.num_classes, num_clusters))
    place = some - share.classes.start
    is_own = (place >= 0) & (place < len(rows))
    points = np.zeros((len(some), rows.shape[1]), np.float32)
    points[is_own] = rows[place[is_own]]
    centers = jax.jit(_centers, static_argnums=1)(jnp.asarray(share.sum(points)) @ metric, num_clusters)
    nearest, *sums = map(np.asarray, jax.jit(_sums)(rows, centers, metric))
    return share.concatenated(nearest), *_rows_of(*(jnp.asarray(share.sum(each)) for each in sums))


def _with_bias(kernel, bias) -> Array:
    column = jnp.zeros(kernel.shape[0]) if bias is None else bias.astype(jnp.float32)
    return jnp.concatenate([kernel.astype(jnp.float32), column[:, None]], axis=1)


def _some_classes(key, num_classes: int, num_clusters: int) -> Array:
    return jax.random.permutation(key, num_classes)[: _ROWS_PER_CENTER * num_clusters]


def _centers(points, num_clusters: int) -> Array:
    """The centers of some points, by a few rounds of k-means."""

    def refine(_, centers):
        nearest, _ = _nearest(points, centers)
        sums, sizes = _segments(points, nearest, num_clusters)
        means = sums / jnp.maximum(sizes, 1.0)[:, None]
        return jnp.where(sizes[:, None] > 0, means, centers)

    return lax.fori_loop(0, _KMEANS_ROUNDS, refine, points[:num_clusters])


def _sums(rows, centers, metric) -> tuple[Array, Array, Array, Array]:
    """The nearest center of each row; of the rows of each center their sum, their number, and their squared distances."""
    nearest, distances = _nearest(rows @ metric, centers)
    return (
        nearest,
        *_segments(rows, nearest, len(centers)),
        jax.ops.segment_sum(distances, nearest, len(centers)),
    )


def _rows_of(sums, sizes, distances) -> tuple[Array, Array]:
    """The rows that stand for the clusters."""
    means = sums / jnp.maximum(sizes, 1.0)[:, None]
    variance = distances / jnp.maximum(sizes, 1.0)
    # A cluster that got no class is far below the others.
    bias = means[:, -1] + jnp.log(jnp.maximum(sizes, 1e-3)) + jnp.minimum(variance / 2, 5.0)
    return means[:, :-1], bias


def _segments(points, nearest, num_centers: int) -> tuple[Array, Array]:
    sizes = jax.ops.segment_sum(jnp.ones(len(points)), nearest, num_centers)
    return jax.ops.segment_sum(points, nearest, num_centers), sizes


def _nearest(points, centers) -> tuple[Array, Array]:
    """The nearest center of each point, and its squared distance."""
    squares = jnp.sum(centers * centers, axis=1)

    def nearest(point):
        distances = squares - 2 * centers @ point
        return jnp.argmin(distances), jnp.maximum(jnp.min(distances) + point @ point, 0.0)

    return lax.map(nearest, points, batch_size=_CHUNK)
