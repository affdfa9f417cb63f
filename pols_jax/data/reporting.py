"""How far long work on data is, for whoever listens to the log of `pols_jax.data`."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_SECONDS_BETWEEN_REPORTS = 0.25

_logger = logging.getLogger(__name__)

T = TypeVar("T")


def counted(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Passes items on, and logs how many there were.

    The first record says what is done to how many pictures. All of them have the attributes ``done`` and ``total``, for
    a bar of progress.

    Examples:
      >>> list(counted("abc", "Decoding", 3))
      ['a', 'b', 'c']
    """
    last = time.monotonic()
    text = f"{what} {total:,} pictures ..."
    _logger.info(text, extra={"done": 0, "total": total})
    for done, item in enumerate(items, 1):
        yield item
        if (now := time.monotonic()) - last > _SECONDS_BETWEEN_REPORTS or done == total:
            last = now
            _logger.info(text, extra={"done": done, "total": total})
