"""Sums, means and extremes over the real examples of a batch, over one device and over eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.losses.class_stats import LogSumExp
from pols_jax.losses.global_batch import GlobalBatch

VALUES = np.array([3.0, -1.0, 7.0, 7.0, 100.0, 2.0, -50.0, 0.5], np.float32)
WHERE = np.array([True, True, True, True, False, True, False, True])
REAL = VALUES[WHERE].astype(np.float64)

STATISTICS = {
    "sum": (lambda batch, x: batch.sum(x), REAL.sum()),
    "mean": (lambda batch, x: batch.mean(x), REAL.mean()),
    "max": (lambda batch, x: batch.max(x), REAL.max()),
    "min": (lambda batch, x: batch.min(x), REAL.min()),
    "weighted mean": (
        lambda batch, x: batch._replace(weights=jnp.where(batch.where, 0.25, 0.0)).mean(x),
        REAL.mean(),
    ),
    "logmeanexp": (
        lambda batch, x: sum(
            batch.logmeanexp(LogSumExp(jax.lax.stop_gradient(x), x - jax.lax.stop_gradient(x)))
        ),
        np.log(np.mean(np.exp(REAL))),
    ),
}
every_statistic = pytest.mark.parametrize(("statistic", "expected"), STATISTICS.values(), ids=STATISTICS)


@every_statistic
def test_one_device_counts_the_real_examples_only(statistic, expected):
    np.testing.assert_allclose(
        statistic(GlobalBatch(jnp.asarray(WHERE)), jnp.asarray(VALUES)), expected, rtol=1e-6
    )


@every_statistic
def test_eight_devices_have_the_statistic_of_all_their_examples(statistic, expected):
    over_devices = jax.pmap(
        lambda x, where: statistic(GlobalBatch(where, axis_name="data"), x), axis_name="data"
    )
    values = over_devices(VALUES[:, None], WHERE[:, None])
    np.testing.assert_allclose(values, np.full(8, expected), rtol=1e-6)


@every_statistic
def test_pmean_of_eight_devices_gradients_is_the_gradient_on_one_device(statistic, expected):
    del expected
    on_one = jax.grad(lambda x: statistic(GlobalBatch(jnp.asarray(WHERE)), x))(jnp.asarray(VALUES))
    assert (on_one[~WHERE] == 0).all()

    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0, 0))
    def gradient_of_scale(scale, x, where):
        gradient = jax.grad(lambda scale: statistic(GlobalBatch(where, axis_name="data"), scale * x))(scale)
        return jax.lax.pmean(gradient, "data")

    # The chain rule: d/d scale of f(scale * x) at 1 is the gradient of f times x.
    expected_slope = np.sum(on_one * VALUES)
    np.testing.assert_allclose(
        gradient_of_scale(jnp.float32(1), VALUES[:, None], WHERE[:, None]),
        np.full(8, expected_slope),
        rtol=1e-5,
    )


def test_the_gradient_of_a_maximum_is_shared_by_the_values_that_tie():
    gradient = jax.grad(lambda x: GlobalBatch(jnp.asarray(WHERE)).max(x))(jnp.asarray(VALUES))
    np.testing.assert_array_equal(gradient, [0, 0, 0.5, 0.5, 0, 0, 0, 0])


def test_no_real_example_gives_zeros_and_a_size_that_can_be_divided_by():
    batch = GlobalBatch(jnp.zeros(8, bool))
    values = jnp.asarray(VALUES)
    assert batch.size(jnp.float32) == 1
    assert batch.sum(values) == batch.mean(values) == 0
    assert tuple(batch.logmeanexp(LogSumExp(values, values))) == (0, 0)
    assert batch.max(values) == jnp.finfo(jnp.float32).min
    for statistic, _ in STATISTICS.values():
        np.testing.assert_array_equal(jax.grad(lambda x, f=statistic: f(batch, x))(values), np.zeros(8))


def test_the_logmeanexp_of_huge_values_in_masked_rows_has_no_nan_in_its_gradient():
    peak, log_sum = jnp.array([1e38, 1.0]), jnp.array([3e38, 0.0])
    batch = GlobalBatch(jnp.array([False, True]))
    gradient = jax.grad(lambda part: sum(batch.logmeanexp(LogSumExp(peak, part))))(log_sum)
    np.testing.assert_array_equal(gradient, [0.0, 1.0])


def test_a_mask_is_checked_against_the_labels_and_absent_means_all_real():
    labels = jnp.arange(3)
    assert GlobalBatch.of(labels, None, None).where.tolist() == [True, True, True]
    assert GlobalBatch.of(labels, [True, False, True], None).size(jnp.float32) == 2
    assert GlobalBatch.of(labels, [0.5, 0.0, 2.0], None).size(jnp.float32) == 2.5
    assert GlobalBatch.of(labels, np.array([3, 0, 2]), None).where.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="where must have the shape of labels"):
        GlobalBatch.of(labels, jnp.ones(4, bool), None)
