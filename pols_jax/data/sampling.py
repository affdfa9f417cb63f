"""Training batches as a pure function of (seed, step), so that a resumed run sees the same batches.

An epoch is ceil(n / batch_size) steps over one random order of the n examples; the last batch of an epoch is
padded to the full size and masked.  `sample_batch` draws such batches from arrays on the device;
`step_rows` names the same examples to the host, which streams them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, UInt8

from pols_jax.data import permutation
from pols_jax.data.dataset import Augment, Batch, network_input


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Returns the number of steps that shows every example once.

    Examples:
      >>> steps_per_epoch(1000, 128)
      8
    """
    return -(-num_examples // batch_size)


def _rows_per_shard(batch_size: int, num_shards: int) -> int:
    """Returns the number of rows of a global batch that each of `num_shards` devices or hosts gets."""
    if batch_size % num_shards:
        raise ValueError(
            f"batch_size {batch_size} is not a multiple of the {num_shards} shards it is split over"
        )
    return batch_size // num_shards


def host_rows(
    batch_size: int, process_index: int | Sequence[int], process_count: int
) -> Int[np.ndarray, "rows"]:
    """Lists the rows of a global batch that a host has: one part of it, or several.

    Examples:
      >>> host_rows(8, 1, 2).tolist(), host_rows(8, [0, 2], 4).tolist()
      ([4, 5, 6, 7], [0, 1, 4, 5])
    """
    rows = _rows_per_shard(batch_size, process_count)
    return (rows * np.atleast_1d(process_index)[:, None] + np.arange(rows)).reshape(-1)


def sample_batch(
    images: UInt8[jax.Array, "examples height width channels"],
    labels: Int[jax.Array, "examples"],
    step: Int[jax.Array, ""] | int,
    *,
    seed: int,
    batch_size: int,
    augment: Augment | None = None,
    shard: Int[jax.Array, ""] | int = 0,
    num_shards: int = 1,
) -> Batch:
    """Draws the batch of one training step from images on the device; call it inside jit.

    Shard i of N gets the rows [i m/N, (i+1) m/N) of exactly the batch that one shard would get, augmentation
    included.  Rows that pad the last batch of an epoch repeat real examples with ``where`` False, so that batch
    statistics stay those of real images.

    Args:
      images: uint8 pixels, shape ``[n, h, w, c]``. Pass them to the jitted function as arguments: captured, they would become
        constants of the program.
      labels: Class ids, int32, shape ``[n]``.
      step: Global step from 0, may be traced.
      seed: Seed of the run.
      batch_size: Examples per step, ``m``, over all shards.
      augment: Maps ([m] keys, [m, h, w, c] uint8) to float32 images in [-1, 1]; None only scales the pixels.
      shard: Index of this shard, may be traced (`jax.lax.axis_index`).
      num_shards: The number of shards ``N``, must divide ``m``.

    Examples:
      >>> images, labels = jnp.zeros((10, 8, 8, 1), "uint8"), jnp.arange(10)
      >>> batches = [sample_batch(images, labels, step, seed=0, batch_size=4) for step in range(3)]
      >>> sorted(int(label) for b in batches for label in b.labels[b.where])
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    num_examples = len(labels)
    rows = _rows_per_shard(batch_size, num_shards)
    step, shard = jnp.asarray(step, jnp.int32), jnp.asarray(shard, jnp.int32)
    epoch_steps = steps_per_epoch(num_examples, batch_size)
    row = shard * rows + jnp.arange(rows)
    position = (step % epoch_steps) * batch_size + row
    index = permutation.epoch_order(
        position % num_examples, num_examples, seed=seed, epoch=step // epoch_steps
    )
    drawn = _augmented(images[index], step, row, seed=seed, augment=augment)
    return Batch(images=drawn, labels=labels[index], where=position < num_examples)


def augment_batch(
    batch: Batch,
    step: Int[jax.Array, ""] | int,
    *,
    seed: int,
    augment: Augment | None = None,
    shard: Int[jax.Array, ""] | int = 0,
) -> Batch:
    """Scales or augments the pictures of a streamed batch on the device, as `sample_batch` does those in memory.

    Args:
      batch: What `stream_batches` gave, or a shard's rows of it: uint8 pixels.
      step: Global step from 0, may be traced.
      seed: Seed of the run.
      augment: As in `sample_batch`.
      shard: Index of this shard, may be traced.

    Examples:
      >>> batch = Batch(np.zeros((2, 8, 8, 1), np.uint8), np.array([3, 0], np.int32), np.array([True, True]))
      >>> augment_batch(batch, 7, seed=0).images.dtype
      dtype('float32')
    """
    rows = len(batch.labels)
    row = jnp.asarray(shard, jnp.int32) * rows + jnp.arange(rows)
    images = jnp.asarray(batch.images)
    return batch._replace(images=_augmented(images, step, row, seed=seed, augment=augment))


def _augmented(images, step, row, *, seed, augment):
    """What a step makes of uint8 images, by the rows of the global batch that they stand in."""
    if augment is None:
        return network_input(images)
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return augment(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, row), images)


class StepRows(NamedTuple):
    """Which examples one host reads for one training step.

    Attributes:
      example: Indices of the examples, shape ``[rows]``.
      where: False for rows that pad the last batch of an epoch, shape ``[rows]``.
    """

    example: Int[np.ndarray, "rows"]
    where: Bool[np.ndarray, "rows"]


def step_rows(
    num_examples: int,
    step: int,
    *,
    seed: int,
    batch_size: int,
    process_index: int | Sequence[int] = 0,
    process_count: int = 1,
) -> StepRows:
    """Lists the examples that `sample_batch` draws at a step, on the host.

    Examples:
      >>> step_rows(10, 2, seed=0, batch_size=4).where
      array([ True,  True, False, False])
    """
    epoch, step_in_epoch = divmod(step, steps_per_epoch(num_examples, batch_size))
    position = step_in_epoch * batch_size + host_rows(batch_size, process_index, process_count)
    example = permutation.epoch_order_on_host(position % num_examples, num_examples, seed=seed, epoch=epoch)
    return StepRows(example=example, where=position < num_examples)
