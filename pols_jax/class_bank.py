"""`ClassBank`: asks a trained network about one class at a time.

Only the backbone is loaded. The row of a class is read from the checkpoint when the class is first asked for, so that
opening a network and asking costs the same for a thousand classes and for a million.
"""

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Num

from pols_jax.checkpoints import HeadRows
from pols_jax.config import ConfigError
from pols_jax.data import scale_pixels
from pols_jax.heads import all_logits
from pols_jax.runs import Run
from pols_jax.thresholds import Rule, Threshold, Thresholds

BATCH_SIZES = (1, 8, 64)
"""Images are padded to the next of these sizes, so that a network is compiled at most this often."""

# The number of asked classes is padded to a multiple of this.
_CLASSES_AT_ONCE = 8


class ClassRow(NamedTuple):
    """What the output layer has about one class.

    Attributes:
      kernel: Its row, shape ``[d]``.
      bias: Its bias.
    """

    kernel: Float[np.ndarray, " features"]
    bias: float


class ClassBank:
    """A trained network of which single classes can be asked for.

    Open one with `ClassBank.open`.

    Attributes:
      run: The run it is from.
      num_traces: How often a program was compiled: once per batch size, whatever the classes.

    Examples:
      >>> import tempfile
      >>> from pols_jax.config import RunConfig
      >>> from pols_jax.data import load
      >>> from pols_jax.training import RunOptions, fit
      >>> config = RunConfig(width=0.1, characters="0030-0039", batch_size=32, steps=2)
      >>> dataset = load("glyphs", **config.options())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = fit(config, dataset, folder, options=RunOptions(quiet=True))
      ...     bank = ClassBank.open(folder)
      ...     is_seven = bank.decide(dataset.test.images, "digit seven", rule="0.5")
      >>> is_seven.shape
      (30,)
    """

    def __init__(self, run: Run):
        self.run = run
        self.num_traces = 0
        self._rows: dict[int, ClassRow] = {}
        self._head = HeadRows(run.directory, step=run.step)
        self._variables = jax.device_put(run.restore_backbone())
        self._scores = jax.jit(self._traced_scores)

    @classmethod
    def open(cls, run_dir: str | Path) -> "ClassBank":
        """Opens the network of a run at its last step.

        Args:
          run_dir: The run directory.

        Raises:
          RunError: if there is no finished run in the directory.
        """
        return cls(Run.open(run_dir))

    @property
    def names(self) -> tuple[str, ...]:
        """One name per class."""
        return self.run.class_names

    @functools.cached_property
    def thresholds(self) -> Thresholds:
        """From which the threshold of any rule follows; a `ConfigError` if the run has not been evaluated."""
        return Thresholds.load(self.run.directory)

    def class_id(self, name_or_id: str | int) -> int:
        """Finds a class by its name, in upper or lower case, or by its id.

        Raises:
          ConfigError: if there is no such class; with the nearest names.
        """
        if not isinstance(name_or_id, str):
            if not 0 <= name_or_id < self.run.num_classes:
                raise ConfigError(f"Class ids are from 0 to {self.run.num_classes - 1}, got {name_or_id}.")
            return int(name_or_id)
        wanted = name_or_id.casefold()
        found = [class_id for class_id, name in enumerate(self.names) if name.casefold() == wanted]
        exact = [class_id for class_id in found if self.names[class_id] == name_or_id]
        if len(exact or found) == 1:
            return (exact or found)[0]
        if found:
            names = " and ".join(self.names[class_id] for class_id in found)
            raise ConfigError(f"The class {name_or_id!r} could be {names}; write it as it is.")
        folded = [name.casefold() for name in self.names]
        near = difflib.get_close_matches(wanted, folded, n=3, cutoff=0.4)
        nearest = [self.names[folded.index(name)] for name in near]
        advice = f"the nearest are {', '.join(nearest)}" if nearest else "class_names.json lists them all"
        raise ConfigError(f"There is no class named {name_or_id!r} in {self.run.directory}; {advice}.")

    def row(self, name_or_id: str | int) -> ClassRow:
        """Reads what the output layer has about a class; the second time, from memory."""
        class_id = self.class_id(name_or_id)
        if class_id not in self._rows:
            kernel, bias = self._head.read([class_id])
            self._rows[class_id] = ClassRow(kernel[0], float(bias[0]))
        return self._rows[class_id]

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

    def logits(
        self, images: Num[np.ndarray, "images height width channels"], classes: Sequence[str | int]
    ) -> Float[np.ndarray, "images classes"]:
        """Computes the logits of some classes, and of no others.

        Args:
          images: uint8 pixels as `pols_jax.data.decode_image` gives them, or floats in [-1, 1], shape ``[m, h, w, c]``.
          classes: Names or ids of ``c`` classes.

        Returns:
          Logits, shape ``[m, c]``.

        Raises:
          ValueError: if the images have another shape than the network wants.
        """
        images = np.asarray(images)
        if images.shape[1:] != self.run.image_shape:
            raise ValueError(
                f"images must have shape [m, {', '.join(map(str, self.run.image_shape))}], got {images.shape}."
            )
        if images.dtype == np.uint8:
            images = np.asarray(scale_pixels(images))
        kernel, bias = self._padded_rows(classes)
        parts = [np.zeros((0, len(classes)), np.float32)]
        for start in range(0, len(images), BATCH_SIZES[-1]):
            batch = images[start : start + BATCH_SIZES[-1]]
            size = next(size for size in BATCH_SIZES if size >= len(batch))
            padded = np.zeros((size, *images.shape[1:]), np.float32)
            padded[: len(batch)] = batch
            scores = np.asarray(self._scores(self._variables, padded, kernel, bias))
            parts.append(scores[: len(batch), : len(classes)])
        return np.concatenate(parts)

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

    def _padded_rows(self, classes: Sequence[str | int]) -> tuple[np.ndarray, np.ndarray]:
        rows = [self.row(name_or_id) for name_or_id in classes]
        size = -(-len(rows) // _CLASSES_AT_ONCE) * _CLASSES_AT_ONCE
        kernel, bias = np.zeros((size, self._head.shape[1]), np.float32), np.zeros(size, np.float32)
        for i, row in enumerate(rows):
            kernel[i], bias[i] = row
        return kernel, bias

    def _traced_scores(self, variables: Any, images, kernel, bias):
        self.num_traces += 1
        model = self.run.model
        features = model.backbone.apply(variables, images)
        dtype = model.dtype or features.dtype
        return all_logits(features.astype(dtype), kernel.astype(dtype), jnp.asarray(bias))
