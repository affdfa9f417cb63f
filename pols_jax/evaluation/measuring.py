"""How good is one logit? From a trained run and its data to the numbers of the paper's Tables 1 and 2.

`evaluate` writes three files into the run directory: ``slc.json``, the record that tables are made of; ``slc.npz``, the
values per class and curves behind it; and ``thresholds.npz``, from which search takes its thresholds. Several hosts share out
the classes, and the first one writes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pols_jax import __version__
from pols_jax.data import Dataset, Split
from pols_jax.errors import RunError
from pols_jax.evaluation.slc_records import (
    MEASURES,
    NUM_EXTREMES,
    ClassScore,
    Measures,
    SlcRecord,
    ThresholdScore,
    slc_paths,
    write_slc,
)
from pols_jax.files import check_writable
from pols_jax.metrics.class_blocks import ExampleStats, ScoredSplit, SplitCounts
from pols_jax.metrics.exact import Counts
from pols_jax.metrics.thresholds import DEFAULT_RULES, Thresholds, thresholds_path
from pols_jax.normalizers import estimates
from pols_jax.training.features import fitting_batch, split_features
from pols_jax.training.hosts import check_same_settings
from pols_jax.training.run_normalizer import score_id
from pols_jax.training.runs import Run

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
    use: Literal["best", "last"] = "best",
    quiet: bool = False,
) -> SlcRecord:
    """Measures a trained run, with one logit and with all logits, and writes what it finds into the run directory.

    Args:
      run_dir: The run directory.
      dataset: The data of the run; loaded if None.
      data_dir: Where prepared tfds data sets are, if ``dataset`` is None.
      split: What to measure on. Thresholds are always chosen on the validation split.
      batch_size: Examples that go through the network together, at most; fewer if they are large.
      block_size: Classes that are scored together; by default as many as fit in 256 MB.
      histograms: Whether to keep histograms of the logits in ``slc.npz`` as well, for figures.
      histogram_class: The class whose logits are kept one by one; by default the one in the middle of the list.
      use: The checkpoint with the best accuracy on the validation split, or the last one.
      quiet: No progress bar.

    Returns:
      The record that was written as ``slc.json`` (``slc-SPLIT.json`` for another split than test).

    Raises:
      RunError: if the directory does not hold a finished run, the data has changed, or the run changes meanwhile.
      ConfigError: if the directory cannot be written to; that is found before anything is measured.
      FileError: if a file cannot be written in the end; the files of an earlier evaluation stay.
      DataError: if the data cannot be had.

    Examples:
      >>> record = evaluate("runs/digits", quiet=True)
      >>> record.num_examples, 0 <= record.slc.auprc <= 1
      (30, True)
    """
    run = Run.open(run_dir, use=use)
    normalizer = run.normalizer
    kinds = (False, True) if normalizer is not None else (False,)
    is_first_host = jax.process_index() == 0
    if is_first_host:
        check_writable(
            *slc_paths(run, split), *(thresholds_path(run.directory, normalized=kind) for kind in kinds)
        )
    class_id = _class_id(run, histogram_class)
    if dataset is None:
        dataset = run.load_dataset(data_dir=data_dir)
    else:
        run.check_dataset(dataset)
    check_same_settings(
        shared_by_hosts(run, dataset)
        | {"--batch-size": batch_size, "the split": split, "the class of the figure": class_id}
        | {"the normalizer": score_id("", normalizer), "--figures": histograms}
    )
    with _Evaluator(run, dataset, batch_size, block_size, quiet=quiet or not is_first_host) as evaluator:
        measured = {}
        for name in dict.fromkeys(("validation", split)):
            measured[name] = evaluator.scored(name)
        chosen, counts, measured_on = {}, {}, measured[split]
        bins = _bins(measured_on.stats) if histograms else None
        for normalized in kinds:
            validation = evaluator.count(measured["validation"], normalized=normalized)
            chosen[normalized] = Thresholds.from_counts(validation)
            counts[normalized] = evaluator.count(
                measured_on,
                normalized=normalized,
                thresholds=_default_thresholds(chosen[normalized], run),
                bins=None if normalized else bins,
            )
    scored, stats, used = measured_on.scored, measured_on.stats, kinds[-1]
    scores = {"": counts[False].one_logit, "all_logits_": counts[False].all_logits}
    if normalizer is not None:
        scores["normalized_"] = counts[True].one_logit
    arrays: dict[str, Any] = _per_class(scores)
    if bins is not None:
        arrays |= _curves(scores) | _histograms(counts[False], bins)
        arrays |= {
            "class_id": np.array(class_id),
            "class_logits": scored.column(class_id),
            "class_labels": scored.labels == class_id,
        }
    best, worst = _extremes(arrays["auprc"], run.class_names)
    record = SlcRecord(
        loss=run.config.loss,
        dataset=dataset.name,
        split=split,
        run=str(run.directory),
        step=run.step,
        steps=run.last_step,
        checkpoint=run.checkpoint,
        learning_rate=run.config.learning_rate,
        batch_size=run.config.batch_size,
        num_examples=len(scored.labels),
        num_classes=run.num_classes,
        num_classes_with_examples=int(np.count_nonzero(arrays["class_sizes"])),
        slc=_means(arrays, "", run),
        normalized=None if normalizer is None else _means(arrays, "normalized_", run),
        normalizer_rows=None if normalizer is None else normalizer.num_rows,
        all_logits=_means(arrays, "all_logits_", run),
        accuracy=float(np.mean(stats.prediction == scored.labels)),
        violation_rate=_number(counts[False].violation_rate()),
        separation_margin=_number(counts[False].separation_margin()),
        thresholds=_threshold_report(chosen[used], counts[used]),
        best_classes=best,
        worst_classes=worst,
    )
    if Run.open(run_dir, use=use).checkpoint != run.checkpoint:
        raise RunError(f"The run in {run.directory} changed while it was measured; evaluate it again.")
    if is_first_host:
        for normalized, thresholds in chosen.items():
            identity = score_id(run.checkpoint, normalizer if normalized else None)
            thresholds.save(run.directory, checkpoint=identity, normalized=normalized)
        write_slc(run, record, arrays)
    return record


def shared_by_hosts(run: Run, dataset: Dataset) -> dict[str, Any]:
    """What has to be the same on all hosts that measure a run, by the names that an error gives it."""
    data = (dataset.provenance.get(key) for key in ("content_sha256", "fingerprint"))
    return {
        "the run directory": str(run.directory),
        f"the checkpoint of {run.directory}": run.checkpoint,
        f"the data of {dataset.name}": next(filter(None, data), None),
        "the version of pols-jax": __version__,
    }


class _Measured(NamedTuple):
    """A split that has gone through the network once, with the estimates of its normalizer."""

    scored: ScoredSplit
    stats: ExampleStats
    estimates: Float[np.ndarray, " examples"]


class _Evaluator:
    """The parameters of a run, and a progress bar over what is done with them."""

    def __init__(self, run: Run, dataset: Dataset, batch_size: int, block_size: int | None, *, quiet: bool):
        self._run, self._dataset = run, dataset
        self._batch_size, self._block_size = fitting_batch(run.image_shape, most=batch_size), block_size
        self._variables = run.restore_backbone()
        self._share = run.class_share()
        self._kernel, self._bias = run.own_head
        self._progress = progress_bars(quiet=quiet)

    def __enter__(self) -> "_Evaluator":
        self._progress.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._progress.stop()

    def scored(self, split: str) -> _Measured:
        """The features of a split with their output layer, and the first pass over the classes."""
        examples: Split = getattr(self._dataset, split)
        num_batches = -(-len(examples) // self._batch_size)
        with self._task(f"{self._run.config.loss}: features of {split}", num_batches) as advance:
            features, labels = split_features(
                self._run.model, self._variables, examples, batch_size=self._batch_size, advance=advance
            )
        if not len(labels):
            raise RunError(f"The {split} split of {self._dataset.name} has no picture that can be decoded.")
        head = self._kernel, self._bias
        scored = ScoredSplit(features, labels, *head, block_size=self._block_size, share=self._share)
        with self._task(f"{self._run.config.loss}: logits of {split}", scored.num_rounds) as advance:
            stats = scored.example_stats(advance=advance)
        return _Measured(scored, stats, estimates(self._run.normalizer, features, share=self._share))

    def count(self, measured: _Measured, *, normalized: bool, **options: Any) -> SplitCounts:
        """The second pass over the classes."""
        scored, stats, estimates = measured
        if normalized:
            scored, stats = scored.minus(stats, estimates)
        with self._task(f"{self._run.config.loss}: counting", scored.num_rounds) as advance:
            return scored.count(stats, advance=advance, **options)

    @contextmanager
    def _task(self, description: str, total: int) -> Iterator[Any]:
        task = self._progress.add_task(description, total=total)
        yield lambda: self._progress.advance(task)
        self._progress.remove_task(task)


def progress_bars(*, quiet: bool) -> Progress:
    """Progress bars on a terminal, which vanish when all is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def _default_thresholds(thresholds: Thresholds, run: Run) -> Float[np.ndarray, "classes rules"]:
    """For each default rule: a threshold for each class, then the one for all classes."""
    columns = []
    for rule in DEFAULT_RULES:
        columns.append(thresholds.per_class(rule, num_classes=run.num_classes))
        columns.append(np.full(run.num_classes, thresholds.shared(rule), np.float32))
    return np.stack(columns, axis=1)


def _threshold_report(thresholds: Thresholds, counts: SplitCounts) -> tuple[ThresholdScore, ...]:
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
                ThresholdScore(
                    rule=str(rule),
                    chosen_for=scope,
                    threshold=_number(shared) if scope == "all classes" else None,
                    mean_recall=_mean(recall),
                    mean_precision=_mean(precision),
                    num_classes=int(np.count_nonzero(measured)),
                    num_classes_with_hits=len(precision),
                    num_classes_promise_held=(
                        None if promised is None else int(np.count_nonzero(promised >= rule.value))
                    ),
                )
            )
    return tuple(report)


def _bins(stats: ExampleStats) -> Float[np.ndarray, " edges"]:
    return np.linspace(stats.smallest.min(), stats.peak.max(), _NUM_BINS + 1)


def _per_class(scores: Mapping[str, Counts]) -> dict[str, np.ndarray]:
    """The measures of every class, for each kind of score by the prefix of its names."""
    arrays = {"class_sizes": np.asarray(scores[""].class_sizes)}
    for prefix, counts in scores.items():
        measures = zip(MEASURES, _class_measures(counts), strict=True)
        arrays |= {f"{prefix}{name}": np.asarray(values) for name, values in measures}
    return arrays


@jax.jit
def _class_measures(counts: Counts) -> tuple[Array, Array, Array]:
    """The measures of each class, in the order of `MEASURES`."""
    return counts.average_precision(), counts.precision_at_recall(0.9), counts.precision_at_recall(0.99)


def _means(arrays: dict[str, np.ndarray], prefix: str, run: Run) -> Measures:
    """The measures, averaged over the classes that have examples."""
    values = [arrays[f"{prefix}{name}"] for name in MEASURES]
    if any(np.isnan(array).all() for array in values):
        raise RunError(f"The logits of the run in {run.directory} are not finite; train another one.")
    return Measures(*(float(np.nanmean(array, dtype=np.float64)) for array in values))


def _curves(scores: Mapping[str, Counts]) -> dict[str, np.ndarray]:
    """Precision at each recall, averaged over classes: Precision@0.9 of the tables is a point of this curve."""

    @jax.jit
    def curve(counts: Counts) -> Array:
        recalls = jnp.asarray(_CURVE_RECALLS, jnp.float32)
        return lax.map(lambda recall: jnp.nanmean(counts.precision_at_recall(recall)), recalls)

    curves = {f"{prefix}curve_precision": np.asarray(curve(counts)) for prefix, counts in scores.items()}
    return {"curve_recall": _CURVE_RECALLS, **curves}


def _histograms(counts: SplitCounts, bins: np.ndarray) -> dict[str, np.ndarray]:
    true, _ = np.histogram(np.asarray(counts.one_logit.own_scores), bins=bins)
    return {"bins": bins, "true_histogram": true, "false_histogram": counts.histogram}


def _extremes(
    auprc: np.ndarray, class_names: tuple[str, ...]
) -> tuple[tuple[ClassScore, ...], tuple[ClassScore, ...]]:
    """The classes that one logit finds best and worst."""
    ascending = np.argsort(auprc, kind="stable")  # NaN, of classes without examples, is last
    ascending = ascending[: np.count_nonzero(~np.isnan(auprc))]

    def named(class_ids) -> tuple[ClassScore, ...]:
        return tuple(ClassScore(name=class_names[i], auprc=float(auprc[i])) for i in class_ids)

    return named(ascending[::-1][:NUM_EXTREMES]), named(ascending[:NUM_EXTREMES])


def _class_id(run: Run, name: str | None) -> int:
    if name is None:
        return run.num_classes // 2
    if name not in run.class_names:
        raise RunError(f"The run in {run.directory} has no class named {name!r}.")
    return run.class_names.index(name)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
