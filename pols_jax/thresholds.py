"""Thresholds for single logits, chosen on the validation split: "it is class c if its logit is at least this".

A threshold follows from a rule: a wanted recall, a wanted precision, or the best F1. It can be chosen for each class from
the examples of that class, or once for all classes from all of them together. The second is what logit separation makes
possible, and what many classes with few examples each need.

What is saved with a run are not the thresholds but the few numbers per validation example that all of them follow from,
so that any rule can be asked for later.
"""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pols_jax.class_blocks import SplitCounts
from pols_jax.config import ConfigError

# With fewer validation examples, a class's own threshold says more about those examples than about the class.
MIN_EXAMPLES = 10
"""A class with at least this many validation examples gets a threshold of its own."""

# Thresholds are this much below the logit they are chosen at, relative to its size where that is above one: the last
# digits of a logit depend on the batch it is computed in, and the same picture has to pass again.
_SLACK = 1e-5


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

        Raises:
          ConfigError: for any other text.

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
    """A threshold and where it is from.

    Attributes:
      value: A logit of at least this is a hit.
      origin: ``class``, ``all classes`` or ``given``.
    """

    value: float
    origin: Literal["class", "all classes", "given"]


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

      >>> import numpy as np
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
    """

    labels: Int[np.ndarray, " examples"]
    logits: Float[np.ndarray, " examples"]
    passing: Int[np.ndarray, " examples"]
    positives: Int[np.ndarray, " examples"]
    false_passing: Int[np.ndarray, " examples"]

    @classmethod
    def from_counts(cls, counts: SplitCounts) -> "Thresholds":
        """Takes what is needed from the counts of the validation split."""
        labels, logits, passing, positives, _ = map(np.asarray, counts.one_logit)
        return cls(labels, logits, passing, positives, counts.false_passing)

    def per_class(self, rule: Rule, *, num_classes: int) -> Float[np.ndarray, " classes"]:
        """The threshold of each class by its own examples.

        Args:
          rule: How to choose.
          num_classes: The number of classes k.

        Returns:
          One threshold per class, shape ``[k]``; NaN for a class without validation examples, and where no threshold
          reaches the wanted precision.
        """
        return _choose(rule, self.labels, self.logits, self.passing, self.positives, num_classes)

    def shared(self, rule: Rule) -> float:
        """The one threshold for all classes, by all true and false logits together; NaN if none satisfies the rule."""
        # How many true logits are at least as large as each.
        ascending = np.sort(self.logits[~np.isnan(self.logits)])
        positives = len(ascending) - np.searchsorted(ascending, self.logits)
        passing = positives + self.false_passing
        (threshold,) = _choose(rule, np.zeros_like(self.labels), self.logits, passing, positives, 1)
        return float(threshold)

    def of_class(self, rule: Rule, class_id: int) -> Threshold:
        """The threshold to use for a class: its own if enough examples support it, and else that of all classes.

        Args:
          rule: How to choose.
          class_id: The class.

        Returns:
          The threshold; NaN if no threshold reaches the wanted precision.

        Examples:
          >>> import numpy as np
          >>> zeros, ones = np.zeros(3, np.int64), np.array([1, 2, 3])
          >>> logits = np.array([3.0, 2.0, 1.0], np.float32)
          >>> Thresholds(np.array([0, 1, 2]), logits, zeros + 1, zeros + 1, zeros).of_class(Rule("recall", 0.6), 0)
          Threshold(value=2.0, origin='all classes')
        """
        if rule.kind == "value":
            return Threshold(rule.value, "given")
        own = self.labels == class_id
        if np.count_nonzero(own) >= MIN_EXAMPLES:
            arrays = (self.logits[own], self.passing[own], self.positives[own])
            (threshold,) = _choose(rule, np.zeros_like(self.labels[own]), *arrays, 1)
            return Threshold(float(threshold), "class")
        return Threshold(self.shared(rule), "all classes")

    def save(self, run_dir: str | Path) -> None:
        """Writes ``thresholds.npz`` into a run directory."""
        np.savez_compressed(Path(run_dir) / "thresholds.npz", **vars(self))

    @classmethod
    def load(cls, run_dir: str | Path) -> "Thresholds":
        """Reads what `save` wrote.

        Raises:
          ConfigError: if the run has not been evaluated.
        """
        path = Path(run_dir) / "thresholds.npz"
        if not path.exists():
            raise ConfigError(
                f"The run in {run_dir} has no thresholds yet; make them with eval_slc.py {run_dir}, or give a number."
            )
        with np.load(path) as arrays:
            return cls(**arrays)


def _choose(rule: Rule, labels, logits, passing, positives, num_classes) -> Float[np.ndarray, " classes"]:
    """Picks one of the examples of each class: the one that the rule ranks highest of those that satisfy it."""
    if rule.kind == "value":
        return np.full(num_classes, rule.value, np.float32)
    class_sizes = np.bincount(labels, minlength=num_classes)
    is_found = positives > 0  # a logit that is NaN passes nothing, itself included
    labels, logits, passing, positives = (a[is_found] for a in (labels, logits, passing, positives))
    precision, recall = positives / passing, positives / class_sizes[labels]
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
    return thresholds - _SLACK * np.maximum(1, np.abs(thresholds))
