"""Noise-contrastive estimation with classes drawn at random: a step whose cost does not depend on k.

The exact loss sums over all classes. Here ``num_noise`` classes are drawn from the noise distribution instead, and only
their rows and those of the true classes are read. The mean over draws is the exact loss. The gradient of the kernel
is formed for those rows alone (`sampled_value_and_grad`) and can be added to a kernel in place (`add_rows`).

Classes are drawn by the alias method: a table is built once from the probabilities, and a draw is then two lookups. Uniform
noise needs no table.
"""

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pols_jax.losses.checks import accumulation_dtype, check_labels, check_noise_probs, check_output_layer
from pols_jax.losses.global_batch import GlobalBatch
from pols_jax.losses.noise import Noise


class NoiseSampler(NamedTuple):
    """A distribution over classes that can be drawn from in constant time. Made by `make_noise_sampler`.

    Attributes:
      probs: The probability of each class, shape ``[k]``.
      keep: For a column of the table, the probability that it gives its own class.
      other: The class that it gives otherwise.

    Examples:
      >>> sampler = make_noise_sampler(np.array([0.0, 1.0, 0.0]))
      >>> sampler.draw(jax.random.key(0), (4,)).tolist()
      [1, 1, 1, 1]
    """

    probs: Float[Array, " classes"]
    keep: Float[Array, " classes"]
    other: Int[Array, " classes"]

    @property
    def num_classes(self) -> int:
        """The number of classes k."""
        return self.probs.shape[0]

    def draw(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Int[Array, "..."]:
        """Draws classes, independently and with repetition."""
        column_key, coin_key = jax.random.split(key)
        column = jax.random.randint(column_key, shape, 0, self.keep.shape[0], jnp.int32)
        coin = jax.random.uniform(coin_key, shape, self.keep.dtype)
        return jnp.where(coin < self.keep[column], column, self.other[column])


class UniformSampler(NamedTuple):
    """All classes alike, without a table; stands wherever a `NoiseSampler` stands.

    Attributes:
      num_classes: The number of classes k.

    Examples:
      >>> UniformSampler(1000).draw(jax.random.key(0), (3,)).shape, UniformSampler(8).probs.tolist()
      ((3,), [0.125])
    """

    num_classes: int

    @property
    def probs(self) -> Float[Array, " one"]:
        """The one probability of all classes."""
        return jnp.full((1,), 1.0 / self.num_classes, jnp.float32)

    def draw(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Int[Array, "..."]:
        """Draws classes, independently and with repetition."""
        return jax.random.randint(key, shape, 0, self.num_classes, jnp.int32)


Sampler: TypeAlias = NoiseSampler | UniformSampler
"""What draws noise classes."""


def make_noise_sampler(noise_probs: Float[ArrayLike, " classes"]) -> NoiseSampler:
    """Builds the alias table of a distribution, in time proportional to the number of classes.

    Every column of the table has the same share 1/k. A class with less than that gives the rest of its column to a class
    that has more.

    Args:
      noise_probs: The distribution, shape ``[k]``; `pols_jax.training.learning.noise_distribution` makes the usual ones.

    Examples:
      >>> make_noise_sampler(np.array([0.25, 0.75])).keep.tolist()
      [0.5, 1.0]
    """
    probs = np.asarray(noise_probs)
    check_noise_probs(probs, probs.size)
    num_classes = probs.size
    keep = probs.astype(np.float64) * (num_classes / probs.sum(dtype=np.float64))
    other = np.arange(num_classes, dtype=np.int32)
    poor, rich = list(np.flatnonzero(keep < 1)), list(np.flatnonzero(keep >= 1))
    while poor and rich:
        receiver, giver = poor.pop(), rich[-1]
        other[receiver] = giver
        keep[giver] -= 1.0 - keep[receiver]
        if keep[giver] < 1:
            poor.append(rich.pop())
    # What is left differs from a whole column by rounding only.
    keep[poor + rich] = 1.0
    return NoiseSampler(*map(jnp.asarray, (probs.astype(np.float32), keep.astype(np.float32), other)))


def sampled_noise_contrastive_estimation(
    key: PRNGKeyArray,
    features: Float[Array, "batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, " batch"],
    *,
    sampler: Sampler,
    num_noise: int,
    shared: bool = True,
) -> Float[Array, " batch"]:
    """Computes the noise-contrastive estimation loss on classes drawn at random. Its mean over keys is the exact loss.

    Under ``jax.grad`` the gradient of the kernel is an array like the kernel, mostly zeros: at large k use
    `sampled_value_and_grad`.

    Args:
      key: Decides which classes are drawn.
      features: Features, shape ``[m, d]``.
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[m]``.
      sampler: Draws the noise classes.
      num_noise: How many noise classes are drawn, t.
      shared: Whether one draw serves the whole batch, which costs one matrix product, or each example has its own.

    Returns:
      One loss per example, shape ``[m]``. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> sampler = make_noise_sampler(np.full(4, 0.25))
      >>> losses = sampled_noise_contrastive_estimation(
      ...     jax.random.key(0), jnp.ones((2, 3)), jnp.zeros((4, 3)), jnp.zeros(4), jnp.array([0, 1]),
      ...     sampler=sampler, num_noise=4,
      ... )
      >>> losses  # five logits of 0, with the scores 0 - log(4 / 4): five times log 2
      Array([3.4657, 3.4657], dtype=float32)
    """
    features, kernel, bias, labels = _check(features, kernel, bias, labels, sampler, num_noise)
    classes, rows = _drawn_rows(key, kernel, bias, labels, sampler, num_noise, shared)
    losses = _loss_of_rows(features, rows, classes, sampler, num_noise)
    return jnp.where((labels >= 0) & (labels < kernel.shape[0]), losses, jnp.nan)


class RowGradients(NamedTuple):
    """The gradient of a kernel and a bias, for the rows that have one.

    Attributes:
      classes: The classes, shape ``[rows]``. A class may stand there several times: its gradient is the sum.
      kernel: Gradients of their rows of the kernel, shape ``[rows, d]``.
      bias: Gradients of their biases, shape ``[rows]``.
    """

    classes: Int[Array, " rows"]
    kernel: Float[Array, "rows features"]
    bias: Float[Array, " rows"]


def sampled_value_and_grad(
    key: PRNGKeyArray,
    features: Float[Array, "batch features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    labels: Int[Array, " batch"],
    *,
    sampler: Sampler,
    num_noise: int,
    shared: bool = True,
    where: Bool[Array, " batch"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, "batch features"], RowGradients]:
    """Computes the mean of `sampled_noise_contrastive_estimation` and its gradients, for the touched rows only.

    The arguments are the same; ``where`` says which examples are real, all if None.

    Returns:
      The loss; the gradient of the features, to go on to the backbone with; and the gradients of the touched rows.

    Examples:
      >>> kernel, bias, labels = jnp.zeros((1000, 3)), jnp.zeros(1000), jnp.array([0, 1])
      >>> value, for_features, rows = sampled_value_and_grad(
      ...     jax.random.key(0), jnp.ones((2, 3)), kernel, bias, labels,
      ...     sampler=make_noise_sampler(np.full(1000, 1e-3)), num_noise=5,
      ... )
      >>> rows.classes.shape, rows.kernel.shape
      ((7,), (7, 3))
    """
    features, kernel, bias, labels = _check(features, kernel, bias, labels, sampler, num_noise)
    batch = GlobalBatch.of(labels, where, None)
    features, labels = jnp.where(batch.where[:, None], features, 0.0), jnp.where(batch.where, labels, 0)
    classes, rows = _drawn_rows(key, kernel, bias, labels, sampler, num_noise, shared)

    def mean_loss(features, rows):
        return batch.mean(_loss_of_rows(features, rows, classes, sampler, num_noise))

    value, (for_features, for_rows) = jax.value_and_grad(mean_loss, argnums=(0, 1))(features, rows)
    return value, for_features, RowGradients(classes, *for_rows)


def add_rows(
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    rows: RowGradients,
    *,
    scale: ArrayLike,
) -> tuple[Float[Array, "classes features"], Float[Array, " classes"]]:
    """Adds multiples of row gradients to a kernel and a bias: a step of gradient descent with ``scale=-rate``.

    In a jitted step that donates kernel and bias (``donate_argnums``) this writes the touched rows in place, and its
    cost does not depend on the number of classes.

    Args:
      kernel: One row per class, shape ``[k, d]``.
      bias: One number per class, shape ``[k]``.
      rows: What `sampled_value_and_grad` returned.
      scale: What the gradients are multiplied with.

    Examples:
      >>> rows = RowGradients(jnp.array([2, 2]), jnp.ones((2, 1)), jnp.zeros(2))
      >>> add_rows(jnp.zeros((4, 1)), jnp.zeros(4), rows, scale=-0.5)[0].ravel().tolist()
      [0.0, 0.0, -1.0, 0.0]
    """
    scale = jnp.asarray(scale)
    return (
        kernel.at[rows.classes].add(scale.astype(kernel.dtype) * rows.kernel.astype(kernel.dtype)),
        bias.at[rows.classes].add(scale.astype(bias.dtype) * rows.bias.astype(bias.dtype)),
    )


class TouchedClasses(NamedTuple):
    """The classes whose rows a step touches, each once. Made by `touched_classes`.

    Attributes:
      classes: The m true and t drawn classes in increasing order, each once, shape ``[m + t]``; filled up with numbers
        from k on, of which there is no class.
      true: Where in ``classes`` the true class of each example stands, shape ``[m]``.
      repetitions: How often each class was drawn, shape ``[m + t]``.
    """

    classes: Int[Array, " touched"]
    true: Int[Array, " batch"]
    repetitions: Int[Array, " touched"]


def touched_classes(
    labels: Int[Array, " batch"], drawn: Int[Array, " drawn"], *, num_classes: int
) -> TouchedClasses:
    """Lists true and drawn classes once each, in arrays whose shapes do not depend on how many differ.

    Examples:
      >>> touched = touched_classes(jnp.array([3, 1]), jnp.array([1, 5, 5]), num_classes=6)
      >>> touched.classes.tolist(), touched.true.tolist(), touched.repetitions.tolist()
      ([1, 3, 5, 9, 10], [1, 0], [1, 0, 2, 0, 0])
    """
    entries = jnp.concatenate([labels.astype(jnp.int32), drawn.astype(jnp.int32)])
    classes, places = jnp.unique(entries, return_inverse=True, size=len(entries), fill_value=num_classes)
    nowhere = num_classes + jnp.arange(len(entries), dtype=jnp.int32)
    true, others = jnp.split(places.astype(jnp.int32), [len(labels)])
    repetitions = jnp.zeros_like(entries).at[others].add(1)
    return TouchedClasses(jnp.where(classes < num_classes, classes, nowhere), true, repetitions)


def loss_of_touched(
    features: Float[Array, "batch features"],
    kernel: Float[Array, "touched features"],
    bias: Float[Array, " touched"],
    touched: TouchedClasses,
    *,
    sampler: Sampler,
    num_noise: int,
) -> Float[Array, " batch"]:
    """Computes `sampled_noise_contrastive_estimation` from the rows and biases of the touched classes alone.

    A class that is true for several examples, or drawn several times, or both, has one row, and one sum of its gradients.
    ``touched.true`` may be that of a part of the batch.

    Examples:
      >>> touched = touched_classes(jnp.array([3, 1]), jnp.array([1, 5, 5, 0]), num_classes=8)
      >>> loss_of_touched(
      ...     jnp.ones((2, 3)), jnp.zeros((6, 3)), jnp.zeros(6), touched, sampler=UniformSampler(8), num_noise=4
      ... )  # scores 0 - log(4 / 8): log(1 + 1/2) + 4 log(1 + 2)
      Array([4.7999, 4.7999], dtype=float32)
    """
    product, shifts = _score_parts(features, kernel, bias, touched.classes, sampler, num_noise)
    scores = product("md,ud->mu", features, kernel) + shifts[None, :]
    true_scores = jnp.take_along_axis(scores, touched.true[:, None], axis=1)[:, 0]
    noise_terms = jax.nn.softplus(scores) * touched.repetitions.astype(scores.dtype)[None, :]
    return jax.nn.softplus(-true_scores) + jnp.sum(noise_terms, axis=1)


def _drawn_rows(key, kernel, bias, labels, sampler: Sampler, num_noise: int, shared: bool):
    """The classes that a step touches, first the m true ones and then the noise; and their rows of kernel and bias."""
    shape = (num_noise,) if shared else (labels.shape[0] * num_noise,)
    classes = jnp.concatenate([labels.astype(jnp.int32), sampler.draw(key, shape)])
    return classes, tuple(array.at[classes].get(mode="clip") for array in (kernel, bias))


def _loss_of_rows(features, rows, classes, sampler: Sampler, num_noise: int):
    """``softplus(-s_y) + sum of softplus(s_c)`` over the drawn classes c, with ``s_j = z_j - log(t q_j)``."""
    num_examples, num_features = features.shape
    kernel, bias = rows
    product, shifts = _score_parts(features, kernel, bias, classes, sampler, num_noise)
    (true, noise), (true_shifts, noise_shifts) = (jnp.split(a, [num_examples]) for a in (kernel, shifts))
    true_scores = product("md,md->m", features, true) + true_shifts
    if noise.shape[0] == num_noise:
        noise_scores = product("md,td->mt", features, noise)
    else:
        noise_scores = product("md,mtd->mt", features, noise.reshape(num_examples, num_noise, num_features))
    noise_scores = noise_scores + noise_shifts.reshape(-1, num_noise)
    return jax.nn.softplus(-true_scores) + jnp.sum(jax.nn.softplus(noise_scores), axis=1)


def _score_parts(features, kernel, bias, classes, sampler: Sampler, num_noise: int):
    """The product that scores are made of, in their dtype; and what is added to it for each class."""
    dtype = accumulation_dtype(features, kernel, bias)
    _, log_counts = Noise(jnp.asarray(num_noise), sampler.probs).of_classes(classes).counts()
    shifts = bias.astype(dtype) - log_counts.astype(dtype)
    return functools.partial(jnp.einsum, preferred_element_type=dtype), shifts


def _check(features, kernel, bias, labels, sampler, num_noise):
    features, kernel, bias = check_output_layer(features, kernel, bias)
    labels = check_labels(labels, features.shape, name="features")
    if features.ndim != 2:
        raise ValueError(f"features must have 2 axes, examples and features, got shape {features.shape}.")
    if num_noise < 1:
        raise ValueError(f"num_noise must be at least 1, got {num_noise}.")
    if bias is None:
        raise ValueError(f"bias must have shape [{kernel.shape[0]}] as kernel has rows, got None.")
    if sampler.num_classes != kernel.shape[0]:
        raise ValueError(
            f"sampler draws from {sampler.num_classes} classes, and kernel has {kernel.shape[0]}."
        )
    return features, kernel, bias, labels
