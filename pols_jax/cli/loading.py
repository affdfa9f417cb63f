"""Loads the data of `pols train`, and says how far that is."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pols_jax.training.config import Experiment

if TYPE_CHECKING:
    from pols_jax.data import Dataset, FolderListing, PictureSizes

FOLDER = "folder:"

# Where no bar can be drawn, a line is printed this often.
_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def said_by_loaders(say: Callable[[str], None], *, draws_bars: bool = False) -> Iterator[None]:
    """Says what the loaders of data log: what is decoded or drawn, which can take minutes, and how much of it is done.

    Examples:
      >>> with said_by_loaders(print):
      ...     logging.getLogger("pols_jax.data.glyphs").info("Drawing 3 characters ...")
      Drawing 3 characters ...
    """
    logger, handler = logging.getLogger("pols_jax.data"), _Handler(say, draws_bars)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        handler.end_bar()
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Handler(logging.Handler):
    def __init__(self, say: Callable[[str], None], draws_bars: bool):
        super().__init__()
        self.say, self.draws_bars = say, draws_bars
        self.bar = None
        self.last = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        done, total = getattr(record, "done", 0), getattr(record, "total", 0)
        if not done:
            self.say(record.getMessage())
            self.last = time.monotonic()
            return
        if self.draws_bars and self.bar is None:
            self.bar = _progress_bar()
            self.task = self.bar.add_task("", total=total)
            self.bar.start()
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        elif time.monotonic() - self.last > _SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.say(f"  {done:,} of {total:,}")
        if done == total:
            self.end_bar()

    def end_bar(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _progress_bar():
    from rich import progress
    from rich.console import Console

    columns = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
    # Lines of a file or a pipe stay there; those of the same terminal stand above the bar.
    options = {"transient": True, "redirect_stdout": sys.stdout.isatty()}
    return progress.Progress(*columns, console=Console(stderr=True), **options)


def check_start(experiment: Experiment, listing: "FolderListing", sizes: "PictureSizes") -> None:
    """Raises unless a folder can be trained on: the network takes the images, a step fits. Decodes nothing."""
    from pols_jax.data.dataset import DEFAULT_MAX_BYTES
    from pols_jax.training.feasibility import check_shape

    shape = sizes.shape(largest=1, image_size=experiment.image_size, channels=experiment.channels)
    resident = listing.num_pictures * math.prod(shape)
    check_shape(
        experiment.runs()[0],
        name=f"{FOLDER}{listing.path}",
        num_classes=len(listing.classes),
        image_shape=shape,
        resident_bytes=resident if resident <= (experiment.max_bytes or DEFAULT_MAX_BYTES) else 0,
    )


def load_data(
    experiment: Experiment, folder: "tuple[FolderListing, PictureSizes] | None", data_dir: Path | None, say
) -> "Dataset":
    """Loads the data set of an experiment; of a folder, what was listed."""
    from pols_jax.data import load, load_listing

    options: dict[str, Any] = experiment.options()
    if data_dir is not None:
        options["data_dir"] = data_dir
    if folder is None or set(options) - {"image_size", "channels", "max_bytes"}:
        return load(experiment.dataset, **options)
    listing, sizes = folder
    size, channels = options.pop("image_size"), options.pop("channels")
    side = sizes.usual_side
    if side is not None and side > size:
        say(
            f"Pictures are shrunk to {size} x {size}: nine of ten are at least {side} pixels high and wide; --image-size "
            "changes that."
        )
    if enlarged := sizes.num_enlarged(size):
        say(
            f"{enlarged:,} of {len(sizes.sides):,} pictures that were looked at are smaller, and are enlarged to {size} x {size}."
        )
    return load_listing(listing, (size, size, channels), **options)
