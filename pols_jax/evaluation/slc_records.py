"""What an evaluation finds: one typed record, the arrays behind it, and the files of a run directory that hold them.

Each file is written at once or not at all, and carries the checkpoint that it was measured on. A file of another
checkpoint, or of another run, is refused.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from pols_jax.errors import ConfigError, RunError, shell_word
from pols_jax.files import write_arrays, write_json
from pols_jax.losses import LOSSES
from pols_jax.metrics.thresholds import DEFAULT_RULES
from pols_jax.schema import ArrayKind, decode, encode, json_field, read_arrays, read_record
from pols_jax.training.runs import Run

MEASURES = ("auprc", "precision_at_0.9", "precision_at_0.99")
"""The measures of the paper's tables, by their names in ``slc.json`` and ``slc.npz``."""


@dataclasses.dataclass(frozen=True)
class Measures:
    """Averages over the classes that have examples.

    Attributes:
      auprc: Area under the precision-recall curve.
      precision_at_90: Precision at recall 0.9.
      precision_at_99: Precision at recall 0.99.

    Examples:
      >>> Measures(0.75, 0.5, 0.25).errors()
      (0.25, 0.5, 0.75)
    """

    auprc: float
    precision_at_90: float = json_field("precision_at_0.9")
    precision_at_99: float = json_field("precision_at_0.99")

    def values(self) -> tuple[float, float, float]:
        """The measures in the order of `MEASURES`."""
        return self.auprc, self.precision_at_90, self.precision_at_99

    def errors(self) -> tuple[float, ...]:
        """One minus each of them, as the tables print it."""
        return tuple(1 - value for value in self.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdScore:
    """What thresholds by one rule, chosen on the validation split, give on the measured one.

    Attributes:
      rule: The rule, as `pols_jax.metrics.thresholds.Rule` writes it.
      chosen_for: ``class`` for a threshold per class, ``all classes`` for one.
      threshold: The one for all classes; None for one per class, and if none satisfies the rule.
      mean_recall: Over the classes that have a threshold and examples.
      mean_precision: Over those that have hits as well.
      num_classes: The number of classes that have a threshold and examples.
      num_classes_with_hits: The number of those that have hits.
      num_classes_promise_held: In how many the wanted recall or precision was reached; None if none was wanted.
    """

    rule: str
    chosen_for: str
    threshold: float | None
    mean_recall: float | None
    mean_precision: float | None
    num_classes: int
    num_classes_with_hits: int
    num_classes_promise_held: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassScore:
    """The AUPRC of one class with one logit."""

    name: str = json_field("class")
    auprc: float


NUM_EXTREMES = 5
"""How many classes a record names as the best and as the worst."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlcRecord:
    """What one evaluation of a run measured; ``slc.json`` holds it.

    Attributes:
      loss: The loss that the run was trained with.
      dataset: The data set.
      split: The split that was measured.
      run: The run directory.
      step: The step of the checkpoint.
      steps: The last step of the run; None in records of old versions, which were measured there.
      checkpoint: What identifies the checkpoint; None in records of old versions.
      learning_rate: Of the training.
      batch_size: Of the training.
      num_examples: Measured examples.
      num_classes: The number of classes k.
      num_classes_with_examples: How many of them the averages are over.
      slc: Measures with one logit.
      normalized: Measures with one logit and a normalizer; None if there is none.
      normalizer_rows: The rows of the normalizer; 1 if it is affine.
      all_logits: Measures with all logits.
      accuracy: Classification accuracy.
      violation_rate: The share of pairs that violate the principle; None if there is no pair.
      separation_margin: The smallest true logit minus the largest false one; None likewise.
      thresholds: What thresholds give.
      best_classes: The classes that one logit finds best.
      worst_classes: Those that it finds worst.

    Examples:
      >>> SlcRecord.from_json({"loss": "cross_entropy"})
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: dataset is missing.
    """

    loss: str
    dataset: str
    split: str
    run: str
    step: int
    steps: int | None = None
    checkpoint: str | None = None
    learning_rate: float
    batch_size: int
    num_examples: int
    num_classes: int
    num_classes_with_examples: int
    slc: Measures
    normalized: Measures | None = None
    normalizer_rows: int | None = None
    all_logits: Measures
    accuracy: float
    violation_rate: float | None
    separation_margin: float | None
    thresholds: tuple[ThresholdScore, ...]
    best_classes: tuple[ClassScore, ...]
    worst_classes: tuple[ClassScore, ...]

    def __post_init__(self):
        """Checks what types cannot say."""
        if self.loss not in LOSSES:
            raise ConfigError(f"loss is {self.loss!r}, which this version does not know.")

    def to_json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold; `from_json` reads it back."""
        return encode(self)

    @classmethod
    def from_json(cls, values: Any) -> "SlcRecord":
        """Reads what `to_json` wrote; a `ConfigError` names the field that is wrong."""
        return decode(cls, values)


# What slc.npz holds: values per class by each score, and what figures need if histograms were asked for.
_SCORES = ("", "all_logits_", "normalized_")
_FOR_FIGURES = {
    "curve_recall": ArrayKind("f", ("recalls",), True),
    **{f"{scores}curve_precision": ArrayKind("f", ("recalls",), True) for scores in _SCORES},
    "bins": ArrayKind("f", ("edges",), True),
    "true_histogram": ArrayKind("iu", ("bins",), True),
    "false_histogram": ArrayKind("iu", ("bins",), True),
    "class_id": ArrayKind("iu", (), True),
    "class_logits": ArrayKind("f", ("examples",), True),
    "class_labels": ArrayKind("b", ("examples",), True),
}
_ARRAYS = {
    "checkpoint": ArrayKind("U", (), True),
    "class_sizes": ArrayKind("iu", ("classes",)),
    **{
        f"{scores}{measure}": ArrayKind("f", ("classes",), is_optional=scores == "normalized_")
        for scores in _SCORES
        for measure in MEASURES
    },
    **_FOR_FIGURES,
}


def slc_paths(run: Run, split: str) -> tuple[Path, Path]:
    """The files of an evaluation: the record and the arrays."""
    stem = "slc" if split == "test" else f"slc-{split}"
    return run.directory / f"{stem}.json", run.directory / f"{stem}.npz"


def write_slc(run: Run, record: SlcRecord, arrays: dict[str, Any]) -> None:
    """Writes ``slc.npz`` and ``slc.json`` into the run directory; a `FileError` leaves what was there before."""
    json_path, npz_path = slc_paths(run, record.split)
    write_arrays(npz_path, arrays | {"checkpoint": np.array(run.checkpoint)})
    write_json(json_path, record.to_json())


def read_slc(run: Run) -> SlcRecord:
    """Reads the record of a run that was evaluated on its test split.

    Raises:
      RunError: if there is none, it cannot be used, or it was measured on another checkpoint.
    """
    path, _ = slc_paths(run, "test")
    _check_there(run, path)
    record = read_record(SlcRecord, path)
    _check_checkpoint(run, path, record.checkpoint)
    if why := _problem(run, record):
        raise RunError(f"{path} {why}; evaluate it again with pols eval {shell_word(run.directory)}.")
    return record


def _problem(run: Run, record: SlcRecord) -> str | None:
    """What is wrong with a record, if anything is."""
    if (record.loss, record.num_classes) != (run.config.loss, run.num_classes):
        return "is not about this run"
    scopes = [(score.rule, score.chosen_for) for score in record.thresholds]
    if scopes != [(str(rule), scope) for rule in DEFAULT_RULES for scope in ("class", "all classes")]:
        return "cannot be used: thresholds does not have each rule for a class and for all classes"
    for name in ("best_classes", "worst_classes"):
        if len(getattr(record, name)) != min(NUM_EXTREMES, record.num_classes_with_examples):
            return f"cannot be used: {name} has {len(getattr(record, name))} classes"
    return None


def read_class_arrays(run: Run, *, for_figures: bool = False) -> dict[str, np.ndarray]:
    """Reads the arrays of ``slc.npz``, by name; with ``for_figures`` there have to be curves and histograms.

    Raises:
      RunError: if there are none, they cannot be used, or were measured on another checkpoint.
    """
    _, path = slc_paths(run, "test")
    _check_there(run, path)
    arrays = read_arrays(path, _ARRAYS, classes=run.num_classes)
    checkpoint = arrays.pop("checkpoint", None)
    _check_checkpoint(run, path, None if checkpoint is None else str(checkpoint))
    missing = [name for name in _FOR_FIGURES if name not in arrays and not name.startswith("normalized")]
    if for_figures and missing:
        raise RunError(
            f"{path} has no {missing[0]}; evaluate again with pols eval {shell_word(run.directory)} --figures DIR."
        )
    if "bins" in arrays and len(arrays["bins"]) != len(arrays.get("true_histogram", ())) + 1:
        raise RunError(f"{path} cannot be used: bins and true_histogram do not fit.")
    if "class_id" in arrays and not 0 <= int(arrays["class_id"]) < run.num_classes:
        raise RunError(f"{path} cannot be used: class_id is {arrays['class_id']}.")
    return arrays


def _check_there(run: Run, path: Path) -> None:
    if not path.exists():
        raise RunError(
            f"The run in {run.directory} has no {path.name} yet; evaluate it with pols eval {shell_word(run.directory)}."
        )


def _check_checkpoint(run: Run, path: Path, checkpoint: str | None) -> None:
    if checkpoint != run.checkpoint:
        was = "an unknown checkpoint" if checkpoint is None else f"another checkpoint ({checkpoint})"
        raise RunError(
            f"{path} was measured on {was}; evaluate again with pols eval {shell_word(run.directory)}."
        )
