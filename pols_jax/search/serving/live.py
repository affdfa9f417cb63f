"""The folder that is watched: when pictures come, change or go, the index follows, and everybody who listens is told."""

import asyncio
import contextlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pols_jax.errors import PolsError, printable
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index import FeatureIndex, update_index
from pols_jax.search.pictures import files_below
from pols_jax.search.serving.collection import Collection

Files = dict[str, tuple[int, int]]


class Feed:
    """Wakes those who listen, in the event loop, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.is_closed = False
        self.trouble: str | None = None

    @property
    def num_listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def add(self) -> asyncio.Event:
        """Makes an event of the running loop that is set by whatever happens from now on."""
        event = asyncio.Event()
        with self._lock:
            self._listeners[event] = asyncio.get_running_loop()
        return event

    def remove(self, event: asyncio.Event) -> None:
        """Listens no more."""
        with self._lock:
            self._listeners.pop(event, None)

    def wake(self) -> None:
        """Wakes everybody."""
        with self._lock:
            for event, loop in self._listeners.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Wakes everybody for the last time."""
        self.is_closed = True
        self.wake()


class FolderIndex:
    """The index of a folder that is watched, and others beside it, which stay as they are.

    Args:
      bank: The network.
      folder: The folder, with the folders in it.
      directory: Where its index is kept.
      others: Other indexes.
    """

    def __init__(self, bank: ClassBank, folder: str, directory: str | Path, others: Sequence[Path] = ()):
        self._bank, self._folder, self._directory, self._others = bank, folder, directory, others

    def files(self) -> Files:
        """The regular files of the folder and the folders in it, all but hidden ones: when each was changed, and its size.

        The files of the index are left out, which may be in the folder too.
        """
        own, files = os.path.join(os.path.realpath(self._directory), ""), {}
        for path in files_below(os.path.realpath(self._folder)):
            with contextlib.suppress(OSError):  # it vanished meanwhile, or may not be read
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode) and not path.startswith(own):
                    files[path] = status.st_mtime_ns, status.st_size
        return files

    def update(
        self, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[FeatureIndex | None, bool]:
        """Brings the index up to date; returns it with the others, and whether pictures were only added at its end."""
        if not self.files():
            return (FeatureIndex.open(*self._others) if self._others else None), False
        update = update_index(
            self._bank,
            [self._folder],
            self._directory,
            on_progress=on_progress,
            on_skip=lambda _, why: print(f"skipped: {why}", file=sys.stderr, flush=True),
        )
        index = FeatureIndex.open(*self._others, self._directory)
        index.normalizers(self._bank)  # once, and not when somebody waits for an answer
        return index, not (update.changed or update.vanished)


class FolderWatcher:
    """Looks at a folder now and then, in a thread of its own.

    A file is taken up when two looks in a row found it the same: one that is being written is left alone.

    Args:
      index: The index of the folder.
      collection: What shows the pictures.
      feed: What tells of them.
      seconds: The time between two looks.
    """

    def __init__(self, index: FolderIndex, collection: Collection, feed: Feed, *, seconds: float = 1.0):
        self._index, self._collection, self._feed, self._seconds = index, collection, feed, seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="folder watcher")

    def __enter__(self) -> "FolderWatcher":
        self._taken = self._before = self._index.files()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self._look()
            except (PolsError, OSError) as error:
                trouble = printable(str(error))
                if trouble != self._feed.trouble:
                    print(trouble, file=sys.stderr, flush=True)
                    self._feed.trouble = trouble
                    self._feed.wake()

    def _look(self) -> None:
        files = self._index.files()
        settled = {path for path, seen in files.items() if self._before.get(path) == seen}
        news = [path for path in settled if self._taken.get(path) != files[path]]
        gone = [path for path in self._taken if path not in files]
        self._before = files
        if not news and not gone:
            return
        # What is still being written is in the way of nobody: it is taken up again when it has settled.
        index, has_only_grown = self._index.update()
        self._collection.show(index, has_only_grown=has_only_grown)
        self._taken = {path: seen for path, seen in files.items() if path in settled}
        self._feed.trouble = None
        self._feed.wake()
