"""`load`: from the name of a data set to the data set."""

import difflib
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from pols_jax import data
from pols_jax.data.dataset import Dataset
from pols_jax.errors import DataError, printable


def load(name: str, **options: Any) -> Dataset:
    """Loads a data set.

    Args:
      name: "glyphs"; the name of a tfds image classification set ("mnist", "svhn_cropped", "cifar10", "cifar100",
        "imagenet2012", "omniglot", ...); "folder:PATH"; or, for benchmarks, "synthetic:K" with K classes.
      **options: Options of that data set: see `load_glyphs`, `load_tfds`, `load_folder` and `load_synthetic`.

    Examples:
      >>> load("glyphs", characters="0030-0039").num_classes
      10
    """
    loader = _loader(name, options.get("data_dir"))
    known = inspect.getfullargspec(loader).kwonlyargs
    if unknown := sorted(set(options) - set(known)):
        raise DataError(
            f"The data set {printable(name)} has no option {', '.join(unknown)}; it has: {', '.join(known)}."
        )
    return loader(**options)


def _loader(name: str, data_dir: Any) -> Callable[..., Dataset]:
    if name == "glyphs":
        return data.load_glyphs
    if name.startswith("folder:"):
        return functools.partial(data.load_folder, name.removeprefix("folder:"))
    if name.startswith("synthetic:"):
        return functools.partial(data.load_synthetic, name.removeprefix("synthetic:"))
    from pols_jax.data import tfds_sets  # here, because glyphs and folders are had without it

    known_names = tfds_sets.known_names()
    if name.split("/")[0] not in known_names and not tfds_sets.is_prepared(name, data_dir):
        if os.path.isdir(os.path.expanduser(name)):
            raise DataError(
                f"There is no data set named {name!r}; for the pictures in that folder, write folder:{printable(name)}."
            )
        near = difflib.get_close_matches(name, ["glyphs", *known_names], n=3, cutoff=0.4)
        nearest = f"the nearest names are {', '.join(near)}" if near else "one that is always there is glyphs"
        raise DataError(
            f"There is no data set named {name!r}; {nearest}, and your own pictures are folder:PATH."
        )
    return functools.partial(tfds_sets.load_tfds, name)
