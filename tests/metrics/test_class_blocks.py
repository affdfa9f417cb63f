"""Metrics class block by class block: the same as from all logits at once, whatever the blocks and devices."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shares import together
from sklearn.metrics import average_precision_score

from pols_jax import metrics, principle
from pols_jax.heads import all_logits
from pols_jax.metrics.class_blocks import ScoredSplit


def problem(num_examples=120, num_classes=21, num_features=6, noise=0.8):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(num_classes, num_features)).astype(np.float32)
    bias = rng.normal(size=num_classes).astype(np.float32)
    labels = rng.integers(0, num_classes - 2, num_examples).astype(np.int32)  # two classes have no example
    features = (kernel[labels] + noise * rng.normal(size=(num_examples, num_features))).astype(np.float32)
    return features, labels, kernel, bias


def dense_logits(features, kernel, bias):
    return np.asarray(all_logits(*map(jnp.asarray, (features, kernel, bias))))


def measured(scored, **options):
    stats = scored.example_stats()
    return stats, scored.count(stats, **options)


@pytest.fixture(scope="module")
def reference():
    features, labels, kernel, bias = problem()
    return features, labels, kernel, bias, dense_logits(features, kernel, bias)


def test_logits_that_are_nan_are_found_by_no_threshold(reference):
    features, labels, kernel, bias, _ = reference
    kernel = kernel.copy()
    kernel[labels[0]] = np.nan
    logits = jnp.asarray(dense_logits(features, kernel, bias))
    _, counts = measured(ScoredSplit(features, labels, kernel, bias, block_size=5))
    one_logit = counts.one_logit
    assert one_logit.average_precision()[labels[0]] == 0
    expected = metrics.average_precision(logits, jnp.asarray(labels))
    np.testing.assert_allclose(one_logit.average_precision(), expected, rtol=0, atol=1e-6)
    expected = metrics.precision_at_recall(logits, jnp.asarray(labels), 0.9)
    np.testing.assert_allclose(one_logit.precision_at_recall(0.9), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("block_size", [2, None])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_are_counted_in_no_pair(reference, value, block_size):
    features, labels, kernel, bias, _ = reference
    features = features.copy()
    features[3] = value  # its logits are NaN, or infinite of either sign
    logits = dense_logits(features, kernel, bias)
    scored = ScoredSplit(features, labels, kernel, bias, block_size=block_size)
    _, counts = measured(scored)
    is_true = labels[:, None] == np.arange(len(kernel))
    true, false = logits[is_true][scored.order], logits[~is_true]
    np.testing.assert_array_equal(counts.false_passing, (false[:, None] >= true).sum(axis=0))
    assert np.isnan(counts.violation_rate()) == np.isnan(true).any()


@pytest.mark.parametrize("block_size", [1, 2, 5, None])
def test_every_count_is_that_of_the_full_array_of_logits(reference, block_size):
    features, labels, kernel, bias, logits = reference
    scored = ScoredSplit(features, labels, kernel, bias, block_size=block_size)
    stats, counts = measured(scored)
    for scores, found in (
        (logits, counts.one_logit),
        (np.asarray(jax.nn.log_softmax(jnp.asarray(logits))), counts.all_logits),
    ):
        expected = metrics.slc_metrics(jnp.asarray(scores), jnp.asarray(labels))
        # Counts are equal unless two scores differ by rounding alone; then one of 120 ranks moves.
        for name, value in found.slc_metrics().items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(stats.prediction, logits.argmax(axis=1)[scored.order])
    # A mean of float32 shares against one division of whole numbers.
    np.testing.assert_allclose(
        counts.violation_rate(),
        principle.violation_rate(jnp.asarray(logits), jnp.asarray(labels)),
        rtol=1e-5,
    )
    margin = principle.separation_margin(jnp.asarray(logits), jnp.asarray(labels))
    np.testing.assert_allclose(counts.separation_margin(), margin, rtol=1e-5)


def test_average_precision_of_each_class_is_scikit_learns(reference):
    features, labels, kernel, bias, logits = reference
    _, counts = measured(ScoredSplit(features, labels, kernel, bias))
    for class_id, found in enumerate(np.asarray(counts.one_logit.average_precision())):
        if not np.any(labels == class_id):
            assert np.isnan(found)
        else:
            expected = average_precision_score(labels == class_id, logits[:, class_id])
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_false_logits_are_counted_pair_by_pair(reference):
    features, labels, kernel, bias, logits = reference
    scored = ScoredSplit(features, labels, kernel, bias, block_size=2)
    _, counts = measured(scored, bins=np.linspace(-100, 100, 3))
    is_true = labels[:, None] == np.arange(len(kernel))
    true, false = logits[is_true][scored.order], logits[~is_true]
    np.testing.assert_array_equal(counts.false_passing, (false[:, None] >= true).sum(axis=0))
    np.testing.assert_array_equal(counts.histogram, [(false < 0).sum(), (false >= 0).sum()])


def test_thresholds_are_measured_for_each_class(reference):
    features, labels, kernel, bias, logits = reference
    thresholds = np.stack([np.linspace(-2, 2, len(kernel)), np.full(len(kernel), np.nan)], axis=1)
    thresholds = thresholds.astype(np.float32)
    _, counts = measured(ScoredSplit(features, labels, kernel, bias, block_size=2), thresholds=thresholds)
    passes = logits >= thresholds[:, 0]
    is_true = labels[:, None] == np.arange(len(kernel))
    np.testing.assert_array_equal(counts.passing[:, 0], passes.sum(axis=0))
    np.testing.assert_array_equal(counts.positives[:, 0], (passes & is_true).sum(axis=0))
    assert not counts.passing[:, 1].any(), "nothing passes NaN"


def test_the_number_of_devices_changes_nothing(reference, monkeypatch):
    features, labels, kernel, bias, _ = reference
    _, on_eight = measured(ScoredSplit(features, labels, kernel, bias, block_size=2))
    one_device = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda: one_device)
    _, on_one = measured(ScoredSplit(features, labels, kernel, bias, block_size=2))
    jax.tree.map(np.testing.assert_array_equal, on_eight._asdict(), on_one._asdict())


def test_confident_softmax_probabilities_keep_their_order():
    # In float32 all three probabilities of class 0 are 1; the example of class 1 is still the least certain one.
    features = np.array([[40.0], [60.0], [41.0]], np.float32)
    labels = np.array([1, 0, 0])
    kernel, bias = np.array([[1.0], [0.0]], np.float32), np.zeros(2, np.float32)
    _, counts = measured(ScoredSplit(features, labels, kernel, bias))
    np.testing.assert_allclose(counts.all_logits.average_precision(), [1.0, 1.0])


def test_bfloat16_kernels_are_multiplied_as_the_network_does(reference):
    features, labels, kernel, bias, _ = reference
    kernel = kernel.astype(jnp.bfloat16)
    logits = dense_logits(features.astype(jnp.bfloat16), kernel, bias)
    scored = ScoredSplit(features, labels, kernel, bias, block_size=2)
    stats = scored.example_stats()
    np.testing.assert_array_equal(stats.peak, logits.max(axis=1)[scored.order])


@pytest.mark.slow
def test_a_hundred_thousand_classes_need_less_than_4_gb():
    features, labels, kernel, bias = problem(50_000, 100_000, 256, noise=3.0)
    stats, counts = measured(ScoredSplit(features, labels, kernel, bias))
    assert len(stats.true_logit) == 50_000
    assert 0 < counts.violation_rate() < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20, "in KB"


@pytest.mark.parametrize("labels", [np.array([0, 2**32 + 1]), np.array([0, -1]), np.zeros(0, np.int32)])
def test_labels_that_are_no_classes_are_refused_in_one_sentence(labels):
    with pytest.raises(ValueError, match=r"labels must be at least one, and in \[0, 3\)"):
        ScoredSplit(np.ones((len(labels), 2), np.float32), labels, np.ones((3, 2), np.float32), np.zeros(3))


@pytest.mark.parametrize("count", [2, 22], ids=["two", "more than classes"])
def test_processes_that_share_out_the_classes_find_what_one_finds(reference, count):
    features, labels, kernel, bias, _ = reference
    thresholds = np.quantile(kernel, [0.3, 0.9], axis=1).T.astype(np.float32)
    options = {"thresholds": thresholds, "bins": np.linspace(-9, 9, 5)}
    alone = ScoredSplit(features, labels, kernel, bias, block_size=2)
    stats, counts = measured(alone, **options)

    def measure(share):
        own = slice(share.classes.start, share.classes.stop)
        scored = ScoredSplit(features, labels, kernel[own], bias[own], block_size=2, share=share)
        return *measured(scored, **options), scored.column(11)

    for found_stats, found_counts, column in together(measure, num_classes=len(kernel), count=count):
        jax.tree.map(assert_same_up_to_rounding, (found_stats, found_counts), (stats, counts))
        np.testing.assert_allclose(column, alone.column(11), rtol=1e-5, atol=1e-6)


def assert_same_up_to_rounding(found, expected):
    """Products and sums of other blocks are rounded in another order; counts are the same."""
    rtol = 0 if np.asarray(expected).dtype.kind == "i" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=rtol)
