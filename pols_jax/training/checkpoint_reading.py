"""Reads checkpoints, and checks everything that it gives out.

A stored array is opened where it lies: reading writes nothing, and may happen while the run is being trained. Nothing is
trusted without its checksum. `seal` makes the ``meta`` of a checkpoint, which has a checksum of every array, one of every
block of rows of the output layer, and one of itself; so a changed bit is an error, wherever it is.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore
from jaxtyping import Float

from pols_jax.errors import CheckpointError, ConfigError, PolsError, reason_of, shell_word
from pols_jax.training.config import RunConfig

HEAD = ("params.head.kernel", "params.head.bias")
"""The names of the two arrays of the output layer."""

# Rows of the head are stored and checked in blocks of about this size: one class is read with one small file.
_BLOCK_BYTES = 2**20
# ... but never in more blocks than this.
_MAX_BLOCKS = 4096
# What `meta` holds; checkpoints of the first format have neither blocks nor a checksum of `meta` itself.
_KEYS = {"step", "config", "data", "validation_accuracy", "arrays", "head", "checksum"}
_KEYS_OF_FIRST_FORMAT = {"step", "config", "crc32"}


def numbered_entries(run_dir: str | Path) -> list[int]:
    """The numbers that something in ``checkpoints/`` is named after, smallest first, whatever it is."""
    directory = Path(run_dir) / "checkpoints"
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror}).") from error
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))


def stored_steps(run_dir: str | Path) -> list[int]:
    """The steps that there is a checkpoint of, oldest first; a folder that cannot be one does not count."""
    return [step for step in numbered_entries(run_dir) if StoredCheckpoint(run_dir, step).looks_complete()]


def newest_step(run_dir: str | Path) -> int | None:
    """The step of the newest checkpoint of a run; None if there is none."""
    return max(stored_steps(run_dir), default=None)


class StoredCheckpoint:
    """One checkpoint on disk."""

    def __init__(self, run_dir: str | Path, step: int):
        self.run_dir, self.step = Path(run_dir), step
        # Tensorstore takes no path with ".." in it.
        self.folder = self.run_dir.resolve() / "checkpoints" / str(step)

    def looks_complete(self) -> bool:
        """Whether everything is there that a checkpoint consists of; its contents are not looked at."""
        return (self.folder / "meta" / "metadata").is_file() and (self.folder / "state").is_dir()

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """What the checkpoint says about itself, as `seal` wrote it; it must not have changed."""
        with self._one_sentence():
            meta = json.loads(self._metadata)
            if meta.keys() == _KEYS_OF_FIRST_FORMAT:
                arrays = {name: [None, None, crc32] for name, crc32 in meta["crc32"].items()}
                meta = {"data": None, "validation_accuracy": None, "head": None, "arrays": arrays} | meta
            elif meta.keys() != _KEYS or meta["checksum"] != _checksum_of_meta(meta):
                raise self.error("is damaged: its metadata has changed")
            if meta["step"] != self.step:
                raise self.error(f"is damaged: it says that it is of step {meta['step']}")
            return meta

    @property
    def identity(self) -> str:
        """What identifies the checkpoint: its step, and a hash over its config and the checksums of its arrays."""
        return f"{self.step}-{hashlib.sha256(self._metadata).hexdigest()[:16]}"

    @functools.cached_property
    def _metadata(self) -> bytes:
        with self._one_sentence():
            path = self.folder / "meta" / "metadata"
            if not path.is_file():
                raise self.error(f"is damaged: there is no file {path.relative_to(self.folder)}")
            return path.read_bytes()

    def check_config(self, config: RunConfig) -> None:
        """Raises a `ConfigError` with the differences unless the checkpoint is of a run with this config."""
        saved = self.meta["config"]
        try:
            differences = config.differences(RunConfig.from_json(saved))
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"The config of checkpoint {self.step} in {self.folder.parent} is not one of this version of pols-jax "
                f"({reason_of(error)})."
            ) from error
        if differences:
            raise ConfigError(
                f"{self.run_dir} holds checkpoint {self.step} of another config: {'; '.join(differences)}. Name another "
                "--run-dir, or the settings of that run."
            )

    def read(self, template: Any) -> Any:
        """Reads and checks the state, or the part of it that a template has the structure, shapes and dtypes of."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(template)
        wanted = {leaf_name(path): (np.dtype(leaf.dtype), np.shape(leaf)) for path, leaf in leaves}
        return jax.tree_util.tree_unflatten(structure, self._read_arrays(wanted))

    def problem(self) -> str | None:
        """Reads all of it; returns a sentence that says what is wrong, None if it is intact."""
        try:
            kinds = {name: (dtype, shape) for name, (dtype, shape, _) in self.meta["arrays"].items()}
            self._read_arrays(kinds)
        except CheckpointError as error:
            return str(error)
        return None

    def error(self, what: str) -> CheckpointError:
        """The error that says what is wrong with this checkpoint."""
        return CheckpointError(f"Checkpoint {self.step} in {self.folder.parent} {what}.")

    def open_array(self, name: str) -> Any:
        """Opens an array of the state, of whatever shape; its contents are not checked."""
        folder = self.folder / "state" / name
        with self._one_sentence():
            if name not in self.meta["arrays"]:
                raise self.error(f"has no array {name}")
            with os.scandir(folder) as entries:
                are_files = all(entry.is_file() for entry in entries)
            if not are_files:  # reading from a pipe would never end
                raise self.error(f"is damaged: something in {folder.relative_to(self.folder)} is not a file")
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": f"{folder}/"},
                "fill_missing_data_reads": False,  # a file that is gone is not zeros
            }
            array = tensorstore.open(spec, open=True, read=True).result()
            self._check_kind(name, array, *self.meta["arrays"][name][:2])
            return array

    def _read_arrays(self, wanted: Mapping[str, tuple[Any, Any]]) -> list[np.ndarray]:
        with self._one_sentence():
            arrays = {name: self.open_array(name) for name in wanted}
            for name, array in arrays.items():
                self._check_kind(name, array, *wanted[name])
            reads = {name: array.read() for name, array in arrays.items()}
            values = []
            for name, read in reads.items():
                values.append(np.asarray(read.result()))
                if crc32(values[-1]) != self.meta["arrays"][name][2]:
                    raise self.error(f"is damaged: {name} has changed")
            return values

    def _check_kind(self, name: str, array: Any, dtype: Any, shape: Any) -> None:
        found = (array.dtype.numpy_dtype, tuple(array.shape))
        if dtype is not None and found != (np.dtype(dtype), tuple(shape)):
            raise self.error(
                f"holds {name} as {found[0]} {list(found[1])} instead of {dtype} {list(shape)}; it is damaged, or of "
                "another network"
            )

    @contextlib.contextmanager
    def _one_sentence(self) -> Iterator[None]:
        """Whatever damaged files make the libraries raise becomes one kind of error."""
        try:
            yield
        except PolsError:
            raise
        except Exception as error:
            raise self.error(f"cannot be read ({reason_of(error)})") from error


class HeadRows:
    """Reads rows of a stored output layer without reading the rest.

    A row is read and checked with the block of rows around it. Checkpoints that were written before there were checksums
    of blocks are read as a whole, once.

    Args:
      run_dir: The run directory.
      step: Which checkpoint; the newest if None.
      advice: What someone can do whose checkpoint is damaged; training again if None.

    Examples:
      >>> import tempfile, numpy as np
      >>> from pols_jax.training.checkpoints import Checkpoints
      >>> head = {"kernel": np.eye(4, dtype=np.float32), "bias": np.arange(4, dtype=np.float32)}
      >>> with tempfile.TemporaryDirectory() as run_dir, Checkpoints(run_dir) as checkpoints:
      ...     checkpoints.save(1, {"params": {"head": head}}, config={})
      ...     checkpoints.wait()
      ...     kernel_rows, biases = HeadRows(run_dir).read([2])
      >>> kernel_rows.tolist(), biases.tolist()
      ([[0.0, 0.0, 1.0, 0.0]], [2.0])
    """

    def __init__(self, run_dir: str | Path, *, step: int | None = None, advice: str | None = None):
        step = newest_step(run_dir) if step is None else step
        if step is None:
            raise CheckpointError(f"There is no checkpoint in {run_dir}; train it first.")
        self._checkpoint = StoredCheckpoint(run_dir, step)
        self._advice = advice
        with advised(run_dir, advice), self._checkpoint._one_sentence():
            self._kernel, self._bias = (self._checkpoint.open_array(name) for name in HEAD)
            self._blocks = self._checkpoint.meta["head"]
            num_classes, num_features = self._kernel.shape
            if self._bias.shape != (num_classes,):
                raise self._checkpoint.error("is damaged: kernel and bias of the output layer do not fit")
        self.shape = (num_classes, num_features)

    def read(
        self, class_ids: list[int]
    ) -> tuple[Float[np.ndarray, "asked features"], Float[np.ndarray, " asked"]]:
        """Reads the kernel rows ``[c, d]`` and the biases ``[c]`` of some classes.

        Raises:
          ValueError: if there is no such class.
          CheckpointError: if they cannot be read, or have changed.
        """
        outside = [class_id for class_id in class_ids if not 0 <= class_id < self.shape[0]]
        if outside:
            raise ValueError(f"class_ids must be in [0, {self.shape[0]}), got {outside[0]}.")
        with advised(self._checkpoint.run_dir, self._advice), self._checkpoint._one_sentence():
            if self._blocks is None:
                kernel, bias = self._whole
                return kernel[list(class_ids)], bias[list(class_ids)]
            rows = self._blocks["rows"]
            blocks = {block: self._read_block(block) for block in {i // rows for i in class_ids}}
            kernel = np.zeros((len(class_ids), self.shape[1]), self._kernel.dtype.numpy_dtype)
            bias = np.zeros(len(class_ids), self._bias.dtype.numpy_dtype)
            for place, class_id in enumerate(class_ids):
                block = blocks[class_id // rows]
                kernel[place], bias[place] = block[0][class_id % rows], block[1][class_id % rows]
            return kernel, bias

    def blocks(self) -> Iterator[tuple[Float[np.ndarray, "block features"], Float[np.ndarray, " block"]]]:
        """Reads and checks all rows in order, a block at a time.

        Raises:
          CheckpointError: if some cannot be read, or have changed.
        """
        num_classes, num_features = self.shape
        rows = (
            self._blocks["rows"]
            if self._blocks
            else head_blocks(4 * num_classes * num_features, num_classes).rows
        )
        for start in range(0, num_classes, rows):
            yield self.read(list(range(start, min(start + rows, num_classes))))

    def _read_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._blocks["rows"]
        place = slice(block * rows, min((block + 1) * rows, self.shape[0]))
        reads = [array[place].read() for array in (self._kernel, self._bias)]
        kernel, bias = (np.asarray(read.result()) for read in reads)
        if crc32(kernel, bias) != self._blocks["crc32"][block]:
            raise self._checkpoint.error(
                f"is damaged: rows {place.start} to {place.stop - 1} of the output layer have changed"
            )
        return kernel, bias

    @functools.cached_property
    def _whole(self) -> list[np.ndarray]:
        return self._checkpoint._read_arrays(dict.fromkeys(HEAD, (None, None)))


@contextlib.contextmanager
def advised(run_dir: str | Path, advice: str | None = None) -> Iterator[None]:
    """Adds to the errors of a damaged checkpoint what someone who wants to use the run can do about it."""
    try:
        yield
    except CheckpointError as error:
        train = f"To train again from the checkpoint before it: pols train --run-dir {shell_word(run_dir)} --resume."
        raise CheckpointError(f"{error} {advice or train}") from error


class HeadBlocks(NamedTuple):
    """How the rows of an output layer are divided into blocks: rows per block, and bytes of a block of the kernel."""

    rows: int
    num_bytes: int


def head_blocks(num_bytes: int, num_rows: int) -> HeadBlocks:
    """Divides an output layer of ``num_rows`` rows into blocks of about a megabyte."""
    block_bytes = max(_BLOCK_BYTES, num_bytes // _MAX_BLOCKS)
    return HeadBlocks(max(1, block_bytes * num_rows // max(1, num_bytes)), block_bytes)


def seal(
    step: int,
    state: Any,
    *,
    config: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    validation_accuracy: float | None = None,
) -> dict[str, Any]:
    """Makes the ``meta`` of a checkpoint, by which a change of any bit of it is noticed."""
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    head = None
    if all(name in leaves for name in HEAD):
        kernel, bias = (leaves[name] for name in HEAD)
        rows = head_blocks(kernel.nbytes, len(kernel)).rows
        places = [slice(start, start + rows) for start in range(0, len(kernel), rows)]
        head = {"rows": rows, "crc32": [crc32(kernel[place], bias[place]) for place in places]}
    meta = {
        "step": step,
        "config": dict(config),
        "data": data,
        "validation_accuracy": validation_accuracy,
        "arrays": {n: [leaf.dtype.name, list(leaf.shape), crc32(leaf)] for n, leaf in leaves.items()},
        "head": head,
    }
    return meta | {"checksum": _checksum_of_meta(meta)}


def crc32(*arrays: np.ndarray) -> int:
    """The checksum of the bytes of some arrays, one after the other."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, value)
    return value


def leaf_name(path: Any) -> str:
    """The name that a leaf of the state is stored under."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _checksum_of_meta(meta: Mapping[str, Any]) -> int:
    content = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
