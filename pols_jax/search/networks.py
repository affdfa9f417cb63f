"""The networks that a `ClassBank` can ask: of a run, exported, adopted from elsewhere, or given as arrays."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pols_jax.data import scale_pixels
from pols_jax.errors import ConfigError, RunError, shell_word
from pols_jax.heads import all_logits
from pols_jax.metrics.thresholds import Thresholds
from pols_jax.normalizers import Normalizer
from pols_jax.search.exported import Exported
from pols_jax.training.checkpoint_reading import HeadRows
from pols_jax.training.run_normalizer import score_id
from pols_jax.training.runs import Run
from pols_jax.training.stored_arrays import crc32

if TYPE_CHECKING:
    from pols_jax.evaluation.adopting import Adopted
    from pols_jax.evaluation.foreign_heads import ForeignHead

__all__ = [
    "BATCH_SIZES",
    "AdoptedNetwork",
    "ExportedNetwork",
    "GivenNetwork",
    "Network",
    "TrainedNetwork",
    "in_batches",
    "scores",
]

BATCH_SIZES = (1, 8, 64)
"""Batches are padded to the next of these sizes, so that a program is compiled at most this often."""

# Floats are refused beyond this: rounding may pass 1, pixels in [0, 255] do by far.
_LARGEST_PIXEL = 1.001

FeaturesOf = Callable[[Any], Any]


class Rows(Protocol):
    """An output layer whose rows are read as they are asked for."""

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of classes and of features."""
        ...

    def read(self, class_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Reads kernel rows ``[c, d]`` and biases ``[c]``."""
        ...


class Network(Protocol):
    """What a bank needs to know of a network; ``dtype`` is what its logits are computed in."""

    dtype: Any
    num_traces: int

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of the pictures it looks at; None if somebody else makes the features."""
        ...

    @property
    def head(self) -> Rows:
        """The output layer."""
        ...

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        ...

    @property
    def checkpoint(self) -> str:
        """What identifies its parameters."""
        ...

    @property
    def num_classes(self) -> int:
        """The number of classes k."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        ...

    @property
    def normalizer(self) -> Normalizer | None:
        """What is subtracted from its logits, if anything is."""
        ...

    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What the thresholds of its logits, minus the normalizer, follow from."""
        ...

    def features(self, images: Any) -> Float[np.ndarray, "images features"]:
        """What the output layer is given for a batch."""
        ...


def in_batches(call: Callable[[np.ndarray], Any], array: np.ndarray) -> np.ndarray:
    """Calls a function on padded parts of an array, as uint8 or float32, and takes the padding off again.

    Examples:
      >>> in_batches(lambda batch: batch.sum(axis=1, keepdims=True), np.ones((70, 3))).shape
      (70, 1)
    """
    parts = [np.zeros(0, np.float32)]
    for start in range(0, len(array), BATCH_SIZES[-1]):
        batch = array[start : start + BATCH_SIZES[-1]]
        size = next(size for size in BATCH_SIZES if size >= len(batch))
        padded = np.zeros((size, *array.shape[1:]), np.uint8 if array.dtype == np.uint8 else np.float32)
        padded[: len(batch)] = batch
        parts.append(np.asarray(call(padded), np.float32)[: len(batch)])
    return np.concatenate(parts[1:] or parts)


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


class TrainedNetwork:
    """The network of a run."""

    def __init__(self, run: Run):
        self.run = run
        self.image_shape = run.image_shape
        self.num_traces = 0
        self.head = HeadRows(run.directory, step=run.step)
        if self.head.shape[0] != run.num_classes:
            raise RunError(
                f"The run in {run.directory} has {run.num_classes} classes, and its checkpoint {self.head.shape[0]}."
            )
        self.dtype = run.model.dtype or np.float32
        self._apply = jax.jit(self._traced)

    @functools.cached_property
    def _variables(self) -> Any:
        """The parameters of the backbone, read when it is first asked to look: who has features does without."""
        return jax.device_put(self.run.restore_backbone())

    @property
    def place(self) -> str:
        """The run directory."""
        return str(self.run.directory)

    @property
    def checkpoint(self) -> str:
        """What identifies its parameters."""
        return self.run.checkpoint

    @property
    def num_classes(self) -> int:
        """The number of classes k."""
        return self.run.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        return self.run.class_names

    @property
    def normalizer(self) -> Normalizer | None:
        """The normalizer that was fitted to the run."""
        return self.run.normalizer

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
        images = np.asarray(images)
        _check_shape(images, self.image_shape)
        if images.dtype == np.uint8:
            images = np.asarray(scale_pixels(images))
        elif not np.all(np.abs(images) <= _LARGEST_PIXEL):  # NaN neither
            raise ValueError(
                f"images must be uint8, or floats in [-1, 1], got {images.dtype} from {np.min(images):g} to "
                f"{np.max(images):g}; scale_pixels(images) scales uint8."
            )
        features = in_batches(lambda batch: self._apply(self._variables, batch), images)
        return features.reshape(len(images), self.head.shape[1])

    def _traced(self, variables: Any, images):
        self.num_traces += 1
        return self.run.model.backbone.apply(variables, images)


class ExportedNetwork:
    """A network that ``pols export`` wrote: its program makes the features."""

    def __init__(self, exported: Exported, *, raw: bool = False):
        manifest = exported.manifest
        if raw and manifest.normalizer is not None:
            raise ConfigError(
                f"{exported.place} was exported with its normalizer; for the raw logits, export the run with --raw."
            )
        self.place, self.head, self.num_traces = exported.place, exported.rows, 0
        self.dtype, self.image_shape = np.dtype(manifest.dtype), manifest.image_shape
        self.num_classes, self.checkpoint = manifest.num_classes, manifest.checkpoint
        self.normalizer = exported.normalizer
        self._exported, self._apply = exported, jax.jit(self._traced)

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        return self._exported.class_names

    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What the run had: an export has one score, that of its program."""
        return self._exported.thresholds()

    def features(self, images: Any) -> Float[np.ndarray, "images features"]:
        """Checks images, and lets the program look at them."""
        images = np.asarray(images)
        _check_shape(images, self.image_shape)
        if images.dtype != np.uint8:
            raise ValueError(f"images must be uint8 for an exported network, got {images.dtype}.")
        return in_batches(self._apply, images).reshape(len(images), self.head.shape[1])

    def _traced(self, images):
        self.num_traces += 1
        # Features do not depend on the rows: one of zeros stands for them all.
        program, one = self._exported.program, jnp.zeros((1, self.head.shape[1]))
        rows = one.astype(self._exported.manifest.rows_dtype), jnp.ones(1), jnp.zeros(1)
        return program.call(images, one[0], jnp.zeros(()), *rows[: len(program.in_avals) - 3])[1]


def _check_shape(images: np.ndarray, image_shape: tuple[int, int, int]) -> None:
    if images.shape[1:] != image_shape:
        raise ValueError(
            f"images must have shape [m, {', '.join(map(str, image_shape))}], got {images.shape}."
        )


class _Foreign:
    """What networks from elsewhere have in common: logits in float32, and somebody else's features."""

    dtype = np.float32
    image_shape = None
    num_traces = 0
    head: Rows
    place: str

    def __init__(self, head: Rows, features_of: FeaturesOf | None):
        self.head, self._features_of = head, features_of

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


class AdoptedNetwork(_Foreign):
    """A network that ``pols adopt`` wrote down."""

    def __init__(self, adopted: "Adopted", features_of: FeaturesOf | None):
        super().__init__(adopted.head_rows(), features_of)
        self._adopted = adopted
        self.place, self.num_classes = adopted.place, adopted.num_classes
        self.checkpoint = adopted.checkpoint
        self.thresholds = adopted.thresholds

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        return self._adopted.class_names

    @property
    def normalizer(self) -> Normalizer | None:
        """The normalizer that was chosen."""
        return self._adopted.normalizer


class GivenNetwork(_Foreign):
    """A network whose output layer was given as arrays."""

    def __init__(
        self,
        head: "ForeignHead",
        normalizer: Normalizer | None,
        thresholds: Thresholds | None,
        features_of: FeaturesOf | None,
    ):
        super().__init__(head, features_of)
        self._arrays = head
        self.place, self.num_classes, self.class_names = head.place, head.num_classes, head.class_names
        self.normalizer, self._thresholds = normalizer, thresholds

    @property
    def checkpoint(self) -> str:
        """The checksum of its arrays."""
        return self._checksum

    @functools.cached_property
    def _checksum(self) -> str:
        return f"arrays-{crc32(self._arrays.kernel, self._arrays.bias):08x}"

    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What the validation examples gave."""
        if self._thresholds is None:
            from pols_jax.evaluation.foreign_heads import no_thresholds

            raise no_thresholds(self.place)
        return self._thresholds
