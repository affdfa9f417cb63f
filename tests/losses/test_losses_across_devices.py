"""One loss, however it is run: eager, jit, vmap over runs, pmap and shard_map over eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from oracles import CASES, NUM_CLASSES, value_and_gradient

from pols_jax.losses import LinearLogits, make_loss

NUM_DEVICES = 8
ROWS = 3  # per device
NUM_FEATURES = 4

ONE_CASE_EACH = list({name: (name, hyperparameters) for name, hyperparameters in CASES}.values())
every_loss = pytest.mark.parametrize(
    ("name", "hyperparameters"), ONE_CASE_EACH, ids=[c[0] for c in ONE_CASE_EACH]
)
# Sums over devices are taken in another order than sums over one device: a few roundings of float32 on numbers up to 20.
assert_same_value = functools.partial(np.testing.assert_allclose, rtol=2e-6)
assert_same_gradient = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


def linear_problem(seed=0):
    """Features, labels, an uneven mask and the kernel of a linear model; device 2 of 8 has no real example at all."""
    rng = np.random.default_rng(seed)
    num_examples = NUM_DEVICES * ROWS
    features = rng.normal(size=(num_examples, NUM_FEATURES)).astype(np.float32)
    labels = rng.integers(0, NUM_CLASSES, num_examples, dtype=np.int32)
    where = rng.random(num_examples) < 0.6
    where[2 * ROWS : 3 * ROWS] = False
    where[3 * ROWS : 4 * ROWS] = True
    # What padding holds must not matter: here, numbers that would ruin every sum.
    features[~where] = 1e30
    labels[~where] = -1
    kernel = rng.normal(size=(NUM_FEATURES, NUM_CLASSES)).astype(np.float32)
    return features, labels, where, kernel


def full_problem(seed=0):
    features, labels, where, kernel = linear_problem(seed)
    rng = np.random.default_rng(seed + 100)
    features[~where] = rng.normal(size=features[~where].shape)
    labels[~where] = 0
    return features, labels, np.ones_like(where), kernel


def loss_of_kernel(loss, **options):
    """The loss as a function of the parameters of a linear model, whose padding gives no gradient of its own."""

    def loss_fn(kernel, features, labels, where):
        # As a training step does: padding is replaced before the product, or 0 * 1e30 * inf would reach the kernel.
        features = jnp.where(where[:, None], features, 0.0)
        return loss(features @ kernel, labels, where=where, **options)

    return loss_fn


def expected_of(name, hyperparameters, features, labels, where, kernel):
    logits = features.astype(np.float64) @ kernel.astype(np.float64)
    value, gradient = value_and_gradient(name, logits, labels, where, **hyperparameters)
    return value, np.where(where[:, None], features, 0.0).astype(np.float64).T @ gradient


def by_device(array):
    return array.reshape((NUM_DEVICES, ROWS, *array.shape[1:]))


def mesh_of(axis_name):
    names, sizes = ((axis_name,), (8,)) if isinstance(axis_name, str) else (axis_name, (4, 2))
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@every_loss
def test_eager_and_a_jitted_vmap_over_runs_are_one_loss(name, hyperparameters):
    loss = loss_of_kernel(make_loss(name, **hyperparameters))
    problems = [linear_problem(seed) for seed in range(2)]
    stacked = [np.stack(arrays) for arrays in zip(*problems, strict=True)]
    features, labels, where, kernel = stacked
    value_and_grad = jax.value_and_grad(loss)
    runs_value, runs_gradient = jax.jit(jax.vmap(value_and_grad))(kernel, features, labels, where)
    for run, arrays in enumerate(problems):
        expected_value, expected_gradient = expected_of(name, hyperparameters, *arrays)
        features, labels, where, kernel = arrays
        is_eager = name == "batch_cross_entropy" and not run  # every operation is a program of its own: slow
        eager = value_and_grad(kernel, features, labels, where) if is_eager else None
        for value, gradient in (
            *([eager] if eager else []),
            (runs_value[run], runs_gradient[run]),
        ):
            assert_same_value(value, expected_value)
            assert_same_gradient(gradient, expected_gradient)


@every_loss
def test_pmap_over_eight_devices_gives_the_value_everywhere_and_pmean_the_gradient(name, hyperparameters):
    features, labels, where, kernel = linear_problem()
    loss = loss_of_kernel(make_loss(name, **hyperparameters), axis_name="data")

    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0, 0, 0))
    def step(kernel, features, labels, where):
        value, gradient = jax.value_and_grad(loss)(kernel, features, labels, where)
        return value, lax.pmean(gradient, "data")

    values, gradients = step(kernel, by_device(features), by_device(labels), by_device(where))
    expected_value, expected_gradient = expected_of(name, hyperparameters, features, labels, where, kernel)
    for device in range(NUM_DEVICES):
        assert_same_value(values[device], expected_value)
        assert_same_gradient(gradients[device], expected_gradient)


# A mean over examples, a logarithm of a sum over them, and a maximum over them: all that a loss does with a batch.
REDUCTIONS = ["cross_entropy", "batch_cross_entropy", "batch_max_margin"]


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize(
    ("check_vma", "axis_name"), [(True, "data"), (False, "data"), (True, ("hosts", "chips"))], ids=str
)
def test_shard_map_over_eight_devices_gives_the_value_and_pmean_the_gradient(name, check_vma, axis_name):
    hyperparameters = {}
    features, labels, where, kernel = linear_problem()
    loss = loss_of_kernel(make_loss(name, **hyperparameters), axis_name=axis_name)
    sharded, replicated = PartitionSpec(axis_name), PartitionSpec()

    def step(kernel, features, labels, where):
        value, gradient = jax.value_and_grad(loss)(kernel, features, labels, where)
        return value, lax.pmean(gradient, axis_name)

    value, gradient = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh_of(axis_name),
            in_specs=(replicated, sharded, sharded, sharded),
            out_specs=(replicated, replicated),
            check_vma=check_vma,
        )
    )(kernel, features, labels, where)
    expected_value, expected_gradient = expected_of(name, hyperparameters, features, labels, where, kernel)
    assert_same_value(value, expected_value)
    assert_same_gradient(gradient, expected_gradient)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_under_shard_map_with_check_vma_the_gradient_of_replicated_parameters_needs_no_pmean(name):
    """JAX then sums the gradient over the axis itself, so that it comes out replicated; pmean of it changes nothing."""
    features, labels, where, kernel = linear_problem()
    sharded, replicated = PartitionSpec("data"), PartitionSpec()
    gradient_of = jax.shard_map(
        jax.grad(loss_of_kernel(make_loss(name), axis_name="data")),
        mesh=mesh_of("data"),
        in_specs=(replicated, sharded, sharded, sharded),
        out_specs=replicated,
    )
    gradient = jax.jit(gradient_of)(kernel, features, labels, where)
    assert_same_gradient(gradient, expected_of(name, {}, features, labels, where, kernel)[1])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_gradient_taken_outside_shard_map_needs_no_pmean(name, check_vma):
    features, labels, where, kernel = linear_problem()
    sharded, replicated = PartitionSpec("data"), PartitionSpec()
    loss = jax.shard_map(
        loss_of_kernel(make_loss(name), axis_name="data"),
        mesh=mesh_of("data"),
        in_specs=(replicated, sharded, sharded, sharded),
        out_specs=replicated,
        check_vma=check_vma,
    )
    gradient = jax.jit(jax.grad(loss))(kernel, features, labels, where)
    assert_same_gradient(gradient, expected_of(name, {}, features, labels, where, kernel)[1])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_without_a_mask_the_count_is_that_of_all_devices(name):
    features, labels, where, kernel = full_problem()
    loss = make_loss(name)
    values = jax.pmap(lambda x, y: loss(x @ kernel, y, axis_name="data"), axis_name="data")(
        by_device(features), by_device(labels)
    )
    assert_same_value(values, np.full(8, expected_of(name, {}, features, labels, where, kernel)[0]))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_batch_masked_on_every_device_gives_zero_and_zero_gradients(name):
    features, labels, where, kernel = linear_problem()
    loss = loss_of_kernel(make_loss(name), axis_name="data")
    values, gradients = jax.pmap(jax.value_and_grad(loss), axis_name="data", in_axes=(None, 0, 0, 0))(
        kernel, by_device(features), by_device(labels), by_device(np.zeros_like(where))
    )
    assert (values == 0).all()
    assert (gradients == 0).all()


def test_axis_name_also_names_an_axis_of_vmap():
    features, labels, where, kernel = linear_problem()
    loss = loss_of_kernel(make_loss("batch_cross_entropy"), axis_name="data")
    values = jax.jit(jax.vmap(loss, in_axes=(None, 0, 0, 0), axis_name="data"))(
        kernel, by_device(features), by_device(labels), by_device(where)
    )
    expected, _ = expected_of("batch_cross_entropy", {}, features, labels, where, kernel)
    assert_same_value(values, np.full(8, expected))


@every_loss
def test_under_an_auto_sharded_jit_the_loss_is_that_of_the_whole_batch_without_axis_name(
    name, hyperparameters
):
    """Arrays with a `NamedSharding` over the batch axis: XLA adds up over the devices by itself."""
    features, labels, where, kernel = linear_problem()
    mesh = mesh_of("data")
    over_devices = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    batch = jax.device_put((features, labels, where), over_devices)
    step = jax.jit(jax.value_and_grad(loss_of_kernel(make_loss(name, **hyperparameters))))
    value, gradient = step(jax.device_put(kernel, everywhere), *batch)
    expected_value, expected_gradient = expected_of(name, hyperparameters, features, labels, where, kernel)
    assert_same_value(value, expected_value)
    assert_same_gradient(gradient, expected_gradient)


@every_loss
def test_logits_whose_classes_or_examples_are_sharded_on_an_explicit_mesh_have_the_same_loss(
    name, hyperparameters
):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 2 * NUM_CLASSES)).astype(np.float32)
    labels = rng.integers(0, 2 * NUM_CLASSES, 8, dtype=np.int32)
    if "noise_probs" in hyperparameters:
        hyperparameters = hyperparameters | {"noise_probs": np.tile(hyperparameters["noise_probs"] / 2, 2)}
    expected_value, expected_gradient = value_and_gradient(name, logits, labels, **hyperparameters)
    loss = make_loss(name, **hyperparameters)
    mesh = jax.make_mesh((4, 2), ("data", "class"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        specs = [PartitionSpec("data", "class")] + [PartitionSpec(None, "class")] * (name in REDUCTIONS)
        for spec in specs:
            arrays = jax.device_put(
                (logits, labels),
                tuple(jax.sharding.NamedSharding(mesh, part) for part in (spec, PartitionSpec(spec[0]))),
            )
            value, gradient = jax.jit(jax.value_and_grad(loss))(*arrays)
            assert_same_value(value, expected_value)
            assert_same_gradient(gradient, expected_gradient)
            assert gradient.sharding.spec == spec


@pytest.mark.parametrize("name", ["batch_cross_entropy", "max_margin"])
def test_linear_logits_on_an_explicit_mesh_have_the_same_loss_even_if_it_is_not_set(name):
    rng = np.random.default_rng(0)
    features, kernel = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(10, 4)).astype(np.float32)
    labels = rng.integers(0, 10, 8, dtype=np.int32)
    value, slopes = value_and_gradient(name, features.astype(float) @ kernel.T.astype(float), labels)
    mesh = jax.make_mesh((4, 2), ("data", "class"), axis_types=(AxisType.Explicit,) * 2)

    def put(array, axis):
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, PartitionSpec(axis)))

    logits = LinearLogits(put(features, "data"), put(kernel, "class"), block_size=3)
    actual, gradient = jax.jit(jax.value_and_grad(make_loss(name)))(logits, put(labels, "data"))
    assert_same_value(actual, value)
    assert_same_gradient(gradient.features, slopes @ kernel)
    assert_same_gradient(gradient.kernel, slopes.T @ features)
