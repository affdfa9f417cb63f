"""Pooling is that of Flax, in values and derivatives."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pols_jax.models.pooling import average_pool, max_pool


@pytest.mark.parametrize("image", [(4, 4), (5, 7), (8, 3)])
@pytest.mark.parametrize(
    ("size", "stride", "padding", "for_flax"),
    [(3, 2, "SAME", "SAME"), (3, 2, "VALID", "VALID"), (2, 2, "VALID", "VALID"), (3, 2, 1, ((1, 1), (1, 1)))],
)
def test_the_maximum_is_that_of_flax(image, size, stride, padding, for_flax):
    x = jax.random.normal(jax.random.key(0), (2, *image, 3))

    def ours(x):
        return max_pool(x, size=size, stride=stride, padding=padding)

    def flax(x):
        return nn.max_pool(x, (size, size), strides=(stride, stride), padding=for_flax)

    chex.assert_trees_all_equal(ours(x), flax(x))
    gradients = [
        jax.jit(jax.grad(lambda x, pool=pool: jnp.sum(jnp.sin(pool(x)))))(x) for pool in (ours, flax)
    ]
    chex.assert_trees_all_close(*gradients, rtol=1e-6)


@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 1, "SAME"), (5, 3, "VALID")])
def test_the_average_counts_the_zeros_of_the_padding(size, stride, padding):
    x = jax.random.normal(jax.random.key(0), (2, 8, 9, 3))
    windows = nn.pool(x, 0.0, lax.add, (size, size), (stride, stride), padding) / size**2
    chex.assert_trees_all_close(
        average_pool(x, size=size, stride=stride, padding=padding), windows, atol=1e-6
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_first_of_equal_entries_gets_the_gradient_as_in_windows(seed):
    x = jax.random.randint(jax.random.key(seed), (2, 9, 8, 3), 0, 3).astype(jnp.float32)  # many are equal
    gradients = [
        jax.grad(lambda x, pool=pool: jnp.sum(pool(x) ** 2))(x)
        for pool in (
            lambda x: max_pool(x, size=3, stride=2, padding="SAME"),
            lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"),
        )
    ]
    chex.assert_trees_all_equal(*gradients)
