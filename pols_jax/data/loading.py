"""`load`: from the name of a data set to the data set."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from pols_jax.data.dataset import DataError, Dataset
from pols_jax.data.folders import load_folder
from pols_jax.data.glyphs import load_glyphs
from pols_jax.data.tfds_sets import data_directory, known_names, load_tfds

_FOLDER_PREFIX = "folder:"


def load(name: str, **options: Any) -> Dataset:
    """Load a data set.

    Args:
        name: "glyphs"; the name of a tfds image classification set ("mnist", "svhn_cropped", "cifar10", "cifar100",
            "imagenet2012", "omniglot", ...); or "folder:PATH".
        **options: Options of that data set: see `load_glyphs`, `load_tfds` and `load_folder`.

    Returns:
        The data set.

    Raises:
        DataError: There is no such data set or option, or the data cannot be had.

    >>> load("glyphs", characters="0030-0039").num_classes
    10
    """
    loader = _loader(name, options.get("data_dir"))
    known = [
        parameter.name
        for parameter in inspect.signature(loader).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    if unknown := sorted(set(options) - set(known)):
        raise DataError(f"the data set {name} has no option {', '.join(unknown)}; it has: {', '.join(known)}")
    return loader(**options)


def _loader(name: str, data_dir: Any) -> Callable[..., Dataset]:
    if name == "glyphs":
        return load_glyphs
    if name.startswith(_FOLDER_PREFIX):
        return functools.partial(load_folder, name.removeprefix(_FOLDER_PREFIX))
    if not name or not (name.split("/")[0] in known_names() or (data_directory(data_dir) / name).is_dir()):
        near = difflib.get_close_matches(name, ["glyphs", *known_names()], n=3, cutoff=0.4)
        nearest = f"the nearest names are {', '.join(near)}" if near else "one that is always there is glyphs"
        raise DataError(f"there is no data set {name!r}: {nearest}; your own pictures are folder:PATH")
    return functools.partial(load_tfds, name)
