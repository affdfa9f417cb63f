"""Search: which of these pictures are of this class? One logit answers.

Pictures are decoded in threads while the network works, and hits are reported as they are found.
"""

import contextlib
import dataclasses
import heapq
import io
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from pols_jax.data import decode_image
from pols_jax.errors import ConfigError, ImageError, printable
from pols_jax.metrics.thresholds import Rule, Threshold
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.networks import BATCH_SIZES
from pols_jax.search.pictures import Picture

if TYPE_CHECKING:
    from pols_jax.search.index import FeatureIndex

# Pictures that are read ahead of the network.
_READ_AHEAD = 4 * BATCH_SIZES[-1]
_SHEET_COLUMNS = 8
_SHEET_HITS = 96
_CELL = 128  # pixels of a picture on the sheet
_LINE = 15


class Query(NamedTuple):
    """A class that is looked for: a logit of at least its threshold is a hit."""

    name: str
    class_id: int
    threshold: Threshold


class Hit(NamedTuple):
    """A picture whose logit passed the threshold of a class."""

    logit: float
    query: Query
    picture: str

    def __str__(self) -> str:
        name, picture = printable(self.query.name), printable(self.picture)
        return f"{self.logit:9.3f} >= {self.query.threshold.value:.3f}  {name}  {picture}"


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
        self._draw(len(self.hits), hit, pixels)

    def draw(self, image_shape: tuple[int, int, int]) -> None:
        """Reads the pictures of the best hits for the sheet, where the hits came without pixels."""
        for place, hit in enumerate(self.best_first()[:_SHEET_HITS]):
            with contextlib.suppress(ImageError):
                self._draw(place, hit, decode_image(hit.picture, image_shape))

    def _draw(self, place: int, hit: Hit, pixels: UInt8[np.ndarray, "height width channels"]) -> None:
        entry = (hit.logit - hit.query.threshold.value, -place, (hit, pixels))  # of equal ones, the first
        heapq.heappush(self._best, entry)
        if len(self._best) > _SHEET_HITS:
            heapq.heappop(self._best)

    def summary(self) -> str:
        """How many hits there are."""
        return f"{_counted(len(self.hits), 'hit')} in {_counted(self.num_pictures, 'picture')}."

    def to_json(self) -> dict[str, Any]:
        """What was found, best first, ready for JSON; a name that is not UTF-8 is written as it is printed."""
        return {
            "num_pictures": self.num_pictures,
            "hits": [
                {
                    "picture": utf8_name(hit.picture),
                    "class": utf8_name(hit.query.name),
                    "logit": hit.logit,
                    "threshold": hit.query.threshold.value,
                }
                for hit in self.best_first()
            ],
            "skipped": [{"picture": utf8_name(name), "why": why} for name, why in self.skipped],
        }

    def sheet(self) -> Image.Image:
        """Draws the best hits side by side, each with its logit, threshold and class."""
        best = [shown for *_, shown in sorted(self._best, reverse=True)]
        columns = min(_SHEET_COLUMNS, max(1, len(best)))
        gap, text_height = 8, 2 * _LINE + 2
        width, height = _CELL + gap, _CELL + text_height + gap
        rows = -(-len(best) // columns)
        sheet = Image.new("RGB", (columns * width, max(rows * height, _LINE + 25)), "white")
        from pols_jax.data.fonts import dejavu_paths  # here, because most searches draw nothing

        draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(str(dejavu_paths()[3]), 11)
        for i, (hit, pixels) in enumerate(best):
            left, top = i % columns * width + gap // 2, i // columns * height + gap // 2
            picture = Image.fromarray(pixels.squeeze()).convert("RGB")
            sheet.paste(picture.resize((_CELL, _CELL), Image.Resampling.NEAREST), (left, top))
            score = f"{hit.logit:.2f} ≥ {hit.query.threshold.value:.2f}"
            for line, text in enumerate((score, printable(hit.query.name))):
                draw.text((left, top + _CELL + line * _LINE), _shortened(text, font), fill="black", font=font)
        if not best:
            draw.text((4, 4), "no hits", fill="black", font=font)
        return sheet


def check_sheet(path: Path | None) -> None:
    """Raises a `ConfigError` unless a file, if one is wanted, has the suffix of an image that can be written."""
    if path is None:
        return
    try:  # Pillow knows suffixes of formats that it cannot write, or not in color
        encoded_sheet(Image.new("RGB", (64, 64)), path)
    except Exception as error:
        raise ConfigError(f"The sheet {path} must be an image, such as {path.stem or 'hits'}.png.") from error


def encoded_sheet(sheet: Image.Image, path: Path) -> bytes:
    """The content of an image file, in the format of its suffix."""
    content = io.BytesIO()
    sheet.save(content, format=Image.registered_extensions()[path.suffix.lower()])
    return content.getvalue()


def make_queries(bank: ClassBank, names: Sequence[str], rule: Rule) -> list[Query]:
    """Finds the classes and their thresholds; a `ConfigError` if a class does not exist, or has no such threshold."""
    class_ids = dict.fromkeys(map(bank.class_id, names))
    return [Query(bank.names[i], i, bank.threshold(i, rule)) for i in class_ids]


def search(
    bank: ClassBank,
    queries: Sequence[Query],
    pictures: Iterable[Picture],
    *,
    on_hit: Callable[[Hit], None] = lambda hit: None,
    on_skip: Callable[[str, str], None] = lambda name, why: None,
    on_progress: Callable[[Findings], None] = lambda findings: None,
    findings: Findings | None = None,
) -> Findings:
    """Looks at pictures as they come, and reports those whose logit of an asked class passes its threshold.

    Args:
      bank: The network.
      queries: The classes that are looked for.
      pictures: The pictures; the iterator may block, and need not end.
      on_hit: Is called with each hit as soon as it is found.
      on_skip: Is called with the name of a picture that cannot be decoded, and why.
      on_progress: Is called with the findings whenever more pictures were looked at.
      findings: What is filled; whoever gives it can use what is there after an interrupt.

    Returns:
      All that was found.
    """
    findings = Findings() if findings is None else findings
    class_ids = [query.class_id for query in queries]
    thresholds = np.array([query.threshold.value for query in queries])
    for batch in _ready_batches(_decoded(pictures, bank.image_shape)):
        images = []
        for name, pixels in batch:
            findings.num_pictures += 1
            if isinstance(pixels, ImageError):
                findings.skipped.append((name, str(pixels)))
                on_skip(name, str(pixels))
            else:
                images.append((name, pixels))
        if images:
            logits = bank.logits(np.stack([pixels for _, pixels in images]), class_ids)
            for i, j in np.argwhere(logits >= thresholds[None, :]).tolist():
                hit = Hit(float(logits[i, j]), queries[j], images[i][0])
                findings.add(hit, images[i][1])
                on_hit(hit)
        on_progress(findings)
    return findings


def search_index(
    bank: ClassBank,
    queries: Sequence[Query],
    index: "FeatureIndex",
    *,
    on_skip: Callable[[str, str], None] = lambda name, why: None,
) -> Findings:
    """Looks up which pictures of an index have a logit of an asked class that passes its threshold.

    The hits are those of `search`, but for pictures whose logit is at the threshold up to rounding.

    Args:
      bank: The network.
      queries: The classes that are looked for.
      index: The features of the pictures.
      on_skip: Is called with the path of a hit whose file is no longer there, and why.

    Returns:
      All that was found.

    Raises:
      RunError: if the index has features of another network.
    """
    findings = Findings(num_pictures=len(index))
    thresholds = np.array([query.threshold.value for query in queries])
    scores = index.scores(bank, [query.class_id for query in queries])
    gone: dict[int, bool] = {}
    for i, j in np.argwhere(scores >= thresholds[None, :]).tolist():
        path = index.path(i)
        if i not in gone:
            gone[i] = not os.path.lexists(path)
            if gone[i]:
                why = f"{printable(path)} is no longer there; bring the index up to date with pols index."
                findings.skipped.append((path, why))
                on_skip(path, why)
        if not gone[i]:
            findings.hits.append(Hit(float(scores[i, j]), queries[j], path))
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


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def utf8_name(name: str) -> str:
    """The name as it is, or as it is printed if it is not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return printable(name)
    return name


def _shortened(text: str, font: Any) -> str:
    """Cuts a text to the width of a cell."""
    while font.getlength(text) > _CELL and len(text) > 1:
        text = text[:-2] + "…"
    return text
