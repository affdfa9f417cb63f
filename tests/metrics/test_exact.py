"""Exact retrieval metrics against scikit-learn, class by class."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import auc, average_precision_score, precision_recall_curve

from pols_jax.metrics import (
    average_precision,
    exact,
    precision_at_recall,
    ranking,
    relative_improvement,
    slc_metrics,
    threshold_at_recall,
)
from pols_jax.metrics.exact import Counts

RECALLS = (0.1, 0.5, 0.9, 0.99, 1.0)


def random_problem(n=41, k=5, *, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, k)).astype(np.float32), rng.integers(0, k, n, dtype=np.int32)


def tied_problem():
    scores, labels = random_problem(seed=1)
    return np.round(scores), labels


def constant_problem():
    scores, labels = random_problem(seed=2)
    return np.zeros_like(scores), labels


def one_positive_problem():
    scores, labels = random_problem(seed=3)
    return scores, np.where(np.arange(len(labels)) == 11, 2, 0).astype(np.int32)


def classes_without_positives_problem():
    scores, labels = random_problem(k=9, seed=4)
    return scores, labels % 3 * 3


def labels_outside_problem():
    scores, labels = random_problem(seed=5)
    return scores, np.where(np.arange(len(labels)) % 4 == 0, np.where(labels < 2, -1, 5), labels)


def extreme_problem():
    scores, labels = random_problem(seed=6)
    return scores * np.float32(1e30), labels


PROBLEMS = (
    random_problem,
    tied_problem,
    constant_problem,
    one_positive_problem,
    classes_without_positives_problem,
    labels_outside_problem,
    extreme_problem,
)
every_problem = pytest.mark.parametrize("make_problem", PROBLEMS)


def scikit_learn(scores, labels, score_of_class):
    """One number per class, NaN for a class without positives."""
    return [
        score_of_class(labels == c, scores[:, c]) if (labels == c).any() else np.nan
        for c in range(scores.shape[1])
    ]


def area_by_trapezoids(positive, scores):
    precision, recall, _ = precision_recall_curve(positive, scores)
    return auc(recall, precision)


def brute_force(positive, scores, recall):
    """Tries every score as the threshold, from the highest, and stops at the first that recalls enough."""
    for threshold in sorted(set(scores.tolist()), reverse=True):
        passes = scores >= threshold
        # Compared as whole numbers, but for the rounding of the wanted recall itself.
        if (passes & positive).sum() >= recall * positive.sum() - 1e-9:
            return threshold, (passes & positive).sum() / passes.sum()
    raise AssertionError("the lowest score recalls everything")


@every_problem
def test_average_precision_is_scikit_learns(make_problem):
    scores, labels = make_problem()
    expected = scikit_learn(scores, labels, average_precision_score)
    # A mean of ratios in float32.
    np.testing.assert_allclose(average_precision(scores, labels), expected, rtol=2e-6)


@every_problem
def test_the_trapezoid_is_scikit_learns_area_under_its_precision_recall_curve(make_problem):
    scores, labels = make_problem()
    expected = scikit_learn(scores, labels, area_by_trapezoids)
    np.testing.assert_allclose(
        average_precision(scores, labels, interpolation="trapezoid"), expected, rtol=2e-6
    )


@every_problem
@pytest.mark.parametrize("recall", RECALLS)
def test_precision_and_threshold_at_recall_are_those_of_a_scan_over_every_threshold(make_problem, recall):
    scores, labels = make_problem()
    thresholds = scikit_learn(scores, labels, lambda positive, s: brute_force(positive, s, recall)[0])
    precisions = scikit_learn(scores, labels, lambda positive, s: brute_force(positive, s, recall)[1])
    np.testing.assert_array_equal(threshold_at_recall(scores, labels, recall), np.float32(thresholds))
    np.testing.assert_allclose(precision_at_recall(scores, labels, recall), precisions, rtol=1e-6)


@settings(max_examples=25)
@given(
    n=st.sampled_from([1, 2, 3, 17, 63, 65, 131]), num_values=st.integers(1, 200), seed=st.integers(0, 2**16)
)
def test_any_number_of_examples_with_any_number_of_ties_equals_scikit_learn(n, num_values, seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, num_values, (n, 3)).astype(np.float32)
    labels = rng.integers(0, 3, n, dtype=np.int32)
    expected = scikit_learn(scores, labels, average_precision_score)
    np.testing.assert_allclose(average_precision(scores, labels), expected, rtol=2e-6)


def test_a_recall_that_is_a_ratio_of_counts_is_reached_exactly():
    # For every class size up to 200 and every number of recalled examples: 9 of 10 is a recall of at least 0.9.
    n = 200
    scores = -np.arange(n, dtype=np.float32)[:, None]
    for size in (3, 7, 10, 49, 100, 199):
        labels = np.where(np.arange(n) < size, 0, 1)
        for hits in (1, size // 3, size // 2, size - 1, size):
            if hits:
                assert threshold_at_recall(scores, labels, hits / size)[0] == scores[hits - 1, 0]
                assert jax.jit(threshold_at_recall)(scores, labels, hits / size)[0] == scores[hits - 1, 0]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32])
def test_labels_may_be_of_any_integer_dtype_although_there_are_more_classes_than_it_can_count(dtype):
    scores, labels = random_problem(k=300)
    labels = (labels % 100).astype(dtype)
    np.testing.assert_array_equal(
        average_precision(scores, labels), average_precision(scores, labels.astype(np.int32))
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_scores_are_ranked_as_they_are_with_their_ties(dtype):
    scores, labels = random_problem(200)
    low = jnp.asarray(scores, dtype)
    same = np.asarray(low.astype(jnp.float32))
    expected = scikit_learn(same, labels, average_precision_score)
    np.testing.assert_allclose(average_precision(low, labels), expected, rtol=2e-6)


@every_problem
def test_slc_metrics_are_the_means_over_the_classes_that_have_examples(make_problem):
    scores, labels = make_problem()
    metrics = slc_metrics(scores, labels)
    present = [c for c in range(scores.shape[1]) if (labels == c).any()]
    assert metrics["num_classes"] == len(present)
    for key, per_class in (
        ("auprc", average_precision(scores, labels)),
        ("precision_at_0.9", precision_at_recall(scores, labels, 0.9)),
        ("precision_at_0.99", precision_at_recall(scores, labels, 0.99)),
    ):
        np.testing.assert_allclose(metrics[key], np.mean(np.asarray(per_class)[present]), rtol=1e-6)


def test_a_score_that_is_nan_is_found_by_no_threshold():
    labels = jnp.array([0, 0, 1, 1])
    everything = slc_metrics(jnp.full((4, 2), jnp.nan), labels)
    assert {float(everything[name]) for name in ("auprc", "precision_at_0.9", "precision_at_0.99")} == {0.0}
    scores = jnp.array([[3.0, 0.0], [jnp.nan, 0.0], [0.0, 3.0], [0.0, 2.0]])
    # half of class 0 is never found
    np.testing.assert_allclose(average_precision(scores, labels), [0.5, 1.0])
    np.testing.assert_allclose(precision_at_recall(scores, labels, 0.9), [0.0, 1.0])
    np.testing.assert_allclose(threshold_at_recall(scores, labels, 0.9), [np.nan, 2.0])


def test_no_example_of_any_class_gives_nan_and_counts_no_class():
    metrics = slc_metrics(np.zeros((3, 2), np.float32), np.full(3, -1))
    assert metrics["num_classes"] == 0
    assert np.isnan([metrics["auprc"], metrics["precision_at_0.9"], metrics["precision_at_0.99"]]).all()


def test_a_common_increasing_map_of_the_scores_changes_no_metric():
    scores, labels = random_problem()
    for metric in (average_precision, lambda s, y: precision_at_recall(s, y, 0.9)):
        np.testing.assert_array_equal(metric(scores, labels), metric(np.arctan(scores), labels))


def test_the_metrics_run_under_jit():
    scores, labels = random_problem()
    np.testing.assert_allclose(
        jax.jit(average_precision)(scores, labels), average_precision(scores, labels), rtol=1e-6
    )
    np.testing.assert_allclose(
        jax.jit(slc_metrics)(scores, labels)["auprc"], slc_metrics(scores, labels)["auprc"], rtol=1e-6
    )
    traced_recall = jax.jit(precision_at_recall)(scores, labels, 0.9)
    np.testing.assert_allclose(traced_recall, precision_at_recall(scores, labels, 0.9))


@pytest.mark.parametrize("num_classes", [1, 3, 70])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sorting_and_comparing_give_the_same_counts(num_classes, dtype, monkeypatch):
    rng = np.random.default_rng(num_classes)
    scores = rng.integers(0, 50, (900, num_classes)).astype(dtype)  # many ties
    scores[rng.random(scores.shape) < 0.02] = np.nan
    scores[0], scores[1] = np.inf, -np.inf
    labels = rng.integers(-1, num_classes + 1, 900, dtype=np.int32)
    labels[labels == 2] = 1  # a class without examples
    for side in ("left", "right"):
        compared = exact._count_all(jnp.asarray(scores), jnp.asarray(labels), side=side)
        by_class_and_score = np.lexsort((compared.own_scores.astype(jnp.float32), compared.labels))
        # By sorting every column or none, in threads or not; at last by XLA in parts.
        for share, many, per_class in ((0, 10**6, 0), (1, 0, 0), (0, 0, 10**6)):
            monkeypatch.setattr(ranking, "_COMPARED", share)
            monkeypatch.setattr(ranking, "_MANY_SCORES", many)
            monkeypatch.setattr(exact, "_EXAMPLES_PER_CLASS", per_class)
            ranked = Counts(*map(np.asarray, exact._count_on_cpu(jnp.asarray(scores), labels, side)))
            again = np.lexsort((ranked.own_scores, ranked.labels))
            members = ranked.labels[again] >= 0
            np.testing.assert_array_equal(ranked.class_sizes, compared.class_sizes)
            for name in ("labels", "own_scores", "examples", "positives"):
                expected = np.asarray(getattr(compared, name))[by_class_and_score]
                np.testing.assert_array_equal(getattr(ranked, name)[again][members], expected[members], name)


def test_few_classes_are_ranked_by_numpy_and_many_classes_by_xla(monkeypatch):
    monkeypatch.setattr(exact, "_count_all", None)
    monkeypatch.setattr(exact, "_count_part", None)
    scores, labels = random_problem(n=200, k=5)
    assert jnp.isfinite(average_precision(scores, labels)).all()
    with pytest.raises(TypeError):
        average_precision(*random_problem(n=200, k=50))
    with pytest.raises(TypeError):
        jax.jit(average_precision)(scores, labels)


def test_relative_improvement_gives_the_last_row_of_the_papers_first_table():
    # MNIST, one minus AUPRC: aligned (.002 + .002 + .002 + .001 + .002) / 5 = .0018, others (.008 + .012) / 2 = .01.
    improvement = relative_improvement([0.002, 0.002, 0.002, 0.001, 0.002], [0.008, 0.012])
    np.testing.assert_allclose(improvement, 0.82, rtol=1e-6)
    # SVHN, one minus precision at 0.9: .016 against .0265, an improvement of 39.6 %.
    improvement = relative_improvement([0.014, 0.017, 0.016, 0.013, 0.020], [0.028, 0.025])
    np.testing.assert_allclose(improvement, 0.396, atol=5e-4)


def test_wrong_input_is_an_error_that_names_the_argument():
    scores, labels = random_problem()
    with pytest.raises(TypeError, match="scores must be floating-point"):
        average_precision(scores.astype(np.int32), labels)
    with pytest.raises(ValueError, match="scores must have 2 axes"):
        slc_metrics(scores[:, 0], labels)
    with pytest.raises(TypeError, match="labels must be integers"):
        average_precision(scores, labels.astype(np.float32))
    with pytest.raises(ValueError, match="labels must have the shape of scores"):
        precision_at_recall(scores, labels[:-1], 0.9)
    with pytest.raises(ValueError, match="interpolation must be 'step' or 'trapezoid', got 'linear'"):
        average_precision(scores, labels, interpolation="linear")  # pyright: ignore[reportArgumentType]
    for recall in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"recall must be in \(0, 1\]"):
            precision_at_recall(scores, labels, recall)
        with pytest.raises(ValueError, match=r"recall must be in \(0, 1\]"):
            threshold_at_recall(scores, labels, recall)


@pytest.mark.slow
def test_fifty_thousand_examples_of_a_thousand_classes_fit_in_two_gigabytes():
    program = """
from pathlib import Path
import numpy as np
from pols_jax.metrics import slc_metrics
rng = np.random.default_rng(0)
scores = rng.normal(size=(50_000, 1_000)).astype(np.float32)
labels = rng.integers(0, 1_000, 50_000, dtype=np.int32)
metrics = slc_metrics(scores, labels)
assert int(metrics["num_classes"]) == 1_000
assert 0 < float(metrics["auprc"]) < 0.01, metrics  # random scores: about the share of a class, 1 in 1,000
# Not ru_maxrss, which begins with what the process that started this one had.
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak_kib = int(done.stdout.split()[-1])
    assert peak_kib < 2 * 1024**2


def test_an_empty_set_is_refused_and_a_label_that_int32_does_not_have_belongs_to_no_class():
    with pytest.raises(ValueError, match="scores must have at least one example"):
        slc_metrics(np.zeros((0, 3), np.float32), np.zeros(0, np.int32))
    scores = np.array([[0.9, 0.1], [0.8, 0.7], [0.3, 0.2]], np.float32)
    wrapping, none = np.array([0, 1, 2**32 + 1]), np.array([0, 1, -1])
    np.testing.assert_array_equal(average_precision(scores, wrapping), average_precision(scores, none))
