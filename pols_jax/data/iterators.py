"""Batches made on the host: evaluation of any split, training from a stream, transfer to the device.

A streamed batch is a pure function of (seed, step): workers compute whole batches from the step's number
alone, so any step can be the first one, and it does not matter which worker does it.
"""

import collections
import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import grain
import jax
import numpy as np
from absl import flags
from jaxtyping import Bool, Int, UInt8

from pols_jax.data.dataset import ArraySplit, Batch, DataWarning, Split, StreamSplit, scale_pixels
from pols_jax.data.images import ImageError, decode_image, decode_random_crop
from pols_jax.data.sampling import StepRows, rows_per_shard, step_rows

_LAST_STEP = 2**31 - 1  # steps are int32 on the device

T = TypeVar("T")


def evaluation_batches(
    split: Split, *, batch_size: int, process_index: int = 0, process_count: int = 1, num_workers: int = 0
) -> Iterator[Batch]:
    """Pass every example of a split once, in order.

    Args:
        split: The examples, in memory or streamed.
        batch_size: m, over all hosts.
        process_index: Index of this host.
        process_count: Number of hosts, must divide m.
        num_workers: Worker processes that decode a streamed split; with 0, this process does.

    Yields:
        Batches of m / process_count rows (NumPy); rows past the end are masked. Every host gets the same number
        of batches. A picture that cannot be decoded is masked too, with a `DataWarning` that names it.

    >>> split = ArraySplit(images=np.zeros((5, 8, 8, 1), np.uint8), labels=np.arange(5, dtype=np.int32))
    >>> [batch.label.tolist() for batch in evaluation_batches(split, batch_size=4)]
    [[0, 1, 2, 3], [4, 0, 0, 0]]
    """
    plan = _InOrder(len(split), batch_size, process_index, process_count)
    num_batches = -(-len(split) // batch_size)
    if isinstance(split, ArraySplit):
        for i in range(num_batches):
            rows = plan(i)
            image = scale_pixels(split.images[rows.example])
            yield Batch(image=image, label=np.where(rows.mask, split.labels[rows.example], 0), mask=rows.mask)
    else:
        yield from _streamed(_BatchReader(split, plan), range(num_batches), num_workers)


def stream_batches(
    split: StreamSplit,
    *,
    seed: int,
    batch_size: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Stream training batches without end, each a random crop of its examples, mirrored half of the time.

    Examples come in the same order, with the same padding, as `sample_batch` would draw them.

    Args:
        split: The examples.
        seed: Seed of the run.
        batch_size: m, over all hosts.
        start_step: Global step of the first batch; a resumed run starts here.
        process_index: Index of this host.
        process_count: Number of hosts, must divide m.
        num_workers: Worker processes that read and decode; with 0, this process does. The batches are the same.

    Yields:
        This host's m / process_count rows (NumPy) of the global batch of each step. A picture that cannot be
        decoded is masked, with a `DataWarning` that names it.

    Raises:
        RuntimeError: A worker process died.

    >>> import tempfile, PIL.Image
    >>> with tempfile.NamedTemporaryFile(suffix=".png") as file:
    ...     PIL.Image.new("RGB", (40, 30)).save(file)
    ...     split = StreamSplit(records=[(file.name, 0)], image_shape=(24, 24, 3))
    ...     batch = next(stream_batches(split, seed=0, batch_size=2))
    >>> batch.mask
    array([ True, False])
    """
    plan = _Shuffled(len(split), seed, batch_size, process_index, process_count)
    return _streamed(_BatchReader(split, plan, crop_seed=seed), range(start_step, _LAST_STEP), num_workers)


def prefetch_to_device(
    batches: Iterable[T], *, size: int = 2, put: Callable[[T], T] = jax.device_put
) -> Iterator[T]:
    """Start the transfer of the next batches while the device works on this one.

    Args:
        batches: Batches on the host.
        size: Number of batches on the device at a time; 2 hides the transfer.
        put: Starts a transfer without waiting for it; give one that shards or reshapes where needed.

    Yields:
        The same batches on the device.

    >>> [int(x) for x in prefetch_to_device(np.arange(3))]
    [0, 1, 2]
    """
    source = iter(batches)
    queue = collections.deque(put(batch) for batch in itertools.islice(source, size))
    while queue:
        yield queue.popleft()
        queue.extend(put(batch) for batch in itertools.islice(source, 1))


@dataclasses.dataclass(frozen=True)
class _InOrder:
    """Which examples a host reads for each evaluation batch."""

    num_examples: int
    batch_size: int
    process_index: int
    process_count: int

    def __call__(self, batch: int) -> StepRows:
        rows = rows_per_shard(self.batch_size, self.process_count)
        row = self.process_index * rows + np.arange(rows)
        position = batch * self.batch_size + row
        return StepRows(
            example=np.minimum(position, self.num_examples - 1), mask=position < self.num_examples, row=row
        )


@dataclasses.dataclass(frozen=True)
class _Shuffled:
    """Which examples a host reads for each training step."""

    num_examples: int
    seed: int
    batch_size: int
    process_index: int
    process_count: int

    def __call__(self, step: int) -> StepRows:
        return step_rows(
            self.num_examples,
            step,
            seed=self.seed,
            batch_size=self.batch_size,
            process_index=self.process_index,
            process_count=self.process_count,
        )


class _DecodedBatch(NamedTuple):
    """A batch as a worker sends it: pixels are four times smaller as uint8."""

    images: UInt8[np.ndarray, "rows height width channels"]
    labels: Int[np.ndarray, "rows"]
    mask: Bool[np.ndarray, "rows"]
    broken: list[str]


@dataclasses.dataclass(frozen=True)
class _BatchReader:
    """Reads and decodes one host's rows of the batch with a given number."""

    split: StreamSplit
    plan: Callable[[int], StepRows]
    crop_seed: int | None = None  # None: central crops

    def __call__(self, step: int) -> _DecodedBatch:
        rows = self.plan(step)
        images = np.zeros((len(rows.row), *self.split.image_shape), np.uint8)
        labels, mask, broken = np.zeros(len(rows.row), np.int32), rows.mask.copy(), []
        for i, (example, row) in enumerate(zip(rows.example.tolist(), rows.row.tolist(), strict=True)):
            if self.crop_seed is None and not mask[i]:
                continue  # nothing looks at padding in evaluation
            source, labels[i] = self.split.records[example]
            try:
                if self.crop_seed is None:
                    images[i] = decode_image(source, self.split.image_shape)
                else:
                    generator = np.random.default_rng((self.crop_seed, step, row))
                    images[i] = decode_random_crop(source, self.split.image_shape, generator)
            except ImageError as error:
                mask[i] = False
                broken.append(f"record {example}: {error}")
        return _DecodedBatch(images, labels, mask, broken)


def _prepare_worker(worker_index: int, worker_count: int) -> None:
    """Tie a worker's life to the main process."""
    del worker_index, worker_count
    # Ctrl-C reaches every process of a terminal: leave it to the main process, which stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_main_process, daemon=True).start()


def _exit_with_main_process() -> None:
    """End this process when the main one is gone; grain's workers would wait for it forever."""
    main_process = multiprocessing.parent_process()
    if main_process is not None:
        main_process.join()
        os._exit(1)


def _streamed(read: _BatchReader, steps: range, num_workers: int) -> Iterator[Batch]:
    batches = (
        grain.MapDataset.range(steps.start, steps.stop)
        .map(read)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    )
    if num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its absl flags, which only absl's own main would parse
        options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=2)
        batches = batches.mp_prefetch(options, worker_init_fn=_prepare_worker)
    reported: set[str] = set()
    iterator: Any = iter(batches)
    try:
        for images, labels, mask, broken in iterator:
            for message in set(broken) - reported:
                reported.add(message)
                warnings.warn(f"{message} ({len(reported)} so far); it is masked", DataWarning, stacklevel=2)
            yield Batch(image=scale_pixels(images), label=labels, mask=mask)
    finally:
        iterator.close()
