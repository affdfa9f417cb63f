"""Measures what a normalizer adds to trained runs: one logit, with the normalizers of the ladder, and all logits.

Every number is of the test split. Each run becomes an entry of the record, in the place of an older one of the same data
and loss, so that runs can be measured one after another.

python results/tools/normalizer_study.py results/normalizers.json runs/mine/cross_entropy ...

With very many classes each score takes minutes: --rows 1024 measures that normalizer alone, beside one logit and all logits.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pols_jax.benchmarking.records import describe_environment
from pols_jax.evaluation.normalizing import LADDER, training_features
from pols_jax.files import write_json
from pols_jax.metrics.class_blocks import ScoredSplit
from pols_jax.metrics.thresholds import Rule, Thresholds
from pols_jax.normalizers import estimates, fit_normalizer
from pols_jax.schema import read_json
from pols_jax.training.features import split_features
from pols_jax.training.runs import Run

_RULE = Rule.parse("precision=0.9")


def study(run_dir: Path, ladder: Sequence[int]) -> dict[str, Any]:
    """Measures a run with every normalizer of a ladder."""
    run = Run.open(run_dir)
    dataset = run.load_dataset()
    variables, (kernel, bias) = run.restore_backbone(), run.restore_head()
    began = time.perf_counter()
    features = np.concatenate([*training_features(run, variables, dataset)])
    feature_seconds = time.perf_counter() - began
    splits = {}
    for name in ("validation", "test"):
        split_features_, labels = split_features(run.model, variables, getattr(dataset, name))
        scored = ScoredSplit(split_features_, labels, kernel, bias)
        splits[name] = (scored, scored.example_stats(), split_features_)
    scores = [_score(splits, None, run.num_classes) | {"score": "one logit", "rows_read": 1}]
    for num_rows in (rows for rows in ladder if rows < run.num_classes):
        began = time.perf_counter()
        normalizer = fit_normalizer(
            features, kernel, bias, num_rows=num_rows, held_out=splits["validation"][2]
        )
        seconds = time.perf_counter() - began
        scores.append(
            _score(splits, normalizer, run.num_classes)
            | {
                "score": "affine" if num_rows == 0 else f"{num_rows} rows",
                "rows_read": 1 + num_rows,
                "fit_seconds": round(seconds, 1),
                "r_squared": round(normalizer.fit.r_squared, 4),
                "error": round(normalizer.fit.error, 4),
            }
        )
        print(run_dir, scores[-1], flush=True)
    scored, stats, _ = splits["test"]
    shifted, shifted_stats = scored.minus(stats, _in_given_order(scored, stats.peak + stats.log_sum))
    last = {"test": (shifted, shifted_stats, None)}
    scored, stats, _ = splits["validation"]
    last["validation"] = (*scored.minus(stats, _in_given_order(scored, stats.peak + stats.log_sum)), None)
    scores.append(_score(last, None, run.num_classes) | {"score": "all logits", "rows_read": run.num_classes})
    return {
        "loss": run.config.loss,
        "dataset": dataset.name,
        "num_classes": run.num_classes,
        "num_features": int(kernel.shape[1]),
        "num_fitted": len(features),
        "feature_seconds": round(feature_seconds, 1),
        "config": run.config.to_json(),
        "scores": scores,
    }


def _in_given_order(scored: ScoredSplit, values: np.ndarray) -> np.ndarray:
    """Numbers about the sorted examples, in the order in which the examples were given."""
    given = np.empty_like(values)
    given[scored.order] = values
    return given


def _score(splits: dict[str, Any], normalizer: Any, num_classes: int) -> dict[str, Any]:
    """AUPRC on test, and what one threshold for all classes, chosen on validation, finds there."""
    counted: dict[str, Any] = {}
    thresholds = None
    for name in ("validation", "test"):
        scored, stats, features = splits[name]
        if normalizer is not None:
            scored, stats = scored.minus(stats, estimates(normalizer, features))
        counted[name] = scored.count(stats, thresholds=thresholds, rank=name == "validation")
        if name == "validation":
            shared = Thresholds.from_counts(counted[name]).shared(_RULE)
            thresholds = np.full((num_classes, 1), shared, np.float32)
    test = counted["test"]
    sizes = np.asarray(test.one_logit.class_sizes)
    has_examples = sizes > 0
    recall = float(np.mean(test.positives[has_examples, 0] / sizes[has_examples]))
    return {
        "auprc": float(np.nanmean(np.asarray(test.one_logit.average_precision()))),
        "validation_auprc": float(
            np.nanmean(np.asarray(counted["validation"].one_logit.average_precision()))
        ),
        "shared_threshold_recall": recall,
        "shared_threshold_precision": float(test.positives.sum() / max(1, test.passing.sum())),
    }


def main(arguments: list[str]) -> None:
    """Measures the runs, and writes each into the record as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=list(LADDER))
    flags = parser.parse_args(arguments)
    record = read_json(flags.record) if flags.record.exists() else {"normalizers": []}
    for run_dir in flags.run_dirs:
        entry = {"environment": describe_environment(jax.local_devices()), **study(run_dir, flags.rows)}
        kept = [
            other
            for other in record["normalizers"]
            if any(other[name] != entry[name] for name in ("loss", "dataset", "num_classes"))
        ]
        record["normalizers"] = sorted(
            [*kept, entry], key=lambda each: (each["dataset"], each["num_classes"], each["loss"])
        )
        write_json(flags.record, record)


if __name__ == "__main__":
    main(sys.argv[1:])
