"""The pooling of the small networks is that of Flax, in values and derivatives."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from pols_jax.models.small import halve


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (8, 3), (1, 2)])
def test_the_small_networks_pool_as_flax_does(size):
    x = jax.random.normal(jax.random.key(0), (2, *size, 3))

    def flax_pool(x):
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")

    chex.assert_trees_all_equal(halve(x), flax_pool(x))
    gradients = [jax.grad(lambda x, pool=pool: jnp.sum(jnp.sin(pool(x))))(x) for pool in (halve, flax_pool)]
    chex.assert_trees_all_close(*gradients, rtol=1e-6)


def test_entries_that_tie_share_the_gradient():
    gradient = jax.grad(lambda x: jnp.sum(halve(x)))(jnp.ones((1, 2, 2, 1)))
    assert float(jnp.sum(gradient)) == 1.0
