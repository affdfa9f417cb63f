"""The seven losses from features and an output layer: equal to the dense ones, whatever the blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from pols_jax import linear_losses, losses
from pols_jax.heads import all_logits
from pols_jax.linear_losses import LINEAR_LOSSES, make_linear_loss
from pols_jax.linear_stats import LinearStats, default_block_size

NUM_CLASSES = 13
NUM_FEATURES = 4
NOISE = np.random.default_rng(7).dirichlet(np.ones(NUM_CLASSES)).astype(np.float32)
CASES = (
    ("cross_entropy", {}),
    ("max_margin", {"margin": 1.5}),
    ("self_normalization", {"alpha": 0.75}),
    ("noise_contrastive_estimation", {"num_noise": 6}),
    ("noise_contrastive_estimation", {"num_noise": 7.5, "noise_probs": NOISE}),
    ("binary_cross_entropy", {}),
    ("batch_cross_entropy", {}),
    ("batch_max_margin", {"margin": 2.0}),
)
IDS = [name + (" with probabilities" if "noise_probs" in options else "") for name, options in CASES]
every_loss = pytest.mark.parametrize(("name", "hyperparameters"), CASES, ids=IDS)
# Blocks that divide 13 classes, that do not, and that are larger than 13.
BLOCKS = [1, 5, 100]
PER_EXAMPLE = [name for name in LINEAR_LOSSES if not name.startswith("batch")]


def problem(num_examples=6, *, seed=0, dtype=np.float32):
    """Features, kernel, bias, labels."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_examples, NUM_FEATURES)).astype(dtype)
    kernel = (2.0 * rng.normal(size=(NUM_CLASSES, NUM_FEATURES))).astype(dtype)
    bias = rng.normal(size=NUM_CLASSES).astype(dtype)
    labels = rng.integers(0, NUM_CLASSES, num_examples, dtype=np.int32)
    return tuple(map(jnp.asarray, (features, kernel, bias, labels)))


def dense_loss(name, hyperparameters):
    loss = losses.make_loss(name, **hyperparameters)
    return lambda features, kernel, bias, labels, **options: loss(
        all_logits(features, kernel, bias), labels, **options
    )


def value_and_gradients(loss, arrays, **options):
    return jax.jit(jax.value_and_grad(functools.partial(loss, **options), argnums=(0, 1, 2)))(*arrays)


def assert_same(actual, expected, *, rtol, atol):
    (value, gradients), (expected_value, expected_gradients) = actual, expected
    np.testing.assert_allclose(value, expected_value, rtol=rtol)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == expected_gradient.dtype
        np.testing.assert_allclose(gradient, expected_gradient, rtol=10 * rtol, atol=atol)


@every_loss
@pytest.mark.parametrize("block_size", BLOCKS)
def test_values_and_gradients_are_those_of_the_dense_loss(name, hyperparameters, block_size):
    arrays = problem()
    expected = value_and_gradients(dense_loss(name, hyperparameters), arrays)
    actual = value_and_gradients(make_linear_loss(name, **hyperparameters), arrays, block_size=block_size)
    # Sums over classes in another order: a few roundings of float32.
    assert_same(actual, expected, rtol=2e-6, atol=2e-6)


@every_loss
def test_in_float64_they_agree_to_twelve_digits(name, hyperparameters, x64):
    arrays = problem(dtype=np.float64)
    if "noise_probs" in hyperparameters:
        hyperparameters = hyperparameters | {"noise_probs": hyperparameters["noise_probs"].astype(np.float64)}
    expected = value_and_gradients(dense_loss(name, hyperparameters), arrays)
    actual = value_and_gradients(make_linear_loss(name, **hyperparameters), arrays, block_size=5)
    assert_same(actual, expected, rtol=1e-12, atol=1e-13)


@every_loss
def test_the_value_is_that_of_the_slow_oracle(name, hyperparameters):
    features, kernel, bias, labels = problem()
    logits = np.asarray(features, np.float64) @ np.asarray(kernel, np.float64).T + np.asarray(bias)
    expected, _ = oracles.value_and_gradient(name, logits, labels, **hyperparameters)
    value = make_linear_loss(name, **hyperparameters)(features, kernel, bias, labels, block_size=5)
    np.testing.assert_allclose(value, expected, rtol=2e-6)


@every_loss
def test_masked_examples_change_neither_value_nor_gradient_even_if_they_are_nan(name, hyperparameters):
    features, kernel, bias, labels = problem()
    where = jnp.array([True, False, True, True, False, True])
    features = jnp.where(where[:, None], features, jnp.nan)
    labels = jnp.where(where, labels, -5)
    arrays = features, kernel, bias, labels
    real = np.flatnonzero(where)
    kept = features[real], kernel, bias, labels[real]
    value, gradients = value_and_gradients(dense_loss(name, hyperparameters), kept)
    for_features = jnp.zeros_like(features).at[real].set(gradients[0])
    actual = value_and_gradients(make_linear_loss(name, **hyperparameters), arrays, where=where, block_size=5)
    assert_same(actual, (value, (for_features, *gradients[1:])), rtol=2e-6, atol=2e-6)


@every_loss
def test_a_batch_without_a_real_example_is_zero_with_zero_gradients(name, hyperparameters):
    arrays = problem()
    value, gradients = value_and_gradients(
        make_linear_loss(name, **hyperparameters), arrays, where=jnp.zeros(6, bool), block_size=5
    )
    assert value == 0
    assert all((gradient == 0).all() for gradient in gradients)


@every_loss
def test_bfloat16_features_and_kernel_are_accumulated_in_float32(name, hyperparameters):
    features, kernel, bias, labels = problem()
    low = features.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), bias, labels
    high = (*(x.astype(jnp.float32) for x in low[:3]), labels)
    actual = value_and_gradients(make_linear_loss(name, **hyperparameters), low, block_size=5)
    value, gradients = value_and_gradients(dense_loss(name, hyperparameters), high)
    # Products of 16-bit numbers are exact in float32, so the value is that of float32 arithmetic on the rounded arrays.
    np.testing.assert_allclose(actual[0], value, rtol=2e-6)
    # A gradient is rounded to the dtype of what it is the gradient of, once.
    rounding = float(jnp.finfo(jnp.bfloat16).eps)
    for gradient, expected, array in zip(actual[1], gradients, low[:3], strict=True):
        assert gradient.dtype == array.dtype
        np.testing.assert_allclose(gradient.astype(jnp.float32), expected, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_a_loss_per_example_takes_any_leading_axes_and_gives_one_value_each(name):
    features, kernel, bias, labels = problem()
    hyperparameters = dict(CASES)[name]
    loss = functools.partial(LINEAR_LOSSES[name], block_size=5, **hyperparameters)
    expected = losses.LOSSES[name](all_logits(features, kernel, bias), labels, **hyperparameters)
    np.testing.assert_allclose(loss(features, kernel, bias, labels), expected, rtol=2e-6)
    grid = loss(features.reshape(2, 3, NUM_FEATURES), kernel, bias, labels.reshape(2, 3))
    np.testing.assert_allclose(grid, expected.reshape(2, 3), rtol=2e-6)
    one = loss(features[0], kernel, bias, labels[0])
    assert one.shape == ()
    np.testing.assert_allclose(one, expected[0], rtol=2e-6)


@every_loss
def test_vmap_over_models_is_a_loop_over_models(name, hyperparameters):
    features, kernel, bias, labels = problem()
    kernels = jnp.stack([kernel, -kernel, 0.5 * kernel])
    loss = functools.partial(make_linear_loss(name, **hyperparameters), block_size=5)
    step = jax.value_and_grad(lambda kernel: loss(features, kernel, bias, labels))
    values, gradients = jax.jit(jax.vmap(step))(kernels)
    for run in range(3):
        value, gradient = step(kernels[run])
        np.testing.assert_allclose(values[run], value, rtol=2e-6)
        np.testing.assert_allclose(gradients[run], gradient, rtol=2e-5, atol=2e-6)


@every_loss
def test_large_logits_give_finite_values_and_gradients_equal_to_the_dense_ones(name, hyperparameters):
    scale = 1e4
    _, kernel, bias, labels = problem()
    logits = scale * jnp.sign(kernel[:, 0])  # logits of +scale and -scale, exactly
    arrays = jnp.ones((6, 1)), logits[:, None], jnp.zeros_like(bias), labels
    actual = value_and_gradients(make_linear_loss(name, **hyperparameters), arrays, block_size=5)
    expected = value_and_gradients(dense_loss(name, hyperparameters), arrays)
    assert np.isfinite(actual[0])
    # The gradient of the one feature is a sum of numbers of size `scale` that cancel.
    assert_same(actual, expected, rtol=2e-6, atol=2e-6 * scale)


@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_a_label_out_of_range_is_nan_as_in_the_dense_loss(name):
    features, kernel, bias, labels = problem()
    labels = labels.at[jnp.array([1, 2, 4])].set(jnp.array([-1, NUM_CLASSES, 2**31 - 1], jnp.int32))
    values = LINEAR_LOSSES[name](features, kernel, bias, labels, block_size=5, **dict(CASES)[name])
    np.testing.assert_array_equal(np.isnan(values), [False, True, True, False, True, False])


def test_among_tied_false_logits_the_lowest_class_has_the_gradient_across_blocks():
    kernel = jnp.array([[9.0], [2.0], [1.0], [2.0], [2.0]])
    arrays = jnp.ones((1, 1)), kernel, jnp.zeros(5), jnp.array([0])
    for block_size in (1, 2, 3, 5):
        loss = functools.partial(linear_losses.max_margin, margin=20.0, block_size=block_size)
        gradient = jax.grad(lambda bias: loss(*arrays[:2], bias, arrays[3])[0])(arrays[2])  # noqa: B023
        np.testing.assert_array_equal(gradient, [-1.0, 1.0, 0.0, 0.0, 0.0])


def test_one_class_has_no_false_logit_and_no_gradient():
    arrays = jnp.ones((2, 1)), jnp.ones((1, 1)), jnp.zeros(1), jnp.zeros(2, jnp.int32)
    value, gradients = value_and_gradients(make_linear_loss("max_margin"), arrays)
    assert value == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_statistics_made_for_one_formula_refuse_another():
    stats = LinearStats(*problem(), statistic="logsumexp", block_size=4)
    with pytest.raises(ValueError, match="made for logsumexp, not for max_false"):
        stats.max_false()


def test_the_automatic_block_fits_its_budget_and_is_not_tiny():
    assert default_block_size(128, 512, 2**20) == 2048  # 2048 rows of 512 float32 numbers are 4 MB
    assert default_block_size(1024, 256, 2**20) == 1024  # 1024 logits of 1024 examples
    assert default_block_size(10**6, 256, 2**20) == 1024
    assert default_block_size(8, 8, 37) == 37


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": jnp.ones((6, 5))}, ValueError, r"features must have shape \[..., 4\]"),
        ({"features": jnp.ones((6, 4), jnp.int32)}, TypeError, "features must be floating-point"),
        ({"bias": jnp.ones(5)}, ValueError, r"bias must have shape \[13\]"),
        ({"labels": jnp.ones(6)}, TypeError, "labels must be integers"),
        ({"labels": jnp.ones(5, jnp.int32)}, ValueError, "labels must have the shape of features"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"where": jnp.ones(6)}, TypeError, "where must be booleans"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named(change, error, message):
    names = ("features", "kernel", "bias", "labels")
    arguments = dict(zip(names, problem(), strict=True)) | change
    with pytest.raises(error, match=message):
        linear_losses.batch_cross_entropy(**arguments)


def test_wrong_hyperparameters_are_named():
    arrays = problem()
    with pytest.raises(ValueError, match="noise_probs must sum to one"):
        linear_losses.noise_contrastive_estimation(
            *arrays, num_noise=3, noise_probs=np.eye(13, dtype=np.float32)[0] / 2
        )
    with pytest.raises(ValueError, match="num_noise must be positive, got -3"):
        linear_losses.noise_contrastive_estimation(*arrays, num_noise=-3)
    with pytest.raises(ValueError, match="margin must be positive"):
        linear_losses.max_margin(*arrays, margin=0.0)
    with pytest.raises(ValueError, match="There is no loss named 'max_margins'"):
        make_linear_loss("max_margins")
    with pytest.raises(TypeError, match="needs the hyper-parameter 'num_noise'"):
        make_linear_loss("noise_contrastive_estimation")
    with pytest.raises(ValueError, match="features must have 2 axes"):
        linear_losses.batch_max_margin(arrays[0][None], *arrays[1:3], arrays[3][None])


def test_the_seven_names_are_those_of_the_dense_losses():
    assert list(LINEAR_LOSSES) == list(losses.LOSSES)
