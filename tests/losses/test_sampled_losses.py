"""Noise-contrastive estimation on drawn classes: right on average, and for the touched rows only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.heads import all_logits
from pols_jax.losses import noise_contrastive_estimation
from pols_jax.losses.sampled import (
    add_rows,
    make_noise_sampler,
    sampled_noise_contrastive_estimation,
    sampled_value_and_grad,
)

NUM_CLASSES, NUM_FEATURES, NUM_EXAMPLES, NUM_NOISE = 12, 3, 4, 5
PROBS = np.random.default_rng(3).dirichlet(np.ones(NUM_CLASSES)).astype(np.float32)
SAMPLER = make_noise_sampler(PROBS)


def problem():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_EXAMPLES, NUM_FEATURES))
    kernel = rng.normal(size=(NUM_CLASSES, NUM_FEATURES))
    arrays = (jnp.asarray(x, jnp.float32) for x in (features, kernel, rng.normal(size=NUM_CLASSES)))
    return (*arrays, jnp.asarray(rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, dtype=np.int32)))


@pytest.mark.parametrize(
    "probs", [PROBS, np.full(7, 1 / 7), np.array([0.0, 0.5, 0.5, 0.0]), np.ones(1)], ids=len
)
def test_an_alias_table_holds_exactly_the_distribution(probs):
    sampler = make_noise_sampler(probs)
    keep, other = np.asarray(sampler.keep, np.float64), np.asarray(sampler.other)
    held = (keep + np.bincount(other, weights=1 - keep, minlength=len(probs))) / len(probs)
    np.testing.assert_allclose(held, probs, atol=1e-7)  # the table is float32


def test_draws_have_the_frequencies_of_the_distribution():
    draws = np.asarray(SAMPLER.draw(jax.random.key(0), (200_000,)))
    frequencies = np.bincount(draws, minlength=NUM_CLASSES) / len(draws)
    # Five standard deviations of a frequency.
    np.testing.assert_array_less(np.abs(frequencies - PROBS), 5 * np.sqrt(PROBS * (1 - PROBS) / len(draws)))


@pytest.mark.parametrize("shared", [True, False])
def test_the_mean_over_draws_is_the_exact_loss_and_its_gradient(shared):
    features, kernel, bias, labels = problem()

    def exact(kernel):
        logits = all_logits(features, kernel, bias)
        losses = noise_contrastive_estimation(logits, labels, num_noise=NUM_NOISE, noise_probs=PROBS)
        return losses.mean(), losses

    def drawn(key):
        def loss(kernel):
            losses = sampled_noise_contrastive_estimation(
                key, features, kernel, bias, labels, sampler=SAMPLER, num_noise=NUM_NOISE, shared=shared
            )
            return losses.mean(), losses

        gradient, losses = jax.grad(loss, has_aux=True)(kernel)
        return losses, gradient

    keys = jax.random.split(jax.random.key(1), 20_000)
    losses, gradients = jax.jit(jax.vmap(drawn))(keys)
    expected_gradient, expected = jax.jit(jax.grad(exact, has_aux=True))(kernel)
    for sample, mean in ((losses, expected), (gradients, expected_gradient)):
        error = 5 * np.std(sample, axis=0) / np.sqrt(len(keys))  # five standard errors of the mean
        np.testing.assert_array_less(np.abs(np.mean(sample, axis=0) - mean), error + 1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_row_gradients_add_up_to_the_gradient_of_the_kernel(shared):
    features, kernel, bias, labels = problem()
    options = {"sampler": SAMPLER, "num_noise": NUM_NOISE, "shared": shared}
    key = jax.random.key(5)

    def loss(features, kernel, bias):
        return sampled_noise_contrastive_estimation(key, features, kernel, bias, labels, **options).mean()

    layer = features, kernel, bias
    expected_value, expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*layer)
    value, for_features, rows = jax.jit(
        lambda *layer: sampled_value_and_grad(key, *layer, labels, **options)
    )(*layer)
    num_drawn = NUM_NOISE if shared else NUM_EXAMPLES * NUM_NOISE
    assert rows.kernel.shape == (NUM_EXAMPLES + num_drawn, NUM_FEATURES)
    for_kernel, for_bias = add_rows(jnp.zeros_like(kernel), jnp.zeros_like(bias), rows, scale=1.0)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for actual, wanted in zip((for_features, for_kernel, for_bias), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_masked_examples_change_nothing():
    features, kernel, bias, labels = problem()
    where = jnp.array([True, False, True, True])
    options = {"sampler": SAMPLER, "num_noise": NUM_NOISE}
    key = jax.random.key(5)
    step = jax.jit(
        lambda features, labels, where: sampled_value_and_grad(
            key, features, kernel, bias, labels, where=where, **options
        )
    )
    value, _, rows = step(features.at[1].set(jnp.nan), labels.at[1].set(-1), where)
    kept = jnp.array([0, 2, 3])
    expected, _, expected_rows = step(features[kept], labels[kept], None)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    zeros = jnp.zeros_like(kernel), jnp.zeros_like(bias)
    for actual, wanted in zip(
        add_rows(*zeros, rows, scale=1.0), add_rows(*zeros, expected_rows, scale=1.0), strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_a_donated_step_writes_rows_in_place_and_makes_no_array_of_all_classes():
    num_classes = 2**16
    sampler = make_noise_sampler(np.full(num_classes, 1 / num_classes))

    def step(kernel, bias, key, features, labels):
        _, _, rows = sampled_value_and_grad(
            key, features, kernel, bias, labels, sampler=sampler, num_noise=64
        )
        return add_rows(kernel, bias, rows, scale=-0.1)

    shapes = (
        jax.ShapeDtypeStruct((num_classes, 32), jnp.float32),
        jax.ShapeDtypeStruct((num_classes,), jnp.float32),
    )
    arguments = jax.random.key(0), jnp.ones((16, 32)), jnp.arange(16)
    memory = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes, *arguments).compile().memory_analysis()
    kernel_bytes = num_classes * 32 * 4
    assert memory.alias_size_in_bytes >= kernel_bytes
    assert memory.temp_size_in_bytes < kernel_bytes / 20


def test_wrong_input_is_named():
    arrays = problem()
    with pytest.raises(ValueError, match="noise_probs must sum to one"):
        make_noise_sampler(np.array([0.5, 0.1]))
    with pytest.raises(ValueError, match="num_noise must be at least 1, got 0"):
        sampled_noise_contrastive_estimation(jax.random.key(0), *arrays, sampler=SAMPLER, num_noise=0)
    with pytest.raises(ValueError, match="sampler draws from 2 classes, and kernel has 12"):
        sampled_noise_contrastive_estimation(
            jax.random.key(0), *arrays, sampler=make_noise_sampler(np.full(2, 0.5)), num_noise=3
        )


def test_a_label_out_of_range_is_nan():
    features, kernel, bias, labels = problem()
    losses = sampled_noise_contrastive_estimation(
        jax.random.key(0), features, kernel, bias, labels.at[2].set(99), sampler=SAMPLER, num_noise=3
    )
    np.testing.assert_array_equal(np.isnan(losses), [False, False, True, False])
