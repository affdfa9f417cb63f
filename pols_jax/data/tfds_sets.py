"""TensorFlow Datasets by name, read without TensorFlow.

tfds keeps prepared data as array_record files, which need no TensorFlow to read.  Sets that fit are decoded
once, and the arrays kept as .npy beside the prepared data; larger ones are streamed.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants as tfds_constants

from pols_jax.data import array_cache
from pols_jax.data.augmentation import augment_glyphs
from pols_jax.data.dataset import DEFAULT_MAX_BYTES, ArraySplit, Dataset, StreamSplit, check_image_size
from pols_jax.data.images import decode_image
from pols_jax.data.reporting import counted
from pols_jax.errors import DataError

_DEFAULT_SIZE = 224  # for sets whose images differ in size
_OMNIGLOT_SIZE = 28
# Hands differ more than typefaces do: this, twice the distortion of glyphs, is best on the validation drawings.
_distort_handwriting = functools.partial(
    augment_glyphs, max_rotation=0.1, max_log_scale=0.1, max_shift=0.04, max_noise=0.2
)
_OMNIGLOT_DRAWINGS = {"train": (0, 15), "validation": (15, 17), "test": (17, 20)}  # of each character
_READ_AHEAD = 1000  # records
_UNLABELED_TEST = ("imagenet2012",)


# Consecutive records of a tfds split: its name, the first one, and the one after the last.
_Part = tuple[str, int, int]


def known_names() -> list[str]:
    """Lists the names of all data sets that this version of tfds can prepare.

    Examples:
      >>> "mnist" in known_names()
      True
    """
    return tfds.list_builders(with_community_datasets=False)


def is_prepared(name: str, data_dir: str | Path | None = None) -> bool:
    """Tells whether a data set that this version of tfds does not know was prepared by hand; paths are no names.

    Examples:
      >>> is_prepared("../mnist")
      False
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or not {"..", "~"}.isdisjoint(parts):
        return False
    try:
        return bool(_prepared_versions(name, _data_directory(data_dir)))
    except (OSError, ValueError):  # such a name no file can have
        return False


def _data_directory(data_dir: str | Path | None) -> Path:
    return Path(data_dir or os.environ.get("TFDS_DATA_DIR") or tfds_constants.DATA_DIR).expanduser()


def _prepared_versions(name: str, data_dir: Path) -> list[Path]:
    return [path.parent for path in (data_dir / name).glob("*/features.json")]


def load_tfds(
    name: str,
    *,
    data_dir: str | Path | None = None,
    image_size: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Dataset:
    """Loads an image classification data set of tfds.

    The validation split is tfds's own where there is a labeled test split beside it, else the last 10 % of
    train. Without a labeled test split tfds's validation split is the test; without either, the last 10 % of
    train are, and the 10 % before them validate.

    Args:
      name: Name as in tfds ("mnist"), with its configuration where it has several ("name/config").
      data_dir: Directory of the prepared data; by default $TFDS_DATA_DIR, then tfds's default.
      image_size: Height and width in pixels; by default the set's own, or 224 where its images differ in
        size, or 28 for omniglot.
      max_bytes: Decoded images of at most this size together are kept in memory, larger sets are streamed.

    Examples:
      >>> load_tfds("mnist", data_dir="prepared").num_classes  # doctest: +SKIP
      10
    """
    if image_size is not None:
        check_image_size(image_size)
    directory = _prepared_directory(name, _data_directory(data_dir))
    builder: Any = tfds.builder_from_directory(directory)  # its type hides which features it has
    image_key, label_key = _supervised_keys(name, builder)
    height, width, channels = builder.info.features[image_key].shape
    if name == "omniglot":
        height, width, channels = _OMNIGLOT_SIZE, _OMNIGLOT_SIZE, 1
    image_shape = (
        image_size or height or _DEFAULT_SIZE,
        image_size or width or _DEFAULT_SIZE,
        channels or 3,
    )
    sizes = {split: info.num_examples for split, info in builder.info.splits.items()}
    provenance = {"tfds": f"{name}:{builder.info.version}", "tfds_splits": sizes}
    if name == "omniglot":
        return _load_omniglot(directory, builder, image_shape, provenance)

    rule, parts = _split_rule(name, sizes)
    records = {split: _Records(builder, image_key, label_key, *part) for split, part in parts.items()}
    provenance["split_rule"] = rule
    if sum(map(len, records.values())) * math.prod(image_shape) > max_bytes:
        splits = {split: StreamSplit(part, image_shape) for split, part in records.items()}
        provenance["fingerprint"] = _info_hash(directory)
    else:
        splits = _decoded_splits(directory, records, image_shape)
        provenance["content_sha256"] = array_cache.content_hash([split.images for split in splits.values()])
    return Dataset(
        name=name,
        class_names=tuple(builder.info.features[label_key].names),
        image_shape=image_shape,
        provenance=provenance,
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
    )


class _Records(Sequence):
    """(encoded image, label) pairs of consecutive records; pickles to worker processes."""

    def __init__(self, builder: Any, image_key: str, label_key: str, split: str, start: int, stop: int):
        try:
            self._source = builder.as_data_source(split, decoders={image_key: tfds.decode.SkipDecoding()})
        except NotImplementedError as error:
            raise DataError(
                f"{builder.data_path} holds {builder.info.file_format} files, which cannot be read at random: "
                "remove it and load it again to prepare it as array_record."
            ) from error
        self._image_key, self._label_key = image_key, label_key
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        record = self._source[self._start + index]
        return record[self._image_key], int(record[self._label_key])

    def __iter__(self):
        # Reading many records at a time is five times faster than one by one.
        for start in range(self._start, self._stop, _READ_AHEAD):
            for record in self._source.__getitems__(range(start, min(start + _READ_AHEAD, self._stop))):
                yield record[self._image_key], int(record[self._label_key])


def _prepared_directory(name: str, data_dir: Path) -> Path:
    """Finds the newest prepared version of a data set; prepares it where TensorFlow is installed."""
    if versions := _prepared_versions(name, data_dir):
        return max(versions, key=lambda path: [int(n) if n.isdigit() else -1 for n in path.name.split(".")])
    if importlib.util.find_spec("tensorflow") is None:
        instructions = getattr(tfds.builder_cls(name.split("/")[0]), "MANUAL_DOWNLOAD_INSTRUCTIONS", None)
        first, manual = "", data_dir / "downloads" / "manual"
        if instructions:
            first = f" First put its files into {manual}: {' '.join(instructions.split())}"
        raise DataError(
            f"The data set {name} is not in {data_dir}: point data_dir or TFDS_DATA_DIR to where it is, or install "
            f"TensorFlow with `pip install 'pols-jax[prepare]'` and it will be downloaded and prepared there.{first}"
        )
    try:
        builder = tfds.builder(name, data_dir=str(data_dir), file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:  # tfds passes on whatever the network, the disk or the archive raised
        raise DataError(f"The data set {name} could not be prepared in {data_dir}: {error}.") from error
    return Path(builder.data_dir)


def _supervised_keys(name: str, builder: Any) -> tuple[str, str]:
    keys, features = builder.info.supervised_keys, builder.info.features
    if (
        not keys
        or not isinstance(features[keys[0]], tfds.features.Image)
        or not isinstance(features[keys[1]], tfds.features.ClassLabel)
    ):
        raise DataError(f"The tfds data set {name} does not map an image to one class label.")
    return keys[0], keys[1]


def _split_rule(name: str, sizes: dict[str, int]) -> tuple[str, dict[str, _Part]]:
    """Returns our three splits as parts of tfds's, and a sentence about them."""
    if "train" not in sizes:
        raise DataError(f"The tfds data set {name} has no train split, only {', '.join(sizes)}.")
    num_train = sizes["train"]
    tenth = num_train // 10
    has_test = "test" in sizes and name not in _UNLABELED_TEST
    if has_test and "validation" in sizes:
        parts = {split: (split, 0, sizes[split]) for split in ("train", "validation", "test")}
        return "tfds's own splits", parts
    if has_test or "validation" in sizes:
        test = "test" if has_test else "validation"
        return f"validation is the last 10 % of train, test is tfds's {test}", {
            "train": ("train", 0, num_train - tenth),
            "validation": ("train", num_train - tenth, num_train),
            "test": (test, 0, sizes[test]),
        }
    return "test is the last 10 % of train, validation the 10 % before", {
        "train": ("train", 0, num_train - 2 * tenth),
        "validation": ("train", num_train - 2 * tenth, num_train - tenth),
        "test": ("train", num_train - tenth, num_train),
    }


def _info_hash(directory: Path) -> str:
    """Identifies prepared data by its description and the sizes of its files."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    texts = {path.name: path.read_text() for path in files if path.suffix == ".json"}
    return array_cache.fingerprint([texts, [(path.name, path.stat().st_size) for path in files]])


def _decoded_splits(
    directory: Path, records: dict[str, _Records], image_shape: tuple[int, int, int]
) -> dict[str, ArraySplit]:
    def decode() -> array_cache.Arrays:
        arrays = {}
        for split, part in records.items():
            images, labels = np.empty((len(part), *image_shape), np.uint8), np.empty(len(part), np.int32)
            for i, (source, label) in enumerate(counted(part, "Decoding", len(part))):
                images[i], labels[i] = decode_image(source, image_shape, name=f"Record {i}"), label
            arrays |= {f"{split}_images": images, f"{split}_labels": labels}
        return arrays

    settings = [image_shape, [len(part) for part in records.values()]]
    entry = f"{directory.parent.name}-{array_cache.fingerprint([1, _info_hash(directory), settings])}"
    # Beside the prepared data, so that others profit too; for the user alone where that is read-only.
    directories = [directory / "pols_jax", array_cache.user_cache_dir()]
    arrays = array_cache.cached_arrays(entry, decode, directories)
    return {split: ArraySplit(arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in records}


def _load_omniglot(
    directory: Path, builder: Any, image_shape: tuple[int, int, int], provenance: dict[str, Any]
) -> Dataset:
    """Pools tfds's splits, which hold different alphabets, and splits the drawings of every character instead."""
    records = {
        split: _Records(builder, "image", "label", split, 0, info.num_examples)
        for split, info in builder.info.splits.items()
        if split in ("train", "test")  # the others repeat parts of these
    }
    decoded = _decoded_splits(directory, records, image_shape).values()
    images = np.concatenate([split.images for split in decoded])
    labels = np.concatenate([split.labels for split in decoded])
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], labels[order])
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - starts  # this is the rank-th drawing of its character
    splits = {}
    for split, (first, stop) in _OMNIGLOT_DRAWINGS.items():
        chosen = (first <= rank) & (rank < stop)
        splits[split] = ArraySplit(images[chosen], labels[chosen])
    rule = "of each character's drawings, in the order of tfds, the first 15 train, 2 validate, 3 test"
    return Dataset(
        name="omniglot",
        class_names=tuple(builder.info.features["label"].names),  # alphabet and character
        image_shape=image_shape,
        provenance=provenance
        | {"split_rule": rule, "content_sha256": array_cache.content_hash([images, labels])},
        augment=_distort_handwriting,
        **splits,
    )
