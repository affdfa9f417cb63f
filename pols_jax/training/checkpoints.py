"""Checkpoints of a run: written by Orbax in the background, atomically, and checked when they are read.

A checkpoint is a folder ``checkpoints/STEP`` with the whole training state, as one Zarr array per leaf, and ``meta``:
the step, the config, the data and checksums. The position in the data and the random numbers of a run are functions of
its seed and step, so they need no storage of their own.

The arrays of the output layer are stored in chunks of whole rows: `HeadRows` reads the rows of the asked classes and leaves
the rest on the disk. With several hosts, all of them save and restore together, and each writes and reads its own rows.
"""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from pols_jax.errors import CheckpointError, PolsError, reason_of
from pols_jax.training.checkpoint_reading import (
    HeadRows,
    StoredCheckpoint,
    advised,
    newest_step,
    numbered_entries,
    seal,
    stored_accuracies,
    stored_steps,
)
from pols_jax.training.hosts import largest_of_hosts, texts_of_hosts
from pols_jax.training.stored_arrays import ArrayParts, leaf_name, tree_bytes

__all__ = ["Checkpoints", "HeadRows", "Saved", "newest_step"]

# Arrays that are written at the same time.
_CONCURRENT = 8


class Saved(NamedTuple):
    """A restored checkpoint; and by its step, one sentence for each newer one that could not be read."""

    step: int
    state: Any
    problems: dict[int, str]


class Checkpoints:
    """The checkpoints of one run directory: the newest few, and the best on the validation split.

    Nothing is written before the first `save`.

    Args:
      run_dir: The run directory.
      keep: How many of the newest checkpoints stay on disk.

    Examples:
      >>> import tempfile, numpy as np
      >>> state = {"params": {"head": {"kernel": np.eye(3, dtype=np.float32)}}}
      >>> with tempfile.TemporaryDirectory() as run_dir, Checkpoints(run_dir) as checkpoints:
      ...     checkpoints.save(10, state, config={"loss": "cross_entropy"})
      ...     checkpoints.wait()
      ...     saved = checkpoints.restore_newest(state)
      >>> saved.step, saved.state["params"]["head"]["kernel"][0].tolist()
      (10, [1.0, 0.0, 0.0])
    """

    def __init__(self, run_dir: str | Path, *, keep: int = 2):
        self.run_dir = Path(run_dir)
        self.directory = self.run_dir.resolve() / "checkpoints"
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._being_written: int | None = None
        self._accuracies: dict[int, float] = {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.close()
        except CheckpointError:
            if kind is None:  # else the error that ended the work says more
                raise

    def steps(self) -> list[int]:
        """The steps that there is a complete checkpoint of, oldest first."""
        return stored_steps(self.run_dir)

    def prepare(self, template: Any) -> None:
        """Finds out before the work whether a checkpoint can be written.

        Args:
          template: A tree with the shapes and dtypes of the state.

        Raises:
          CheckpointError: if the directory cannot be written to, or the disk has no room for one checkpoint.
        """
        needed = tree_bytes(template)
        with self._one_sentence(f"{self.directory} cannot be written to"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
            free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise CheckpointError(
                f"The disk of {self.directory} has {free / 1e6:,.0f} MB left, and a checkpoint takes "
                f"{needed / 1e6:,.0f} MB; free some space, or name another --run-dir."
            )

    def save(
        self,
        step: int,
        state: Any,
        *,
        config: Mapping[str, Any],
        data: Mapping[str, Any] | None = None,
        validation_accuracy: float | None = None,
    ) -> None:
        """Starts to write a checkpoint, and returns while it is being written; with arrays on devices, when it is written.

        Args:
          step: The number of steps that the state has seen.
          state: The state, with leaves that all hosts have, or `ArrayParts` where each host has its own rows. They must
            not be changed before `wait` returns.
          config: The config of the run, as `RunConfig.to_json` gives it.
          data: The provenance of the data of the run.
          validation_accuracy: Decides which checkpoint is the best; None if it was not measured at this step.

        Raises:
          CheckpointError: if this or the checkpoint before could not be written.
        """
        self.wait()
        arrays = {
            leaf_name(path): leaf
            if isinstance(leaf, ArrayParts)
            else ArrayParts.of_first_host(leaf_name(path), np.asarray(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        with self._one_sentence(f"Could not write checkpoint {step} to {self.directory}"):
            # Orbax would make one, without the rest of the run.
            if self._manager is not None and not self.directory.is_dir():
                raise FileNotFoundError("the directory is gone")
            meta = seal(step, arrays, config=config, data=data, validation_accuracy=validation_accuracy)
            is_written = self._opened_manager().save(
                step, args=ocp.args.Composite(state=_ArraysSave(arrays), meta=ocp.args.JsonSave(meta))
            )
        if not is_written:
            raise CheckpointError(
                f"Checkpoint {step} was not written: there is a newer one in {self.directory}, "
                f"{max(numbered_entries(self.run_dir), default=step)}. Move it away, and start again to resume."
            )
        self._being_written = step
        if validation_accuracy is not None:
            self._accuracies[step] = validation_accuracy
        if largest_of_hosts(int(any(array.is_on_device for array in arrays.values()))):
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
          CheckpointError: if it could not be written, or is not there.
        """
        step, self._being_written = self._being_written, None
        if self._manager is None or step is None:
            return
        with self._one_sentence(f"Could not write checkpoint {step} to {self.directory}"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            if not StoredCheckpoint(self.run_dir, step).looks_complete():
                raise FileNotFoundError("it was written, and is not there")

    def restore_newest(self, template: Any) -> Saved | None:
        """Reads the newest checkpoint that is whole.

        Args:
          template: A tree with the structure, shapes and dtypes of the state.

        Returns:
          The newest checkpoint that can be read and has the right checksums; None if there is no checkpoint.

        Raises:
          CheckpointError: if there are checkpoints, and none can be read.
        """
        problems: dict[int, str] = {}
        steps = numbered_entries(self.run_dir)
        if len({*texts_of_hosts(str(steps))}) > 1:
            raise CheckpointError(
                f"The hosts do not find the same checkpoints in {self.directory}; the run directory has to be one that all "
                "hosts see."
            )
        for step in reversed(steps):
            state, problem = None, ""
            try:
                state = StoredCheckpoint(self.run_dir, step).read(template)
            except CheckpointError as error:
                problem = str(error)
            problem = next(filter(None, texts_of_hosts(problem)), None)  # all hosts go on from the same one
            if problem is None:
                return Saved(step, state, problems)
            problems[step] = problem
        if problems:
            raise CheckpointError(
                f"{' '.join(problems.values())} No checkpoint is left: bring one back, or move {self.directory} away to "
                "start from the beginning."
            )
        return None

    def set_aside(self, step: int) -> Path:
        """Moves a checkpoint that cannot be read out of the way of new ones; nothing is deleted.

        Args:
          step: The name of its folder.

        Returns:
          Where it is now: in the folder ``damaged-checkpoints`` of the run directory.

        Raises:
          CheckpointError: if it cannot be moved.
        """
        folder = self.directory.parent / "damaged-checkpoints"
        with self._one_sentence(f"Could not move {self.directory / str(step)} away"):
            folder.mkdir(exist_ok=True)
            names = (f"{step}-{copy}" if copy else str(step) for copy in range(10**6))
            place = next(folder / name for name in names if not os.path.lexists(folder / name))
            os.rename(self.directory / str(step), place)
        return place

    def restore(self, step: int, template: Any) -> Any:
        """Reads one checkpoint and checks it.

        Args:
          step: The step to read.
          template: A tree with the structure, shapes and dtypes of what to read: the state, or a part of it.

        Returns:
          The state, with NumPy leaves.

        Raises:
          CheckpointError: if it cannot be read, or a checksum is wrong.
        """
        with advised(self.run_dir):
            return StoredCheckpoint(self.run_dir, step).read(template)

    def close(self) -> None:
        """Waits for what is being written, and lets go of the directory.

        Raises:
          CheckpointError: if it could not be written.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            with self._one_sentence(f"Could not write to {self.directory}"):
                manager.close()

    def _opened_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._accuracies |= stored_accuracies(self.run_dir)
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_NewestAndBest(self._keep, self._accuracies),
                    cleanup_tmp_directories=True,  # what a killed training left
                ),
                item_handlers={"state": _ArraysHandler(), "meta": ocp.JsonCheckpointHandler()},
            )
        return self._manager

    @contextlib.contextmanager
    def _one_sentence(self, what: str) -> Iterator[None]:
        try:
            yield
        except PolsError:
            raise
        except Exception as error:  # whatever a full disk or a directory that is gone makes libraries raise
            left = "There is no checkpoint"
            with contextlib.suppress(CheckpointError):
                if (newest := newest_step(self.run_dir)) is not None:
                    left = f"The newest checkpoint there is {newest}"
            raise CheckpointError(
                f"{what} ({reason_of(error)}). {left}; free some space or mend the directory, and start again to "
                "resume."
            ) from error


class _NewestAndBest(preservation_policy.PreservationPolicy):
    """Keeps the newest few, and the best; a resumed run knows the accuracies of what is there."""

    def __init__(self, keep: int, accuracies: dict[int, float]):
        self._keep, self._accuracies = keep, accuracies

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        measured = [step for step in steps if step in self._accuracies]
        kept = {*steps[-self._keep :], *sorted(measured, key=lambda step: self._accuracies[step])[-1:]}
        return [step in kept for step in steps]


class _ArraysHandler(ocp.AsyncCheckpointHandler):
    """Writes `ArrayParts` where Orbax tells it to, in the background."""

    async def async_save(self, directory, args: "_ArraysSave") -> list[Future] | None:
        """Starts to write; called on every process."""
        return [CommitFutureAwaitingContractedSignals(_write_all(directory, args.arrays), name="arrays")]

    def save(self, directory, args: "_ArraysSave"):
        """Writes."""
        asyncio.run(_write_all(directory, args.arrays))

    def restore(self, directory, args: Any = None):
        """Is not used: `StoredCheckpoint` reads."""
        raise NotImplementedError


@ocp.args.register_with_handler(_ArraysHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _ArraysSave(ocp.args.CheckpointArgs):
    """What an `_ArraysHandler` saves."""

    arrays: Mapping[str, ArrayParts]


async def _write_all(directory: Any, arrays: Mapping[str, ArrayParts]) -> None:
    turns = asyncio.Semaphore(_CONCURRENT)

    async def write(array: ArrayParts) -> None:
        async with turns:
            await array.write(directory)

    await asyncio.gather(*map(write, arrays.values()))
