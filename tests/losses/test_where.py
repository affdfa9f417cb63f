"""Which examples count, and how much: masks, weights, leading axes, and batches of no examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ANY_K, value_and_gradient

from pols_jax.heads import all_logits
from pols_jax.losses import LOSSES, LinearLogits, make_loss

every_loss = pytest.mark.parametrize("name", LOSSES)
BATCH_LOSSES = ("batch_cross_entropy", "batch_max_margin")
NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES = 6, 4, 5


def problem(seed):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(NUM_EXAMPLES, NUM_FEATURES)).astype(np.float32)
    kernel = (2.0 * rng.normal(size=(NUM_CLASSES, NUM_FEATURES))).astype(np.float32)
    return features, kernel, rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, dtype=np.int32)


def weights_of_nine(seed):
    """Integer weights whose sum is nine, some of them zero."""
    rng = np.random.default_rng(seed)
    return np.bincount(rng.integers(0, NUM_EXAMPLES, 9), minlength=NUM_EXAMPLES)


def dense(features, kernel, spoiled):
    return jnp.where(spoiled[:, None], jnp.nan, all_logits(features, kernel))


def linear(features, kernel, spoiled):
    return LinearLogits(jnp.where(spoiled[:, None], jnp.nan, features), kernel, block_size=3)


@functools.cache
def step(name, make_logits):
    """Value, and gradients with respect to features and kernel; the logits of spoiled examples are NaN."""
    loss = make_loss(name, **ANY_K[name])

    def value(features, kernel, labels, where, spoiled):
        return loss(make_logits(features, kernel, spoiled), labels, where=where)

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))


@pytest.mark.parametrize(
    ("name", "make_logits"),
    [*((name, dense) for name in LOSSES), *((name, linear) for name in ("cross_entropy", *BATCH_LOSSES))],
)
def test_an_integer_weight_of_w_equals_w_copies_of_the_example(name, make_logits):
    run = step(name, make_logits)
    for seed in range(5):
        features, kernel, labels = problem(seed)
        weights = weights_of_nine(seed)
        copies, is_absent = np.repeat(np.arange(NUM_EXAMPLES), weights), weights == 0
        value, gradients = run(features, kernel, np.where(is_absent, -7, labels), weights, is_absent)
        of_copies = features[copies], kernel, labels[copies]
        expected, (for_copies, for_kernel) = run(*of_copies, np.ones(9, int), np.zeros(9, bool))
        for_features = np.zeros_like(features)
        np.add.at(for_features, copies, for_copies)
        # Sums in another order.
        np.testing.assert_allclose(value, expected, rtol=3e-6)
        np.testing.assert_allclose(gradients[0], for_features, rtol=2e-5, atol=3e-6)
        np.testing.assert_allclose(gradients[1], for_kernel, rtol=2e-5, atol=3e-6)


def test_weights_may_be_of_any_dtype_and_zeros_and_ones_are_a_mask():
    features, kernel, labels = problem(0)
    logits = all_logits(features, kernel)
    loss = jax.jit(make_loss("batch_max_margin"))
    for weights in (np.array([1, 0, 1, 1, 0, 1]), np.array([1, 0, 3, 1, 2, 1])):
        expected = loss(logits, labels, where=weights)
        for dtype in (np.uint8, np.float16, jnp.bfloat16, np.float32):
            np.testing.assert_array_equal(loss(logits, labels, where=weights.astype(dtype)), expected)
        if weights.max() == 1:
            np.testing.assert_allclose(loss(logits, labels, where=weights.astype(bool)), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["batch_max_margin", "max_margin"])
def test_copies_of_a_tied_example_share_the_gradient_as_its_weight_does(name):
    logits = jnp.array([[0.0, 2.0], [0.0, 2.0], [3.0, 0.0]])
    labels, weights = jnp.zeros(3, jnp.int32), np.array([2, 1, 1])
    gradient = jax.jit(jax.grad(make_loss(name)))
    of_copies = gradient(logits[jnp.array([0, 0, 1, 2])], labels[jnp.array([0, 0, 1, 2])])
    wanted = jnp.stack([of_copies[0] + of_copies[1], of_copies[2], of_copies[3]])
    np.testing.assert_allclose(gradient(logits, labels, where=weights), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", *BATCH_LOSSES])
def test_a_common_factor_of_the_weights_matters_to_the_batch_term_of_batch_max_margin_alone(name):
    features, kernel, labels = problem(0)
    weights = np.array([0.5, 0.0, 0.25, 0.125, 0.0, 1.0], np.float32)
    loss, logits = jax.jit(make_loss(name)), all_logits(features, kernel)
    values = [loss(logits, labels, where=factor * weights) for factor in (np.float32(1), np.float32(64))]
    one, other = map(float, values)
    assert np.isclose(one, other, rtol=1e-5) == (name != "batch_max_margin")


def test_weights_are_summed_over_devices():
    features, kernel, labels = problem(1)
    weights = np.array([3, 0, 1, 2, 0, 1], np.float32)
    logits = np.asarray(all_logits(features, kernel))
    for name in ("cross_entropy", *BATCH_LOSSES):
        loss = make_loss(name)
        over_devices = jax.vmap(
            lambda z, y, w, loss=loss: loss(z, y, where=w, axis_name="data"), axis_name="data"
        )
        values = jax.jit(over_devices)(logits.reshape(3, 2, -1), labels.reshape(3, 2), weights.reshape(3, 2))
        np.testing.assert_allclose(
            values, np.full(3, jax.jit(loss)(logits, labels, where=weights)), rtol=3e-6
        )


@every_loss
@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (np.array([1.0, -1.0]), ValueError, "where must not have weights that are negative, infinite or NaN"),
        (np.array([1, -1]), ValueError, "where must not have weights that are negative"),
        ([np.nan, 1.0], ValueError, "where must not have weights that are negative, infinite or NaN"),
        (np.array([1.0, np.inf], np.float32), ValueError, "where must not have weights that are negative"),
        (np.array(["a", "b"]), TypeError, "where must be a mask or weights"),
        (np.ones(2, np.complex64), TypeError, "where must be a mask or weights, got dtype complex64"),
        (np.ones(3, bool), ValueError, "where must have the shape of labels"),
        (np.ones((2, 1), bool), ValueError, "where must have the shape of labels"),
    ],
    ids=str,
)
def test_a_wrong_mask_or_weight_is_an_error_that_names_it(name, where, error, message):
    with pytest.raises(error, match=message):
        make_loss(name, **ANY_K[name])(np.ones((2, 3), np.float32), np.zeros(2, np.int32), where=where)


def test_a_traced_weight_of_nan_makes_the_loss_nan_and_a_negative_one_counts_as_none():
    logits, labels = jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.array([0, 0])
    loss = jax.jit(lambda where: make_loss("cross_entropy")(logits, labels, where=where))
    assert np.isnan(loss(jnp.array([1.0, jnp.nan])))
    np.testing.assert_array_equal(loss(jnp.array([1.0, -1.0])), loss(jnp.array([1.0, 0.0])))


@pytest.mark.parametrize("name", BATCH_LOSSES)
def test_the_leading_axes_of_a_batch_loss_are_one_batch(name):
    features, kernel, labels = problem(2)
    grid = features.reshape(2, 3, -1), labels.reshape(2, 3)
    logits = np.asarray(all_logits(features, kernel))
    loss = jax.jit(LOSSES[name])
    for mask in (None, np.array([1, 2, 0, 1, 3, 1])):
        wanted = loss(logits, labels, where=mask)
        shaped = None if mask is None else mask.reshape(2, 3)
        for given in (logits.reshape(2, 3, -1), LinearLogits(grid[0], kernel)):
            np.testing.assert_allclose(loss(given, grid[1], where=shaped), wanted, rtol=2e-6)
    one = loss(logits[0], labels[0])
    np.testing.assert_allclose(one, value_and_gradient(name, logits[:1], labels[:1])[0], rtol=2e-6)


@every_loss
@pytest.mark.parametrize("make_logits", [all_logits, LinearLogits])
def test_a_batch_of_no_rows_gives_zero_and_a_loss_per_example_no_values(name, make_logits):
    features, kernel = np.zeros((0, 3), np.float32), np.ones((5, 3), np.float32)
    labels, is_batch_loss = np.zeros(0, np.int32), name in BATCH_LOSSES
    direct = jax.eval_shape(
        lambda f, k: LOSSES[name](make_logits(f, k), labels, **ANY_K[name]), features, kernel
    )
    assert direct.shape == (() if is_batch_loss else (0,))
    if make_logits is LinearLogits and not is_batch_loss:
        return  # the mean of no values, as of an array
    loss = make_loss(name, **ANY_K[name])
    step = jax.jit(jax.value_and_grad(lambda f, k: loss(make_logits(f, k), labels), argnums=(0, 1)))
    value, gradients = step(features, kernel)
    assert value == 0
    assert gradients[0].shape == (0, 3)
    assert (gradients[1] == 0).all()
