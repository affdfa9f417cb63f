"""Statistics over the classes of each example, from an array of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from pols_jax.class_stats import DenseStats


def problem(num_examples=6, num_classes=5, *, seed=0):
    rng = np.random.default_rng(seed)
    logits = (3.0 * rng.normal(size=(num_examples, num_classes))).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(rng.integers(0, num_classes, num_examples, dtype=np.int32))


def test_each_statistic_is_the_plain_sum_or_maximum_that_its_name_says():
    logits, labels = problem()
    stats = DenseStats(logits, labels)
    weights = np.array([0.1, 0.2, 0.3, 0.4, 0.0], np.float32)
    z, y = np.asarray(logits, np.float64), np.asarray(labels)
    false = [[z[i, j] for j in range(5) if j != y[i]] for i in range(6)]
    peak, log_sum = stats.logsumexp()
    close = {"rtol": 2e-6}  # a few roundings of float32
    np.testing.assert_array_equal(stats.true, [logits[i, y[i]] for i in range(6)])
    np.testing.assert_allclose(peak + log_sum, [oracles.logsumexp(row) for row in z], **close)
    np.testing.assert_allclose(stats.max_false(), [max(row) for row in false], **close)
    softplus = np.vectorize(oracles.softplus)
    np.testing.assert_allclose(stats.softplus_sum(), softplus(z).sum(axis=1), **close)
    np.testing.assert_allclose(
        stats.softplus_sum(false_only=True), [softplus(row).sum() for row in false], **close
    )
    np.testing.assert_allclose(
        stats.softplus_sum(weights=jnp.asarray(weights)), softplus(z) @ weights.astype(float), **close
    )


def test_the_parts_of_a_logsumexp_keep_the_digits_that_their_sum_would_lose():
    stats = DenseStats(jnp.array([[1e4, 1e4 - 1.0]]), jnp.array([0]))
    peak, log_sum = stats.logsumexp()
    # log(1 + e^-1) = 0.31326169
    np.testing.assert_allclose((peak - stats.true) + log_sum, 0.31326169, rtol=1e-6)
    assert abs((peak + log_sum) - stats.true - 0.31326169) > 1e-5


def test_the_gradient_of_a_logsumexp_is_the_softmax_although_its_peak_is_held_fixed():
    logits, labels = problem()
    gradient = jax.grad(lambda z: sum(part.sum() for part in DenseStats(z, labels).logsumexp()))(logits)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits), atol=1e-6)


def test_among_tied_false_logits_the_lowest_class_has_the_gradient():
    logits, labels = jnp.array([[9.0, 2.0, 2.0, 1.0]]), jnp.array([0])
    gradient = jax.grad(lambda z: DenseStats(z, labels).max_false().sum())(logits)
    np.testing.assert_array_equal(gradient, [[0.0, 1.0, 0.0, 0.0]])


def test_a_true_logit_that_is_the_largest_or_ties_is_never_taken_for_a_false_one():
    logits, labels = jnp.array([[3.0, 1.0], [2.0, 2.0]]), jnp.array([0, 1])
    stats = DenseStats(logits, labels)
    np.testing.assert_array_equal(stats.max_false(), [1.0, 2.0])
    gradient = jax.grad(lambda z: DenseStats(z, labels).max_false().sum())(logits)
    np.testing.assert_array_equal(gradient, [[0.0, 1.0], [1.0, 0.0]])


def test_one_class_has_no_false_logit_and_so_the_most_negative_number_with_no_gradient():
    logits, labels = jnp.array([[3.0]]), jnp.array([0])
    assert DenseStats(logits, labels).max_false()[0] == jnp.finfo(jnp.float32).min
    assert DenseStats(logits, labels).softplus_sum(false_only=True)[0] == 0
    assert jax.grad(lambda z: DenseStats(z, labels).max_false().sum())(logits)[0, 0] == 0


@pytest.mark.parametrize(
    "labels",
    [np.array([-1], np.int8), np.array([5], np.uint8), np.array([2**32 - 1], np.uint32)],
    ids=["minus one", "past the end", "wraps to minus one"],
)
def test_a_label_out_of_range_has_a_true_logit_of_nan(labels):
    assert np.isnan(DenseStats(jnp.ones((1, 5)), jnp.asarray(labels)).true[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_logits_are_read_as_float32(dtype):
    logits, labels = problem()
    low = DenseStats(logits.astype(dtype), labels)
    high = DenseStats(logits.astype(dtype).astype(jnp.float32), labels)
    assert low.softplus_sum().dtype == jnp.float32
    np.testing.assert_array_equal(low.softplus_sum(), high.softplus_sum())


def test_float64_logits_stay_float64(x64):
    logits, labels = np.ones((2, 3)), np.array([0, 1])
    stats = DenseStats(jnp.asarray(logits), jnp.asarray(labels))
    statistics = (stats.true, *stats.logsumexp(), stats.max_false(), stats.softplus_sum())
    assert {statistic.dtype for statistic in statistics} == {jnp.dtype("float64")}
