"""Exact AUPRC and precision at recall of every class, against scikit-learn and torchmetrics."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pols_jax.benchmarking import torch_peer
from pols_jax.benchmarking.records import Recorder
from pols_jax.benchmarking.settings import MetricSettings, find_devices
from pols_jax.benchmarking.timing import Variant, profile
from pols_jax.errors import ProgramError
from pols_jax.metrics import average_precision, precision_at_recall, slc_metrics

_RECALLS = (0.9, 0.99)  # those of slc_metrics


def run_metrics(settings: MetricSettings, recorder: Recorder, *, say: Callable[[str], None]) -> None:
    """Measures the metrics of every class, for each number of examples and of classes."""
    (device,) = find_devices(settings.device)
    for num_examples, num_classes in settings.sizes:
        timed_classes = max(1, min(num_classes, settings.max_scores // num_examples))
        part = f", scikit-learn on {timed_classes:,} of them" * (timed_classes < num_classes)
        say(f"{num_examples:,} examples, {num_classes:,} classes{part}: {settings.repetitions} calls of each")
        variants = metric_variants(
            *random_scores(num_examples, num_classes),
            device=device,
            with_torch=settings.peer == "torch",
            timed_classes=timed_classes,
        )
        place = len(recorder.record.measurements)
        recorder.measure(variants, repetitions=settings.repetitions, warmup=1)
        for measured in recorder.record.measurements[place:]:
            if measured.variant == "scikit_learn" and timed_classes < num_classes:
                measured.case["timed_classes"] = timed_classes
                measured.times_ms = [
                    round(time * num_classes / timed_classes, 5) for time in measured.times_ms
                ]
        recorder.save()
        profile(variants, settings.profile, f"metrics-{num_examples}-{num_classes}")


def random_scores(
    num_examples: int, num_classes: int
) -> tuple[Float[np.ndarray, "examples classes"], Int[np.ndarray, " examples"]]:
    """Returns random scores in (0, 1), higher for the true class, and random labels.

    They look like probabilities because torchmetrics treats other scores differently. Where there is one class, half of
    the examples do not belong to it.
    """
    rng = np.random.default_rng(num_classes)
    labels = rng.integers(max(2, num_classes), size=num_examples, dtype=np.int32)
    scores = 0.5 * rng.random((num_examples, num_classes), np.float32)
    members = np.flatnonzero(labels < num_classes)
    scores[members, labels[members]] += 0.4 * rng.random(len(members), np.float32)
    return scores, labels


def metric_variants(
    scores: Float[np.ndarray, "examples classes"],
    labels: Int[np.ndarray, " examples"],
    *,
    device,
    with_torch: bool,
    timed_classes: int | None = None,
) -> list[Variant]:
    """Makes the metrics of every class by this library, by scikit-learn and by torchmetrics; they must agree.

    With ``timed_classes``, scikit-learn does so many of the classes, spread evenly.
    """
    case = {"num_examples": scores.shape[0], "num_classes": scores.shape[1]}
    arrays = jax.device_put((scores, labels), device)
    ours = average_precision(*arrays), precision_at_recall(arrays[0], arrays[1], _RECALLS[0])
    _check_same(ours, _scikit_learn(scores, labels, range(min(20, scores.shape[1])))[:2])
    num_timed = scores.shape[1] if timed_classes is None else timed_classes
    classes = np.linspace(0, scores.shape[1], num_timed, endpoint=False).astype(int).tolist()
    variants = [
        Variant("pols_jax", lambda call: slc_metrics(*arrays), case),
        Variant("scikit_learn", lambda call: _scikit_learn(scores, labels, classes), case),
    ]
    if with_torch and scores.shape[1] > 1:
        torchmetrics = torch_peer.metrics_call(scores, labels, recall=_RECALLS[0])
        variants.append(Variant("torchmetrics", torchmetrics, case))
    return variants


def _scikit_learn(scores, labels, classes: Sequence[int]):
    """The metrics from one precision-recall curve per class; classes without examples are left out."""
    from sklearn.metrics import precision_recall_curve

    found = np.full((1 + len(_RECALLS), len(classes)), np.nan)
    sizes = np.bincount(labels, minlength=scores.shape[1])
    for place, class_id in enumerate(classes):
        if sizes[class_id]:
            column = np.ascontiguousarray(scores[:, class_id])
            precision, recall, _ = precision_recall_curve(labels == class_id, column)
            average = -np.sum(np.diff(recall) * precision[:-1])
            at_recalls = [precision[np.flatnonzero(recall >= wanted)[-1]] for wanted in _RECALLS]
            found[:, place] = average, *at_recalls
    return found


def _check_same(ours, theirs):
    for our_values, their_values in zip(ours, theirs, strict=True):
        # Ours are sums of float32 numbers.
        if not jnp.allclose(our_values[: len(their_values)], their_values, atol=1e-5, equal_nan=True):
            raise ProgramError("This library's metrics and scikit-learn's differ.")
