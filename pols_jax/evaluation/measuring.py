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
from pols_jax.metrics.thresholds import DEFAULT_RULES, Rule, Thresholds, thresholds_path
from pols_jax.normalizers import Normalizer, estimates
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
    kinds = tuple(dict.fromkeys((None, normalizer)))
    is_first_host = jax.process_index() == 0
    if is_first_host:
        files = (thresholds_path(run.directory, normalized=kind is not None) for kind in kinds)
        check_writable(*slc_paths(run, split), *files)
    class_id = run.num_classes // 2
    if histogram_class is not None:
        if histogram_class not in run.class_names:
            raise RunError(f"The run in {run.directory} has no class named {histogram_class!r}.")
        class_id = run.class_names.index(histogram_class)
    if dataset is None:
        dataset = run.load_dataset(data_dir=data_dir)
    else:
        run.check_dataset(dataset)
    check_same_settings(
        shared_by_hosts(run, dataset)
        | {"--batch-size": batch_size, "the split": split, "the class of the figure": class_id}
        | {"the normalizer": score_id("", normalizer), "--figures": histograms}
    )
    with progress_bars(quiet=quiet or not is_first_host) as bars:
        evaluator = _Evaluator(run, dataset, batch_size, block_size, bars)
        measured = evaluator.scored("validation")
        chosen = {kind: Thresholds.from_counts(evaluator.count(measured, kind)) for kind in kinds}
        if split != "validation":
            del measured  # its features go before those of the other split come
            measured = evaluator.scored(split)
        scored, stats, counts, report = measured.scored, measured.stats, {}, ()
        bins = np.linspace(stats.smallest.min(), stats.peak.max(), _NUM_BINS + 1) if histograms else None
        for kind in kinds:
            rules = _default_thresholds(chosen[kind], run.num_classes)
            counts[kind] = evaluator.count(
                measured,
                kind,
                thresholds=np.stack([thresholds for *_, thresholds in rules], axis=1),
                bins=bins if kind is None else None,
            )
            report = _threshold_report(rules, counts[kind])  # in the end, that of the score that is used
    raw = counts[None]
    scores = {"": raw.one_logit, "all_logits_": raw.all_logits}
    if normalizer is not None:
        scores["normalized_"] = counts[normalizer].one_logit
    arrays: dict[str, Any] = {"class_sizes": np.asarray(raw.one_logit.class_sizes)}
    for prefix, of_score in scores.items():
        arrays |= {f"{prefix}{name}": np.asarray(values) for name, values in of_score.measures().items()}
    if bins is not None:
        true_histogram, _ = np.histogram(np.asarray(raw.one_logit.own_scores), bins=bins)
        arrays |= _curves(scores) | {
            "bins": bins,
            "true_histogram": true_histogram,
            "false_histogram": raw.histogram,
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
        violation_rate=_number(raw.violation_rate()),
        separation_margin=_number(raw.separation_margin()),
        thresholds=report,
        best_classes=best,
        worst_classes=worst,
    )
    if Run.open(run_dir, use=use).checkpoint != run.checkpoint:
        raise RunError(f"The run in {run.directory} changed while it was measured; evaluate it again.")
    if is_first_host:
        for kind, thresholds in chosen.items():
            identity = score_id(run.checkpoint, kind)
            thresholds.save(run.directory, checkpoint=identity, normalized=kind is not None)
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


class Measured(NamedTuple):
    """Examples after the first pass over the classes, to be counted with any normalizer."""

    features: Float[np.ndarray, "examples features"]
    scored: ScoredSplit
    stats: ExampleStats

    def counts(self, normalizer: Normalizer | None, **options: Any) -> SplitCounts:
        """Makes the second pass, over logits minus a normalizer; the options are those of `ScoredSplit.count`."""
        offsets = estimates(normalizer, self.features, share=self.scored.share)
        scored, stats = self.scored.minus(self.stats, offsets)
        return scored.count(stats, **options)


class _Evaluator:
    """The parameters of a run, and a progress bar over what is done with them."""

    def __init__(
        self, run: Run, dataset: Dataset, batch_size: int, block_size: int | None, progress: Progress
    ):
        self._run, self._dataset = run, dataset
        self._batch_size, self._block_size = fitting_batch(run.image_shape, most=batch_size), block_size
        self._variables = run.restore_backbone()
        self._progress = progress

    def scored(self, split: str) -> Measured:
        """The features of a split with their output layer, and the first pass over the classes."""
        examples: Split = getattr(self._dataset, split)
        num_batches = -(-len(examples) // self._batch_size)
        with self._task(f"{self._run.config.loss}: features of {split}", num_batches) as advance:
            features, labels = split_features(
                self._run.model, self._variables, examples, batch_size=self._batch_size, advance=advance
            )
        if not len(labels):
            raise RunError(f"The {split} split of {self._dataset.name} has no picture that can be decoded.")
        options = {"block_size": self._block_size, "share": self._run.class_share()}
        scored = ScoredSplit(features, labels, *self._run.own_head, **options)
        with self._task(f"{self._run.config.loss}: logits of {split}", scored.num_rounds) as advance:
            stats = scored.example_stats(advance=advance)
        return Measured(features, scored, stats)

    def count(self, measured: Measured, normalizer: Normalizer | None, **options: Any) -> SplitCounts:
        """The second pass over the classes."""
        with self._task(f"{self._run.config.loss}: counting", measured.scored.num_rounds) as advance:
            return measured.counts(normalizer, advance=advance, **options)

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


def _default_thresholds(thresholds: Thresholds, num_classes: int) -> list[tuple[Rule, str, np.ndarray]]:
    """For each default rule: a threshold for each class, then the one for all classes."""
    return [
        (rule, scope, values)
        for rule in DEFAULT_RULES
        for scope, values in (
            ("class", thresholds.per_class(rule, num_classes=num_classes)),
            ("all classes", np.full(num_classes, thresholds.shared(rule), np.float32)),
        )
    ]


def _threshold_report(
    rules: list[tuple[Rule, str, np.ndarray]], counts: SplitCounts
) -> tuple[ThresholdScore, ...]:
    """What the thresholds that were chosen on validation really give, and for how many classes they keep their word."""
    class_sizes, report = np.asarray(counts.one_logit.class_sizes), []
    for (rule, scope, chosen), passing, positives in zip(
        rules, counts.passing.T, counts.positives.T, strict=True
    ):
        measured = (class_sizes > 0) & ~np.isnan(chosen)
        passing, positives = passing[measured], positives[measured]
        recall = positives / class_sizes[measured]
        precision = positives[passing > 0] / passing[passing > 0]
        promised = {"recall": recall, "precision": precision}.get(rule.kind)
        report.append(
            ThresholdScore(
                rule=str(rule),
                chosen_for=scope,
                threshold=_number(chosen[0]) if scope == "all classes" else None,
                mean_recall=_mean(recall),
                mean_precision=_mean(precision),
                num_classes=len(recall),
                num_classes_with_hits=len(precision),
                num_classes_promise_held=(
                    None if promised is None else int(np.count_nonzero(promised >= rule.value))
                ),
            )
        )
    return tuple(report)


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


def _extremes(
    auprc: np.ndarray, class_names: tuple[str, ...]
) -> tuple[tuple[ClassScore, ...], tuple[ClassScore, ...]]:
    """The classes that one logit finds best and worst."""
    ascending = np.argsort(auprc, kind="stable")  # NaN, of classes without examples, is last
    ascending = ascending[: np.count_nonzero(~np.isnan(auprc))]

    def named(class_ids) -> tuple[ClassScore, ...]:
        return tuple(ClassScore(name=class_names[i], auprc=float(auprc[i])) for i in class_ids)

    return named(ascending[::-1][:NUM_EXTREMES]), named(ascending[:NUM_EXTREMES])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
