"""Batches made on the host: every example of a split once, for evaluation."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int, UInt8

from pols_jax.data.dataset import ArraySplit, Batch, scale_pixels
from pols_jax.data.sampling import rows_per_shard


def evaluation_batches(
    split: ArraySplit, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Pass every example of a split once, in order.

    Args:
        split: The examples.
        batch_size: m, over all hosts.
        process_index: Index of this host.
        process_count: Number of hosts, must divide m.

    Yields:
        Batches of m / process_count rows (NumPy); rows past the end are zero and masked. Every host gets the
        same number of batches.

    >>> split = ArraySplit(images=np.zeros((5, 8, 8, 1), np.uint8), labels=np.arange(5, dtype=np.int32))
    >>> [batch.label.tolist() for batch in evaluation_batches(split, batch_size=4)]
    [[0, 1, 2, 3], [4, 0, 0, 0]]
    """
    rows = rows_per_shard(batch_size, process_count)
    for batch_start in range(0, len(split), batch_size):
        start = batch_start + process_index * rows
        yield padded_batch(split.images[start : start + rows], split.labels[start : start + rows], rows)


def padded_batch(
    images: UInt8[np.ndarray, "real height width channels"], labels: Int[np.ndarray, "real"], rows: int
) -> Batch:
    """Scale images to [-1, 1] and fill up with zero, masked rows.

    >>> padded_batch(np.zeros((1, 8, 8, 1), np.uint8), np.array([7], np.int32), 3).label
    array([7, 0, 0], dtype=int32)
    """
    num_real = len(labels)
    image = np.zeros((rows, *images.shape[1:]), np.float32)
    image[:num_real] = scale_pixels(images)
    label = np.zeros(rows, np.int32)
    label[:num_real] = labels
    return Batch(image=image, label=label, mask=np.arange(rows) < num_real)
