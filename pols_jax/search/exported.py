"""What ``pols export`` wrote, opened again: the manifest, the program, and the rows of the classes.

Nothing is trusted without its checksum. The program and the small files are checked when they are read, and a row with the
block of rows around it when its class is first asked for: opening costs the same for a thousand classes and for a million.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.export
import numpy as np
from jaxtyping import Float

from pols_jax.errors import ConfigError, RunError, reason_of
from pols_jax.files import read_bytes, reading
from pols_jax.metrics.thresholds import Thresholds
from pols_jax.normalizers import Normalizer
from pols_jax.schema import decode, json_field, read_json, read_record
from pols_jax.training.run_normalizer import normalizer_path, read_normalizer
from pols_jax.training.stored_arrays import crc32

FORMAT = 1
"""The version of the layout of the directory."""
MANIFEST = "export.json"
PROGRAM = "score.stablehlo"
_ADVICE = "export the run again with pols export"
_MAX_BYTES = 2**40


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """The size and the SHA-256 checksum of a file."""

    num_bytes: int = json_field("bytes")
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``export.json`` holds.

    Attributes:
      format: The version of the layout of the directory.
      program: Inputs and outputs of the program, in words.
      platforms: What the program runs on.
      calling_convention: The version of JAX's calling convention that the program has.
      image_shape: Height, width and channels of its pictures.
      preprocessing: What to do with a picture before the program gets it, in words.
      num_classes: The number of classes k.
      num_features: The width d of a row.
      dtype: What the program computes in.
      rows_dtype: What the rows are stored in.
      rows_per_block: How many rows have a checksum together, with their scales and biases.
      rows_crc32: The checksums.
      normalizer: The rows of the normalizer that the score contains: 1 if it is affine; None if there is none.
      checkpoint: What identifies the checkpoint of the run.
      trained: The data set, network and loss of the run.
      files: All other files.
      versions: The software that wrote it.
    """

    format: int
    program: dict[str, str]
    platforms: tuple[str, ...]
    calling_convention: int
    image_shape: tuple[int, int, int]
    preprocessing: str
    num_classes: int
    num_features: int
    dtype: Literal["float32", "bfloat16"]
    rows_dtype: Literal["float32", "bfloat16", "int8"]
    rows_per_block: int
    rows_crc32: tuple[int, ...]
    normalizer: int | None
    checkpoint: str
    trained: dict[str, str]
    files: dict[str, StoredFile]
    versions: dict[str, str]

    def __post_init__(self):
        """Checks what types cannot say."""
        if min(self.num_classes, self.num_features, self.rows_per_block, *self.image_shape) < 1:
            raise ConfigError("a size is below 1.")
        if len(self.rows_crc32) != -(-self.num_classes // self.rows_per_block):
            raise ConfigError(f"{len(self.rows_crc32)} checksums are not one for each block of rows.")


class ExportedRows:
    """The rows of the classes, memory-mapped.

    Args:
      directory: The export.
      manifest: What it says about itself.
    """

    def __init__(self, directory: Path, manifest: Manifest):
        self.shape = (manifest.num_classes, manifest.num_features)
        self._directory, self._manifest = directory, manifest
        self._arrays = (
            _mapped(directory / "rows.npy", manifest.rows_dtype, self.shape),
            _mapped(directory / "scales.npy", "float32", self.shape[:1]),
            _mapped(directory / "biases.npy", "float32", self.shape[:1]),
        )
        self._intact: set[int] = set()

    def read(
        self, class_ids: Sequence[int]
    ) -> tuple[Float[np.ndarray, "asked features"], Float[np.ndarray, " asked"]]:
        """Reads the rows ``[c, d]``, multiplied by their scales, and the biases ``[c]`` of some classes, in float32.

        Raises:
          RunError: if they have changed.
        """
        size = self._manifest.rows_per_block
        for block in {class_id // size for class_id in class_ids} - self._intact:
            first, stop = block * size, min((block + 1) * size, self.shape[0])
            if crc32(*(array[first:stop] for array in self._arrays)) != self._manifest.rows_crc32[block]:
                raise RunError(f"Rows {first} to {stop - 1} of {self._directory} are damaged; {_ADVICE}.")
            self._intact.add(block)
        rows, scales, biases = (np.asarray(array[class_ids], np.float32) for array in self._arrays)
        return rows * scales[:, None], biases


@dataclasses.dataclass(frozen=True)
class Exported:
    """An export on disk.

    Attributes:
      directory: Where it is.
      manifest: What it says about itself.
      rows: The rows of the classes.
      program: Maps images, a row and a bias to scores and features; with a normalizer that reads rows of classes, it is
        given all of them, with their scales and biases.
    """

    directory: Path
    manifest: Manifest
    rows: ExportedRows
    program: jax.export.Exported

    @classmethod
    def open(cls, directory: str | Path) -> "Exported":
        """Opens what `pols_jax.search.export` wrote.

        Raises:
          RunError: if there is none, it is damaged, or it was written by a newer version of pols_jax or for another
            version of JAX.

        Examples:
          >>> Exported.open("no/such/export")
          Traceback (most recent call last):
          pols_jax.errors.RunError: no/such/export/export.json cannot be read: No such file or directory.
        """
        directory = Path(directory)
        manifest = _read_manifest(directory / MANIFEST)
        return cls(directory, manifest, ExportedRows(directory, manifest), _read_program(directory, manifest))

    @property
    def checkpoint(self) -> str:
        """What identifies the checkpoint of the run."""
        return self.manifest.checkpoint

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        return read_record(tuple[str, ...], self._checked("class_names.json"))  # type: ignore[return-value]

    @functools.cached_property
    def normalizer(self) -> Normalizer | None:
        """What has to be subtracted from logits of features; an affine one is in the rows already."""
        if self.manifest.normalizer in (None, 1):
            return None
        path = self._checked(normalizer_path(self.directory).name)
        normalizer = read_normalizer(
            self.directory,
            checkpoint=self.checkpoint,
            shape=self.rows.shape,
            head=lambda: (*self.rows.read(range(self.rows.shape[0])), 0),
            advice=_ADVICE,
        )
        if normalizer is None:
            raise RunError(f"{path} is that of another network; {_ADVICE}.")
        return normalizer

    def thresholds(self) -> Thresholds:
        """What the thresholds of the score follow from; a `RunError` if the run had not been evaluated."""
        if "thresholds.npz" not in self.manifest.files:
            raise RunError(
                f"{self.directory} was exported without thresholds; evaluate the run with pols eval and export it again, or "
                "give a number."
            )
        self._checked("thresholds.npz")
        return Thresholds.load(
            self.directory,
            checkpoint=self.checkpoint,
            num_classes=self.manifest.num_classes,
            advice="with pols eval, export the run again, or give a number",
        )

    def _checked(self, name: str) -> Path:
        _checked_bytes(self.directory, self.manifest, name)
        return self.directory / name


def is_exported(directory: str | Path) -> bool:
    """Whether a directory is that of an export.

    Examples:
      >>> is_exported("no/such/directory")
      False
    """
    return os.path.exists(os.path.join(directory, MANIFEST))


def _read_manifest(path: Path) -> Manifest:
    content = read_json(path)
    version = content.get("format") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise RunError(
            f"{path} was written by a newer version of pols_jax (format {version}, this one reads {FORMAT}); update pols_jax."
        )
    try:
        return decode(Manifest, content)
    except ConfigError as error:
        raise RunError(f"{path} cannot be used: {error}") from error


def _read_program(directory: Path, manifest: Manifest) -> jax.export.Exported:
    lowest = jax.export.minimum_supported_calling_convention_version
    highest = jax.export.maximum_supported_calling_convention_version
    serialized = _checked_bytes(directory, manifest, PROGRAM)
    written_by = manifest.versions.get("jax", "another version")
    problem = f"calling convention {manifest.calling_convention}, and this one takes {lowest} to {highest}"
    if lowest <= manifest.calling_convention <= highest:
        try:
            return jax.export.deserialize(bytearray(serialized))
        except Exception as error:  # whatever a format that it does not know makes JAX raise
            problem = reason_of(error)
    raise RunError(
        f"The program in {directory} was exported with jax {written_by} and cannot be used with jax {jax.__version__} "
        f"({problem}); install that version, or {_ADVICE}."
    )


def _checked_bytes(directory: Path, manifest: Manifest, name: str) -> bytes:
    path = directory / name
    if name not in manifest.files:
        raise RunError(f"{directory / MANIFEST} cannot be used: files.{name} is missing.")
    with reading(path):
        content = read_bytes(path, max_bytes=_MAX_BYTES)
    if hashlib.sha256(content).hexdigest() != manifest.files[name].sha256:
        raise RunError(f"{path} is damaged: its checksum is another one; {_ADVICE}.")
    return content


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> Any:
    try:
        if not path.is_file():  # opening a pipe would never end
            raise FileNotFoundError(2, "it is not there, or not a file")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        # bfloat16 has no name in this format, only its two bytes.
        array = array.view(dtype) if array.dtype.itemsize == np.dtype(dtype).itemsize else array
    except (OSError, ValueError, EOFError) as error:
        raise RunError(f"{path} is damaged ({reason_of(error)}); {_ADVICE}.") from error
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise RunError(
            f"{path} is damaged: it holds {array.dtype} {list(array.shape)} instead of {dtype} {list(shape)}; {_ADVICE}."
        )
    return array
