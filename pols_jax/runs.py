"""Finds trained runs on disk and opens them: what `pols_jax.training.fit` wrote, for those who use it."""

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pols_jax.checkpoints import Checkpoints, newest_step, read_config
from pols_jax.config import ConfigError, RunConfig
from pols_jax.data import Dataset, load
from pols_jax.learning import make_model
from pols_jax.losses import LOSSES
from pols_jax.models import Classifier
from pols_jax.progress import MetricsLog


class RunError(ConfigError):
    """A directory that cannot be used as a trained run; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained run: its directory, what it was trained on, and which checkpoint is used.

    Attributes:
      directory: The run directory.
      config: What determined the model.
      num_classes: The number of classes k.
      image_shape: Height, width and channels that the network wants.
      data: The provenance of the data it was trained on.
      step: The step of the checkpoint.
    """

    directory: Path
    config: RunConfig
    num_classes: int
    image_shape: tuple[int, int, int]
    data: dict[str, Any]
    step: int

    @classmethod
    def open(cls, run_dir: str | Path) -> "Run":
        """Opens a run at its last step.

        Args:
          run_dir: The run directory.

        Returns:
          The run.

        Raises:
          RunError: if there is no run in the directory, it has no checkpoint, diverged, or did not finish.

        Examples:
          >>> Run.open("no/such/run")
          Traceback (most recent call last):
          pols_jax.runs.RunError: There is no run in no/such/run (no config.json); train one with train.py.
        """
        directory = Path(run_dir)
        saved = read_config(directory)
        if saved is None:
            raise RunError(f"There is no run in {directory} (no config.json); train one with train.py.")
        config = RunConfig.from_json(saved["config"])
        records = MetricsLog(directory / "metrics.jsonl").records()
        if records and records[-1].get("diverged"):
            raise RunError(
                f"The run in {directory} diverged at step {records[-1]['step']}; train another one."
            )
        step = newest_step(directory)
        if step is None:
            raise RunError(f"The run in {directory} has no checkpoint; train it with train.py.")
        if step < config.steps:
            raise RunError(
                f"The run in {directory} is not finished: step {step} of {config.steps}. "
                f"Go on with train.py --run-dir {directory} --resume."
            )
        height, width, channels = saved["image_shape"]
        return cls(directory, config, saved["num_classes"], (height, width, channels), saved["data"], step)

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        path = self.directory / "class_names.json"
        try:
            return tuple(json.loads(path.read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise RunError(f"{path} cannot be read ({error}).") from error

    @functools.cached_property
    def model(self) -> Classifier:
        """The network, without parameters."""
        return make_model(self.config, self.num_classes)

    def restore_backbone(self) -> Any:
        """Reads the variables of the backbone, and neither the output layer nor the optimizer's state."""
        backbone = self.model.backbone
        images = jax.ShapeDtypeStruct((1, *self.image_shape), jnp.float32)
        shapes = jax.eval_shape(backbone.init, jax.random.key(0), images)
        saved = self._restore({name: {"backbone": tree} for name, tree in shapes.items()})
        return {name: tree["backbone"] for name, tree in saved.items()}

    def restore_head(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads the whole output layer: kernel ``[k, d]`` and bias ``[k]``."""
        images = jax.ShapeDtypeStruct((1, *self.image_shape), jnp.float32)
        shapes: Any = jax.eval_shape(self.model.init, jax.random.key(0), images)
        head = self._restore({"params": {"head": shapes["params"]["head"]}})["params"]["head"]
        return head["kernel"], head["bias"]

    def _restore(self, template: Any) -> Any:
        with Checkpoints(self.directory) as checkpoints:
            return checkpoints.restore(self.step, template)

    def load_dataset(self, *, data_dir: str | Path | None = None) -> Dataset:
        """Loads the data that the run was trained on.

        Args:
          data_dir: Where prepared tfds data sets are; the default places if None.

        Raises:
          DataError: if the data cannot be had.
          RunError: if it is no longer the data that the run was trained on.
        """
        options = self.config.options() | ({"data_dir": data_dir} if data_dir is not None else {})
        dataset = load(self.config.dataset, **options)
        self.check_dataset(dataset)
        return dataset

    def check_dataset(self, dataset: Dataset) -> None:
        """Raises a `RunError` unless a data set is the one that the run was trained on."""
        if not dataset.is_the_data_of(self.data) or dataset.class_names != self.class_names:
            raise RunError(
                f"The data set {dataset.name} has changed since the run in {self.directory} was trained on it; "
                "bring the old data back, or train again."
            )


def find_runs(paths: Iterable[str | Path] = (), *, root: str | Path = "runs") -> list[Path]:
    """Lists the run directories that some paths stand for.

    A run directory stands for itself; a directory of runs for its runs, and of a sweep only for the chosen ones.

    Args:
      paths: Run directories, or directories of them; without any, the newest one in ``root``.
      root: Where experiments are written by default.

    Returns:
      Run directories, in the order of `LOSSES` within each path.

    Raises:
      RunError: if a path holds no run.

    Examples:
      >>> find_runs(["no/such/run"])
      Traceback (most recent call last):
      pols_jax.runs.RunError: There is no run in no/such/run; train one with train.py.
    """
    paths = [Path(path) for path in paths] or [_newest_experiment(Path(root))]
    found = [run for path in paths for run in _runs_in(path)]
    return list(dict.fromkeys(found))


def _runs_in(path: Path) -> list[Path]:
    if (path / "config.json").exists():
        return [path]
    if (path / "sweep.json").exists():
        sweep = json.loads((path / "sweep.json").read_text())
        runs = [path / entry["chosen"] for entry in sweep.values() if entry["chosen"]]
    else:
        runs = [config.parent for config in sorted(path.glob("*/config.json"))]
    if not runs:
        raise RunError(f"There is no run in {path}; train one with train.py.")
    order = list(LOSSES)
    return sorted(runs, key=lambda run: order.index((read_config(run) or {}).get("loss", order[0])))


def _newest_experiment(root: Path) -> Path:
    configs = [*root.glob("*/config.json"), *root.glob("*/*/config.json")]
    if not configs:
        raise RunError(f"There is no run in {root}; train one with train.py, or name a run directory.")
    newest = max(configs, key=lambda path: path.stat().st_mtime)
    return root / newest.relative_to(root).parts[0]
