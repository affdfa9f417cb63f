"""Measures what storing the rows of the classes in fewer bytes changes: AUPRC, and what a common threshold finds.

Every number is of the test split, from the features and rows of an export itself. Each run becomes an entry of the record, and
another one with its normalizer if it has one, in the place of older ones of the same data, loss and normalizer.

python results/tools/export_study.py results/export.json runs/mine/cross_entropy ...
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pols_jax.benchmarking.records import describe_environment
from pols_jax.evaluation.normalizing import mean_measures
from pols_jax.files import write_json
from pols_jax.metrics.class_blocks import ScoredSplit
from pols_jax.metrics.thresholds import Rule
from pols_jax.normalizers import estimates
from pols_jax.schema import read_json
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.exported import Exported
from pols_jax.search.exporting import ROWS_DTYPES, export
from pols_jax.training.runs import Run

_RULE = Rule.parse("recall=0.9")


def study(run_dir: Path, *, raw: bool) -> dict[str, Any]:
    """Exports a run with rows of every dtype, and measures each export."""
    run = Run.open(run_dir)
    test = run.load_dataset().test
    bank = ClassBank.open(run_dir, raw=raw)
    expected = bank.logits(test.images, [0, run.num_classes - 1])
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ROWS_DTYPES:
            out = Path(folder) / dtype
            manifest = export(run_dir, out, rows_dtype=dtype, raw=raw, quiet=True)
            exported = ClassBank.open(out)
            found = exported.logits(test.images, [0, run.num_classes - 1])
            entry = {
                "rows_dtype": dtype,
                "rows_bytes": manifest.files["rows.npy"].num_bytes,
                "scales_bytes": manifest.files["scales.npy"].num_bytes,
                "largest_difference": float(
                    np.max(np.abs(found - expected) / np.maximum(1, np.abs(expected)))
                ),
                **_score(exported, Exported.open(out), test),
            }
            measured.append(entry)
            print(run_dir, entry, flush=True)
    return {
        "loss": run.config.loss,
        "dataset": run.config.dataset,
        "num_classes": run.num_classes,
        "num_features": manifest.num_features,
        "normalizer": manifest.normalizer,
        "config": run.config.to_json(),
        "exports": measured,
    }


def _score(bank: ClassBank, exported: Exported, test: Any) -> dict[str, float]:
    """AUPRC of one logit on test, and what the common threshold, chosen for the exact rows, finds there."""
    num_classes = exported.manifest.num_classes
    kernel, bias = exported.rows.read(list(range(num_classes)))
    features = bank.features(test.images)
    scored = ScoredSplit(features, test.labels, kernel, bias)
    scored, stats = scored.minus(scored.example_stats(), estimates(bank.normalizer, features))
    shared = np.full((num_classes, 1), bank.thresholds.shared(_RULE), np.float32)
    counts = scored.count(stats, thresholds=shared)
    sizes = np.asarray(counts.one_logit.class_sizes)
    has_examples = sizes > 0
    return {
        "auprc": mean_measures(counts.one_logit)[0],
        "shared_threshold_recall": float(np.mean(counts.positives[has_examples, 0] / sizes[has_examples])),
        "shared_threshold_precision": float(counts.positives.sum() / max(1, counts.passing.sum())),
    }


def main(arguments: list[str]) -> None:
    """Measures the runs, and writes each into the record as soon as it is measured."""
    path, *run_dirs = map(Path, arguments)
    record = read_json(path) if path.exists() else {"exports": []}
    choices = [(run_dir, raw) for run_dir in run_dirs for raw in (True, False)]
    for run_dir, raw in choices:
        if not raw and Run.open(run_dir).normalizer is None:
            continue
        entry = {"environment": describe_environment(jax.local_devices()), **study(run_dir, raw=raw)}
        keys = ("dataset", "num_classes", "loss", "normalizer")
        kept = [other for other in record["exports"] if any(other[key] != entry[key] for key in keys)]
        record["exports"] = sorted(
            [*kept, entry], key=lambda each: (*(each[key] for key in keys[:3]), each["normalizer"] or 0)
        )
        write_json(path, record)


if __name__ == "__main__":
    main(sys.argv[1:])
