"""Fits a normalizer to a trained run: from its training pictures, without their labels, to one more file beside it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from pols_jax.data import Dataset, StreamSplit, augment_batch, find_augmentation, sample_batch, stream_batches
from pols_jax.errors import ConfigError, RunError
from pols_jax.evaluation.measuring import Measured, progress_bars, shared_by_hosts
from pols_jax.files import check_writable
from pols_jax.metrics.class_blocks import ScoredSplit
from pols_jax.metrics.exact import Counts
from pols_jax.normalizers import Normalizer, fit_normalizer
from pols_jax.training.features import split_features
from pols_jax.training.hosts import check_same_settings, same_on_all_hosts
from pols_jax.training.run_normalizer import normalizer_path, write_normalizer
from pols_jax.training.runs import Run

LADDER = (0, 256, 1024)
"""The numbers of rows that ``choose`` tries; 0 is affine."""

# A rung with fewer rows is chosen if its error is within this factor of the best.
_NEARLY = 1.02
# How often the training pictures are looked at with new distortions, if the run was trained with them.
_PASSES = 2
_BATCH_SIZE = 1024
# Pictures that are streamed, which takes long.
_MAX_STREAMED = 200_000


class Rung(NamedTuple):
    """A normalizer that was tried.

    Attributes:
      normalizer: The normalizer; None for the logits as they are.
      auprc: The AUPRC of one logit with it, on validation examples; None without their labels.
      precision: Its precision at recall 0.9, likewise.
    """

    normalizer: Normalizer | None
    auprc: float | None = None
    precision: float | None = None

    @property
    def error(self) -> float:
        """What the choice makes small: 1-AUPRC; without labels the share of the variance of log Z that is left."""
        if self.auprc is not None:
            return 1 - self.auprc
        return 1.0 if self.normalizer is None else 1 - self.normalizer.fit.r_squared


def mean_measures(counts: Counts) -> tuple[float, float]:
    """AUPRC and precision at recall 0.9, averaged over the classes that have examples."""
    values = counts.average_precision(), counts.precision_at_recall(0.9)
    auprc, precision = (float(np.nanmean(np.asarray(array), dtype=np.float64)) for array in values)
    return auprc, precision


def measured_rung(normalizer: Normalizer | None, validation: Measured | None) -> Rung:
    """Measures a normalizer on validation examples, if there are some."""
    if validation is None:
        return Rung(normalizer)
    return Rung(normalizer, *mean_measures(validation.counts(normalizer, rank=False).one_logit))


def choose_rung(rungs: Iterable[Rung]) -> Rung:
    """Chooses the first rung, the one with the fewest rows, whose error is nearly that of the best.

    Examples:
      >>> choose_rung([Rung(None, 0.5), Rung(None, 0.899), Rung(None, 0.9)]).auprc
      0.899
    """
    rungs = list(rungs)
    best = max(0.0, min(rung.error for rung in rungs))  # an AUPRC may round to more than one
    return next(rung for rung in rungs if rung.error <= _NEARLY * best)


def fit_rungs(
    features: Float[np.ndarray, "examples features"],
    kernel: Float[np.ndarray, "classes features"],
    bias: Float[np.ndarray, " classes"],
    *,
    ladder: Iterable[int],
    validation: Measured | None,
    **options: Any,
) -> Iterator[Rung]:
    """Fits a normalizer with each number of rows of the ladder, and measures it; the options are those of `fit_normalizer`.

    Without validation examples, each is measured by its fit to held-out features.
    """
    held_out = None if validation is None else validation.features
    for num_rows in ladder:
        fitted = fit_normalizer(features, kernel, bias, num_rows=num_rows, held_out=held_out, **options)
        yield measured_rung(fitted, validation)


def check_rows(rows: str, *, or_none: bool = False) -> None:
    """Raises a `ConfigError` if a number of rows is none, and no word for it either; the word none may be allowed.

    Examples:
      >>> check_rows("many")
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: Rows of a normalizer are a number such as 256, affine or choose, got many.
    """
    words = ("none", "affine", "choose") if or_none else ("affine", "choose")
    if rows not in words and not (rows.isdecimal() and len(rows) < 8):
        allowed = f"{', '.join(words[:-1])} or {words[-1]}"
        raise ConfigError(f"Rows of a normalizer are a number such as 256, {allowed}, got {rows}.")


def ladder_of(rows: str, *, at_most: int) -> list[int]:
    """The numbers of rows that are fitted: the one that is asked for, or those of `LADDER` that are not too many.

    Examples:
      >>> ladder_of("affine", at_most=100), ladder_of("choose", at_most=300), ladder_of("500", at_most=300)
      ([0], [0, 256], [500])
    """
    if rows == "choose":
        return [num_rows for num_rows in LADDER if num_rows <= at_most]
    return [0 if rows == "affine" else int(rows)]


def normalize(
    run_dir: str | Path,
    *,
    rows: str = "256",
    dataset: Dataset | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
    use: Literal["best", "last"] = "best",
    quiet: bool = False,
) -> list[Rung]:
    """Fits a normalizer to a trained run, and writes it into the run directory.

    The features are those of the training pictures, distorted as in training. Those of the validation pictures decide
    when to stop. Labels are looked at only to compare the result with the raw logits, and by ``choose``.

    Args:
      run_dir: The run directory.
      rows: The number of rows, ``affine``, or ``choose``: the fewest of `LADDER` that are nearly as good as the best
        on the validation split.
      dataset: The data of the run; loaded if None.
      data_dir: Where prepared tfds data sets are, if ``dataset`` is None.
      seed: Decides distortions, start and order of the fit.
      use: The checkpoint with the best accuracy on the validation split, or the last one.
      quiet: No progress bar.

    Returns:
      What was tried, the raw logits first and what was kept last.

    Raises:
      ConfigError: if ``rows`` is none of the above, or the directory cannot be written to.
      RunError: if there is no finished run, its data has changed, or it changes meanwhile.

    Examples:
      >>> import tempfile
      >>> from pols_jax.training.config import RunConfig
      >>> from pols_jax.data import load
      >>> from pols_jax.training.fitting import RunOptions, fit
      >>> config = RunConfig(width=0.1, characters="0030-0039", batch_size=32, steps=2)
      >>> dataset = load("glyphs", **config.options())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     outcome = fit(config, dataset, folder, options=RunOptions(quiet=True))
      ...     raw, affine = normalize(folder, rows="affine", dataset=dataset, quiet=True)
      >>> affine.normalizer.num_rows
      1
    """
    check_rows(rows)
    run = Run.open(run_dir, use=use)
    is_first_host = jax.process_index() == 0
    if is_first_host:
        check_writable(normalizer_path(run.directory))
    if dataset is None:
        dataset = run.load_dataset(data_dir=data_dir)
    else:
        run.check_dataset(dataset)
    check_same_settings(shared_by_hosts(run, dataset) | {"--rows": rows, "--seed": seed})
    share = run.class_share()
    variables, (kernel, bias) = run.restore_backbone(), run.own_head
    features, labels = split_features(run.model, variables, dataset.validation)
    scored = ScoredSplit(features, labels, kernel, bias, share=share)
    validation = Measured(features, scored, scored.example_stats())
    with fit_progress(quiet=quiet or not is_first_host) as report:
        features = np.concatenate([*training_features(run, variables, dataset, seed=seed, report=report)])
        fits = fit_rungs(
            features,
            kernel,
            bias,
            ladder=ladder_of(rows, at_most=len(features)),
            validation=validation,
            seed=seed,
            share=share,
            on_progress=report,
        )
        try:
            rungs = list(fits)
        except ValueError as error:
            raise ConfigError(f"{run.directory}: {error}") from error
    chosen = choose_rung(rungs)
    if Run.open(run_dir, use=use).checkpoint != run.checkpoint:
        raise RunError(f"The run in {run.directory} changed meanwhile; fit the normalizer again.")
    assert chosen.normalizer is not None
    if is_first_host:
        write_normalizer(run.directory, chosen.normalizer, checkpoint=run.checkpoint)
    same_on_all_hosts(0)  # whoever evaluates next finds it
    return [measured_rung(None, validation), *(each for each in rungs if each is not chosen), chosen]


def training_features(
    run: Run,
    variables: Any,
    dataset: Dataset,
    *,
    seed: int = 0,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Iterator[Float[np.ndarray, "batch features"]]:
    """The features of the training pictures, as they are and as training distorted them."""
    what = "features of the training pictures"
    split = dataset.train
    augment = find_augmentation(run.config.augment, dataset)
    if isinstance(split, StreamSplit):
        total = min(_MAX_STREAMED, (1 if augment is None else _PASSES) * len(split))
        batches = stream_batches(split, seed=seed, batch_size=min(_BATCH_SIZE, len(split)))

        @jax.jit
        def streamed(variables, batch, step):
            batch = augment_batch(batch, step, seed=seed, augment=augment)
            return run.model.backbone.apply(variables, batch.images)

        done = 0
        for step, batch in enumerate(batches):
            yield np.asarray(streamed(variables, batch, step), np.float32)[np.asarray(batch.where)]
            done += int(np.count_nonzero(batch.where))
            report(what, done, total)
            if done >= total:
                break
        return
    plain, _ = split_features(run.model, variables, split, batch_size=_BATCH_SIZE)
    yield plain.astype(np.float32)
    if augment is None:
        return
    batch_size = min(_BATCH_SIZE, len(split))
    num_batches = _PASSES * -(-len(split) // batch_size)

    @jax.jit
    def distorted(images, labels, step):
        batch = sample_batch(images, labels, step, seed=seed, batch_size=batch_size, augment=augment)
        return run.model.backbone.apply(variables, batch.images)

    images, labels = jax.device_put(split.images), np.zeros(len(split), np.int32)
    for step in range(num_batches):
        yield np.asarray(distorted(images, labels, step), np.float32)
        report(what, step + 1, num_batches)


@contextmanager
def fit_progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each thing that is reported about."""
    tasks: dict[str, Any] = {}
    with progress_bars(quiet=quiet) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total or None)

        yield report
