"""The record of an experiment: one JSON file from which every number and figure about it can be made again.

A record holds the command, the settings, the data, the software and the machine, what was tried and chosen on the
validation split, and for each trained run what it measured there and on the test split.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pols_jax.config import Experiment
from pols_jax.data import Dataset
from pols_jax.evaluation import evaluate
from pols_jax.experiments import read_sweep
from pols_jax.progress import MetricsLog
from pols_jax.training import Outcome, write_json

# What `evaluate` keeps for figures, by its name in slc.npz; the values per class stay there.
_CURVES = ("curve_recall", "curve_precision", "all_logits_curve_precision")
_HISTOGRAMS = ("bins", "true_histogram", "false_histogram")


def write_experiment_record(
    path: str | Path,
    experiment: Experiment,
    dataset: Dataset,
    outcomes: Sequence[Outcome],
    *,
    run_dir: str | Path,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """Evaluates the trained runs of an experiment on the test split, and writes its record.

    Args:
      path: The file.
      experiment: What was asked for.
      dataset: The data it was trained on.
      outcomes: The trained runs, as `pols_jax.experiments.run_experiment` returns them.
      run_dir: The directory of the experiment.
      environment: What `pols_jax.benchmarking.records.describe_environment` said before training began.

    Returns:
      The record.

    Examples:
      >>> import tempfile
      >>> import jax
      >>> from pols_jax.benchmarking.records import describe_environment
      >>> from pols_jax.data import load
      >>> from pols_jax.experiments import run_experiment
      >>> from pols_jax.training import RunOptions
      >>> experiment = Experiment(loss=("max_margin",), width=0.1, characters="0030-0039", batch_size=32, steps=2)
      >>> dataset = load("glyphs", **experiment.options())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     environment = describe_environment(jax.local_devices())
      ...     outcomes = run_experiment(experiment, dataset, folder, options=RunOptions(quiet=True))
      ...     path = Path(folder) / "record.json"
      ...     record = write_experiment_record(
      ...         path, experiment, dataset, outcomes, run_dir=folder, environment=environment
      ...     )
      >>> sorted(record)
      ['data', 'environment', 'experiment', 'num_classes', 'runs', 'sweep', 'training_minutes']
    """
    record = {
        "environment": dict(environment),
        "experiment": experiment.to_json(),
        "num_classes": dataset.num_classes,
        "data": dataset.provenance,
        "sweep": read_sweep(run_dir),
        "training_minutes": _training_minutes(Path(run_dir)),
        "runs": [_run_record(outcome, dataset) for outcome in outcomes],
    }
    write_json(Path(path), record)
    return record


def _training_minutes(run_dir: Path) -> float:
    """How long all runs of the experiment took, those that were not chosen included."""
    seconds = 0.0
    for path in sorted(run_dir.rglob("metrics.jsonl")):
        step = 0
        for entry in MetricsLog(path).records():
            if "steps_per_second" in entry:  # a run that diverged says so in an entry of its own
                seconds += (entry["step"] - step) / entry["steps_per_second"]
                step = entry["step"]
    return round(seconds / 60, 2)


def _run_record(outcome: Outcome, dataset: Dataset) -> dict[str, Any]:
    test = evaluate(outcome.run_dir, dataset=dataset, histograms=True)
    log = MetricsLog(outcome.run_dir / "metrics.jsonl").records()
    with np.load(outcome.run_dir / "slc.npz") as arrays:
        figures = {name: _short(arrays[name]) for name in (*_CURVES, *_HISTOGRAMS)}
    return {
        "config": outcome.config.to_json(),
        "training": [
            {name: entry[name] for name in ("step", "loss", "accuracy", "validation")} for entry in log
        ],
        "steps_per_second": float(np.median([entry["steps_per_second"] for entry in log])),
        "test": test,
        **figures,
    }


def _short(values: np.ndarray) -> list[float] | list[int]:
    """Numbers with as many digits as a figure can show."""
    return [float(f"{value:.4g}") if values.dtype.kind == "f" else int(value) for value in values]
