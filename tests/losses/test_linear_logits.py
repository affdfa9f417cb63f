"""`LinearLogits` in the place of logits: the same losses, on one device and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from oracles import value_and_gradient

from pols_jax import losses
from pols_jax.heads import all_logits, pad_classes
from pols_jax.losses import LOSSES, LinearLogits, is_correct, make_loss

NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES = 24, 4, 16
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
every_loss = pytest.mark.parametrize("name", CASES)
# How the statistics are computed is tested by themselves: here one loss for each of them will do.
ONE_OF_EACH_STATISTIC = [
    *("batch_cross_entropy", "batch_max_margin", "binary_cross_entropy", "noise_contrastive_estimation"),
]


def problem():
    """Features, kernel and bias, labels, and an uneven mask whose padding would ruin every sum."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_EXAMPLES, NUM_FEATURES)).astype(np.float32)
    kernel = (2.0 * rng.normal(size=(NUM_CLASSES, NUM_FEATURES))).astype(np.float32)
    bias = rng.normal(size=NUM_CLASSES).astype(np.float32)
    labels = rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, dtype=np.int32)
    where = rng.random(NUM_EXAMPLES) < 0.6
    where[6:9] = False  # device 2 of 8 has no real example
    features[~where], labels[~where] = np.nan, -1
    return (features, kernel, bias), labels, where


def expected(name):
    """Value and gradients of the layer from the oracle."""
    (features, kernel, bias), labels, where = problem()
    features = np.where(where[:, None], features, 0.0).astype(np.float64)
    logits = features @ kernel.T.astype(np.float64) + bias
    value, slopes = value_and_gradient(name, logits, np.where(where, labels, 0), where, **CASES[name])
    return value, (slopes @ kernel, slopes.T @ features, slopes.sum(axis=0))


def assert_same(actual, wanted):
    # A few roundings of float32 on numbers up to 20.
    (value, gradients), (wanted_value, wanted_gradients) = actual, wanted
    np.testing.assert_allclose(value, wanted_value, rtol=3e-6)
    for gradient, wanted_gradient in zip(jax.tree.leaves(gradients), wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted_gradient, rtol=2e-5, atol=3e-6)


@every_loss
def test_the_gradient_of_a_loss_with_respect_to_linear_logits_has_the_gradients_of_their_parts(name):
    layer, labels, where = problem()
    logits = LinearLogits(*layer, block_size=5)
    loss = make_loss(name, **CASES[name])
    step = jax.jit(jax.value_and_grad(lambda logits, where: loss(logits, labels, where=where)))
    value, gradient = step(logits, where)
    assert isinstance(gradient, LinearLogits)
    assert gradient.block_size == 5
    assert_same((value, gradient), expected(name))
    value, gradient = step(logits, np.zeros_like(where))
    assert value == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


@every_loss
def test_on_a_mesh_of_data_and_classes_value_and_gradients_are_those_of_one_device(name):
    loss = make_loss(name, **CASES[name])

    def on_device(logits, labels, where):
        return loss(logits, labels, where=where, axis_name="data")

    spec = LinearLogits(P("data"), P("class"), P("class"), block_size=3, class_axis_name="class")
    on_mesh = jax.shard_map(
        jax.value_and_grad(on_device),
        mesh=jax.make_mesh((2, 4), ("data", "class"), axis_types=(AxisType.Auto,) * 2),
        in_specs=(spec, P("data"), P("data")),
        out_specs=(P(), spec),
    )
    layer, labels, where = problem()
    logits = LinearLogits(*layer, block_size=3, class_axis_name="class")
    assert_same(jax.jit(on_mesh)(logits, labels, where), expected(name))


@pytest.mark.parametrize("name", ["batch_cross_entropy", "noise_contrastive_estimation"])
def test_class_shards_alone_need_no_batch_axis(name):
    loss = make_loss(name, **CASES[name])
    spec = LinearLogits(P(), P("class"), P("class"), class_axis_name="class")
    on_mesh = jax.shard_map(
        jax.value_and_grad(lambda logits, labels, where: loss(logits, labels, where=where)),
        mesh=jax.make_mesh((8,), ("class",), axis_types=(AxisType.Auto,)),
        in_specs=(spec, P(), P()),
        out_specs=(P(), spec),
    )
    layer, labels, where = problem()
    actual = jax.jit(on_mesh)(LinearLogits(*layer, class_axis_name="class"), labels, where)
    assert_same(actual, expected(name))


@pytest.mark.parametrize("name", ["cross_entropy", "batch_cross_entropy", "max_margin"])
def test_a_batch_split_alone_works_under_pmap_as_with_arrays(name):
    (features, kernel, bias), labels, where = problem()
    loss = make_loss(name, **CASES[name])

    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0, 0, 0))
    def step(head, features, labels, where):
        def of_head(head):
            return loss(LinearLogits(features, *head), labels, where=where, axis_name="data")

        value, gradients = jax.value_and_grad(of_head)(head)
        return value, jax.lax.pmean(gradients, "data")

    by_device = [x.reshape(8, 3, *x.shape[1:]) for x in (features, labels, where)]
    values, gradients = step((kernel, bias), *by_device)
    value, (_, *wanted) = expected(name)
    assert_same((values[0], [gradient[5] for gradient in gradients]), (value, wanted))


@pytest.mark.parametrize("name", ONE_OF_EACH_STATISTIC)
def test_padding_for_class_shards_changes_no_loss_and_has_no_gradient(name):
    (features, kernel, bias), labels, where = problem()
    features, labels = np.where(where[:, None], features, 0.0), np.where(where, labels, 0) % 13
    hyperparameters = {"num_noise": 5} if "num_noise" in CASES[name] else CASES[name]
    wanted = jax.jit(jax.value_and_grad(lambda z: make_loss(name, **hyperparameters)(z, labels)))(
        LinearLogits(features, kernel[:13], bias[:13])
    )
    if "num_noise" in hyperparameters:
        padded_noise = np.pad(np.full(13, 1 / 13, np.float32), (0, 3))
        hyperparameters = {"num_noise": 5, "noise_probs": padded_noise}
    spec = LinearLogits(P(), P("class"), P("class"), class_axis_name="class")
    on_mesh = jax.shard_map(
        jax.value_and_grad(make_loss(name, **hyperparameters)),
        mesh=jax.make_mesh((8,), ("class",), axis_types=(AxisType.Auto,)),
        in_specs=(spec, P()),
        out_specs=(P(), spec),
    )
    padded = pad_classes(jnp.asarray(kernel[:13]), jnp.asarray(bias[:13]), num_shards=8)
    logits = LinearLogits(jnp.asarray(features), *padded, class_axis_name="class")
    value, gradient = jax.jit(on_mesh)(logits, labels)
    assert (gradient.kernel[13:] == 0).all()
    assert (gradient.bias[13:] == 0).all()
    kept = gradient.features, gradient.kernel[:13], gradient.bias[:13]
    assert_same((value, kept), (wanted[0], jax.tree.leaves(wanted[1])))


@pytest.mark.parametrize("name", ONE_OF_EACH_STATISTIC)
def test_without_a_bias_it_is_the_loss_without_a_bias(name):
    (features, kernel, _), labels, where = problem()
    loss = make_loss(name, **CASES[name])
    step = jax.jit(jax.value_and_grad(lambda logits: loss(logits, labels, where=where)))
    value, gradient = step(LinearLogits(features, kernel, block_size=5))
    wanted_value, wanted = step(LinearLogits(features, kernel, np.zeros(NUM_CLASSES, np.float32)))
    assert gradient.bias is None
    assert_same((value, gradient), (wanted_value, jax.tree.leaves(wanted)[:2]))


@pytest.mark.parametrize("name", ["self_normalization", "noise_contrastive_estimation"])
def test_a_loss_per_example_takes_any_leading_axes_and_gives_one_value_each(name):
    (features, kernel, bias), labels, where = problem()
    features, labels = features[where][:6], labels[where][:6]
    loss = jax.jit(lambda *z, labels: LOSSES[name](LinearLogits(*z), labels, **CASES[name]))
    flat = loss(features, kernel, bias, labels=labels)
    dense = jax.jit(lambda z: LOSSES[name](z, labels, **CASES[name]))(all_logits(features, kernel, bias))
    np.testing.assert_allclose(flat, dense, rtol=3e-6)
    grid = loss(features.reshape(2, 3, NUM_FEATURES), kernel, bias, labels=labels.reshape(2, 3))
    np.testing.assert_allclose(grid, flat.reshape(2, 3), rtol=2e-6)
    one = loss(features[0], kernel, bias, labels=labels[0])
    assert one.shape == ()
    np.testing.assert_allclose(one, flat[0], rtol=2e-6)


@pytest.mark.parametrize("name", ONE_OF_EACH_STATISTIC)
def test_large_logits_give_finite_values_and_gradients_equal_to_the_dense_ones(name):
    rng = np.random.default_rng(3)
    kernel = np.sign(rng.normal(size=(NUM_CLASSES, 1))).astype(np.float32)  # logits of +1e4 and -1e4, exactly
    features, labels = np.full((6, 1), 1e4, np.float32), rng.integers(0, NUM_CLASSES, 6)
    loss = make_loss(name, **CASES[name])
    of_parts, of_array = (
        jax.jit(jax.value_and_grad(lambda f, k, make=make: loss(make(f, k), labels), argnums=(0, 1)))
        for make in (functools.partial(LinearLogits, block_size=5), all_logits)
    )
    (value, gradients), (wanted_value, wanted) = of_parts(features, kernel), of_array(features, kernel)
    assert np.isfinite(value)
    np.testing.assert_allclose(value, wanted_value, rtol=2e-6, atol=1e-3)
    for gradient, wanted_gradient in zip(gradients, wanted, strict=True):
        # The gradient of a row is a sum of numbers of size 1e4 that cancel.
        np.testing.assert_allclose(gradient, wanted_gradient, rtol=2e-5, atol=3e-2)


def test_which_examples_are_right_is_told_from_logits_and_from_linear_logits_alike():
    (features, kernel, bias), labels, where = problem()
    features, labels = features[where], labels[where]
    logits = np.asarray(all_logits(features, kernel, bias))
    labels[::2] = logits.argmax(axis=1)[::2]
    wanted = logits.argmax(axis=1) == labels
    right = jax.jit(is_correct)
    for given in (logits, LinearLogits(features, kernel, bias, block_size=5)):
        np.testing.assert_array_equal(right(given, labels), wanted)
    tied = jnp.array([[1.0, 1.0], [2.0, 1.0]])
    np.testing.assert_array_equal(right(tied, jnp.array([0, 0])), [False, True])
    np.testing.assert_array_equal(right(tied, jnp.array([-1, -1])), [False, False])


def test_forward_mode_is_refused_in_one_sentence_that_says_what_to_do():
    (features, kernel, bias), labels, where = problem()
    logits = LinearLogits(features, kernel, bias)
    loss = make_loss("cross_entropy")
    with pytest.raises(TypeError, match=r"in reverse mode alone: use jax.grad or jax.vjp, or .* all_logits"):
        jax.jvp(lambda logits: loss(logits, labels, where=where), (logits,), (logits,))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": np.ones((6, 5), np.float32)}, ValueError, r"features must have shape \[..., 4\]"),
        ({"features": np.ones((6, 4), np.int32)}, TypeError, "features must be floating-point"),
        (
            {"kernel": np.ones((4, 16), np.float32)},
            ValueError,
            r"kernel must be \[k, d\].*transposed.*kernel.T",
        ),
        ({"kernel": np.ones((0, 4), np.float32)}, ValueError, r"kernel must have shape \[k, d\]"),
        ({"bias": np.ones(5, np.float32)}, ValueError, r"bias must have shape \[16\]"),
        ({"labels": np.ones(6, np.float32)}, TypeError, "labels must be integers"),
        ({"labels": np.ones(5, np.int32)}, ValueError, "labels must have the shape of features"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"where": np.ones(5, bool)}, ValueError, "where must have the shape of labels"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_part_is_named(change, error, message):
    arguments = {
        "features": np.ones((6, 4), np.float32),
        "kernel": np.ones((16, 4), np.float32),
        "bias": np.ones(16, np.float32),
        "labels": np.zeros(6, np.int32),
        "where": None,
    } | change
    labels, where = arguments.pop("labels"), arguments.pop("where")
    with pytest.raises(error, match=message):
        losses.batch_cross_entropy(LinearLogits(**arguments), labels, where=where)
    if where is None:
        with pytest.raises(error, match=message):
            losses.cross_entropy(LinearLogits(**arguments), labels)


def test_hyperparameters_are_checked_against_the_classes_of_all_parts():
    logits = LinearLogits(np.ones((2, 3), np.float32), np.ones((4, 3), np.float32))
    with pytest.raises(ValueError, match=r"noise_probs must have shape \[4\]"):
        losses.noise_contrastive_estimation(
            logits, np.zeros(2, np.int32), num_noise=3, noise_probs=np.full(5, 0.2, np.float32)
        )
