"""Finds trained runs on disk and opens them: what `pols_jax.training.fit` wrote, for those who use it."""

import dataclasses
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from pols_jax.class_shares import ClassShare
from pols_jax.data import Dataset, load
from pols_jax.errors import RunError, shell_word
from pols_jax.losses import LOSSES
from pols_jax.models import Classifier
from pols_jax.normalizers import Normalizer
from pols_jax.schema import read_json
from pols_jax.training.checkpoint_reading import (
    HeadRows,
    StoredCheckpoint,
    advised,
    newest_step,
    stored_accuracies,
)
from pols_jax.training.config import RunConfig
from pols_jax.training.hosts import gather_from_hosts
from pols_jax.training.network import make_model
from pols_jax.training.progress import MetricsLog, ended_early
from pols_jax.training.run_files import (
    RunInfo,
    read_class_names,
    read_experiment,
    read_run_info,
    read_sweep_file,
)
from pols_jax.training.run_normalizer import read_normalizer


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained run: its directory, what it was trained on, and which checkpoint is used.

    Attributes:
      directory: The run directory.
      info: What ``config.json`` says.
      step: The step of the checkpoint.
      checkpoint: What identifies the checkpoint; measurements carry it.
      last_step: The last step of the run.
    """

    directory: Path
    info: RunInfo
    step: int
    checkpoint: str
    last_step: int

    @classmethod
    def open(cls, run_dir: str | Path, *, use: Literal["best", "last"] | None = None) -> "Run":
        """Opens a finished run.

        Args:
          run_dir: The run directory.
          use: The checkpoint with the best accuracy on the validation split, the later one in a tie, or the last one. By
            default that of the evaluation in the directory, to which its thresholds belong; without one, the best.

        Raises:
          RunError: if there is no run in the directory, it has no checkpoint, diverged, or did not finish, or a file of
            it cannot be used.
          CheckpointError: if its checkpoint is damaged.

        Examples:
          >>> Run.open("no/such/run")
          Traceback (most recent call last):
          pols_jax.errors.RunError: There is no run in no/such/run (no config.json); train one with pols train.
        """
        directory = Path(run_dir)
        info = read_run_info(directory)
        if info is None:
            raise RunError(f"There is no run in {directory} (no config.json); train one with pols train.")
        records = MetricsLog(directory / "metrics.jsonl").records()
        if records and records[-1].get("diverged"):
            raise RunError(
                f"The run in {directory} diverged at step {records[-1]['step']}; train another one."
            )
        step = newest_step(directory)
        if step is None:
            raise RunError(f"The run in {directory} has no checkpoint; train it with pols train.")
        if step < info.config.steps and not (records and ended_early(records[-1], step)):
            raise RunError(
                f"The run in {directory} is not finished: step {step} of {info.config.steps}. "
                f"Go on with pols train --run-dir {shell_word(directory)} --resume."
            )
        checkpoint = StoredCheckpoint(directory, step)
        with advised(directory):
            checkpoint.check_config(info.config)
        if use != "last":
            is_evaluated = use is None and checkpoint.identity == _evaluated_checkpoint(directory)
            measured = {} if is_evaluated else stored_accuracies(directory)
            if measured:
                checkpoint = StoredCheckpoint(directory, max(measured, key=lambda at: (measured[at], at)))
        return cls(directory, info, checkpoint.step, checkpoint.identity, step)

    @property
    def use(self) -> str:
        """Which of its checkpoints this is, as ``--use`` has it."""
        return "last" if self.step == self.last_step else "best"

    @property
    def is_evaluated(self) -> bool | None:
        """Whether it was this checkpoint that was evaluated last; None if none was."""
        evaluated = _evaluated_checkpoint(self.directory)
        return None if evaluated is None else evaluated == self.checkpoint

    @property
    def config(self) -> RunConfig:
        """What determined the model."""
        return self.info.config

    @property
    def num_classes(self) -> int:
        """The number of classes k."""
        return self.info.num_classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that the network wants."""
        return self.info.image_shape

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        return read_class_names(self.directory, self.info)

    @functools.cached_property
    def model(self) -> Classifier:
        """The network, without parameters."""
        return make_model(self.config, self.num_classes)

    @functools.cached_property
    def normalizer(self) -> Normalizer | None:
        """What is subtracted from its logits; None if none was fitted to this checkpoint."""
        again = f"pols normalize {shell_word(self.directory)} --use {self.use}"
        return read_normalizer(
            self.directory,
            checkpoint=self.checkpoint,
            shape=self._head.shape,
            head=lambda: (*self.own_head, self.class_share().classes.start),
            advice=f"fit another one with {again}, or delete it",
        )

    @functools.cached_property
    def own_head(self) -> tuple[np.ndarray, np.ndarray]:
        """Kernel, as the network multiplies it, and bias of the classes of this process."""
        kernel, bias = self.restore_head(self.class_share().classes)
        return kernel.astype(self.model.dtype or kernel.dtype), bias

    def restore_backbone(self) -> Any:
        """Reads the variables of the backbone, and neither the output layer nor the optimizer's state."""
        stored = StoredCheckpoint(self.directory, self.step)
        with advised(self.directory):
            trees = {name: stored.read_below(f"{name}.backbone") for name in ("params", "batch_stats")}
        return {name: tree for name, tree in trees.items() if tree}

    def restore_head(self, classes: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Reads the output layer, kernel ``[k, d]`` and bias ``[k]``; or the rows of some classes next to each other."""
        classes = range(self.num_classes) if classes is None else classes
        return self._head.rows(classes.start, classes.stop)

    @functools.cached_property
    def _head(self) -> HeadRows:
        head = HeadRows(self.directory, step=self.step)
        if head.shape[0] != self.num_classes:
            raise RunError(
                f"Checkpoint {self.step} in {self.directory} has {head.shape[0]:,} classes and its run has "
                f"{self.num_classes:,}: it is damaged, or of another run."
            )
        return head

    def class_share(self) -> ClassShare:
        """The classes that this host looks at, when several hosts measure the run together."""
        return ClassShare.of(
            self.num_classes,
            process=jax.process_index(),
            count=jax.process_count(),
            gather=gather_from_hosts,
        )

    def load_dataset(self, *, data_dir: str | Path | None = None) -> Dataset:
        """Loads the data that the run was trained on; a `RunError` if it has changed. tfds data is read from ``data_dir``."""
        options = self.config.options() | ({"data_dir": data_dir} if data_dir is not None else {})
        name = self.config.dataset
        if name.startswith("folder:"):
            # Decoded as the network saw it, whatever the rule is now; and found from anywhere.
            options |= {"image_size": self.image_shape[0], "channels": self.image_shape[2]}
            then = str((self.info.data or {}).get("path", ""))
            if not os.path.isdir(os.path.expanduser(name.removeprefix("folder:"))) and os.path.isdir(then):
                name = f"folder:{then}"
        dataset = load(name, **options)
        self.check_dataset(dataset)
        return dataset

    def check_dataset(self, dataset: Dataset) -> None:
        """Raises a `RunError` unless a data set is the one that the run was trained on."""
        if not dataset.is_the_data_of(self.info.data) or dataset.class_names != self.class_names:
            raise RunError(
                f"The data set {dataset.name} has changed since the run in {self.directory} was trained on it; "
                "bring the old data back, or train again."
            )


def _evaluated_checkpoint(run_dir: Path) -> str | None:
    """What identifies the checkpoint that was evaluated last; None if there is no evaluation."""
    try:
        return str(read_json(run_dir / "slc.json")["checkpoint"])
    except (RunError, LookupError, TypeError):  # whoever needs the evaluation says what is wrong with it
        return None


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
      pols_jax.errors.RunError: There is no run in no/such/run; train one with pols train.
    """
    paths = [Path(path) for path in paths] or [_newest_experiment(Path(root))]
    found = [run for path in paths for run in _runs_in(path)]
    return list(dict.fromkeys(found))


def _runs_in(path: Path) -> list[Path]:
    if read_run_info(path) is not None:
        return [path]
    if sweep := read_sweep_file(path / "sweep.json"):
        _, runs = sweep
    else:
        experiment = read_experiment(path)
        if experiment is not None and experiment.is_sweep() and experiment.sweep_steps is None:
            raise RunError(
                f"{path} holds a sweep without sweep.json, which says what was chosen; go on with pols train --run-dir "
                f"{shell_word(path)} --resume."
            )
        runs = [config.parent for config in sorted(path.glob("*/config.json"))]
    infos = {run: info for run in runs if (info := read_run_info(run))}
    if not infos:
        raise RunError(f"There is no run in {path}; train one with pols train.")
    order = list(LOSSES)
    return sorted(infos, key=lambda run: order.index(infos[run].config.loss))


def _newest_experiment(root: Path) -> Path:
    configs = [*root.glob("*/config.json"), *root.glob("*/*/config.json")]
    if not configs:
        raise RunError(f"There is no run in {root}; train one with pols train, or name a run directory.")
    newest = max(configs, key=lambda path: path.stat().st_mtime)
    return root / newest.relative_to(root).parts[0]


def find_run(path: str | Path) -> Path:
    """Finds the run that a directory stands for: itself, or the only run of an experiment.

    Of several runs the `RunError` names all, those that do best on the validation split first.
    """
    runs = find_runs([path])
    if len(runs) == 1:
        return runs[0]
    best_first = sorted(runs, key=_validation_auprc, reverse=True)
    raise RunError(
        f"{path} holds {len(runs)} runs; name one of them, best on the validation split first: "
        f"{', '.join(map(str, best_first))}."
    )


def _validation_auprc(run_dir: Path) -> float:
    """What the run's last look at the validation split found for one logit; -1 for a run without one."""
    looks = [r["validation"] for r in MetricsLog(run_dir / "metrics.jsonl").records() if r.get("validation")]
    return looks[-1].get("auprc", -1.0) if looks else -1.0
