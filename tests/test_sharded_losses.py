"""Batch and classes over a mesh of devices: the loss and its gradients are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pols_jax import losses
from pols_jax.heads import all_logits
from pols_jax.linear_losses import cross_entropy, make_linear_loss

NUM_CLASSES, NUM_FEATURES, NUM_EXAMPLES = 16, 4, 24
NOISE = np.random.default_rng(7).dirichlet(np.ones(NUM_CLASSES)).astype(np.float32)
CASES = {
    "cross_entropy": {},
    "max_margin": {"margin": 1.5},
    "self_normalization": {"alpha": 0.75},
    "noise_contrastive_estimation": {"num_noise": 7.5, "noise_probs": NOISE},
    "binary_cross_entropy": {},
    "batch_cross_entropy": {},
    "batch_max_margin": {"margin": 2.0},
}
SPLITS = [(1, 8), (2, 4), (4, 2), (8, 1)]
ARRAYS = (P("data"), P("class"), P("class"), P("data"), P("data"))


def problem():
    """Features, kernel, bias, labels and an uneven mask, whose padding would ruin every sum."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_EXAMPLES, NUM_FEATURES)).astype(np.float32)
    kernel = (2.0 * rng.normal(size=(NUM_CLASSES, NUM_FEATURES))).astype(np.float32)
    bias = rng.normal(size=NUM_CLASSES).astype(np.float32)
    labels = rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, dtype=np.int32)
    where = rng.random(NUM_EXAMPLES) < 0.6
    where[6:9] = False  # device 2 of 8 has no real example
    features[~where], labels[~where] = np.nan, -1
    return features, kernel, bias, labels, where


@functools.cache
def expected(name):
    features, kernel, bias, labels, where = problem()
    loss = losses.make_loss(name, **CASES[name])
    features = np.where(where[:, None], features, 0.0)

    def dense(features, kernel, bias):
        return loss(all_logits(features, kernel, bias), labels, where=where)

    return jax.jit(jax.value_and_grad(dense, argnums=(0, 1, 2)))(features, kernel, bias)


def mesh_of(split):
    return jax.make_mesh(split, ("data", "class"), axis_types=(AxisType.Auto,) * 2)


def loss_on_mesh(name, **options):
    loss = make_linear_loss(name, **CASES[name])

    def on_device(features, kernel, bias, labels, where):
        return loss(
            features, kernel, bias, labels, where=where, axis_name="data", class_axis_name="class", **options
        )

    return on_device


def assert_same(actual, expected):
    # Sums over devices and blocks are taken in another order: a few roundings of float32 on numbers up to 20.
    (value, gradients), (expected_value, expected_gradients) = actual, expected
    np.testing.assert_allclose(value, expected_value, rtol=2e-6)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_gradients_taken_on_the_devices_are_those_of_one_device(name, split):
    step = jax.value_and_grad(loss_on_mesh(name, block_size=3), argnums=(0, 1, 2))
    on_mesh = jax.shard_map(
        step, mesh=mesh_of(split), in_specs=ARRAYS, out_specs=(P(), (P("data"), P("class"), P("class")))
    )
    assert_same(jax.jit(on_mesh)(*problem()), expected(name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_taken_outside_shard_map_are_those_of_one_device_with_and_without_check_vma(
    name, check_vma
):
    loss = jax.shard_map(
        loss_on_mesh(name), mesh=mesh_of((2, 4)), in_specs=ARRAYS, out_specs=P(), check_vma=check_vma
    )
    assert_same(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*problem()), expected(name))


@pytest.mark.parametrize("name", CASES)
def test_class_shards_alone_need_no_batch_axis(name):
    loss = make_linear_loss(name, **CASES[name])

    def on_device(features, kernel, bias, labels, where):
        return loss(features, kernel, bias, labels, where=where, class_axis_name="class")

    step = jax.value_and_grad(on_device, argnums=(0, 1, 2))
    on_mesh = jax.shard_map(
        step,
        mesh=mesh_of((1, 8)),
        in_specs=(P(), P("class"), P("class"), P(), P()),
        out_specs=(P(), (P(), P("class"), P("class"))),
    )
    assert_same(jax.jit(on_mesh)(*problem()), expected(name))


@pytest.mark.parametrize("name", ["cross_entropy", "batch_cross_entropy", "max_margin"])
def test_a_batch_split_alone_works_under_pmap_as_the_dense_losses_do(name):
    features, kernel, bias, labels, where = problem()
    loss = functools.partial(make_linear_loss(name, **CASES[name]), axis_name="data", block_size=5)

    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, None, 0, 0, 0))
    def step(kernel, bias, features, labels, where):
        value, gradients = jax.value_and_grad(
            lambda kernel, bias: loss(features, kernel, bias, labels, where=where), argnums=(0, 1)
        )(kernel, bias)
        return value, jax.lax.pmean(gradients, "data")

    by_device = [x.reshape(8, 3, *x.shape[1:]) for x in (features, labels, where)]
    values, gradients = step(kernel, bias, *by_device)
    value, (_, *expected_gradients) = expected(name)
    assert_same((values[0], [gradient[5] for gradient in gradients]), (value, expected_gradients))


def test_a_tie_between_shards_goes_to_the_lowest_class():
    kernel, bias = jnp.array([[9.0], [2.0], [1.0], [2.0], [2.0], [0.0], [0.0], [2.0]]), jnp.zeros(8)
    loss = make_linear_loss("max_margin", margin=20.0)
    gradient = jax.shard_map(
        lambda bias, kernel: jax.grad(
            lambda bias: loss(
                jnp.ones((1, 1)), kernel, bias, jnp.zeros(1, jnp.int32), class_axis_name="class"
            )
        )(bias),
        mesh=mesh_of((1, 8)),
        in_specs=(P("class"), P("class")),
        out_specs=P("class"),
    )(bias, kernel)
    np.testing.assert_array_equal(gradient, [-1.0, 1.0, 0, 0, 0, 0, 0, 0])


def test_a_label_that_no_shard_has_is_nan():
    features, kernel, bias, _, _ = problem()
    features = np.where(np.isnan(features), 0.0, features)
    labels = jnp.full(NUM_EXAMPLES, 3).at[4].set(NUM_CLASSES).at[7].set(-1)
    values = jax.shard_map(
        functools.partial(cross_entropy, class_axis_name="class"),
        mesh=mesh_of((1, 8)),
        in_specs=(P(), P("class"), P("class"), P()),
        out_specs=P(),
    )(features, kernel, bias, labels)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(values)), [4, 7])
