"""Search: which of these pictures are of this class? One logit answers.

Pictures are decoded in threads while the network works, and hits are reported as they are found.
"""

import dataclasses
import heapq
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from pols_jax.class_bank import BATCH_SIZES, ClassBank
from pols_jax.config import ConfigError
from pols_jax.data import ImageError, decode_image
from pols_jax.data.fonts import dejavu_paths
from pols_jax.picture_sources import Picture
from pols_jax.thresholds import Rule, Threshold

# Pictures that are read ahead of the network.
_READ_AHEAD = 4 * BATCH_SIZES[-1]
_SHEET_COLUMNS = 8
_SHEET_HITS = 96
_CELL = 128  # pixels of a picture on the sheet
_LINE = 15


class Query(NamedTuple):
    """A class that is looked for.

    Attributes:
      name: The name of the class.
      class_id: Its id.
      threshold: A logit of at least this is a hit.
    """

    name: str
    class_id: int
    threshold: Threshold


class Hit(NamedTuple):
    """A picture that passed the threshold of a class.

    Attributes:
      logit: Its logit of the class.
      query: The class.
      picture: The name of the picture.
    """

    logit: float
    query: Query
    picture: str

    def __str__(self) -> str:
        return f"{self.logit:9.3f} >= {self.query.threshold.value:.3f}  {self.query.name}  {self.picture}"


@dataclasses.dataclass
class Findings:
    """What a search found.

    Attributes:
      hits: All hits, in the order in which they came.
      skipped: Pictures that could not be decoded, and why.
      num_pictures: How many pictures were looked at.
    """

    hits: list[Hit] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    num_pictures: int = 0
    _best: list[tuple[float, int, Any]] = dataclasses.field(default_factory=list)

    def best_first(self) -> list[Hit]:
        """The hits by how far they are above their thresholds."""
        return sorted(self.hits, key=lambda hit: hit.query.threshold.value - hit.logit)

    def add(self, hit: Hit, pixels: UInt8[np.ndarray, "height width channels"]) -> None:
        """Notes a hit, and keeps the pixels of the best ones for the sheet."""
        self.hits.append(hit)
        entry = (hit.logit - hit.query.threshold.value, -len(self.hits), (hit, pixels))
        if len(self._best) < _SHEET_HITS:
            heapq.heappush(self._best, entry)
        else:
            heapq.heappushpop(self._best, entry)

    def summary(self) -> str:
        """The hits, best first, one per line, below a line that counts them."""
        first = f"{len(self.hits)} hits in {self.num_pictures} pictures, best first:"
        return "\n".join([first, *map(str, self.best_first())])

    def to_json(self) -> dict[str, Any]:
        """What was found, best first, ready for JSON."""
        return {
            "num_pictures": self.num_pictures,
            "hits": [
                {
                    "picture": hit.picture,
                    "class": hit.query.name,
                    "logit": hit.logit,
                    "threshold": hit.query.threshold.value,
                }
                for hit in self.best_first()
            ],
            "skipped": [{"picture": name, "why": why} for name, why in self.skipped],
        }

    def sheet(self) -> Image.Image:
        """Draws the best hits side by side, each with its logit, threshold and class.

        Examples:
          >>> Findings().sheet().size
          (136, 40)
        """
        best = [shown for *_, shown in sorted(self._best, reverse=True)]
        columns = min(_SHEET_COLUMNS, max(1, len(best)))
        gap, text_height = 8, 2 * _LINE + 2
        width, height = _CELL + gap, _CELL + text_height + gap
        rows = -(-len(best) // columns)
        sheet = Image.new("RGB", (columns * width, max(rows * height, _LINE + 25)), "white")
        draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(str(dejavu_paths()[3]), 11)
        for i, (hit, pixels) in enumerate(best):
            left, top = i % columns * width + gap // 2, i // columns * height + gap // 2
            picture = Image.fromarray(pixels.squeeze()).convert("RGB")
            sheet.paste(picture.resize((_CELL, _CELL), Image.Resampling.NEAREST), (left, top))
            score = f"{hit.logit:.2f} ≥ {hit.query.threshold.value:.2f}"
            for line, text in enumerate((score, hit.query.name)):
                draw.text((left, top + _CELL + line * _LINE), _shortened(text, font), fill="black", font=font)
        if not best:
            draw.text((4, 4), "no hits", fill="black", font=font)
        return sheet


def check_sheet(path: Path | None) -> None:
    """Raises a `ConfigError` unless a file, if one is wanted, has the suffix of an image that can be written.

    Examples:
      >>> check_sheet(Path("hits.txt"))
      Traceback (most recent call last):
      pols_jax.config.ConfigError: The sheet hits.txt must be an image, such as hits.png.
    """
    if path is not None and path.suffix.lower() not in Image.registered_extensions():
        raise ConfigError(f"The sheet {path} must be an image, such as {path.stem}.png.")


def make_queries(bank: ClassBank, names: Sequence[str], rule: Rule) -> list[Query]:
    """Finds the classes and their thresholds.

    Args:
      bank: The network.
      names: Names of classes.
      rule: How to choose the thresholds.

    Raises:
      ConfigError: if a class does not exist, or has no such threshold.
    """
    class_ids = dict.fromkeys(map(bank.class_id, names))
    return [Query(bank.names[i], i, bank.threshold(i, rule)) for i in class_ids]


def search(
    bank: ClassBank,
    queries: Sequence[Query],
    pictures: Iterable[Picture],
    *,
    on_hit: Callable[[Hit], None] = lambda hit: None,
    on_skip: Callable[[str, str], None] = lambda name, why: None,
    findings: Findings | None = None,
) -> Findings:
    """Looks at pictures as they come, and reports those whose logit of an asked class passes its threshold.

    Args:
      bank: The network.
      queries: The classes that are looked for.
      pictures: The pictures; the iterator may block, and need not end.
      on_hit: Is called with each hit as soon as it is found.
      on_skip: Is called with the name of a picture that cannot be decoded, and why.
      findings: What is filled; whoever gives it can use what is there after an interrupt.

    Returns:
      All that was found.
    """
    findings = Findings() if findings is None else findings
    class_ids = [query.class_id for query in queries]
    thresholds = np.array([query.threshold.value for query in queries])
    for batch in _ready_batches(_decoded(pictures, bank.run.image_shape)):
        images = []
        for name, pixels in batch:
            findings.num_pictures += 1
            if isinstance(pixels, ImageError):
                findings.skipped.append((name, str(pixels)))
                on_skip(name, str(pixels))
            else:
                images.append((name, pixels))
        if not images:
            continue
        logits = bank.logits(np.stack([pixels for _, pixels in images]), class_ids)
        for i, j in np.argwhere(logits >= thresholds[None, :]).tolist():
            hit = Hit(float(logits[i, j]), queries[j], images[i][0])
            findings.add(hit, images[i][1])
            on_hit(hit)
    return findings


def _decoded(
    pictures: Iterable[Picture], image_shape: tuple[int, int, int]
) -> "queue.Queue[tuple[str, Future] | BaseException | None]":
    """Starts to read and decode; the queue gets pictures in order, and at last None or what went wrong."""
    decoded: queue.Queue = queue.Queue(maxsize=_READ_AHEAD)

    def read() -> None:
        try:
            with ThreadPoolExecutor() as threads:  # Pillow works outside of the interpreter lock
                for name, source in pictures:
                    decoded.put((name, threads.submit(_decode, source, image_shape)))
        except BaseException as error:  # raised again where the queue is read
            decoded.put(error)
        else:
            decoded.put(None)

    # A daemon: a stream that blocks for ever must not keep the program alive.
    threading.Thread(target=read, daemon=True).start()
    return decoded


def _decode(source, image_shape: tuple[int, int, int]) -> np.ndarray | ImageError:
    if isinstance(source, np.ndarray):
        return source
    try:
        return decode_image(source, image_shape)
    except ImageError as error:
        return error


def _ready_batches(decoded: queue.Queue) -> Iterator[list[tuple[str, Any]]]:
    """Waits for one picture, and takes with it what else is there by then."""
    while True:
        batch, last = [], decoded.get()
        while isinstance(last, tuple):
            name, future = last
            batch.append((name, future.result()))
            if len(batch) == BATCH_SIZES[-1] or decoded.empty():
                break
            last = decoded.get()
        if batch:
            yield batch
        if isinstance(last, BaseException):
            raise last
        if last is None:
            return


def _shortened(text: str, font: Any) -> str:
    """Cuts a text to the width of a cell."""
    while font.getlength(text) > _CELL and len(text) > 1:
        text = text[:-2] + "…"
    return text
