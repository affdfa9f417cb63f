"""The record of an experiment: one JSON file from which every number and figure about it can be made again.

A record holds the command, the settings, the data, the software and the machine, what was tried and chosen on the
validation split, and for each trained run what it measured there and on the test split.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pols_jax.data import Dataset
from pols_jax.evaluation.measuring import evaluate
from pols_jax.evaluation.slc_records import read_class_arrays
from pols_jax.files import write_json
from pols_jax.training.config import Experiment
from pols_jax.training.experiments import read_sweep
from pols_jax.training.fitting import Outcome
from pols_jax.training.progress import MetricsLog
from pols_jax.training.runs import Run

# What `evaluate` keeps for figures, by its name in slc.npz; the values per class stay there.
_CURVES = ("curve_recall", "curve_precision", "normalized_curve_precision", "all_logits_curve_precision")
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
    """Evaluates the trained runs of an experiment on the test split, and writes and returns its record.

    ``environment`` is what `pols_jax.benchmarking.records.describe_environment` said before training began.
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
    write_json(path, record)
    return record


def _training_minutes(run_dir: Path) -> float:
    """How long all runs of the experiment took, those that were not chosen included."""
    seconds = 0.0
    for path in sorted(run_dir.rglob("metrics.jsonl")):
        step = 0
        for entry in MetricsLog(path).records():
            if entry.get("steps_per_second"):  # a run that diverged says so in an entry of its own
                seconds += (entry["step"] - step) / entry["steps_per_second"]
                step = entry["step"]
    return round(seconds / 60, 2)


def _run_record(outcome: Outcome, dataset: Dataset) -> dict[str, Any]:
    test = evaluate(outcome.run_dir, dataset=dataset, histograms=True)
    log = MetricsLog(outcome.run_dir / "metrics.jsonl").records()
    speeds = [speed for entry in log if (speed := entry.get("steps_per_second"))]
    arrays = read_class_arrays(Run.open(outcome.run_dir), for_figures=True)
    figures = {name: _short(arrays[name]) for name in (*_CURVES, *_HISTOGRAMS) if name in arrays}
    return {
        "config": outcome.config.to_json(),
        "training": [
            {name: entry.get(name) for name in ("step", "loss", "accuracy", "validation")} for entry in log
        ],
        "steps_per_second": float(np.median(speeds)) if speeds else None,
        "test": test.to_json(),
        **figures,
    }


def _short(values: np.ndarray) -> list[float] | list[int]:
    """Numbers with as many digits as a figure can show."""
    return [float(f"{value:.4g}") if values.dtype.kind == "f" else int(value) for value in values]
