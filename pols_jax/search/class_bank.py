"""`ClassBank`: asks a trained network about one class at a time.

Only the backbone is loaded. The row of a class is read from the checkpoint when the class is first asked for, so that
opening a network and asking costs the same for a thousand classes and for a million.

The network may be one of a run, or one that was trained elsewhere: the bank then has its output layer, and whoever asks
brings the features, or a function that makes features of pictures.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Num

from pols_jax.errors import ConfigError
from pols_jax.metrics.thresholds import Rule, Threshold, Thresholds
from pols_jax.normalizers import Normalizer, fold
from pols_jax.search.class_names import ClassNames
from pols_jax.search.exported import Exported, is_exported
from pols_jax.search.networks import (
    ExportedNetwork,
    ForeignNetwork,
    GivenArrays,
    Network,
    TrainedNetwork,
    in_batches,
    scores,
)
from pols_jax.training.run_files import is_adopted
from pols_jax.training.runs import Run, find_run

if TYPE_CHECKING:
    from pols_jax.evaluation.normalizing import Rung

# The number of asked classes is padded to a multiple of this.
_CLASSES_AT_ONCE = 8


class ClassRow(NamedTuple):
    """What the output layer has about one class: its row, shape ``[d]``, and its bias."""

    kernel: Float[np.ndarray, " features"]
    bias: float


class ClassBank:
    """A trained network of which single classes can be asked for.

    `ClassBank.open` opens a run, what ``pols export`` made of one, or what ``pols adopt`` made of a network that was
    trained elsewhere.
    `ClassBank.from_arrays` takes the arrays of such a network.

    If a normalizer was fitted to the network, it is subtracted from every logit.

    Attributes:
      normalizer: What is subtracted from its logits; None if there is none, or the raw logits were asked for.
      ladder: The normalizers that `from_arrays` tried, fewest rows first; empty for a network that was opened.

    Examples:
      >>> from pols_jax.data import load
      >>> bank = ClassBank.open("runs/digits")
      >>> images = load("glyphs", characters="0030-0039").test.images
      >>> bank.decide(images, "digit seven", rule="0.5").shape
      (30,)
    """

    def __init__(self, network: Network, *, raw: bool = False, ladder: "Sequence[Rung]" = ()):
        self._network = network
        self.normalizer = None if raw else network.source.normalizer
        self.ladder = tuple(ladder)
        self._num_traces = 0
        self._rows: dict[int, ClassRow] = {}
        self._scores = jax.jit(self._traced_scores)

    @classmethod
    def open(
        cls,
        run_dir: str | Path,
        *,
        raw: bool = False,
        use: Literal["best", "last"] | None = None,
        features_of: Callable[[Any], Float[np.ndarray, "images features"]] | None = None,
    ) -> "ClassBank":
        """Opens the network of a run, an exported one, or an adopted one.

        Args:
          run_dir: The run directory, or that of an experiment that consists of one run, or what ``pols export`` or
            ``pols adopt`` wrote.
          raw: Whether to leave the normalizer out; an export that has one cannot do without.
          use: Which checkpoint of a run, as for `Run.open`: by default the one that was evaluated, else the best.
          features_of: For an adopted network, as for `from_arrays`; a run and an export have their own.

        Raises:
          RunError: if there is no finished run in the directory, or several, or a file of it cannot be used.
          CheckpointError: if its checkpoint is damaged.
        """
        if is_adopted(run_dir):
            from pols_jax.evaluation.adopting import Adopted  # here, because a run is opened without it

            return cls(ForeignNetwork(Adopted.open(run_dir), features_of), raw=raw)
        if is_exported(run_dir):
            network = ExportedNetwork(Exported.open(run_dir), raw=raw)
        else:
            network = TrainedNetwork(Run.open(find_run(run_dir), use=use))
        if features_of is not None:
            raise ConfigError(f"features_of is for adopted networks; {run_dir} has its own network.")
        return cls(network, raw=raw)

    @classmethod
    def from_arrays(
        cls,
        kernel: Float[np.ndarray, "classes features"],
        bias: Float[np.ndarray, " classes"] | None = None,
        class_names: Sequence[str] | None = None,
        *,
        features: Float[np.ndarray, "examples features"] | None = None,
        validation: tuple[Any, Any] | None = None,
        features_of: Callable[[Any], Float[np.ndarray, "images features"]] | None = None,
        normalizer: Normalizer | int | str | None = None,
    ) -> "ClassBank":
        """Takes the output layer of a network that was trained elsewhere, and makes its single logits comparable.

        With features, normalizers are fitted to it: affine, 256 and 1,024 rows, as far as they are fewer than the
        classes and not more than the features. The one with the fewest rows that is nearly the best is used, or
        none: by AUPRC on the validation examples, or without those by how well log Z is estimated. This takes seconds
        to minutes; ``pols adopt`` does it once and writes it down.

        Args:
          kernel: One row per class, shape ``[k, d]`` (not ``[d, k]``).
          bias: One number per class, shape ``[k]``; zeros if None.
          class_names: One name per class; the class ids if None.
          features: What the output layer is given for examples, as many as possible, shape ``[n, d]``.
          validation: Features ``[m, d]`` and labels ``[m]`` of other examples, for the choice and for thresholds.
          features_of: Makes features ``[m, d]`` of a batch of whatever `logits` and `decide` are to be asked about.
          normalizer: A normalizer that is there already, or how many rows to fit: a number, ``affine``, ``none`` or
            ``choose``; by default ``choose`` if there are features, and else ``none``.

        Returns:
          The bank; its ``ladder`` has what was tried.

        Raises:
          ConfigError: with one sentence, if the arrays do not fit together.

        Examples:
          >>> rng = np.random.default_rng(0)
          >>> kernel, labels = rng.normal(size=(30, 8)), np.arange(600) % 30
          >>> features = kernel[labels] + rng.normal(size=(600, 8))
          >>> bank = ClassBank.from_arrays(
          ...     kernel, features=features[:300], validation=(features[300:], labels[300:])
          ... )
          >>> [rung.normalizer and rung.normalizer.num_rows for rung in bank.ladder]
          [None, 1]
          >>> is_seven = bank.logits_of_features(features[300:], 7) >= bank.threshold(7).value
          >>> float(np.mean(is_seven[labels[300:] == 7]))
          0.9
        """
        # Here, because a run is opened without what fits and measures.
        from pols_jax.evaluation.foreign_heads import ForeignHead, climb

        head = ForeignHead.checked(kernel, bias, class_names, features=features, validation=validation)
        if normalizer is None:
            normalizer = "none" if features is None else "choose"
        ladder = climb(head, rows=normalizer if isinstance(normalizer, Normalizer) else str(normalizer))
        return cls(ForeignNetwork(GivenArrays(head, ladder), features_of), ladder=ladder.rungs)

    @property
    def run(self) -> Run:
        """The run it is from; a `ConfigError` if it is not from one."""
        if isinstance(self._network, TrainedNetwork):
            return self._network.run
        if self._network.image_shape is not None:
            raise ConfigError(
                f"{self.place} is an export, without the data that it was trained on; name pictures instead of --split."
            )
        raise self._without_pictures()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the pictures it looks at; a `ConfigError` if it looks at none."""
        if self._network.image_shape is None:
            raise self._without_pictures()
        return self._network.image_shape

    @property
    def place(self) -> str:
        """Where the network is, for messages."""
        return self._network.place

    @property
    def checkpoint(self) -> str:
        """What identifies the parameters of the network; an index of features carries it."""
        return self._network.source.checkpoint

    @property
    def num_features(self) -> int:
        """The width d of the output layer."""
        return self._network.head.shape[1]

    @property
    def num_traces(self) -> int:
        """How often a program was compiled: once per batch size for features and for logits, whatever the classes."""
        return self._num_traces + self._network.num_traces

    @property
    def names(self) -> tuple[str, ...]:
        """One name per class."""
        return self._network.source.class_names

    @functools.cached_property
    def thresholds(self) -> Thresholds:
        """From which the threshold of any rule follows; a `RunError` if there are none, as in a run before evaluation."""
        return self._network.thresholds(self.normalizer)

    def class_id(self, name_or_id: str | int) -> int:
        """Finds a class by its name, in upper or lower case, by the character that it is the name of, or by its id.

        Raises:
          ConfigError: if there is no such class; with the nearest names.
        """
        if not isinstance(name_or_id, str):
            num_classes = self._network.head.shape[0]
            if not 0 <= name_or_id < num_classes:
                raise ConfigError(f"Class ids are from 0 to {num_classes - 1}, got {name_or_id}.")
            return int(name_or_id)
        return self._class_names.find(name_or_id)

    def find_classes(self, pattern: str = "") -> list[int]:
        """Lists the classes that a pattern stands for.

        Args:
          pattern: Part of a name, in upper or lower case; with ``*``, ``?`` or ``[...]``, a pattern for the whole name; or
            a single character, which also finds the class that is named after it.

        Returns:
          Class ids, in order.
        """
        return self._class_names.like(pattern)

    def row(self, name_or_id: str | int) -> ClassRow:
        """Reads and checks what the output layer has about a class; the second time, from memory.

        An affine normalizer is in the row already: it costs nothing.

        Raises:
          ConfigError: if there is no such class.
          CheckpointError: if the row cannot be read, or has changed since it was saved.
        """
        class_id = self.class_id(name_or_id)
        if class_id not in self._rows:
            kernel, bias = self._network.head.read([class_id])
            if self.normalizer is not None and self.normalizer.num_rows == 1:
                kernel, bias = map(np.asarray, fold(self.normalizer, kernel, bias))
            self._rows[class_id] = ClassRow(kernel[0], float(bias[0]))
        return self._rows[class_id]

    def rows(
        self, classes: Sequence[str | int]
    ) -> tuple[Float[np.ndarray, "classes features"], Float[np.ndarray, " classes"]]:
        """Reads the rows of some classes as the network multiplies them.

        Returns:
          Kernel ``[c, d]`` and bias ``[c]``, in float32.
        """
        rows = [self.row(name_or_id) for name_or_id in classes]
        kernel = np.stack([row.kernel for row in rows]) if rows else np.zeros((0, self.num_features))
        rounded = np.asarray(kernel, self._network.dtype)
        return rounded.astype(np.float32), np.array([row.bias for row in rows], np.float32)

    def threshold(self, name_or_id: str | int, rule: str | Rule = "recall=0.9") -> Threshold:
        """Chooses the threshold of a class.

        Args:
          name_or_id: The class.
          rule: ``recall=0.9``, ``precision=0.95``, ``f1``, or a number, which is the threshold itself.

        Returns:
          The threshold: that of the class if its validation examples support one, and else that of all classes.

        Raises:
          ConfigError: if the run has not been evaluated, or no threshold reaches the wanted precision.
        """
        rule = Rule.parse(rule) if isinstance(rule, str) else rule
        class_id = self.class_id(name_or_id)
        if rule.kind == "value":
            return Threshold(rule.value, "given")
        threshold = self.thresholds.of_class(rule, class_id)
        if np.isnan(threshold.value):
            raise ConfigError(
                f"On the validation split no threshold of {self.names[class_id]} reaches {rule}; ask for less."
            )
        return threshold

    def features(
        self, images: Num[np.ndarray, "images height width channels"]
    ) -> Float[np.ndarray, "images features"]:
        """Computes what the output layer is given: once, for any number of questions.

        Args:
          images: As for `logits`.

        Returns:
          Features, shape ``[m, d]``.
        """
        return self._network.features(images)

    def logits_of_features(
        self, features: Float[np.ndarray, "images features"], classes: str | int | Sequence[str | int]
    ) -> Float[np.ndarray, "images *classes"]:
        """Computes the logits of some classes, and of no others, minus the normalizer if there is one.

        Args:
          features: Features, shape ``[m, d]``.
          classes: Names or ids of ``c`` classes, or a single one.

        Returns:
          Logits, shape ``[m, c]``; of a single class, ``[m]``.

        Raises:
          ValueError: if the features have another width than the output layer.
        """
        if isinstance(classes, str | int | np.integer):
            return self.logits_of_features(features, [classes])[:, 0]
        features = np.asarray(features)
        if features.ndim != 2 or features.shape[1] != self.num_features:
            raise ValueError(
                f"features must have shape [m, {self.num_features}], got {list(features.shape)}."
            )
        kernel, bias = self.rows(classes)
        padding = -len(bias) % _CLASSES_AT_ONCE
        kernel, bias = np.pad(kernel, ((0, padding), (0, 0))), np.pad(bias, (0, padding))
        logits = in_batches(
            lambda batch: self._scores(batch, kernel, bias, self.estimator), features, len(bias)
        )
        return logits[:, : len(classes)]

    def logits(
        self,
        images: Num[np.ndarray, "images height width channels"],
        classes: str | int | Sequence[str | int],
    ) -> Float[np.ndarray, "images *classes"]:
        """Computes the logits of some classes, and of no others, minus the normalizer if there is one.

        Args:
          images: uint8 pixels as `pols_jax.data.decode_image` gives them, or floats in [-1, 1], shape ``[m, h, w, c]``;
            for a network that was trained elsewhere, whatever its ``features_of`` takes.
          classes: Names or ids of ``c`` classes, or a single one.

        Returns:
          Logits, shape ``[m, c]``; of a single class, ``[m]``.

        Raises:
          ValueError: if the images have another shape than the network wants, or floats outside of [-1, 1].
        """
        return self.logits_of_features(self.features(images), classes)

    def decide(
        self,
        images: Num[np.ndarray, "images height width channels"],
        name_or_id: str | int,
        *,
        rule: str | Rule = "recall=0.9",
    ) -> Bool[np.ndarray, " images"]:
        """Tells which images belong to a class, by its logit alone.

        Args:
          images: As for `logits`.
          name_or_id: The class.
          rule: As for `threshold`.

        Returns:
          One answer per image, shape ``[m]``.
        """
        return self.logits(images, [name_or_id])[:, 0] >= self.threshold(name_or_id, rule).value

    def _without_pictures(self) -> ConfigError:
        return ConfigError(
            f"{self.place} has an output layer and no network that looks at pictures; ask it from Python, with "
            "ClassBank.open(DIR, features_of=...)."
        )

    @functools.cached_property
    def _class_names(self) -> ClassNames:
        listed = "names" if isinstance(self._network.source, GivenArrays) else "class_names.json"
        return ClassNames(self.names, place=self.place, listed=listed)

    @property
    def estimator(self) -> Normalizer | None:
        """What is subtracted from logits; an affine normalizer is in the rows already."""
        return None if self.normalizer is None or self.normalizer.num_rows == 1 else self.normalizer

    def _traced_scores(self, features, kernel, bias, normalizer: Normalizer | None):
        self._num_traces += 1
        return scores(features, kernel, bias, normalizer, dtype=self._network.dtype)
