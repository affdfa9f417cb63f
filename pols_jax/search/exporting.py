"""Writes a trained network as files that need no part of this package: a StableHLO program, and the rows of the classes.

One program serves every class, on every platform and for every batch size: ``images, row, bias -> scores, features``. It
contains the scaling of pixels, the backbone and the normalizer. If the normalizer reads rows of classes, the program is
given all of them, too.
"""

import contextlib
import dataclasses
import hashlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from pols_jax import __version__
from pols_jax.data import scale_pixels
from pols_jax.errors import ConfigError, RunError, RunWarning, printable, unknown_name
from pols_jax.evaluation.normalizing import fit_progress
from pols_jax.files import check_new, check_space, new_directory, write_bytes, write_json
from pols_jax.metrics.thresholds import DEFAULT_RULES, MIN_EXAMPLES, Thresholds
from pols_jax.normalizers import Normalizer, fold
from pols_jax.schema import encode
from pols_jax.search.exported import FORMAT, MANIFEST, PROGRAM, Manifest, StoredFile, is_exported
from pols_jax.search.networks import TrainedNetwork, scores
from pols_jax.training.run_files import is_adopted
from pols_jax.training.run_normalizer import write_normalizer
from pols_jax.training.runs import Run, find_run
from pols_jax.training.stored_arrays import crc32

PLATFORMS = ("cpu", "cuda", "tpu")
"""What the program is lowered for; no such device is needed."""
ROWS_DTYPES = ("float32", "bfloat16", "int8")
"""What rows can be stored in."""

_WORDS = {
    "images": "uint8 [batch, {0}, {1}, {2}], pixels as they are decoded",
    "row": "float32 [{3}], the row of a class times its scale",
    "bias": "float32 [], the bias of the class",
    "score": "float32 [batch], at least the threshold of the class for pictures of it",
    "features": "float32 [batch, {3}], what the rows are multiplied with",
}
# What a program takes as well, if its normalizer reads rows of classes.
_ALL_ROWS = {
    "rows": "{0} [{1}, {2}], rows.npy",
    "scales": "float32 [{1}], scales.npy",
    "biases": "float32 [{1}], biases.npy",
}
_PREPROCESSING = (
    "Turn a picture upright by its EXIF tag, lay transparency on white, convert it to {kind}, scale it with a bilinear filter "
    "(antialiased) until it covers {height} x {width} pixels and crop the center. The program takes the uint8 pixels as they "
    "are: it scales them itself."
)


def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    rows_dtype: str = "float32",
    raw: bool = False,
    use: Literal["best", "last"] | None = None,
    quiet: bool = False,
) -> Manifest:
    """Writes the network of a run as files that JAX and NumPy can use without this package, at once or not at all.

    Args:
      run_dir: The run directory, or that of an experiment that consists of one run.
      out: The directory to write; it must not exist yet. `ClassBank.open` opens it.
      rows_dtype: What the rows are stored in: ``float32``, ``bfloat16``, or ``int8`` with a scale for each row.
      raw: Whether to leave the normalizer out.
      use: Which checkpoint, as for `ClassBank.open`: by default the one that was evaluated, else the best.
      quiet: No progress bar.

    Returns:
      What ``export.json`` says.

    Raises:
      ConfigError: if the directory exists already, there is no such dtype, or a row is not finite.
      RunError: if there is no finished run.
      CheckpointError: if its checkpoint is damaged.
      FileError: if a file cannot be written; there is no directory then.

    Examples:
      >>> from pols_jax.search.class_bank import ClassBank
      >>> export("runs/digits", "exported", rows_dtype="int8", quiet=True).platforms
      ('cpu', 'cuda', 'tpu')
      >>> ClassBank.open("exported").names[7]
      'DIGIT SEVEN'
    """
    if rows_dtype not in ROWS_DTYPES:
        raise ConfigError(unknown_name("dtype of rows", rows_dtype, ROWS_DTYPES))
    check_new(out)
    for is_other, what in ((is_exported, "an export already"), (is_adopted, "an adopted network")):
        if is_other(run_dir):
            raise ConfigError(f"{run_dir} is {what}; name a run, which has a network that looks at pictures.")
    network = TrainedNetwork(Run.open(find_run(run_dir), use=use))
    run, (num_classes, num_features) = network.run, network.head.shape
    normalizer = None if raw else run.normalizer
    try:
        thresholds = network.thresholds(normalizer)
    except RunError as error:
        warnings.warn(f"The export has no thresholds. {error}", RunWarning, stacklevel=2)
        thresholds = None
    program = _program(run, normalizer, num_features, rows_dtype)
    serialized = program.serialize()
    row_bytes = num_features * np.dtype(rows_dtype).itemsize + 8
    check_space(Path(out).absolute().parent, len(serialized) + num_classes * row_bytes)
    with new_directory(out) as directory, fit_progress(quiet=quiet) as report:
        write_bytes(directory / PROGRAM, bytes(serialized))
        blocks = _write_rows(directory, network, normalizer, rows_dtype, report)
        write_json(directory / "class_names.json", list(run.class_names))
        if normalizer is not None and normalizer.num_rows > 1:
            write_normalizer(directory, normalizer, checkpoint=run.checkpoint)
        if thresholds is not None:
            thresholds.save(directory, checkpoint=run.checkpoint)
            write_json(directory / "thresholds.json", plain_thresholds(thresholds, num_classes=num_classes))
        height, width, channels = run.image_shape
        config = run.config
        words = {name: text.format(*run.image_shape, num_features) for name, text in _WORDS.items()}
        if len(program.in_avals) > 3:
            all_rows = (rows_dtype, num_classes, num_features)
            words |= {name: text.format(*all_rows) for name, text in _ALL_ROWS.items()}
        manifest = Manifest(
            format=FORMAT,
            program=words,
            platforms=tuple(program.platforms),
            calling_convention=program.calling_convention_version,
            image_shape=run.image_shape,
            preprocessing=_PREPROCESSING.format(
                height=height, width=width, kind="gray" if channels == 1 else "RGB"
            ),
            num_classes=num_classes,
            num_features=num_features,
            dtype=config.dtype,
            rows_dtype=rows_dtype,  # type: ignore[arg-type]  # one of ROWS_DTYPES
            normalizer=None if normalizer is None else normalizer.num_rows,
            checkpoint=run.checkpoint,
            trained={"dataset": config.dataset, "model": config.model, "loss": config.loss},
            files={path.name: _stored_file(path) for path in sorted(directory.iterdir())},
            versions={
                "pols_jax": __version__,
                "jax": jax.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            **blocks,
        )
        write_json(directory / MANIFEST, encode(manifest))
    return manifest


def stored_rows(
    kernel: Float[np.ndarray, "classes features"], dtype: str
) -> tuple[Num[np.ndarray, "classes features"], Float[np.ndarray, " classes"]]:
    """Turns rows into what is stored: the rows in a dtype, and what to multiply each with to get it back.

    The largest entry of a row of int8 is 127 times its scale. The scale of everything else, and of a row of zeros, is 1.

    Args:
      kernel: Finite rows, shape ``[k, d]``.
      dtype: One of `ROWS_DTYPES`.

    Returns:
      The stored rows, shape ``[k, d]``, and the scales, shape ``[k]``, float32.

    Examples:
      >>> rows, scales = stored_rows(np.array([[254.0, -2.0], [0.0, 0.0]], np.float32), "int8")
      >>> rows.tolist(), scales.tolist()
      ([[127, -1], [0, 0]], [2.0, 1.0])
    """
    kernel = np.asarray(kernel, np.float32)
    scales = np.ones(len(kernel), np.float32)
    if dtype != "int8":
        return kernel.astype(dtype), scales
    largest = np.max(np.abs(kernel), axis=1, initial=0) / np.float32(127)
    scales = np.where(largest > 0, largest, scales)
    # Rounding makes the largest entry of a row of the smallest numbers more than 127.
    return np.rint(kernel / scales[:, None]).clip(-127, 127).astype(np.int8), scales


def plain_thresholds(thresholds: Thresholds, *, num_classes: int) -> dict[str, Any]:
    """What ``thresholds.json`` holds: for some rules the common threshold, and that of each class with enough examples.

    Args:
      thresholds: What all thresholds follow from.
      num_classes: The number of classes k.

    Returns:
      By rule, ``common`` and, by class id, ``per_class``; None where no threshold satisfies the rule.

    Examples:
      >>> logits, ones = np.arange(10, dtype=np.float32), np.ones(10, np.int64)
      >>> ranks = np.arange(10, 0, -1)
      >>> plain = plain_thresholds(Thresholds(0 * ones, logits, ranks, ranks, 0 * ones), num_classes=2)
      >>> plain["recall=0.9"]["per_class"]
      {'0': 1.0}
    """
    has_enough = np.bincount(thresholds.labels, minlength=num_classes) >= MIN_EXAMPLES
    plain = {}
    for rule in DEFAULT_RULES:
        own = thresholds.per_class(rule, num_classes=num_classes)
        per_class = {str(i): float(own[i]) for i in np.flatnonzero(has_enough).tolist()}
        plain[str(rule)] = {"common": thresholds.shared(rule), "per_class": per_class}
    return plain


def _program(
    run: Run, normalizer: Normalizer | None, num_features: int, rows_dtype: str
) -> jax.export.Exported:
    """The program, with all parameters in it, for any batch size."""
    backbone, dtype = run.model.backbone, run.model.dtype or np.float32
    variables = jax.tree.map(np.asarray, run.restore_backbone())
    # An affine normalizer is in the rows already.
    subtracted = None if normalizer is None or normalizer.num_rows == 1 else normalizer
    clusters = subtracted and subtracted.clusters
    if subtracted is not None:
        subtracted = jax.tree.map(np.asarray, dataclasses.replace(subtracted, clusters=None))

    def score(images, row, bias, *all_rows):
        features = backbone.apply(variables, scale_pixels(images)).astype(jnp.float32)
        used = subtracted
        if clusters is not None and used is not None:
            kernel, scales, biases = all_rows
            own = dataclasses.replace(clusters, kernel=kernel, bias=biases, scales=scales)
            used = dataclasses.replace(used, clusters=own)
        return scores(features, row[None], bias[None], used, dtype=dtype)[:, 0], features

    batch, classes = jax.export.symbolic_shape("batch, classes")
    all_rows = (
        jax.ShapeDtypeStruct((classes, num_features), rows_dtype),
        jax.ShapeDtypeStruct((classes,), jnp.float32),
        jax.ShapeDtypeStruct((classes,), jnp.float32),
    )
    with _without_places():
        return jax.export.export(jax.jit(score), platforms=PLATFORMS)(
            jax.ShapeDtypeStruct((batch, *run.image_shape), jnp.uint8),
            jax.ShapeDtypeStruct((num_features,), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.float32),
            *(all_rows if clusters is not None else ()),
        )


@contextlib.contextmanager
def _without_places() -> Iterator[None]:
    """Keeps the paths and lines of the source, which are those of this machine, out of a program."""
    option = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, option)
    jax.config.update(option, 0)
    try:
        yield
    finally:
        jax.config.update(option, before)


def _write_rows(
    directory: Path,
    network: TrainedNetwork,
    normalizer: Normalizer | None,
    dtype: str,
    report: Callable[[str, int, int], None],
) -> Mapping[str, Any]:
    """Writes rows, scales and biases, a block at a time; returns what the manifest says about the blocks."""
    shape, checksums, sizes = network.head.shape, [], []
    numbers: dict[str, list[np.ndarray]] = {"scales": [], "biases": []}
    with _synced(directory / "rows.npy") as file:
        header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for kernel, bias in network.head.blocks():
            is_finite = np.isfinite(kernel).all(axis=1) & np.isfinite(bias)
            if not is_finite.all():
                class_id = sum(sizes) + int(np.argmin(is_finite))
                raise ConfigError(
                    f"The row of class {class_id} ({printable(network.run.class_names[class_id])}) of the run in "
                    f"{network.place} is not finite; train another one."
                )
            if normalizer is not None and normalizer.num_rows == 1:
                kernel, bias = fold(normalizer, kernel, bias)
            rows, scales = stored_rows(np.asarray(kernel), dtype)
            biases = np.asarray(bias, np.float32)
            file.write(rows.tobytes())
            numbers["scales"].append(scales)
            numbers["biases"].append(biases)
            checksums.append(crc32(rows, scales, biases))
            sizes.append(len(rows))
            report("rows of the classes", sum(sizes), shape[0])
    for name, parts in numbers.items():
        with _synced(directory / f"{name}.npy") as file:
            np.save(file, np.concatenate(parts))
    return {"rows_per_block": sizes[0], "rows_crc32": tuple(checksums)}


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file to write, which is on the disk at the end."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _stored_file(path: Path) -> StoredFile:
    with open(path, "rb") as file:
        return StoredFile(
            num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )
