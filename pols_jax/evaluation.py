"""How good is one logit? From a trained run and its data to the numbers of the paper's Tables 1 and 2.

`evaluate` writes three files into the run directory: ``slc.json``, the record that tables are made of; ``slc.npz``, the
values per class and curves behind it; and ``thresholds.npz``, from which search takes its thresholds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pols_jax.class_blocks import ExampleStats, ScoredSplit, SplitCounts
from pols_jax.data import Dataset, Split, evaluation_batches
from pols_jax.metrics import Counts
from pols_jax.models import Classifier
from pols_jax.runs import Run, RunError
from pols_jax.thresholds import DEFAULT_RULES, Thresholds
from pols_jax.training import write_json

MEASURES = ("auprc", "precision_at_0.9", "precision_at_0.99")
"""The measures of the paper's tables, by their names in ``slc.json``."""

# How many classes the record names as the best and as the worst.
_NUM_EXTREMES = 5
_NUM_BINS = 120
_CURVE_RECALLS = np.linspace(0.01, 1.0, 100)


def evaluate(
    run_dir: str | Path,
    *,
    dataset: Dataset | None = None,
    data_dir: str | Path | None = None,
    split: Literal["test", "validation", "train"] = "test",
    batch_size: int = 1024,
    block_size: int | None = None,
    histograms: bool = False,
    histogram_class: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measures a trained run, with one logit and with all logits, and writes what it finds into the run directory.

    Args:
      run_dir: The run directory.
      dataset: The data of the run; loaded if None.
      data_dir: Where prepared tfds data sets are, if ``dataset`` is None.
      split: What to measure on. Thresholds are always chosen on the validation split.
      batch_size: Examples that go through the network together; rounded up to a multiple of the devices.
      block_size: Classes that are scored together; by default as many as fit in 256 MB.
      histograms: Whether to keep histograms of the logits in ``slc.npz`` as well, for figures.
      histogram_class: The class whose logits are kept one by one; by default the one in the middle of the list.
      quiet: No progress bar.

    Returns:
      The record that was written as ``slc.json`` (``slc-SPLIT.json`` for another split than test).

    Raises:
      RunError: if the directory does not hold a finished run, or the data has changed.
      DataError: if the data cannot be had.

    Examples:
      >>> import tempfile
      >>> from pols_jax.config import RunConfig
      >>> from pols_jax.data import load
      >>> from pols_jax.training import RunOptions, fit
      >>> config = RunConfig(width=0.1, characters="0030-0039", batch_size=32, steps=2)
      >>> dataset = load("glyphs", **config.options())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     outcome = fit(config, dataset, folder, options=RunOptions(quiet=True))
      ...     record = evaluate(folder, dataset=dataset, quiet=True)
      >>> record["num_examples"], sorted(record["slc"])
      (30, ['auprc', 'precision_at_0.9', 'precision_at_0.99'])
    """
    run = Run.open(run_dir)
    if dataset is None:
        dataset = run.load_dataset(data_dir=data_dir)
    else:
        run.check_dataset(dataset)
    with _Evaluator(run, dataset, batch_size, block_size, quiet=quiet) as evaluator:
        validation, stats = evaluator.scored("validation")
        thresholds = Thresholds.from_counts(evaluator.count(validation, stats))
        scored, stats = (validation, stats) if split == "validation" else evaluator.scored(split)
        bins = np.linspace(stats.smallest.min(), stats.largest.max(), _NUM_BINS + 1) if histograms else None
        counts = evaluator.count(scored, stats, thresholds=_default_thresholds(thresholds, run), bins=bins)
    arrays: dict[str, Any] = _per_class(counts)
    if bins is not None:
        class_id = _class_id(run, histogram_class)
        arrays |= _curves(counts) | _histograms(counts, bins)
        arrays |= {
            "class_id": np.array(class_id),
            "class_logits": scored.column(class_id),
            "class_labels": scored.labels == class_id,
        }
    record = {
        "loss": run.config.loss,
        "dataset": dataset.name,
        "split": split,
        "run": str(run.directory),
        "step": run.step,
        "learning_rate": run.config.learning_rate,
        "batch_size": run.config.batch_size,
        "num_examples": len(scored.labels),
        "num_classes": run.num_classes,
        "num_classes_with_examples": int(np.count_nonzero(arrays["class_sizes"])),
        "slc": _means(arrays, ""),
        "all_logits": _means(arrays, "all_logits_"),
        "accuracy": float(np.mean(stats.prediction == scored.labels)),
        "violation_rate": counts.violation_rate(),
        "separation_margin": counts.separation_margin(),
        "thresholds": _threshold_report(thresholds, counts),
        **_extremes(arrays["auprc"], run.class_names),
    }
    suffix = "" if split == "test" else f"-{split}"
    thresholds.save(run.directory)
    np.savez_compressed(run.directory / f"slc{suffix}.npz", **arrays)
    write_json(run.directory / f"slc{suffix}.json", record)
    return record


class _Evaluator:
    """The parameters of a run, and a progress bar over what is done with them."""

    def __init__(self, run: Run, dataset: Dataset, batch_size: int, block_size: int | None, *, quiet: bool):
        self._run, self._dataset = run, dataset
        self._batch_size, self._block_size = batch_size, block_size
        self._variables = run.restore_backbone()
        kernel, self._bias = run.restore_head()
        self._kernel = kernel.astype(run.model.dtype or kernel.dtype)  # as the network multiplies it
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        hidden = quiet or not console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=hidden)

    def __enter__(self) -> "_Evaluator":
        self._progress.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._progress.stop()

    def scored(self, split: str) -> tuple[ScoredSplit, ExampleStats]:
        """The features of a split with their output layer, and the first pass over the classes."""
        examples: Split = getattr(self._dataset, split)
        num_batches = -(-len(examples) // self._batch_size)
        with self._task(f"{self._run.config.loss}: features of {split}", num_batches) as advance:
            features, labels = split_features(
                self._run.model, self._variables, examples, batch_size=self._batch_size, advance=advance
            )
        if not len(labels):
            raise RunError(f"The {split} split of {self._dataset.name} has no picture that can be decoded.")
        scored = ScoredSplit(features, labels, self._kernel, self._bias, block_size=self._block_size)
        with self._task(f"{self._run.config.loss}: logits of {split}", scored.num_rounds) as advance:
            return scored, scored.example_stats(advance=advance)

    def count(self, scored: ScoredSplit, stats: ExampleStats, **options: Any) -> SplitCounts:
        """The second pass over the classes."""
        with self._task(f"{self._run.config.loss}: counting", scored.num_rounds) as advance:
            return scored.count(stats, advance=advance, **options)

    @contextmanager
    def _task(self, description: str, total: int) -> Iterator[Any]:
        task = self._progress.add_task(description, total=total)
        yield lambda: self._progress.advance(task)
        self._progress.remove_task(task)


def split_features(
    model: Classifier, variables: Any, split: Split, *, batch_size: int = 1024, advance: Any = lambda: None
) -> tuple[Float[np.ndarray, "examples features"], Int[np.ndarray, " examples"]]:
    """Computes the features of every example of a split, each once, on all local devices.

    Args:
      model: The network.
      variables: The variables of its backbone.
      split: The examples.
      batch_size: Examples per batch; rounded up to a multiple of the devices.
      advance: Is called after every batch, for a progress bar.

    Returns:
      Features ``[n, d]`` and labels ``[n]``, in the order of the split. Pictures that cannot be decoded are left out.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from pols_jax.data import load
      >>> from pols_jax.models import MODELS
      >>> model, split = Classifier(MODELS["mlp"](width=0.1), 10), load("glyphs", characters="0030-0039").test
      >>> variables = model.backbone.init(jax.random.key(0), jnp.zeros((1, *split.images.shape[1:])))
      >>> features, labels = split_features(model, variables, split)
      >>> features.shape, labels.shape
      ((30, 50), (30,))
    """
    devices = jax.local_devices()
    replicate = jax.pmap(lambda tree, _: tree, in_axes=(None, 0), devices=devices)
    variables = replicate(variables, np.arange(len(devices)))
    apply = jax.pmap(model.backbone.apply, devices=devices)
    batch_size = -(-min(batch_size, len(split)) // len(devices)) * len(devices)
    features, labels = [], []
    for batch in evaluation_batches(split, batch_size=batch_size):
        images = np.asarray(batch.image)
        outputs = apply(variables, images.reshape((len(devices), -1, *images.shape[1:])))
        features.append(np.concatenate(np.asarray(outputs))[batch.mask])
        labels.append(np.asarray(batch.label)[batch.mask])
        advance()
    return np.concatenate(features), np.concatenate(labels)


def _default_thresholds(thresholds: Thresholds, run: Run) -> Float[np.ndarray, "classes rules"]:
    """For each default rule: a threshold for each class, then the one for all classes."""
    columns = []
    for rule in DEFAULT_RULES:
        columns.append(thresholds.per_class(rule, num_classes=run.num_classes))
        columns.append(np.full(run.num_classes, thresholds.shared(rule), np.float32))
    return np.stack(columns, axis=1)


def _threshold_report(thresholds: Thresholds, counts: SplitCounts) -> list[dict[str, Any]]:
    """What the thresholds that were chosen on validation really give, and for how many classes they keep their word."""
    class_sizes = np.asarray(counts.one_logit.class_sizes)
    num_classes = len(class_sizes)
    report = []
    for i, rule in enumerate(DEFAULT_RULES):
        shared = thresholds.shared(rule)
        per_class = thresholds.per_class(rule, num_classes=num_classes)
        for j, (scope, chosen) in enumerate(
            (("class", per_class), ("all classes", np.full(num_classes, shared)))
        ):
            measured = (class_sizes > 0) & ~np.isnan(chosen)
            passing, positives = (
                array[measured, 2 * i + j].astype(np.float64) for array in (counts.passing, counts.positives)
            )
            recall = positives / class_sizes[measured]
            precision = positives[passing > 0] / passing[passing > 0]
            promised = {"recall": recall, "precision": precision}.get(rule.kind)
            report.append(
                {
                    "rule": str(rule),
                    "chosen_for": scope,
                    "threshold": _number(shared) if scope == "all classes" else None,
                    "mean_recall": _mean(recall),
                    "mean_precision": _mean(precision),
                    "num_classes": int(np.count_nonzero(measured)),
                    "num_classes_with_hits": len(precision),
                    "num_classes_promise_held": None
                    if promised is None
                    else int(np.count_nonzero(promised >= rule.value)),
                }
            )
    return report


def _per_class(counts: SplitCounts) -> dict[str, np.ndarray]:
    arrays = {"class_sizes": np.asarray(counts.one_logit.class_sizes)}
    for prefix, scores in (("", counts.one_logit), ("all_logits_", counts.all_logits)):
        measures = zip(MEASURES, _class_measures(scores), strict=True)
        arrays |= {f"{prefix}{name}": np.asarray(values) for name, values in measures}
    return arrays


@jax.jit
def _class_measures(counts: Counts) -> tuple[Array, Array, Array]:
    """The measures of each class, in the order of `MEASURES`."""
    return counts.average_precision(), counts.precision_at_recall(0.9), counts.precision_at_recall(0.99)


def _means(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, float]:
    """The measures, averaged over the classes that have examples."""
    return {name: float(np.nanmean(arrays[f"{prefix}{name}"], dtype=np.float64)) for name in MEASURES}


def _curves(counts: SplitCounts) -> dict[str, np.ndarray]:
    """Precision at each recall, averaged over classes: Precision@0.9 of the tables is a point of this curve."""

    @jax.jit
    def curve(scores: Counts) -> Array:
        recalls = jnp.asarray(_CURVE_RECALLS, jnp.float32)
        return lax.map(lambda recall: jnp.nanmean(scores.precision_at_recall(recall)), recalls)

    return {
        "curve_recall": _CURVE_RECALLS,
        "curve_precision": np.asarray(curve(counts.one_logit)),
        "all_logits_curve_precision": np.asarray(curve(counts.all_logits)),
    }


def _histograms(counts: SplitCounts, bins: np.ndarray) -> dict[str, np.ndarray]:
    true, _ = np.histogram(np.asarray(counts.one_logit.own_scores), bins=bins)
    return {"bins": bins, "true_histogram": true, "false_histogram": counts.histogram}


def _extremes(auprc: np.ndarray, class_names: tuple[str, ...]) -> dict[str, Any]:
    """The classes that one logit finds best and worst."""
    ascending = np.argsort(auprc, kind="stable")  # NaN, of classes without examples, is last
    ascending = ascending[: np.count_nonzero(~np.isnan(auprc))]

    def named(class_ids) -> list[dict[str, Any]]:
        return [{"class": class_names[i], "auprc": float(auprc[i])} for i in class_ids]

    return {
        "best_classes": named(ascending[::-1][:_NUM_EXTREMES]),
        "worst_classes": named(ascending[:_NUM_EXTREMES]),
    }


def _class_id(run: Run, name: str | None) -> int:
    if name is None:
        return run.num_classes // 2
    if name not in run.class_names:
        raise RunError(f"The run in {run.directory} has no class named {name!r}.")
    return run.class_names.index(name)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
