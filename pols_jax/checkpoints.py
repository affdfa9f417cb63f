"""Checkpoints of a run: written by Orbax in the background, atomically, and checked when they are read.

A checkpoint is a folder ``checkpoints/STEP`` with the whole training state, as one Zarr array per leaf, and ``meta``:
the step, the config and a checksum of every leaf. The position in the data and the random numbers of a run are
functions of its seed and step, so they need no storage of their own.

The kernel and the bias of the output layer are stored in chunks of whole rows: `HeadRows` reads the rows of the asked
classes and leaves the rest on the disk.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jaxtyping import Float
from orbax.checkpoint.checkpoint_managers import preservation_policy

# Rows of the head are stored in chunks of about this size: one class is read with one small file.
_CHUNK_BYTES = 2**20
# ... but never in more files than this.
_MAX_CHUNKS = 4096
_BEST = "validation_accuracy"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message says which one, and what is left."""


class Saved(NamedTuple):
    """A restored checkpoint.

    Attributes:
      step: The number of steps that the state has seen.
      state: The state, with the structure of the template and NumPy leaves.
      problems: One sentence for each newer checkpoint that could not be read.
    """

    step: int
    state: Any
    problems: list[str]


class Checkpoints:
    """The checkpoints of one run directory: the newest few, and the best on the validation split.

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
        self.directory = Path(run_dir).absolute() / "checkpoints"
        policies = [
            preservation_policy.LatestN(keep),
            preservation_policy.BestN(
                n=1, get_metric_fn=lambda metrics: metrics[_BEST], keep_checkpoints_without_metrics=False
            ),
        ]
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.AnyPreservationPolicy(policies)
            ),
            item_handlers={
                # One folder per array and one file per chunk, instead of a database that all arrays share: rows
                # are read without an index, and writing is faster.
                "state": ocp.PyTreeCheckpointHandler(use_ocdbt=False),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that there is a complete checkpoint of, oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, state: Any, *, config: Mapping[str, Any], validation_accuracy: float | None = None
    ) -> None:
        """Starts to write a checkpoint, and returns while it is being written.

        Args:
          step: The number of steps that the state has seen.
          state: The state; its leaves are copied before this returns.
          config: The config of the run, as `RunConfig.to_json` gives it.
          validation_accuracy: Decides which checkpoint is the best; None if it was not measured at this step.

        Raises:
          CheckpointError: if this or the checkpoint before could not be written.
        """
        state = jax.tree.map(np.asarray, state)
        meta = {"step": step, "config": dict(config), "crc32": _checksums(state)}
        with self._clear_errors(f"checkpoint {step}"):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(
                        state, save_args=jax.tree_util.tree_map_with_path(_save_args, state)
                    ),
                    meta=ocp.args.JsonSave(meta),
                ),
                metrics=None if validation_accuracy is None else {_BEST: validation_accuracy},
            )

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
          CheckpointError: if it could not be written.
        """
        with self._clear_errors("the last checkpoint"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def restore_newest(self, template: Any) -> Saved | None:
        """Reads the newest checkpoint that is whole.

        Args:
          template: A tree with the structure, shapes and dtypes of the state.

        Returns:
          The newest checkpoint that can be read and has the right checksums; None if there is no checkpoint.

        Raises:
          CheckpointError: if there are checkpoints, and none can be read.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                return Saved(step, self.restore(step, template), problems)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(" ".join(problems))
        return None

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
        template = jax.tree.map(lambda leaf: np.zeros(np.shape(leaf), leaf.dtype), template)
        try:
            saved = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(item=template, partial_restore=True),
                    meta=ocp.args.JsonRestore(),
                ),
            )
            state = jax.tree.map(lambda leaf, like: np.asarray(leaf, like.dtype), saved["state"], template)
            expected = saved["meta"]["crc32"]
        except Exception as error:  # whatever a damaged file makes the libraries raise
            raise CheckpointError(
                f"Checkpoint {step} in {self.directory} cannot be read ({_first_line(error)})."
            ) from error
        for name, checksum in _checksums(state).items():
            if expected.get(name) != checksum:
                raise CheckpointError(
                    f"Checkpoint {step} in {self.directory} is damaged: {name} has changed."
                )
        return state

    def close(self) -> None:
        """Waits for what is being written, and lets go of the directory."""
        self._manager.close()

    @contextlib.contextmanager
    def _clear_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            steps = self.steps()
            left = f"Checkpoint {steps[-1]} is intact" if steps else "No earlier checkpoint exists"
            raise CheckpointError(
                f"Could not write {what} to {self.directory} ({_first_line(error)}). {left}; free some space or mend "
                "the directory, and start again to resume."
            ) from error


class HeadRows:
    """Reads rows of a stored output layer without reading the rest.

    Args:
      run_dir: The run directory.
      step: Which checkpoint; the newest if None.

    Examples:
      >>> import tempfile, numpy as np
      >>> head = {"kernel": np.eye(4, dtype=np.float32), "bias": np.arange(4, dtype=np.float32)}
      >>> with tempfile.TemporaryDirectory() as run_dir, Checkpoints(run_dir) as checkpoints:
      ...     checkpoints.save(1, {"params": {"head": head}}, config={})
      ...     checkpoints.wait()
      ...     kernel_rows, biases = HeadRows(run_dir).read([2])
      >>> kernel_rows.tolist(), biases.tolist()
      ([[0.0, 0.0, 1.0, 0.0]], [2.0])
    """

    def __init__(self, run_dir: str | Path, *, step: int | None = None):
        step = newest_step(run_dir) if step is None else step
        if step is None:
            raise CheckpointError(f"There is no checkpoint in {run_dir}; train it first.")
        folder = Path(run_dir).absolute() / "checkpoints" / str(step) / "state"
        self._kernel, self._bias = (
            _open_array(folder / f"params.head.{name}") for name in ("kernel", "bias")
        )
        num_classes, num_features = self._kernel.shape
        self.shape = (num_classes, num_features)

    def read(
        self, class_ids: list[int]
    ) -> tuple[Float[np.ndarray, "asked features"], Float[np.ndarray, " asked"]]:
        """Reads the kernel rows ``[c, d]`` and the biases ``[c]`` of some classes."""
        outside = [class_id for class_id in class_ids if not 0 <= class_id < self.shape[0]]
        if outside:
            raise ValueError(f"class_ids must be in [0, {self.shape[0]}), got {outside[0]}.")
        kernel, bias = self._kernel[list(class_ids)].read(), self._bias[list(class_ids)].read()
        return kernel.result(), bias.result()


def newest_step(run_dir: str | Path) -> int | None:
    """The step of the newest complete checkpoint of a run; None if there is none.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as run_dir:
      ...     print(newest_step(run_dir))
      None
    """
    directory = Path(run_dir) / "checkpoints"
    # Orbax renames a checkpoint to its plain number once it is complete.
    steps = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
    return max(steps, default=None)


def read_config(run_dir: str | Path) -> dict[str, Any] | None:
    """The config that a run directory was started with; None if it holds no run.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as run_dir:
      ...     print(read_config(run_dir))
      None
    """
    path = Path(run_dir) / "config.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not readable as JSON ({_first_line(error)}).") from error


def _open_array(folder: Path):
    if not folder.exists():
        raise CheckpointError(f"There is no array {folder.name} in {folder.parent}.")
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return tensorstore.open(spec, open=True, read=True).result()


def _save_args(path, leaf) -> ocp.SaveArgs:
    if _name(path) not in ("params.head.kernel", "params.head.bias"):
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=max(_CHUNK_BYTES, leaf.nbytes // _MAX_CHUNKS))


def _checksums(state) -> dict[str, int]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        _name(path): zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        for path, leaf in leaves
    }


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
