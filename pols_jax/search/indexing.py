"""Makes an index of pictures, and brings it up to date.

The network looks at every picture once. An index can be killed at any moment and updated at any time: what the next update
has to do follows from the pictures that are there and those that the index has.
"""

import collections
import dataclasses
import glob
import hashlib
import itertools
import os
import time
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8

from pols_jax.data import decode_image
from pols_jax.errors import ConfigError, ImageError, RunError, printable, reason_of
from pols_jax.files import check_directory, check_space, read_bytes
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index_files import DTYPES, SCHEMA, IndexInfo, IndexWriter, PartInfo, Rows, read_pictures
from pols_jax.search.networks import BATCH_SIZES
from pols_jax.search.pictures import Picture, find_pictures
from pols_jax.training.run_dirs import locked

_BATCH = BATCH_SIZES[-1]
# Pictures that are read ahead of the network.
_READ_AHEAD = 4 * _BATCH
# A kill costs at most the work of this long.
_SECONDS_BETWEEN_COMMITS = 10.0


@dataclasses.dataclass
class IndexUpdate:
    """What an update did.

    Attributes:
      added: The paths of new pictures.
      changed: The paths of pictures that were looked at again, because they have changed.
      vanished: The paths of pictures that are no longer there.
      broken: The paths of files that could not be decoded this time, and why.
      num_pictures: How many pictures the index has now.
      num_broken: How many broken files it knows; they are not tried again until they change.
    """

    added: list[str] = dataclasses.field(default_factory=list)
    changed: list[str] = dataclasses.field(default_factory=list)
    vanished: list[str] = dataclasses.field(default_factory=list)
    broken: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    num_pictures: int = 0
    num_broken: int = 0


class _Status(NamedTuple):
    """By what a file is known again; -1 if it cannot be had."""

    size: int
    mtime_ns: int
    ctime_ns: int


class _Seen(NamedTuple):
    """A file that was looked at: its pixels, or why there are none."""

    path: bytes
    status: _Status
    sha256: bytes
    pixels: UInt8[np.ndarray, "height width channels"] | None
    why: str | None


def update_index(
    bank: ClassBank,
    sources: Iterable[str | Picture],
    out: str | os.PathLike,
    *,
    dtype: str | None = None,
    shard: tuple[int, int] = (0, 1),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_skip: Callable[[str, str], None] = lambda name, why: None,
) -> IndexUpdate:
    """Makes an index of pictures, or brings it up to date.

    New and changed pictures are looked at; those that have vanished from the sources are dropped. Pictures of other
    sources stay. A file has changed if its size, or its times and its contents, are others.

    Args:
      bank: The network.
      sources: Files, folders and patterns, as for `pols_jax.search.pictures.find_pictures`; or pictures with paths.
      out: The directory of the index; it is made if it does not exist.
      dtype: What features are stored in, ``float32`` or ``float16``; by default what the index has, and else float32.
      shard: Which part of the pictures this index takes, and how many parts there are: ``(0, 4)`` to ``(3, 4)``.
      on_progress: Is called with how many pictures have been looked at, and how many there are to look at.
      on_skip: Is called with the path of a file that cannot be decoded, and why.

    Returns:
      What was done.

    Raises:
      ConfigError: if the directory cannot be used, or holds an index of another network or dtype.
      DataError: if a source does not exist; nothing is changed then.
      FileError: if a file cannot be written; what was written before stays.
    """
    image_shape = bank.image_shape
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"Features are stored in {' or '.join(DTYPES)}, not {dtype}.")
    if not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"shard must be (i, n) with i from 0 to n - 1, got {shard}.")
    out = Path(out)
    check_directory(out)
    sources = list(sources)
    found = {path: None for path in _found(sources, out) if zlib.crc32(path) % shard[1] == shard[0]}
    update = IndexUpdate()
    with locked(out, flag="--out"):
        writer = _open(bank, out, dtype)
        known = _drop_what_is_gone(writer, found, _scope(sources), update)
        todo = [path for path in found if path not in known]
        check_space(out, len(todo) * writer.info.num_features * np.dtype(writer.info.dtype).itemsize)
        _add(bank, writer, todo, image_shape, update, on_progress, on_skip)
        update.num_pictures = sum(part.num_pictures for part in writer.info.parts)
        update.num_broken = sum(part.num_broken for part in writer.info.parts)
    return update


def _open(bank: ClassBank, out: Path, dtype: str | None) -> IndexWriter:
    new = IndexInfo(
        checkpoint=bank.checkpoint,
        run_dir=printable(os.path.abspath(bank.place)),
        num_features=bank.num_features,
        dtype=dtype or "float32",  # type: ignore[arg-type]
    )
    writer = IndexWriter(out, new)
    if (writer.info.checkpoint, writer.info.num_features) != (new.checkpoint, new.num_features):
        raise RunError(
            f"{out} holds features of another network ({writer.info.checkpoint} of {writer.info.run_dir}), not of "
            f"{bank.place} ({bank.checkpoint}); name another directory with --out."
        )
    if dtype is not None and writer.info.dtype != dtype:
        raise ConfigError(
            f"{out} holds features in {writer.info.dtype}, not {dtype}; name another directory with --out."
        )
    return writer


def _found(sources: list[str | Picture], out: Path) -> dict[bytes, None]:
    """The absolute paths of all pictures, each once, in order; without the files of the index itself."""
    texts = [source for source in sources if isinstance(source, str)]
    pictures = itertools.chain(
        find_pictures(texts), (source for source in sources if not isinstance(source, str))
    )
    own = os.fsencode(os.path.abspath(out)) + b"/"
    paths = (os.fsencode(os.path.abspath(picture.name)) for picture in pictures)
    return dict.fromkeys(path for path in paths if not path.startswith(own))


def _scope(sources: list[str | Picture]) -> tuple[bytes, ...]:
    """The folders that sources stand for: what is not found there any longer has vanished."""
    folders = []
    for source in sources:
        name = source if isinstance(source, str) else source.name
        if not os.path.exists(name) and glob.has_magic(name):
            before = itertools.takewhile(lambda part: not glob.has_magic(part), name.split("/"))
            folders.append("/".join(before) or ("/" if name.startswith("/") else "."))
        elif os.path.isdir(name):
            folders.append(name)
    return tuple(os.fsencode(os.path.abspath(folder)).rstrip(b"/") + b"/" for folder in folders)


def _drop_what_is_gone(
    writer: IndexWriter, found: dict[bytes, None], scope: tuple[bytes, ...], update: IndexUpdate
) -> set[bytes]:
    """Drops the pictures that have vanished or changed; returns the paths of all others."""
    known: set[bytes] = set()
    for part in writer.info.parts:
        pictures = read_pictures(writer.directory, part)
        paths = pictures["path"].to_pylist()
        columns = [pictures[name].to_pylist() for name in _Status._fields]
        old = [_Status(*values) for values in zip(*columns, strict=True)]
        hashes, broken = (pictures[name].to_pylist() for name in ("sha256", "broken"))
        new, keep = list(old), np.ones(len(paths), bool)
        for i, path in enumerate(paths):
            if path in found:
                new[i] = _status(path)
                keep[i] = new[i] == old[i] or (new[i].size == old[i].size and _hash(path) == hashes[i])
                if not keep[i]:
                    update.changed.append(os.fsdecode(path))
            elif path.startswith(scope) and (broken[i] is not None or _has_vanished(path)):
                keep[i] = False
                if broken[i] is None:
                    update.vanished.append(os.fsdecode(path))
        known.update(itertools.compress(paths, keep))
        if not keep.all() or new != old:
            _rewrite(writer, part, new, keep)
    return known


def _rewrite(writer: IndexWriter, part: PartInfo, statuses: list[_Status], keep: np.ndarray) -> None:
    rows = writer.read(part)
    pictures = rows.pictures
    for name, values in zip(_Status._fields, zip(*statuses, strict=True), strict=True):
        place = pictures.schema.get_field_index(name)
        pictures = pictures.set_column(place, pictures.schema.field(place), pa.array(values, pa.int64()))
    writer.replace(part, Rows(pictures, rows.features).kept(keep))


def _add(
    bank: ClassBank,
    writer: IndexWriter,
    todo: list[bytes],
    image_shape: tuple[int, int, int],
    update: IndexUpdate,
    on_progress: Callable[[int, int], None],
    on_skip: Callable[[str, str], None],
) -> None:
    """Looks at pictures and adds them, some at a time."""
    pending: list[Rows] = []
    done, last_commit, again = 0, time.monotonic(), set(update.changed)

    def commit() -> None:
        nonlocal last_commit
        if pending:
            writer.append(Rows.joined(pending))
            pending.clear()
        last_commit = time.monotonic()

    on_progress(0, len(todo))
    seen = _looked_at(todo, image_shape)
    try:
        # Always the same batches, wherever an update before was killed: so the features have the same bits.
        while batch := list(itertools.islice(seen, _BATCH)):
            rows = _rows(bank, batch, writer.info)
            pending.append(rows)
            _note(rows, again, update, on_skip)
            done += len(batch)
            on_progress(done, len(todo))
            full = sum(len(rows.features) for rows in pending) + _BATCH > writer.rows_per_part
            if full or time.monotonic() - last_commit > _SECONDS_BETWEEN_COMMITS:
                commit()
    except KeyboardInterrupt:
        commit()
        raise
    finally:
        seen.close()
    commit()


def _note(rows: Rows, again: set[str], update: IndexUpdate, on_skip: Callable[[str, str], None]) -> None:
    for path, why in zip(*(rows.pictures[name].to_pylist() for name in ("path", "broken")), strict=True):
        name = os.fsdecode(path)
        if why is not None:
            update.broken.append((name, why))
            on_skip(name, why)
        elif name not in again:
            update.added.append(name)


def _rows(bank: ClassBank, batch: list[_Seen], info: IndexInfo) -> Rows:
    """Lets the network look at a batch."""
    whys, pixels = [seen.why for seen in batch], [seen.pixels for seen in batch if seen.pixels is not None]
    features = bank.features(np.stack(pixels)) if pixels else np.zeros((0, info.num_features), np.float32)
    finite = np.asarray(np.isfinite(features).all(axis=1))
    for place, is_finite in zip((i for i, why in enumerate(whys) if why is None), finite, strict=True):
        if not is_finite:
            whys[place] = (
                f"{printable(os.fsdecode(batch[place].path))} has features that are not finite numbers."
            )
    features = features[finite]
    largest = float(np.finfo(info.dtype).max)
    if np.abs(features).max(initial=0.0) > largest:
        raise ConfigError(
            f"The network has features up to {np.abs(features).max():.3g}, and {info.dtype} ends at {largest:.3g}; make the "
            "index with --dtype float32."
        )
    columns = zip(*(seen.status for seen in batch), strict=True)
    values = [[seen.path for seen in batch], *columns, [seen.sha256 for seen in batch], whys]
    arrays = [pa.array(column, field.type) for column, field in zip(values, SCHEMA, strict=True)]
    return Rows(pa.Table.from_arrays(arrays, schema=SCHEMA), features.astype(info.dtype))


def _looked_at(paths: list[bytes], image_shape: tuple[int, int, int]) -> Generator[_Seen]:
    """Reads and decodes pictures in threads, ahead of whoever takes them; in order."""
    ahead: collections.deque[Future[_Seen]] = collections.deque()
    threads = ThreadPoolExecutor()  # Pillow works outside of the interpreter lock
    try:
        for path in paths:
            ahead.append(threads.submit(_look, path, image_shape))
            if len(ahead) == _READ_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def _look(path: bytes, image_shape: tuple[int, int, int]) -> _Seen:
    name, status, sha256 = os.fsdecode(path), _status(path), b""
    try:
        content = read_bytes(name)
        sha256 = _sha256(content)
        return _Seen(path, status, sha256, decode_image(content, image_shape, name=name), None)
    except ImageError as error:
        why = str(error)
    except OSError as error:
        why = f"{printable(name)} cannot be decoded: {printable(reason_of(error))}."
    return _Seen(path, status, sha256, None, why)


def _status(path: bytes) -> _Status:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return _Status(-1, -1, -1)
    return _Status(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _has_vanished(path: bytes) -> bool:
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _hash(path: bytes) -> bytes | None:
    try:
        return _sha256(read_bytes(os.fsdecode(path)))
    except OSError:
        return None


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:16]
