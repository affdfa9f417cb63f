"""May a run be written to a directory or continued there, has it ended, and what it is started with."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any, Literal

import jax

from pols_jax import __version__
from pols_jax.data import Dataset
from pols_jax.errors import CheckpointError, ConfigError
from pols_jax.files import check_directory
from pols_jax.training.checkpoint_reading import StoredCheckpoint, newest_step, stored_steps
from pols_jax.training.config import RunConfig
from pols_jax.training.progress import MetricsLog, ended_early
from pols_jax.training.run_dirs import check_unlocked
from pols_jax.training.run_files import RunInfo, StartInfo, read_run_info, write_run_info


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      run_dir: Its directory.
      config: Its config.
      status: ``finished``, or ``diverged`` if the loss, of training or of validation, was no longer finite.
      step: The last step.
      validation: What `Trainer.validate` measured when the accuracy was best; empty if nothing was.
    """

    run_dir: Path
    config: RunConfig
    status: Literal["finished", "diverged"]
    step: int
    validation: dict[str, float]


def check_run_dir(run_dir: Path, config: RunConfig, dataset: Dataset) -> None:
    """Raises unless the run can be written to, or continued in, the directory. Writes nothing.

    Raises:
      ConfigError: if it cannot be written, holds a run of another config or data, or another process trains in it.
    """
    try:
        check_directory(run_dir)
    except ConfigError as error:
        raise ConfigError(f"--run-dir {error}") from error
    check_unlocked(run_dir)
    saved = read_run_info(run_dir)
    if saved is not None:
        differences = config.differences(saved.config)
        if differences:
            raise ConfigError(
                f"{run_dir} holds a run of another config: {'; '.join(differences)}. Name another --run-dir, or the "
                "settings of that run."
            )
        _check_data(run_dir, dataset, saved.data)
    # config.json may be gone, or of another run itself.
    for step in stored_steps(run_dir):
        checkpoint = StoredCheckpoint(run_dir, step)
        try:
            checkpoint.check_config(config)
        except CheckpointError:  # a damaged one is not continued
            continue
        if checkpoint.meta["data"] is not None:
            _check_data(run_dir, dataset, checkpoint.meta["data"])


def _check_data(run_dir: Path, dataset: Dataset, provenance: dict[str, Any]) -> None:
    if not dataset.is_the_data_of(provenance):
        raise ConfigError(
            f"{run_dir} was trained on other data of the name {dataset.name}; name another --run-dir."
        )


def ended_before(run_dir: Path, config: RunConfig) -> Outcome | None:
    """How a run ended; None if it goes on."""
    records = MetricsLog(run_dir / "metrics.jsonl").records()
    last = records[-1] if records else {}
    if last.get("diverged"):
        return Outcome(run_dir, config, "diverged", last["step"], {})
    newest = newest_step(run_dir)
    if newest is None or not last.get("validation"):
        return None
    is_at_the_end = last["step"] == config.steps == newest or ended_early(last, newest)
    looks = [record for record in records if record.get("validation")]
    if is_at_the_end and StoredCheckpoint(run_dir, newest).problem() is None:
        return Outcome(run_dir, config, "finished", newest, best_look(looks))
    return None


def best_look(looks: list[dict[str, Any]]) -> dict[str, float]:
    """What the look at the validation split found that had the best accuracy; in a tie, the latest."""
    return max(looks, key=lambda look: (look["validation"]["accuracy"], look["step"]))["validation"]


def write_run_files(run_dir: Path, config: RunConfig, dataset: Dataset, start: StartInfo | None) -> None:
    """Writes what makes the directory that of a run, unless it is there."""
    if read_run_info(run_dir) is not None:
        return
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    info = RunInfo(
        config=config,
        loss=config.loss,
        dataset=config.dataset,
        num_classes=dataset.num_classes,
        image_shape=dataset.image_shape,
        data=dataset.provenance,
        # A checkout that was not installed has no metadata of its own.
        versions={"pols-jax": __version__} | {name: importlib.metadata.version(name) for name in packages},
        devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        start=start,
    )
    write_run_info(run_dir, info, dataset.class_names)
