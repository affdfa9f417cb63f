"""The output layer of a network that was trained elsewhere: checked, and given the normalizer that suits it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pols_jax.errors import ConfigError, RunError
from pols_jax.evaluation.measuring import Measured
from pols_jax.evaluation.normalizing import (
    Rung,
    check_rows,
    choose_rung,
    fit_rungs,
    ladder_of,
    mean_measures,
    measured_rung,
)
from pols_jax.metrics.class_blocks import ScoredSplit
from pols_jax.metrics.thresholds import Thresholds
from pols_jax.normalizers import Normalizer


class ForeignHead(NamedTuple):
    """Arrays of a network that was trained elsewhere; `ForeignHead.checked` makes one.

    Attributes:
      kernel: One row per class, shape ``[k, d]``; float32, or of 16 bits.
      bias: One number per class, shape ``[k]``, float32.
      class_names: One name per class, all different.
      features: What the output layer is given for some examples, shape ``[n, d]``; None if there are none.
      validation: Features of other examples, and their labels; None if there are none.
    """

    kernel: Float[np.ndarray, "classes features"]
    bias: Float[np.ndarray, " classes"]
    class_names: tuple[str, ...]
    features: Float[np.ndarray, "examples features"] | None = None
    validation: tuple[Float[np.ndarray, "others features"], Int[np.ndarray, " others"]] | None = None

    @classmethod
    def checked(
        cls,
        kernel: Any,
        bias: Any,
        class_names: Sequence[str] | None,
        *,
        features: Any = None,
        validation: tuple[Any, Any] | None = None,
        transpose: str = "give kernel.T",
    ) -> "ForeignHead":
        """Checks arrays as somebody gives them to `ClassBank.from_arrays`.

        Without a bias it is zero, without names they are the class ids. A `ConfigError` names the argument that is wrong,
        and ``transpose`` says there what to do about a kernel that is ``[d, k]``.

        Examples:
          >>> ForeignHead.checked(np.eye(3), None, None).class_names
          ('0', '1', '2')
          >>> ForeignHead.checked(np.ones((3, 5)), np.zeros(5), None)
          Traceback (most recent call last):
          pols_jax.errors.ConfigError: kernel must be [k, d], one row per class, and looks transposed: it has the shape
          [3, 5], and there are 5 numbers in bias; give kernel.T.
        """
        kernel = _numbers("kernel", kernel, num_axes=2)
        if not kernel.size:
            raise ConfigError(f"kernel must have a row for each class, got shape {list(kernel.shape)}.")
        bias = None if bias is None else _numbers("bias", bias, num_axes=1, dtype=np.float32)
        if features is not None:
            features = _numbers("features", features, num_axes=2, dtype=np.float32)
        if validation is not None:
            others = _numbers("validation features", validation[0], num_axes=2, dtype=np.float32)
            validation = others, np.asarray(validation[1])
        names = None if class_names is None else [_text(name) for name in class_names]
        _check_layout(kernel, bias, names, features, validation, transpose)
        num_classes, num_features = kernel.shape
        if bias is not None and len(bias) != num_classes:
            raise ConfigError(f"bias must have {num_classes} numbers, as kernel has rows, got {len(bias)}.")
        for what, array in (("features", features), ("validation features", validation and validation[0])):
            if array is not None and array.shape[1] != num_features:
                raise ConfigError(
                    f"{what} must have shape [n, {num_features}] to fit kernel of shape {list(kernel.shape)}, got "
                    f"{list(array.shape)}."
                )
        if validation is not None:
            _check_labels(validation[1], len(validation[0]), num_classes)
        return cls(
            kernel,
            np.zeros(num_classes, np.float32) if bias is None else bias,
            _checked_names(names, num_classes),
            features,
            validation,
        )

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return "this network"

    @property
    def num_classes(self) -> int:
        """The number of classes k."""
        return len(self.kernel)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of classes and of features."""
        num_classes, num_features = self.kernel.shape
        return num_classes, num_features

    def read(self, class_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The kernel rows ``[c, d]`` and the biases ``[c]`` of some classes."""
        return self.kernel[class_ids], self.bias[class_ids]


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Normalizers that were tried on an output layer, from none to many rows.

    Attributes:
      rungs: What was tried, fewest rows first; the first one is the raw logits.
      chosen: The one to use.
      all_logits: AUPRC and precision at recall 0.9 of all logits, on the validation examples; None without them.
    """

    rungs: tuple[Rung, ...]
    chosen: Rung
    all_logits: tuple[float, float] | None
    _validation: Measured | None

    @functools.cached_property
    def thresholds(self) -> Thresholds | None:
        """What the thresholds of the chosen score follow from; None without validation examples."""
        return self.thresholds_of(self.chosen.normalizer)

    def thresholds_of(self, normalizer: Normalizer | None) -> Thresholds | None:
        """What the thresholds of any of the scores follow from; None without validation examples."""
        return self._validation and Thresholds.from_counts(self._validation.counts(normalizer))


def climb(
    head: ForeignHead,
    *,
    rows: str | Normalizer = "choose",
    seed: int = 0,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Ladder:
    """Fits normalizers to an output layer, and chooses one.

    With validation labels the choice is by AUPRC, without them by how well log Z is estimated. Of those that are nearly
    the best, the one with the fewest rows is taken. Fitting itself sees no labels.

    Args:
      head: The output layer.
      rows: ``choose`` to try none, affine, 256 and 1,024 rows, as far as they are fewer than the classes and not more
        than the features; ``none``, ``affine`` or a number for that one; or a normalizer that is there already.
      seed: Decides start and order of the fits.
      on_progress: As for `fit_normalizer`.

    Raises:
      ConfigError: if there are no features or too few, or ``rows`` is none of the above.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> head = ForeignHead.checked(rng.normal(size=(20, 4)), None, None, features=rng.normal(2.0, size=(100, 4)))
      >>> ladder = climb(head)
      >>> [rung.normalizer and rung.normalizer.num_rows for rung in ladder.rungs], ladder.chosen.normalizer.num_rows
      ([None, 1], 1)
    """
    given = None
    if isinstance(rows, Normalizer):
        given, rows = rows, "none"
        if given.kernel.shape[1] != head.shape[1]:
            raise ConfigError(
                f"The normalizer is for {given.kernel.shape[1]} features, and kernel has {head.shape[1]}."
            )
    check_rows(rows, or_none=True)
    if rows != "none" and head.features is None:
        raise ConfigError(
            "A normalizer is fitted to features, and there are none; give features of examples, or ask for none."
        )
    kernel = head.kernel.astype(np.float32, copy=False)
    validation, all_logits, rungs = None, None, [Rung(None)]
    if head.validation is not None:
        scored = ScoredSplit(*head.validation, kernel, head.bias)
        validation = Measured(head.validation[0], scored, scored.example_stats())
        counts = validation.counts(None, rank=False)
        rungs, all_logits = [Rung(None, *mean_measures(counts.one_logit))], mean_measures(counts.all_logits)
    if given is not None:
        rungs.append(measured_rung(given, validation))
    elif rows != "none":
        assert head.features is not None
        try:
            rungs += fit_rungs(
                head.features,
                kernel,
                head.bias,
                ladder=ladder_of(rows, at_most=min(len(head.features), head.num_classes - 1)),
                validation=validation,
                seed=seed,
                on_progress=on_progress,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
    chosen = choose_rung(rungs) if rows == "choose" else rungs[-1]
    return Ladder(tuple(rungs), chosen, all_logits, validation)


def no_thresholds(place: str) -> RunError:
    """The error for a network that was given no validation labels."""
    return RunError(
        f"There are no thresholds for {place}, because no validation labels were given with it; give them, or a number."
    )


def _numbers(what: str, array: Any, *, num_axes: int, dtype: Any = None) -> np.ndarray:
    """A finite array of floating-point numbers; 64 bits become 32."""
    array = np.asarray(array)
    if array.ndim != num_axes:
        axes = {1: "one axis", 2: "two axes"}[num_axes]
        raise ConfigError(f"{what} must have {axes}, got shape {list(array.shape)}.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ConfigError(f"{what} must be floating-point numbers, got dtype {array.dtype}.")
    if not np.isfinite(array).all():
        raise ConfigError(f"{what} must be finite numbers; some are NaN or infinite.")
    if dtype is None and array.dtype == np.float64:
        dtype = np.float32
    return array if dtype is None else array.astype(dtype, copy=False)


def _check_layout(kernel, bias, names, features, validation, transpose: str) -> None:
    """Raises if something else shows that the kernel is ``[d, k]``."""
    num_rows, num_columns = kernel.shape
    shown = {"numbers in bias": (bias, 0), "names": (names, 0), "columns in features": (features, 1)}
    shown["columns in validation features"] = (validation and validation[0], 1)
    for what, (array, axis) in shown.items():
        size = kernel.shape[1 - axis]
        if array is not None and np.shape(array)[axis] == size and num_rows != num_columns:
            raise ConfigError(
                "kernel must be [k, d], one row per class, and looks transposed: it has the shape "
                f"{list(kernel.shape)}, and there are {size} {what}; {transpose}."
            )


def _check_labels(labels: np.ndarray, num_examples: int, num_classes: int) -> None:
    if labels.shape != (num_examples,) or not num_examples:
        raise ConfigError(
            f"validation labels must be one per row of the validation features, {num_examples}, got shape "
            f"{list(labels.shape)}."
        )
    if labels.dtype.kind not in "iu":
        raise ConfigError(f"validation labels must be whole numbers, got dtype {labels.dtype}.")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ConfigError(
            f"validation labels must be in [0, {num_classes}), got {labels.min()} to {labels.max()}."
        )


def _text(name: Any) -> str:
    return name.decode(errors="backslashreplace") if isinstance(name, bytes) else str(name)


def _checked_names(names: list[str] | None, num_classes: int) -> tuple[str, ...]:
    if names is None:
        return tuple(map(str, range(num_classes)))
    if len(names) != num_classes:
        raise ConfigError(f"There must be a name for each of the {num_classes} classes, got {len(names)}.")
    first: dict[str, int] = {}
    for class_id, name in enumerate(names):
        if first.setdefault(name, class_id) != class_id:
            raise ConfigError(
                f"Names must be different, and the classes {first[name]} and {class_id} are both named {name!r}."
            )
        if not name.strip():
            raise ConfigError(f"Names must not be empty, and that of class {class_id} is.")
    return tuple(names)
