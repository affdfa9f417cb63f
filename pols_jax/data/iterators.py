"""Batches made on the host: evaluation of any split, training from a stream, transfer to the device.

A streamed batch is a pure function of (seed, step): workers compute whole batches from the step's number
alone, so any step can be the first one, and it does not matter which worker does it.
"""

import atexit
import collections
import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from pols_jax.data.dataset import ArraySplit, Batch, Split, StreamSplit, network_input, scale_pixels
from pols_jax.data.images import decode_image
from pols_jax.data.sampling import StepRows, host_rows, step_rows
from pols_jax.errors import DataWarning, ImageError, WorkerError

_LAST_STEP = 2**31 - 1  # steps are int32 on the device
_MAX_THREADS = 8

T = TypeVar("T")
_Read = Callable[[int], tuple[Batch, list[str]]]

_streams: weakref.WeakSet[Generator[Batch]] = weakref.WeakSet()


def evaluation_batches(
    split: Split,
    *,
    batch_size: int,
    process_index: int | Sequence[int] = 0,
    process_count: int = 1,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Passes every example of a split once, in order.

    Args:
      split: The examples, in memory or streamed.
      batch_size: Examples per batch, ``m``, over all hosts.
      process_index: Index of this host; or several, if a host has several parts of the batch.
      process_count: Number of hosts, or of parts; must divide m.
      num_workers: Worker processes that decode a streamed split; with 0, threads of this process do.

    Yields:
      Batches of m / process_count rows (NumPy); rows past the end are masked. Every host gets the same number
      of batches. A picture that cannot be decoded is masked too, with a `DataWarning` that names it.

    Examples:
      >>> split = ArraySplit(images=np.zeros((5, 8, 8, 1), np.uint8), labels=np.arange(5, dtype=np.int32))
      >>> [batch.labels.tolist() for batch in evaluation_batches(split, batch_size=4)]
      [[0, 1, 2, 3], [4, 0, 0, 0]]
    """
    place = {"batch_size": batch_size, "process_index": process_index, "process_count": process_count}
    plan = functools.partial(_rows_in_order, len(split), **place)
    num_batches = -(-len(split) // batch_size)
    if isinstance(split, ArraySplit):
        for i in range(num_batches):
            rows = plan(i)
            images = network_input(split.images[rows.example])
            labels = np.where(rows.where, split.labels[rows.example], 0)
            yield Batch(images=images, labels=labels, where=rows.where)
    else:
        read = functools.partial(_read_batch, split, plan, reads_padding=False)
        for batch in _streamed(read, range(num_batches), num_workers):
            yield batch._replace(images=scale_pixels(np.asarray(batch.images)))


def stream_batches(
    split: StreamSplit,
    *,
    seed: int,
    batch_size: int,
    start_step: int = 0,
    process_index: int | Sequence[int] = 0,
    process_count: int = 1,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Streams training batches without end: the pictures that `sample_batch` would draw, before augmentation.

    Order and padding are the same, and `augment_batch` makes of these pixels what `sample_batch` would have made.

    Args:
      split: The examples.
      seed: Seed of the run.
      batch_size: Examples per batch, ``m``, over all hosts.
      start_step: Global step of the first batch; a resumed run starts here.
      process_index: Index of this host; or several, if a host has several parts of the batch.
      process_count: Number of hosts, or of parts; must divide m.
      num_workers: Worker processes that read and decode; with 0, threads of this process do. The batches are the same.

    Yields:
      This host's m / process_count rows (NumPy, uint8 pixels) of the global batch of each step. A picture that cannot
      be decoded is masked, with a `DataWarning` that names it.

    Examples:
      >>> import tempfile, PIL.Image
      >>> with tempfile.NamedTemporaryFile(suffix=".png") as file:
      ...     PIL.Image.new("RGB", (40, 30)).save(file)
      ...     split = StreamSplit(records=[(file.name, 0)], image_shape=(24, 24, 3))
      ...     batch = next(stream_batches(split, seed=0, batch_size=2))
      >>> batch.where
      array([ True, False])
    """
    place = {"batch_size": batch_size, "process_index": process_index, "process_count": process_count}
    plan = functools.partial(step_rows, len(split), seed=seed, **place)
    read = functools.partial(_read_batch, split, plan, reads_padding=True)
    return _streamed(read, range(start_step, _LAST_STEP), num_workers)


@contextlib.contextmanager
def streams_closed() -> Iterator[None]:
    """Closes, in the end, the streams that were opened meanwhile: their workers stop, and free what nobody read.

    A stream that is left open is closed when the program ends.

    Examples:
      >>> split = StreamSplit(records=[("no.png", 0)], image_shape=(24, 24, 3))
      >>> with streams_closed():
      ...     batches = stream_batches(split, seed=0, batch_size=2)
    """
    before = set(_streams)
    try:
        yield
    finally:
        _close(set(_streams) - before)


def prefetch_to_device(
    batches: Iterable[T], *, size: int = 2, put: Callable[[T], T] = jax.device_put
) -> Iterator[T]:
    """Starts the transfer of the next batches while the device works on this one.

    Args:
      batches: Batches on the host.
      size: Number of batches on the device at a time; 2 hides the transfer.
      put: Starts a transfer without waiting for it; give one that shards or reshapes where needed.

    Examples:
      >>> [int(x) for x in prefetch_to_device(np.arange(3))]
      [0, 1, 2]
    """
    source = iter(batches)
    queue = collections.deque(put(batch) for batch in itertools.islice(source, size))
    while queue:
        yield queue.popleft()
        queue.extend(put(batch) for batch in itertools.islice(source, 1))


def _rows_in_order(
    num_examples: int, batch: int, *, batch_size: int, process_index: int | Sequence[int], process_count: int
) -> StepRows:
    """Which examples a host reads for an evaluation batch; `step_rows` says it for a training step."""
    position = batch * batch_size + host_rows(batch_size, process_index, process_count)
    return StepRows(example=np.minimum(position, num_examples - 1), where=position < num_examples)


def _read_batch(
    split: StreamSplit, plan: Callable[[int], StepRows], step: int, *, reads_padding: bool
) -> tuple[Batch, list[str]]:
    """Reads and decodes one host's rows of the batch with a given number; and says what could not be decoded.

    Pixels stay uint8: they are four times smaller to send. Batch statistics look at padding in training; in evaluation
    nothing does, and it is not read.
    """
    rows = plan(step)
    images = np.zeros((len(rows.where), *split.image_shape), np.uint8)
    labels, where, broken = np.zeros(len(rows.where), np.int32), rows.where.copy(), []
    for i, example in enumerate(rows.example.tolist()):
        if not where[i] and not reads_padding:
            continue
        source, labels[i] = split.records[example]
        try:
            images[i] = decode_image(source, split.image_shape)
        except ImageError as error:
            where[i] = False
            broken.append(f"Record {example}: {error}")
    return Batch(images, labels, where), broken


def _prepare_worker(worker_index: int, worker_count: int) -> None:
    """Ties a worker's life to the main process; grain's workers would wait for one that is gone forever."""

    def exit_with_main_process() -> None:
        main_process = multiprocessing.parent_process()
        if main_process is not None:
            main_process.join()
            os._exit(1)

    # Ctrl-C and a terminal that closes reach every process: leave it to the main process, which stops the workers.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=exit_with_main_process, daemon=True).start()


def _streamed(read: _Read, steps: range, num_workers: int) -> Iterator[Batch]:
    stream = _stream(read, steps, num_workers)
    _streams.add(stream)
    return stream


def _stream(read: _Read, steps: range, num_workers: int) -> Generator[Batch]:
    import grain  # here, because batches of arrays in memory need neither
    from absl import flags

    _close_at_exit()
    # Pillow decodes, but does not resize, outside of the interpreter lock; each thread reads a batch of its own.
    num_threads = 1 if num_workers else min(_MAX_THREADS, os.cpu_count() or 1)
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=num_threads + 1)
    batches = grain.MapDataset.range(steps.start, steps.stop).map(read).to_iter_dataset(options)
    if num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its absl flags, which only absl's own main would parse
        options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=2)
        batches = batches.mp_prefetch(options, worker_init_fn=_prepare_worker)
    reported: set[str] = set()
    source: Any = iter(batches)
    try:
        for batch, broken in source:
            if num_workers:
                # Copied out of the memory that a worker shares, which is dropped: JAX may keep a batch for long.
                batch = Batch(*map(np.array, batch))
            for message in set(broken) - reported:
                reported.add(message)
                warnings.warn(f"{message} It is masked ({len(reported)} so far).", DataWarning, stacklevel=2)
            yield batch
    except RuntimeError as error:
        if died := re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error)):
            raise WorkerError(
                f"A worker process that decodes pictures died (exit code {died[1]}), perhaps for want of memory; start again "
                "to go on, with fewer --workers."
            ) from error
        raise
    finally:
        source.close()


def _close(streams: Iterable[Generator[Batch]]) -> None:
    for stream in streams:
        stream.close()


@functools.cache
def _close_at_exit() -> None:
    """Leaves no stream to the garbage collector of a program that ends.

    Grain's modules are gone by then, and with them what would free the memory that workers share.
    """
    atexit.register(lambda: _close(set(_streams)))  # after grain's own: what comes last is done first
