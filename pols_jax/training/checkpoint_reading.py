"""Reads checkpoints, and checks everything that it gives out.

A stored array is opened where it lies: reading writes nothing, and may happen while the run is being trained. Nothing is
trusted without its checksum. `seal` makes the ``meta`` of a checkpoint, which has a checksum of every array, or of each
of its chunks, and one of itself; so a changed bit is an error, wherever it is.
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
from typing import Any

import jax
import numpy as np
import tensorstore
from flax.traverse_util import unflatten_dict
from jaxtyping import Float

from pols_jax.errors import CheckpointError, ConfigError, PolsError, reason_of, shell_word
from pols_jax.training.config import RunConfig
from pols_jax.training.stored_arrays import ArrayParts, StoredArray, checksums, chunk_rows, leaf_name

HEAD = ("params.head.kernel", "params.head.bias")
"""The names of the two arrays of the output layer."""

# What `meta` holds. In the second format there was "head" too, and each array had one checksum; in the first, `meta`
# itself had none.
_KEYS = {"step", "config", "data", "validation_accuracy", "arrays", "checksum"}
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


def stored_accuracies(run_dir: str | Path) -> dict[int, float]:
    """By step, what the checkpoints that were measured on the validation split reached; damaged ones are left out."""
    accuracies = {}
    for step in stored_steps(run_dir):
        with contextlib.suppress(CheckpointError):
            accuracies[step] = StoredCheckpoint(run_dir, step).meta["validation_accuracy"]
    return {step: accuracy for step, accuracy in accuracies.items() if accuracy is not None}


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
                meta = {"data": None, "validation_accuracy": None, "arrays": arrays} | meta
            elif meta.keys() not in (_KEYS, {*_KEYS, "head"}) or meta["checksum"] != _checksum_of_meta(meta):
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
        """Reads and checks the state, or the part of it that a template has the structure, shapes and dtypes of.

        A leaf of the template that has a method ``placed`` says itself what becomes of the array: it is called with the
        function ``rows(start, stop)`` that reads rows. All other leaves become NumPy arrays.
        """

        def started(path: Any, leaf: Any) -> StoredArray:
            array = self.array(leaf_name(path))
            self._check_kind(array, np.dtype(leaf.dtype), np.shape(leaf))
            array.start()
            return array

        def read(leaf: Any, array: StoredArray) -> Any:
            return leaf.placed(array.rows) if hasattr(leaf, "placed") else array.read()

        with self._one_sentence():
            return jax.tree.map(read, template, jax.tree_util.tree_map_with_path(started, template))

    def read_below(self, name: str) -> dict[str, Any]:
        """Reads and checks all arrays whose names begin with a name and a dot, as a tree; empty if there are none."""
        with self._one_sentence():
            names = [stored for stored in self.meta["arrays"] if stored.startswith(f"{name}.")]
            arrays = {tuple(stored[len(name) + 1 :].split(".")): self.array(stored) for stored in names}
            for array in arrays.values():
                array.start()
            return unflatten_dict({path: array.read() for path, array in arrays.items()})

    def problem(self) -> str | None:
        """Reads all of it; returns a sentence that says what is wrong, None if it is intact."""
        try:
            with self._one_sentence():
                for name in self.meta["arrays"]:
                    self.array(name).check()
        except CheckpointError as error:
            return str(error)
        return None

    def error(self, what: str) -> CheckpointError:
        """The error that says what is wrong with this checkpoint."""
        return CheckpointError(f"Checkpoint {self.step} in {self.folder.parent} {what}.")

    def array(self, name: str) -> StoredArray:
        """An array of the state, which checks what it reads."""
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
            store = tensorstore.open(spec, open=True, read=True).result()
            dtype, shape, checksum = self.meta["arrays"][name]
            array = StoredArray(store, checksum, self.error, name=name)
            self._check_kind(array, dtype, shape)
            return array

    def _check_kind(self, array: StoredArray, dtype: Any, shape: Any) -> None:
        if dtype is not None and (array.dtype, array.shape) != (np.dtype(dtype), tuple(shape)):
            raise self.error(
                f"holds {array.name} as {array.dtype} {list(array.shape)} instead of {dtype} {list(shape)}; it is damaged, "
                "or of another network"
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

    A row is read and checked with the chunk of rows around it. Checkpoints that were written before there were checksums
    of chunks are read as a whole, once.

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
            self._kernel, self._bias = (self._checkpoint.array(name) for name in HEAD)
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
        with self._advised():
            return self._kernel.at(class_ids), self._bias.at(class_ids)

    def rows(
        self, start: int, stop: int
    ) -> tuple[Float[np.ndarray, "classes features"], Float[np.ndarray, " classes"]]:
        """Reads the kernel rows and the biases of the classes from ``start`` on, and before ``stop``.

        Raises:
          CheckpointError: if they cannot be read, or have changed.
        """
        with self._advised():
            return self._kernel.rows(start, stop), self._bias.rows(start, stop)

    def blocks(self) -> Iterator[tuple[Float[np.ndarray, "block features"], Float[np.ndarray, " block"]]]:
        """Reads and checks all rows in order, a block at a time.

        Raises:
          CheckpointError: if some cannot be read, or have changed.
        """
        num_classes = self.shape[0]
        rows = chunk_rows(HEAD[0], self._kernel.shape, self._kernel.dtype) or num_classes
        for start in range(0, num_classes, rows):
            yield self.rows(start, min(start + rows, num_classes))

    @contextlib.contextmanager
    def _advised(self) -> Iterator[None]:
        with advised(self._checkpoint.run_dir, self._advice), self._checkpoint._one_sentence():
            yield


@contextlib.contextmanager
def advised(run_dir: str | Path, advice: str | None = None) -> Iterator[None]:
    """Adds to the errors of a damaged checkpoint what someone who wants to use the run can do about it."""
    try:
        yield
    except CheckpointError as error:
        train = f"To train again from the checkpoint before it: pols train --run-dir {shell_word(run_dir)} --resume."
        raise CheckpointError(f"{error} {advice or train}") from error


def seal(
    step: int,
    arrays: Mapping[str, ArrayParts],
    *,
    config: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    validation_accuracy: float | None,
) -> dict[str, Any]:
    """Makes the ``meta`` of a checkpoint, by which a change of any bit of it is noticed."""
    found = checksums(arrays)
    meta = {
        "step": step,
        "config": dict(config),
        "data": data,
        "validation_accuracy": validation_accuracy,
        "arrays": {
            name: [array.dtype.name, list(array.shape), found[name]] for name, array in arrays.items()
        },
    }
    return meta | {"checksum": _checksum_of_meta(meta)}


def _checksum_of_meta(meta: Mapping[str, Any]) -> int:
    content = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
