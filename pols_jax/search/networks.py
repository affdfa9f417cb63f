"""The networks that a `ClassBank` can ask: of a run, exported, or from elsewhere."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pols_jax.data import scale_pixels
from pols_jax.errors import ConfigError, RunError, shell_word
from pols_jax.heads import all_logits
from pols_jax.metrics.thresholds import Thresholds
from pols_jax.normalizers import Normalizer
from pols_jax.search.exported import Exported, ExportedRows
from pols_jax.training.checkpoint_reading import HeadRows
from pols_jax.training.run_normalizer import score_id
from pols_jax.training.runs import Run
from pols_jax.training.stored_arrays import crc32

if TYPE_CHECKING:
    from pols_jax.evaluation.adopting import Adopted
    from pols_jax.evaluation.foreign_heads import ForeignHead, Ladder

BATCH_SIZES = (1, 8, 64)
"""Batches are padded to the next of these sizes, so that a program is compiled at most this often."""

# Floats are refused beyond this: rounding may pass 1, pixels in [0, 255] do by far.
_LARGEST_PIXEL = 1.001


@dataclasses.dataclass(frozen=True)
class GivenArrays:
    """An output layer that was given as arrays, with the normalizers that were tried on it."""

    head: "ForeignHead"
    ladder: "Ladder"

    @property
    def place(self) -> str:
        """What messages call it."""
        return self.head.place

    def head_rows(self) -> "ForeignHead":
        """The output layer."""
        return self.head

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        return self.head.class_names

    @property
    def normalizer(self) -> Normalizer | None:
        """The normalizer that was chosen."""
        return self.ladder.chosen.normalizer

    @functools.cached_property
    def checkpoint(self) -> str:
        """The checksum of the arrays."""
        return f"arrays-{crc32(self.head.kernel, self.head.bias):08x}"

    def thresholds(self, _: Normalizer | None) -> Thresholds:
        """What the validation examples gave for the normalizer that was chosen."""
        if self.ladder.thresholds is None:
            from pols_jax.evaluation.foreign_heads import no_thresholds

            raise no_thresholds(self.place)
        return self.ladder.thresholds


class Network(abc.ABC):
    """What a bank needs to know of a network.

    Attributes:
      source: What has its names, its normalizer, and what identifies its parameters.
      head: The output layer, whose rows are read as they are asked for.
      place: Where it is, for messages.
      dtype: What its logits are computed in.
      image_shape: Height, width and channels of the pictures it looks at; None if somebody else makes the features.
      num_traces: How often its program was compiled.
    """

    dtype: Any = np.float32
    image_shape: tuple[int, int, int] | None = None
    num_traces = 0

    def __init__(
        self,
        source: "Run | Exported | Adopted | GivenArrays",
        head: "HeadRows | ExportedRows | ForeignHead",
        place: str,
    ):
        self.source, self.head, self.place = source, head, place

    @abc.abstractmethod
    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What the thresholds of its logits, minus the normalizer, follow from."""

    @abc.abstractmethod
    def features(self, images: Any) -> Float[np.ndarray, "images features"]:
        """What the output layer is given for a batch, which is checked."""

    def _of_shape(self, images: Any) -> np.ndarray:
        images, image_shape = np.asarray(images), self.image_shape or ()
        if images.shape[1:] != image_shape:
            wanted = ", ".join(map(str, image_shape))
            raise ValueError(f"images must have shape [m, {wanted}], got {images.shape}.")
        return images


def in_batches(call: Callable[[np.ndarray], Any], array: np.ndarray, width: int) -> np.ndarray:
    """Calls a function on padded parts of an array, as uint8 or float32, and takes the padding off its rows again.

    Examples:
      >>> in_batches(lambda batch: batch.sum(axis=1, keepdims=True), np.ones((70, 3)), width=1).shape
      (70, 1)
    """
    parts = [np.zeros((0, width), np.float32)]
    for start in range(0, len(array), BATCH_SIZES[-1]):
        batch = array[start : start + BATCH_SIZES[-1]]
        size = next(size for size in BATCH_SIZES if size >= len(batch))
        padded = np.zeros((size, *array.shape[1:]), np.uint8 if array.dtype == np.uint8 else np.float32)
        padded[: len(batch)] = batch
        parts.append(np.asarray(call(padded), np.float32)[: len(batch)])
    return np.concatenate(parts)


def scores(
    features: Float[Array, "images features"],
    kernel: Float[Array, "classes features"],
    bias: Float[Array, " classes"],
    normalizer: Normalizer | None,
    *,
    dtype: Any,
) -> Float[Array, "images classes"]:
    """Computes what a class is asked by: its logits in a dtype, minus the normalizer if there is one.

    Examples:
      >>> scores(jnp.ones((1, 2)), jnp.eye(2), jnp.array([0.0, 3.0]), None, dtype=jnp.bfloat16).tolist()
      [[1.0, 4.0]]
    """
    logits = all_logits(features.astype(dtype), kernel.astype(dtype), jnp.asarray(bias))
    return logits if normalizer is None else logits - normalizer(features)[:, None]


class TrainedNetwork(Network):
    """The network of a run."""

    head: HeadRows  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, run: Run):
        super().__init__(run, HeadRows(run.directory, step=run.step), str(run.directory))
        if self.head.shape[0] != run.num_classes:
            raise RunError(
                f"The run in {run.directory} has {run.num_classes} classes, and its checkpoint {self.head.shape[0]}."
            )
        self.run, self.image_shape, self.dtype = run, run.image_shape, run.model.dtype or np.float32
        self._apply = jax.jit(self._traced)

    @functools.cached_property
    def _variables(self) -> Any:
        """The parameters of the backbone, read when it is first asked to look: who has features does without."""
        return jax.device_put(self.run.restore_backbone())

    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What evaluation found on the validation split."""
        run, measure = self.run, f"pols eval {shell_word(self.run.directory)} --use {self.run.use}"
        try:
            return Thresholds.load(
                run.directory,
                checkpoint=score_id(run.checkpoint, normalizer),
                num_classes=run.num_classes,
                normalized=normalizer is not None,
                advice=f"with {measure}, or give a number",
            )
        except RunError as error:
            if run.is_evaluated is not False:
                raise
            raise RunError(
                f"The run in {run.directory} was evaluated, but not at step {run.step}; make thresholds for that with "
                f"{measure}, or leave --use out to search with the step that was evaluated."
            ) from error

    def features(self, images: Any) -> Float[np.ndarray, "images features"]:
        """Checks images, and lets the backbone look at them."""
        images = self._of_shape(images)
        if images.dtype == np.uint8:
            images = np.asarray(scale_pixels(images))
        elif not np.all(np.abs(images) <= _LARGEST_PIXEL):  # NaN neither
            raise ValueError(
                f"images must be uint8, or floats in [-1, 1], got {images.dtype} from {np.min(images):g} to "
                f"{np.max(images):g}; scale_pixels(images) scales uint8."
            )
        return in_batches(lambda batch: self._apply(self._variables, batch), images, self.head.shape[1])

    def _traced(self, variables: Any, images):
        self.num_traces += 1
        return self.run.model.backbone.apply(variables, images)


class ExportedNetwork(Network):
    """A network that ``pols export`` wrote: its program makes the features."""

    def __init__(self, exported: Exported, *, raw: bool):
        super().__init__(exported, exported.rows, str(exported.directory))
        manifest = exported.manifest
        if raw and manifest.normalizer is not None:
            raise ConfigError(
                f"{self.place} was exported with its normalizer; for the raw logits, export the run with --raw."
            )
        self.dtype, self.image_shape = np.dtype(manifest.dtype), manifest.image_shape
        self._exported, self._apply = exported, jax.jit(self._traced)

    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What the run had: an export has one score, that of its program."""
        return self._exported.thresholds()

    def features(self, images: Any) -> Float[np.ndarray, "images features"]:
        """Checks images, and lets the program look at them."""
        images = self._of_shape(images)
        if images.dtype != np.uint8:
            raise ValueError(f"images must be uint8 for an exported network, got {images.dtype}.")
        return in_batches(self._apply, images, self.head.shape[1])

    def _traced(self, images):
        self.num_traces += 1
        # Features do not depend on the rows: one of zeros stands for them all.
        program, one = self._exported.program, jnp.zeros((1, self.head.shape[1]))
        rows = one.astype(self._exported.manifest.rows_dtype), jnp.ones(1), jnp.zeros(1)
        return program.call(images, one[0], jnp.zeros(()), *rows[: len(program.in_avals) - 3])[1]


class ForeignNetwork(Network):
    """A network from elsewhere, adopted or given as arrays: logits in float32, and somebody else's features."""

    def __init__(self, source: "Adopted | GivenArrays", features_of: Callable[[Any], Any] | None):
        super().__init__(source, source.head_rows(), source.place)
        self._foreign, self._features_of = source, features_of

    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What validation examples gave, if there were some."""
        return self._foreign.thresholds(normalizer)

    def features(self, images: Any) -> Float[np.ndarray, "images features"]:
        """Asks the function that was given."""
        if self._features_of is None:
            raise ConfigError(
                f"{self.place} cannot look at pictures; give features_of=, which makes features of them, or use "
                "logits_of_features."
            )
        features, num_features = np.asarray(self._features_of(images), np.float32), self.head.shape[1]
        if features.shape != (len(images), num_features):
            raise ConfigError(
                f"features_of must give an array of shape [{len(images)}, {num_features}], got {list(features.shape)}."
            )
        return features
