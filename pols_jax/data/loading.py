"""`load`: from the name of a data set to the data set."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from pols_jax.data.dataset import DataError, Dataset
from pols_jax.data.glyphs import load_glyphs


def load(name: str, **options: Any) -> Dataset:
    """Load a data set.

    Args:
        name: "glyphs".
        **options: Options of that data set, see `load_glyphs`.

    Returns:
        The data set.

    Raises:
        DataError: There is no such data set or option, or the data cannot be had.

    >>> load("glyphs", characters="0030-0039").num_classes
    10
    """
    if name != "glyphs":
        close = difflib.get_close_matches(name, ["glyphs"], n=3, cutoff=0.5)
        raise DataError(f"there is no data set {name!r}; the nearest names are: {', '.join(close)}")
    _check_options(name, load_glyphs, options)
    return load_glyphs(**options)


def _check_options(name: str, loader: Callable[..., Dataset], options: dict[str, Any]) -> None:
    known = [
        parameter.name
        for parameter in inspect.signature(loader).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    if unknown := sorted(set(options) - set(known)):
        raise DataError(
            f"the data set {name} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}"
        )
