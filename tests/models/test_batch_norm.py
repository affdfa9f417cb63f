"""Batch norm: the textbook values, masks, and N devices against one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.models import BatchNorm

DEVICES = 8
# Uneven on purpose: full devices, empty devices and everything between (17 of 32 examples are real).
COUNTS = (4, 0, 1, 3, 4, 0, 2, 3)
UNEVEN_MASK = jnp.arange(4)[None, :] < jnp.array(COUNTS)[:, None]


def normal(seed, shape, mean=0.0, std=1.0, dtype=jnp.float32):
    values = np.random.default_rng(seed).normal(mean, std, shape)
    return jnp.asarray(values, dtype)


def random_variables(channels):
    return {
        "params": {"scale": normal(1, channels, 1.0, 0.3), "bias": normal(2, channels)},
        "batch_stats": {"mean": normal(3, channels), "var": jnp.square(normal(4, channels)) + 0.1},
    }


def train_apply(norm, variables, x, where=None):
    y, updates = norm.apply(variables, x, train=True, where=where, mutable=["batch_stats"])
    return y, updates["batch_stats"]


def assert_same_up_to_rounding(actual, expected):
    """The same float32 sums in another order: a few roundings (6e-8) of the largest number."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6 * np.max(np.abs(expected)))


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 4, 5)], ids=["vectors", "images"])
def test_training_normalizes_by_the_batch_and_moves_the_running_statistics(shape):
    variables, x = random_variables((5,)), normal(0, shape, 2.0, 3.0)
    y, stats = train_apply(BatchNorm(momentum=0.9, epsilon=1e-3), variables, x)

    old = jax.tree.map(np.asarray, variables)
    rows = np.asarray(x, np.float64).reshape(-1, 5)
    mean, var = rows.mean(0), rows.var(0)  # np.var divides by n
    normalized = (rows - mean) / np.sqrt(var + 1e-3)
    expected = normalized * old["params"]["scale"] + old["params"]["bias"]
    # A few float32 roundings of numbers below 10.
    np.testing.assert_allclose(y.reshape(-1, 5), expected, atol=1e-5)
    for name, batch in (("mean", mean), ("var", var)):
        np.testing.assert_allclose(stats[name], 0.9 * old["batch_stats"][name] + 0.1 * batch, rtol=1e-5)


def test_evaluation_normalizes_by_the_running_statistics_and_keeps_them():
    variables, x = random_variables((5,)), normal(0, (6, 3, 4, 5))
    y, updates = BatchNorm(epsilon=1e-3).apply(variables, x, mutable=["batch_stats"])
    stats, params = (jax.tree.map(np.asarray, variables[name]) for name in ("batch_stats", "params"))
    normalized = (np.asarray(x) - stats["mean"]) / np.sqrt(stats["var"] + 1e-3)
    expected = normalized * params["scale"] + params["bias"]
    np.testing.assert_allclose(y, expected, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, updates["batch_stats"], stats)


def test_masked_rows_change_neither_the_real_rows_nor_the_statistics_nor_the_gradient():
    norm, variables = BatchNorm(), random_variables((5,))
    real, padding = normal(0, (4, 3, 3, 5)), normal(9, (3, 3, 3, 5), 1000.0)
    where = jnp.arange(7) < 4
    weights = normal(5, real.shape)

    def loss(params, x, where):
        y, stats = train_apply(norm, variables | {"params": params}, x, where)
        return jnp.sum(y[:4] * weights), stats

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, stats), (params_grad, x_grad) = grad(variables["params"], real, None)
    (masked_value, masked_stats), (masked_params_grad, masked_x_grad) = grad(
        variables["params"], jnp.concatenate([real, padding]), where
    )
    jax.tree.map(
        assert_same_up_to_rounding,
        (masked_value, masked_stats, masked_params_grad, masked_x_grad[:4]),
        (value, stats, params_grad, x_grad),
    )
    assert not np.any(masked_x_grad[4:])


@pytest.mark.parametrize("axis_name", ["data", ("data",)], ids=["string", "tuple"])
@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "uneven where"])
def test_eight_devices_equal_one_in_value_gradient_and_running_statistics(axis_name, masked):
    variables = random_variables((5,))
    x = normal(0, (DEVICES, 4, 3, 3, 5), 2.0)
    where = UNEVEN_MASK if masked else jnp.ones((DEVICES, 4), bool)
    targets = normal(6, x.shape)

    def loss(norm, add_up, params, x, targets, where):
        y, stats = train_apply(norm, variables | {"params": params}, x, where if masked else None)
        per_example = jnp.mean(jnp.square(y - targets), axis=(1, 2, 3))
        real_loss = add_up(jnp.sum(per_example, where=where))
        return real_loss / add_up(jnp.sum(where.astype(jnp.float32))), (y, stats)

    def one_device(params, x, targets, where):
        whole = functools.partial(loss, BatchNorm(), lambda total: total)
        (value, (y, stats)), grads = jax.value_and_grad(whole, (0, 1), has_aux=True)(
            params, x, targets, where
        )
        return value, y, stats, grads

    @functools.partial(
        jax.pmap, axis_name="data", in_axes=(None, 0, 0, 0), out_axes=(None, 0, None, (None, 0))
    )
    def all_devices(params, x, targets, where):
        part = functools.partial(loss, BatchNorm(axis_name=axis_name), lambda t: jax.lax.psum(t, "data"))
        (value, (y, stats)), grads = jax.value_and_grad(part, (0, 1), has_aux=True)(params, x, targets, where)
        # The loss is that of the whole batch on every device, so an input's gradient comes out once per device.
        return value, y, stats, (jax.lax.pmean(grads[0], "data"), grads[1] / DEVICES)

    together = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, targets, where))
    expected = one_device(variables["params"], *together)
    value, y, stats, (params_grad, x_grad) = all_devices(variables["params"], x, targets, where)
    y, x_grad = (a.reshape(-1, *a.shape[2:]) for a in (y, x_grad))
    jax.tree.map(assert_same_up_to_rounding, (value, y, stats, (params_grad, x_grad)), expected)


def test_a_batch_without_real_rows_keeps_the_statistics_and_gives_no_nan():
    variables, x = random_variables((5,)), normal(0, (4, 3, 3, 5))

    def loss(params, x):
        y, stats = train_apply(BatchNorm(), variables | {"params": params}, x, jnp.zeros(4, bool))
        return jnp.sum(y), stats

    (value, stats), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables["params"], x)
    jax.tree.map(np.testing.assert_array_equal, stats, variables["batch_stats"])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((value, grads)))


def test_a_small_variance_beside_a_large_mean_is_not_lost():
    # float32 holds 1e4 to about 1e-3; the mean of squares (1e8) less the square of the mean would err by about 8.
    x = normal(0, (4096, 3), 1e4, 1.0)
    variables = BatchNorm().init(jax.random.key(0), x)
    _, stats = train_apply(BatchNorm(momentum=0.0), variables, x)
    np.testing.assert_allclose(stats["var"], np.var(np.asarray(x, np.float64), axis=0), rtol=1e-3)


def test_bfloat16_activations_have_float32_statistics_and_parameters():
    # 4,096 values near 100 are beyond what bfloat16 sums (it holds 8 bits): a bfloat16 mean would be far off.
    x = normal(0, (4096, 3), 100.0, 5.0, jnp.bfloat16)
    norm = BatchNorm(momentum=0.0, dtype=jnp.bfloat16)
    variables = norm.init(jax.random.key(0), x)
    y, stats = train_apply(norm, variables, x)
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves((variables, stats))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(stats["mean"], np.mean(np.asarray(x, np.float64), axis=0), rtol=1e-5)


def test_init_needs_no_devices_and_starts_at_the_identity():
    x = normal(0, (4, 5))
    variables = BatchNorm(axis_name="data", epsilon=0.0).init(jax.random.key(0), x, train=True)
    np.testing.assert_array_equal(BatchNorm(epsilon=0.0).apply(variables, x), x)
