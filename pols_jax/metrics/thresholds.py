"""Thresholds for single logits, chosen on the validation split: "it is class c if its logit is at least this".

A threshold follows from a rule: a wanted recall, a wanted precision, or the best F1. It can be chosen for each class from
the examples of that class, or once for all classes from all of them together. The second is what logit separation makes
possible, and what many classes with few examples each need.

What is saved with a run are not the thresholds but the few numbers per validation example that all of them follow from,
so that any rule can be asked for later.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pols_jax.errors import ConfigError, RunError
from pols_jax.files import write_arrays
from pols_jax.schema import ArrayKind, read_arrays

if TYPE_CHECKING:
    from pols_jax.metrics.class_blocks import SplitCounts

# With fewer validation examples, a class's own threshold says more about those examples than about the class.
MIN_EXAMPLES = 10
"""A class with at least this many validation examples gets a threshold of its own."""

# Thresholds are this much below the logit they are chosen at, relative to its size where that is above one: the last
# digits of a logit depend on the batch it is computed in, and the same picture has to pass again.
_SLACK = 1e-5

# What thresholds.npz holds; old files do not say which checkpoint they are about.
_ARRAYS = {
    "labels": ArrayKind("iu", ("examples",)),
    "logits": ArrayKind("f", ("examples",)),
    "passing": ArrayKind("iu", ("examples",)),
    "positives": ArrayKind("iu", ("examples",)),
    "false_passing": ArrayKind("iu", ("examples",)),
    "checkpoint": ArrayKind("U", (), is_optional=True),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to choose a threshold.

    Attributes:
      kind: ``recall`` for the highest threshold that reaches a recall; ``precision`` for the lowest one that reaches a
        precision; ``f1`` for the one with the best F1; ``value`` for a threshold that is given.
      value: The wanted recall or precision, or the threshold; 0 for ``f1``, which wants no number.
    """

    kind: Literal["recall", "precision", "f1", "value"]
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Reads ``recall=0.9``, ``precision=0.95``, ``f1`` or a number.

        Examples:
          >>> Rule.parse("recall=0.9")
          Rule(kind='recall', value=0.9)
          >>> Rule.parse("-3.5")
          Rule(kind='value', value=-3.5)
        """
        kind, _, number = text.strip().partition("=")
        if text.strip() == "f1":
            return cls("f1")
        try:
            if kind in ("recall", "precision") and 0 < float(number) <= 1:
                return cls(kind, float(number))
            if not number and np.isfinite(float(kind)):
                return cls("value", float(kind))
        except ValueError:
            pass
        raise ConfigError(
            f"The threshold rule {text!r} is not one of recall=R and precision=P, with R and P in (0, 1], f1, or a number."
        )

    def __str__(self) -> str:
        return {"f1": "f1", "value": f"{self.value}"}.get(self.kind, f"{self.kind}={self.value}")


DEFAULT_RULES = tuple(map(Rule.parse, ("recall=0.9", "recall=0.99", "precision=0.9", "f1")))
"""The rules that an evaluation measures."""


class Threshold(NamedTuple):
    """A threshold, of which a logit that is at least as large is a hit; and where it is from."""

    value: float
    origin: Literal["class", "all classes", "given"]


class Curve(NamedTuple):
    """What validation found at every threshold that tells examples apart, strictest first.

    Attributes:
      thresholds: Thresholds, each a little below a true logit, as `Thresholds.of_class` gives them; shape ``[p]``.
      passing: How many logits pass each, shape ``[p]``.
      positives: How many of those are true, shape ``[p]``.
      num_examples: The true logits that there are.
      origin: Whose logits they are: of the class, or of all classes.

    Examples:
      >>> curve = Curve(np.array([3.0, 2.0]), np.array([1, 4]), np.array([1, 2]), num_examples=2, origin="class")
      >>> curve.precision.tolist(), curve.recall.tolist()
      ([1.0, 0.5], [0.5, 1.0])
      >>> curve.at(2.0), curve.at(2.5), curve.at(1.0)
      ((0.5, 1.0), (0.3333333333333333, 0.5), (None, 1.0))
    """

    thresholds: Float[np.ndarray, " points"]
    passing: Int[np.ndarray, " points"]
    positives: Int[np.ndarray, " points"]
    num_examples: int
    origin: Literal["class", "all classes"]

    @property
    def precision(self) -> Float[np.ndarray, " points"]:
        """The share of what passes that is true, shape ``[p]``."""
        return self.positives / self.passing

    @property
    def recall(self) -> Float[np.ndarray, " points"]:
        """The share of what is true that passes, shape ``[p]``."""
        return self.positives / self.num_examples

    def at(self, threshold: float) -> tuple[float | None, float]:
        """The precision and the recall of any threshold.

        False logits were counted at the true ones only: in between, the precision is the least that it can be, and None
        below and above all of them.
        """
        last = np.count_nonzero(self.thresholds >= threshold) - 1
        if last < 0:
            return None, 0.0
        positives, is_a_point = self.positives[last], self.thresholds[last] == threshold
        if not is_a_point and last + 1 == len(self.thresholds):
            return None, float(self.recall[last])
        below = last if is_a_point else last + 1
        most_false = self.passing[below] - self.positives[below]
        return float(positives / (positives + most_false)), float(self.recall[last])


def thresholds_path(run_dir: str | Path, *, normalized: bool = False) -> Path:
    """The file of a run that has the thresholds of logits, or of logits minus the normalizer.

    Examples:
      >>> thresholds_path("run").name, thresholds_path("run", normalized=True).name
      ('thresholds.npz', 'thresholds-normalized.npz')
    """
    return Path(run_dir) / ("thresholds-normalized.npz" if normalized else "thresholds.npz")


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """What every threshold follows from: numbers about the true logit of each validation example.

    Attributes:
      labels: True classes, shape ``[n]``.
      logits: The true logits, shape ``[n]``.
      passing: How many examples have a logit of that class that is at least as large, shape ``[n]``.
      positives: How many of those belong to the class, shape ``[n]``.
      false_passing: How many false logits, of any example and class, are at least as large, shape ``[n]``.

    Examples:
      One class with three examples; one example of another class gets in between.

      >>> thresholds = Thresholds(
      ...     labels=np.array([0, 0, 0]),
      ...     logits=np.array([3.0, 2.0, 1.0], np.float32),
      ...     passing=np.array([1, 3, 4]),
      ...     positives=np.array([1, 2, 3]),
      ...     false_passing=np.array([0, 1, 1]),
      ... )
      >>> thresholds.per_class(Rule.parse("precision=0.9"), num_classes=2).tolist()
      [3.0, nan]
      >>> thresholds.shared(Rule.parse("recall=0.6"))
      2.0
      >>> thresholds.of_class(Rule.parse("recall=0.6"), 0)
      Threshold(value=2.0, origin='all classes')
      >>> thresholds.curve(0).precision.tolist()
      [1.0, 0.6666666666666666, 0.75]
    """

    labels: Int[np.ndarray, " examples"]
    logits: Float[np.ndarray, " examples"]
    passing: Int[np.ndarray, " examples"]
    positives: Int[np.ndarray, " examples"]
    false_passing: Int[np.ndarray, " examples"]

    @classmethod
    def from_counts(cls, counts: "SplitCounts") -> "Thresholds":
        """Takes what is needed from the counts of the validation split."""
        labels, logits, passing, positives, _ = map(np.asarray, counts.one_logit)
        return cls(labels, logits, passing, positives, counts.false_passing)

    def per_class(self, rule: Rule, *, num_classes: int) -> Float[np.ndarray, " classes"]:
        """The threshold of each class by its own examples, shape ``[k]``.

        NaN for a class without validation examples, and where no threshold reaches the wanted precision.
        """
        if rule.kind == "value":
            return np.full(num_classes, rule.value, np.float32)
        class_sizes = np.bincount(self.labels, minlength=num_classes)
        is_found = self.positives > 0  # a logit that is NaN passes nothing, itself included
        labels, logits = self.labels[is_found], self.logits[is_found]
        precision = self.positives[is_found] / self.passing[is_found]
        recall = self.positives[is_found] / class_sizes[labels]
        if rule.kind == "recall":
            satisfies, rank = recall >= rule.value, logits
        elif rule.kind == "precision":
            satisfies, rank = precision >= rule.value, -logits
        else:
            satisfies, rank = np.ones(len(labels), bool), 2 * precision * recall / (precision + recall)
        labels, logits, rank = labels[satisfies], logits[satisfies], rank[satisfies]
        ascending = np.lexsort((logits, rank))  # of equal ranks, the higher threshold
        thresholds = np.full(num_classes, np.nan, np.float32)
        thresholds[labels[ascending]] = logits[ascending]  # the last assignment stays
        return _lowered(thresholds)

    def shared(self, rule: Rule) -> float:
        """The one threshold for all classes, by all true and false logits together; NaN if none satisfies the rule."""
        return float(self._as_one_class().per_class(rule, num_classes=1)[0])

    def of_class(self, rule: Rule, class_id: int) -> Threshold:
        """The threshold to use for a class: its own if enough examples support it, and else that of all classes."""
        if rule.kind == "value":
            return Threshold(rule.value, "given")
        examples, origin = self._examples_for(class_id)
        return Threshold(float(examples.per_class(rule, num_classes=1)[0]), origin)

    def curve(self, class_id: int) -> Curve:
        """Every threshold of a class with its precision and recall, by the same examples that `of_class` uses."""
        examples, origin = self._examples_for(class_id)
        is_found = examples.positives > 0  # as in `per_class`
        values, first = np.unique(-examples.logits[is_found], return_index=True)
        passing, positives = examples.passing[is_found][first], examples.positives[is_found][first]
        return Curve(_lowered(-values), passing, positives, len(examples.logits), origin)

    def _examples_for(self, class_id: int) -> tuple["Thresholds", Literal["class", "all classes"]]:
        """The examples that thresholds of a class are chosen by, with the label 0; and whose examples they are."""
        own = self.labels == class_id
        if np.count_nonzero(own) < MIN_EXAMPLES:
            return self._as_one_class(), "all classes"
        examples = Thresholds(**{name: array[own] for name, array in vars(self).items()})
        return dataclasses.replace(examples, labels=np.zeros_like(examples.labels)), "class"

    def _as_one_class(self) -> "Thresholds":
        """All classes together: with the label 0, and counted among the true and false logits of all of them."""
        ascending = np.sort(self.logits[~np.isnan(self.logits)])
        positives = len(ascending) - np.searchsorted(ascending, self.logits)
        passing, labels = positives + self.false_passing, np.zeros_like(self.labels)
        return dataclasses.replace(self, labels=labels, passing=passing, positives=positives)

    def save(self, run_dir: str | Path, *, checkpoint: str, normalized: bool = False) -> None:
        """Writes a file of a run directory, at once or not at all: `thresholds_path`."""
        path = thresholds_path(run_dir, normalized=normalized)
        write_arrays(path, vars(self) | {"checkpoint": np.array(checkpoint)})

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        *,
        checkpoint: str,
        num_classes: int,
        normalized: bool = False,
        advice: str = "with pols eval, or give a number",
    ) -> "Thresholds":
        """Reads what `save` wrote; a `RunError` if there is nothing, or it is damaged or about another checkpoint.

        The ``advice`` says how to get thresholds.
        """
        path = thresholds_path(run_dir, normalized=normalized)
        if not path.exists():
            raise RunError(f"The run in {run_dir} has no thresholds yet; make them {advice}.")
        arrays = read_arrays(path, _ARRAYS)
        measured_on = str(arrays.pop("checkpoint", "an unknown checkpoint"))
        if measured_on != checkpoint:
            raise RunError(
                f"{path} was not measured on the checkpoint {checkpoint} of the run, but on {measured_on}; evaluate again "
                f"{advice}."
            )
        if np.any((arrays["labels"] < 0) | (arrays["labels"] >= num_classes)):
            raise RunError(
                f"{path} cannot be used: labels are outside [0, {num_classes}); evaluate again {advice}."
            )
        return cls(**arrays)


def _lowered(logits: Float[np.ndarray, " thresholds"]) -> Float[np.ndarray, " thresholds"]:
    return logits - _SLACK * np.maximum(1, np.abs(logits))
