"""Exact AUPRC and precision at recall of every class, against scikit-learn and torchmetrics."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pols_jax.benchmarking import torch_peer
from pols_jax.benchmarking.logits_speed import profile
from pols_jax.benchmarking.programs import ProgramError
from pols_jax.benchmarking.records import Recorder
from pols_jax.benchmarking.settings import MetricSettings, find_devices
from pols_jax.benchmarking.timing import Variant, measure
from pols_jax.metrics import average_precision, precision_at_recall

_RECALL = 0.9


def run_metrics(settings: MetricSettings, recorder: Recorder, *, say: Callable[[str], None]) -> None:
    """Measures both metrics of every class, for each number of classes.

    Args:
      settings: What to measure, checked.
      recorder: Where the measurements go.
      say: Called with a line of text about what is going on.
    """
    (device,) = find_devices(settings.device)
    for num_classes in settings.classes:
        say(f"{settings.examples:,} examples, {num_classes:,} classes: {settings.repetitions} calls of each")
        variants = metric_variants(
            *random_scores(settings.examples, num_classes), device=device, with_torch=settings.peer == "torch"
        )
        measure(
            variants,
            repetitions=settings.repetitions,
            warmup=1,
            measurements=recorder.record.measurements,
            after_round=recorder.save_now_and_then,
        )
        recorder.save()
        if settings.profile is not None:
            profile(variants, settings.profile / f"metrics-{num_classes}")


def random_scores(
    num_examples: int, num_classes: int
) -> tuple[Float[np.ndarray, "examples classes"], Int[np.ndarray, " examples"]]:
    """Returns random scores in (0, 1), higher for the true class, and random labels.

    They look like probabilities because torchmetrics treats other scores differently.

    Examples:
      >>> scores, labels = random_scores(100, 5)
      >>> scores.shape, labels.shape
      ((100, 5), (100,))
    """
    rng = np.random.default_rng(num_classes)
    labels = rng.integers(num_classes, size=num_examples, dtype=np.int32)
    scores = 0.5 * rng.random((num_examples, num_classes), np.float32)
    scores[np.arange(num_examples), labels] += 0.4 * rng.random(num_examples, np.float32)
    return scores, labels


def metric_variants(
    scores: Float[np.ndarray, "examples classes"],
    labels: Int[np.ndarray, " examples"],
    *,
    device,
    with_torch: bool,
) -> list[Variant]:
    """Makes the variants: both metrics of every class by this library, by scikit-learn and by torchmetrics.

    Args:
      scores: Scores, shape ``[n, k]``.
      labels: True classes, shape ``[n]``.
      device: Where ours are computed.
      with_torch: Whether torchmetrics is compared too.

    Returns:
      Two or three variants, whose results were compared with each other.

    Raises:
      ProgramError: if ours and scikit-learn's differ.

    Examples:
      >>> variants = metric_variants(*random_scores(50, 3), device=jax.devices()[0], with_torch=False)
      >>> [variant.name for variant in variants]
      ['pols_jax', 'scikit_learn']
    """
    case = {"num_examples": scores.shape[0], "num_classes": scores.shape[1]}
    arrays = jax.device_put((scores, labels), device)

    @jax.jit
    def both(scores, labels):
        return average_precision(scores, labels), precision_at_recall(scores, labels, _RECALL)

    _check_same(both(*arrays), _scikit_learn(scores, labels, max_classes=20))
    variants = [
        Variant("pols_jax", lambda call: both(*arrays), case),
        Variant("scikit_learn", lambda call: _scikit_learn(scores, labels), case),
    ]
    if with_torch:
        torchmetrics = torch_peer.metrics_call(scores, labels, recall=_RECALL)
        variants.append(Variant("torchmetrics", _quiet(torchmetrics), case))
    return variants


def _scikit_learn(scores, labels, *, max_classes=None):
    """Both metrics from one precision-recall curve per class; classes without examples are left out."""
    from sklearn.metrics import precision_recall_curve

    columns = np.ascontiguousarray(scores.T[:max_classes])
    average, at_recall = np.full(len(columns), np.nan), np.full(len(columns), np.nan)
    for class_id in np.intersect1d(labels, np.arange(len(columns))):
        precision, recall, _ = precision_recall_curve(labels == class_id, columns[class_id])
        average[class_id] = -np.sum(np.diff(recall) * precision[:-1])
        at_recall[class_id] = precision[np.flatnonzero(recall >= _RECALL)[-1]]
    return average, at_recall


def _check_same(ours, theirs):
    for our_values, their_values in zip(ours, theirs, strict=True):
        # Ours are sums of float32 numbers.
        if not jnp.allclose(our_values[: len(their_values)], their_values, atol=1e-5, equal_nan=True):
            raise ProgramError("This library's metrics and scikit-learn's differ.")


def _quiet(call):
    """Without the warnings of torchmetrics about every class without examples."""

    def quiet(number):
        with warnings.catch_warnings(action="ignore"):
            return call(number)

    return quiet
