"""Streams and evaluation: complete, disjoint between hosts, resumable, and loud when a worker dies."""

import functools
import io
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import PIL.Image
import pytest

from pols_jax.data import (
    ArraySplit,
    StreamSplit,
    augment_batch,
    decode_image,
    evaluation_batches,
    iterators,
    prefetch_to_device,
    sample_batch,
    scale_pixels,
    stream_batches,
)
from pols_jax.data.augmentation import AUGMENTATIONS
from pols_jax.errors import DataWarning, WorkerError

SHAPE = (16, 16, 3)


def encoded_image(seed, size=(24, 20)):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class DyingRecords(list):
    """Records of which the reading of one ends the process that reads it."""

    def __init__(self, records, deadly, exit_now):
        super().__init__(records)
        self.deadly, self.exit_now = deadly, exit_now

    def __reduce__(self):  # a list would pickle without its attributes being there at once
        return DyingRecords, (list(self), self.deadly, self.exit_now)

    def __getitem__(self, index):
        if index == self.deadly:
            self.exit_now()
        return super().__getitem__(index)


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error():
    raise OSError("the disk is gone")


@pytest.fixture(scope="module")
def records():
    return [(encoded_image(i), i) for i in range(21)]  # the label tells which example it is


@pytest.fixture(scope="module")
def split(records):
    return StreamSplit(records, SHAPE)


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def is_running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"  # nobody may have collected a dead orphan


def labels_of(batches):
    return np.concatenate([batch.labels[batch.where] for batch in batches])


def assert_equal_batches(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_an_epoch_streams_every_example_once_in_another_order_each_time(split):
    batches = take(stream_batches(split, seed=0, batch_size=8), 6)
    first, second = labels_of(batches[:3]), labels_of(batches[3:])
    assert sorted(first) == sorted(second) == list(range(21))
    assert first.tolist() != second.tolist()
    assert [int(batch.where.sum()) for batch in batches] == [8, 8, 5, 8, 8, 5]
    assert all(batch.images.shape == (8, *SHAPE) and batch.images.dtype == np.uint8 for batch in batches)


@pytest.mark.parametrize("name", ["none", "crop", "crop-flip"])
def test_memory_and_stream_give_the_same_batches_bit_for_bit_augmentation_included(split, records, name):
    images = jax.numpy.asarray(np.stack([decode_image(source, SHAPE) for source, _ in records]))
    rule = {"seed": 5, "augment": AUGMENTATIONS[name]}
    draw = jax.jit(functools.partial(sample_batch, batch_size=8, **rule))
    augment = jax.jit(functools.partial(augment_batch, **rule))
    for step, batch in enumerate(take(stream_batches(split, seed=5, batch_size=8), 5)):
        whole = augment(batch, step)
        assert_equal_batches(whole, draw(images, jax.numpy.arange(21), step))
        halves = [jax.tree.map(lambda leaf, i=i: leaf[4 * i : 4 * i + 4], batch) for i in range(2)]
        parts = [augment(half, step, shard=i) for i, half in enumerate(halves)]
        assert_equal_batches(jax.tree.map(lambda *rows: np.concatenate(rows), *parts), whole)


def test_two_hosts_get_disjoint_and_complete_parts_of_the_same_batch(split):
    whole = take(stream_batches(split, seed=2, batch_size=8), 4)
    hosts = [
        take(stream_batches(split, seed=2, batch_size=8, process_index=i, process_count=2), 4)
        for i in range(2)
    ]
    for batch, *parts in zip(whole, *hosts, strict=True):
        assert_equal_batches(jax.tree.map(lambda *rows: np.concatenate(rows), *parts), batch)
    for step in range(3):
        assert not set(labels_of([hosts[0][step]])) & set(labels_of([hosts[1][step]]))


def test_a_resume_in_mid_epoch_gives_the_same_next_batches(split):
    whole = take(stream_batches(split, seed=2, batch_size=8), 6)
    for start_step in (1, 2, 4):
        resumed = take(stream_batches(split, seed=2, batch_size=8, start_step=start_step), 2)
        for batch, expected in zip(resumed, whole[start_step:], strict=False):
            assert_equal_batches(batch, expected)


def test_worker_processes_give_the_same_batches_as_none(split):
    expected = take(stream_batches(split, seed=2, batch_size=8, start_step=1), 4)
    workers = take(stream_batches(split, seed=2, batch_size=8, start_step=1, num_workers=2), 4)
    for batch, alone in zip(workers, expected, strict=True):
        assert_equal_batches(batch, alone)


@pytest.mark.parametrize(
    ("exit_now", "num_workers", "message"),
    [
        (kill_this_process, 2, r"died \(exit code -9\).*fewer --workers"),
        (raise_error, 1, "the disk is gone"),
    ],
)
def test_a_worker_that_dies_raises_and_does_not_hang(records, exit_now, num_workers, message):
    split = StreamSplit(DyingRecords(records, deadly=3, exit_now=exit_now), SHAPE)
    start = time.monotonic()
    with pytest.raises((WorkerError, OSError), match=message):
        # One epoch meets every example.
        take(stream_batches(split, seed=0, batch_size=8, num_workers=num_workers), 4)
    assert time.monotonic() - start < 60  # starting a process and noticing its death take a few seconds


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_workers_leave_signals_of_the_terminal_to_the_main_process(number):
    before = {sent: signal.getsignal(sent) for sent in (signal.SIGINT, signal.SIGHUP)}
    try:
        iterators._prepare_worker(0, 1)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)


def test_workers_end_when_the_main_process_is_killed(tmp_path):
    picture, script = tmp_path / "picture.png", tmp_path / "stream.py"
    picture.write_bytes(encoded_image(0))
    script.write_text(
        f"""
import multiprocessing, time
from pols_jax.data import StreamSplit, stream_batches

if __name__ == "__main__":
    batches = stream_batches(StreamSplit([({str(picture)!r}, 0)], {SHAPE}), seed=0, batch_size=1, num_workers=1)
    next(batches)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert workers
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in workers)


def test_a_program_that_leaves_streams_of_workers_open_ends_without_leaks(tmp_path):
    picture, script = tmp_path / "picture.png", tmp_path / "stream.py"
    picture.write_bytes(encoded_image(0))
    script.write_text(
        f"""
import time
from pols_jax.data import StreamSplit, prefetch_to_device, stream_batches
from pols_jax.data.iterators import streams_closed

def read():
    split = StreamSplit([({str(picture)!r}, 0)], {SHAPE})
    batches = prefetch_to_device(stream_batches(split, seed=0, batch_size=1, num_workers=1))
    batch = next(batches)
    time.sleep(0.5)  # the worker has more than anybody will read
    return batches, batch

if __name__ == "__main__":
    with streams_closed():
        closed = read()
    left_open = read()
"""
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")  # where Python would warn of leaks


@pytest.mark.parametrize("process_count", [1, 2])
@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_evaluation_passes_every_example_exactly_once(split, records, kind, process_count):
    images = np.stack([decode_image(source, SHAPE) for source, _ in records])
    if kind == "memory":
        split = ArraySplit(images, np.arange(21, dtype=np.int32))
    hosts = [
        list(evaluation_batches(split, batch_size=8, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert {len(batches) for batches in hosts} == {3}
    seen = [labels_of(batches) for batches in hosts]
    assert sorted(np.concatenate(seen)) == list(range(21))
    for batch in itertools.chain(*hosts):
        assert batch.images.shape == (8 // process_count, *SHAPE)
        np.testing.assert_array_equal(
            batch.images[batch.where], scale_pixels(images[batch.labels[batch.where]])
        )


def test_all_hosts_get_as_many_batches_when_the_last_has_rows_for_one_host_only():
    split = ArraySplit(np.zeros((9, *SHAPE), np.uint8), np.arange(9, dtype=np.int32))
    hosts = [
        list(evaluation_batches(split, batch_size=8, process_index=i, process_count=2)) for i in range(2)
    ]
    assert [len(batches) for batches in hosts] == [2, 2]
    assert hosts[1][1].where.tolist() == [False] * 4


@pytest.mark.parametrize("iterate", ["training", "evaluation"])
def test_a_broken_picture_is_masked_named_and_counted(records, iterate):
    broken = [*records[:3], (b"not a picture", 3), *records[4:8]]
    split = StreamSplit(broken, SHAPE)
    batches = (
        stream_batches(split, seed=0, batch_size=8)
        if iterate == "training"
        else evaluation_batches(split, batch_size=8)
    )
    with pytest.warns(DataWarning, match=r"Record 3: .*cannot be decoded.*1 so far"):
        batch = next(iter(batches))
    assert sorted(batch.labels[batch.where].tolist()) == [0, 1, 2, 4, 5, 6, 7]
    assert batch.where.sum() == 7


def test_prefetching_keeps_order_and_content_and_looks_only_so_far_ahead():
    requested = []

    def batches():
        for i in range(6):
            requested.append(i)
            yield np.full(3, i, np.float32)

    arrived = prefetch_to_device(batches(), size=2)
    first = next(arrived)
    assert isinstance(first, jax.Array)
    assert requested == [0, 1]
    assert [int(batch[0]) for batch in arrived] == [1, 2, 3, 4, 5]


def test_prefetching_takes_a_sharding_put():
    devices = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec("data"))
    batch = next(prefetch_to_device([np.arange(16)], put=lambda batch: jax.device_put(batch, devices)))
    assert len(batch.sharding.device_set) == 8
