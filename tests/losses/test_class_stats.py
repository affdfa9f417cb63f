"""Statistics over the classes of each example: from logits, block by block, and over devices that have parts of them.

Every placement is compared with plain float64 NumPy, in value and in the gradients of features, kernel and bias.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from pols_jax.heads import all_logits
from pols_jax.losses import LinearLogits
from pols_jax.losses.class_stats import DenseStats
from pols_jax.losses.linear_stats import LinearStats, default_block_size
from pols_jax.losses.noise import Noise

NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES, NUM_NOISE = 24, 4, 16, 7.5
PROBS = np.random.default_rng(7).dirichlet(np.ones(NUM_CLASSES)).astype(np.float32)
STATISTICS = ("logsumexp", "max_false_logit", "false_softplus_sum", "noise_softplus_sum", "uniform_noise")


def problem(dtype=np.float32):
    """Features, kernel and bias; labels; and how much the true logit and the statistic of each example count."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_EXAMPLES, NUM_FEATURES)).astype(dtype)
    kernel = (2.0 * rng.normal(size=(NUM_CLASSES, NUM_FEATURES))).astype(dtype)
    bias = rng.normal(size=NUM_CLASSES).astype(dtype)
    labels = rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, dtype=np.int32)
    weights = rng.normal(size=(2, len(STATISTICS), NUM_EXAMPLES)).astype(dtype)
    return (features, kernel, bias), labels, weights


def statistics(stats, dtype=jnp.float32):
    """True logits and statistics, both ``[statistics, examples]``; the parts of a logsumexp are added up."""
    noises = (
        Noise.of(num_noise=NUM_NOISE, noise_probs=probs, num_classes=stats.num_classes)
        for probs in (jnp.asarray(PROBS, dtype), None)
    )
    pairs = [
        stats.logsumexp(),
        stats.max_false_logit(),
        stats.false_softplus_sum(),
        *map(stats.noise_softplus_sum, noises),
    ]
    pairs[0] = pairs[0][0], sum(pairs[0][1])
    return tuple(jnp.stack(column) for column in zip(*pairs, strict=True))


def weighted(make_stats, layer, labels, weights):
    return jnp.sum(weights * jnp.stack(statistics(make_stats(*layer, labels), weights.dtype)))


def dense(features, kernel, bias, labels):
    return DenseStats(all_logits(features, kernel, bias), labels)


def linear(features, kernel, bias, labels, **options):
    return LinearStats(LinearLogits(features, kernel, bias, **options), labels)


@functools.cache
def expected():
    """The statistics, their weighted sum and its gradients, in float64 and by loops."""
    (features, kernel, bias), labels, weights = (
        jax.tree.map(lambda x: np.asarray(x, np.float64 if x.dtype.kind == "f" else int), part)
        for part in problem()
    )
    logits = features @ kernel.T + bias
    softplus, sigmoid = np.vectorize(oracles.softplus), np.vectorize(oracles.sigmoid)
    values, slopes = np.zeros((2, len(STATISTICS), NUM_EXAMPLES)), np.zeros_like(logits)
    for i, (row, label) in enumerate(zip(logits, labels, strict=True)):
        is_true = np.arange(NUM_CLASSES) == label
        largest = max((j for j in range(NUM_CLASSES) if j != label), key=lambda j: row[j])
        counts = NUM_NOISE * np.stack([PROBS.astype(np.float64), np.full(NUM_CLASSES, 1 / NUM_CLASSES)])
        scores = row - np.log(counts)
        values[0, :, i] = [*[row[label]] * 3, *scores[:, label]]
        values[1, :, i] = [
            oracles.logsumexp(row),
            row[largest],
            softplus(row)[~is_true].sum(),
            *(counts * softplus(scores)).sum(axis=1),
        ]
        slope_of = [
            np.exp(row - oracles.logsumexp(row)),
            (np.arange(NUM_CLASSES) == largest).astype(float),
            sigmoid(row) * ~is_true,
            *(counts * sigmoid(scores)),
        ]
        slopes[i] = weights[1, :, i] @ slope_of + weights[0, :, i].sum() * is_true
    return values, np.sum(weights * values), (slopes @ kernel, slopes.T @ features, slopes.sum(axis=0))


def assert_same(actual, wanted, *, rtol=2e-5, atol=2e-5):
    # Sums over blocks and devices are taken in another order: a few roundings of float32 on numbers up to 50.
    for value, wanted_value in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(value, wanted_value, rtol=rtol, atol=atol)


PLACEMENTS = {
    "dense": dense,
    **{f"blocks of {size}": functools.partial(linear, block_size=size) for size in (1, 5, 100)},
}


@pytest.mark.parametrize("make_stats", PLACEMENTS.values(), ids=PLACEMENTS)
def test_statistics_and_gradients_on_one_device_are_the_plain_sums_and_maxima(make_stats):
    layer, labels, weights = problem()
    values = jax.jit(lambda layer: jnp.stack(statistics(make_stats(*layer, labels))))(layer)
    step = jax.jit(jax.value_and_grad(functools.partial(weighted, make_stats)))
    wanted_values, *wanted = expected()
    assert_same(values, wanted_values, rtol=2e-6, atol=2e-6)
    assert_same(step(layer, labels, weights), wanted)


@pytest.mark.parametrize(
    "make_stats", [dense, functools.partial(linear, block_size=5)], ids=["dense", "blocks"]
)
def test_in_float64_they_agree_to_twelve_digits(make_stats, x64):
    layer, labels, weights = jax.tree.map(
        lambda x: x.astype(np.float64) if x.dtype.kind == "f" else x, problem()
    )
    actual = jax.jit(jax.value_and_grad(functools.partial(weighted, make_stats)))(layer, labels, weights)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype("float64")}
    assert_same(actual, expected()[1:], rtol=1e-12, atol=1e-12)


def mesh_of(split):
    return jax.make_mesh(split, ("data", "class"), axis_types=(AxisType.Auto,) * 2)


IN_SPECS = ((P("data"), P("class"), P("class")), P("data"), P(None, None, "data"))


def on_shards(layer, labels, weights):
    make_stats = functools.partial(linear, block_size=3, class_axis_name="class")
    return lax.psum(weighted(make_stats, layer, labels, weights), "data")


@pytest.mark.parametrize("split", [(1, 8), (2, 4), (8, 1)], ids=str)
def test_over_data_and_class_shards_gradients_taken_on_the_devices_are_those_of_one_device(split):
    on_mesh = jax.shard_map(
        jax.value_and_grad(on_shards), mesh=mesh_of(split), in_specs=IN_SPECS, out_specs=(P(), IN_SPECS[0])
    )
    assert_same(jax.jit(on_mesh)(*problem()), expected()[1:])


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_taken_outside_shard_map_are_those_of_one_device_with_and_without_check_vma(check_vma):
    on_mesh = jax.shard_map(
        on_shards, mesh=mesh_of((2, 4)), in_specs=IN_SPECS, out_specs=P(), check_vma=check_vma
    )
    assert_same(jax.jit(jax.value_and_grad(on_mesh))(*problem()), expected()[1:])


def test_vmap_over_models_is_a_loop_over_models():
    layer, labels, weights = problem()
    step = jax.value_and_grad(functools.partial(weighted, functools.partial(linear, block_size=5)))
    models = jax.tree.map(lambda x: np.stack([x, -x]), layer)
    values, gradients = jax.jit(jax.vmap(step, in_axes=(0, None, None)))(models, labels, weights)
    assert_same((values[0], jax.tree.map(lambda x: x[0], gradients)), expected()[1:])
    other = jax.jit(step)(jax.tree.map(np.negative, layer), labels, weights)
    assert_same((values[1], jax.tree.map(lambda x: x[1], gradients)), other)


def test_16_bit_numbers_are_accumulated_in_float32_and_a_gradient_is_rounded_once():
    (features, kernel, bias), labels, weights = problem()
    low = features.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), bias
    high = tuple(x.astype(np.float32) for x in low)
    make_stats = functools.partial(linear, block_size=5)
    values, of_dense = (
        jax.jit(lambda layer, make=make: jnp.stack(statistics(make(*layer, labels))))(layer)
        for make, layer in ((make_stats, low), (dense, high))
    )
    # Products of 16-bit numbers are exact in float32.
    assert values.dtype == jnp.float32
    assert_same(values, of_dense, rtol=2e-6, atol=1e-6)
    gradient_of, wanted_of = (jax.jit(jax.grad(functools.partial(weighted, m))) for m in (make_stats, dense))
    for one in np.eye(len(STATISTICS), dtype=np.float32):  # a sum of several would be rounded several times
        gradients = gradient_of(low, labels, weights * one[None, :, None])
        assert [gradient.dtype for gradient in gradients] == [array.dtype for array in low]
        gradients = jax.tree.map(lambda x: x.astype(np.float32), gradients)
        wanted = wanted_of(high, labels, weights * one[None, :, None])
        assert_same(gradients, wanted, rtol=float(jnp.finfo(jnp.bfloat16).eps), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_logits_are_read_as_float32(dtype):
    logits, labels = oracles.problem()
    logits = jnp.asarray(logits, dtype)
    low, high = (DenseStats(x, labels).false_softplus_sum() for x in (logits, logits.astype(jnp.float32)))
    assert low[1].dtype == jnp.float32
    assert_same(low, high, rtol=0, atol=0)


def test_the_parts_of_a_logsumexp_keep_the_digits_that_their_sum_would_lose():
    true_logit, (peak, log_sum) = DenseStats(jnp.array([[1e4, 1e4 - 1.0]]), jnp.array([0])).logsumexp()
    # log(1 + e^-1) = 0.31326169
    np.testing.assert_allclose((peak - true_logit) + log_sum, 0.31326169, rtol=1e-6)
    assert abs((peak + log_sum) - true_logit - 0.31326169) > 1e-5


TIES = jnp.array([9.0, 2.0, 1.0, 2.0, 2.0, 0.0, 0.0, 2.0])


@pytest.mark.parametrize("block_size", [None, 1, 2, 3, 8])
def test_among_tied_false_logits_the_lowest_class_has_the_gradient(block_size):
    def max_false_logit(bias):
        layer = jnp.ones((1, 1)), TIES[:, None], bias, jnp.array([0])
        stats = linear(*layer, block_size=block_size) if block_size else dense(*layer)
        return stats.max_false_logit()[1][0]

    np.testing.assert_array_equal(jax.jit(jax.grad(max_false_logit))(jnp.zeros(8)), [0, 1, 0, 0, 0, 0, 0, 0])


def test_a_tie_between_shards_goes_to_the_lowest_class():
    def max_false_logit(bias, kernel):
        stats = linear(jnp.ones((1, 1)), kernel, bias, jnp.zeros(1, jnp.int32), class_axis_name="class")
        return stats.max_false_logit()[1][0]

    gradient = jax.shard_map(
        jax.grad(max_false_logit),
        mesh=mesh_of((1, 8)),
        in_specs=(P("class"), P("class")),
        out_specs=P("class"),
    )
    np.testing.assert_array_equal(jax.jit(gradient)(jnp.zeros(8), TIES[:, None]), [0, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("make_stats", [dense, linear])
def test_a_true_logit_that_is_the_largest_or_ties_is_never_taken_for_a_false_one(make_stats):
    kernel, labels = jnp.array([[3.0, 2.0], [1.0, 2.0]]), jnp.array([0, 1])

    def max_false_logit(kernel):
        return make_stats(jnp.eye(2), kernel, jnp.zeros(2), labels).max_false_logit()[1]

    np.testing.assert_array_equal(max_false_logit(kernel), [1.0, 2.0])
    gradient = jax.grad(lambda kernel: max_false_logit(kernel).sum())(kernel)
    np.testing.assert_array_equal(gradient, [[0.0, 1.0], [1.0, 0.0]])


@pytest.mark.parametrize("make_stats", [dense, linear])
def test_one_class_has_no_false_logit_and_so_the_most_negative_number_with_no_gradient(make_stats):
    def stats(bias):
        return make_stats(jnp.ones((1, 1)), jnp.ones((1, 1)), bias, jnp.array([0]))

    bias = jnp.zeros(1)
    assert stats(bias).max_false_logit()[1][0] == jnp.finfo(jnp.float32).min
    assert stats(bias).false_softplus_sum()[1][0] == 0
    assert jax.grad(lambda bias: stats(bias).max_false_logit()[1].sum())(bias)[0] == 0


@pytest.mark.parametrize("placement", ["dense", "blocks", "shards"])
def test_a_label_out_of_range_has_a_true_logit_of_nan(placement):
    layer, labels, _ = problem()
    labels[[1, 4, 7]] = [-1, NUM_CLASSES, 2**31 - 1]
    make_stats = {
        "dense": dense,
        "blocks": functools.partial(linear, block_size=5),
        "shards": functools.partial(linear, class_axis_name="class"),
    }[placement]

    def true_logit(layer, labels):
        return make_stats(*layer, labels).logsumexp()[0]

    if placement == "shards":
        specs = ((P(), P("class"), P("class")), P())
        true_logit = jax.shard_map(true_logit, mesh=mesh_of((1, 8)), in_specs=specs, out_specs=P())
    values = jax.jit(true_logit)(layer, labels)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(values)), [1, 4, 7])


def test_the_automatic_block_fits_its_budget_and_is_not_tiny():
    assert default_block_size(128, 512, 2**20) == 2048  # 2048 rows of 512 float32 numbers are 4 MB
    assert default_block_size(1024, 256, 2**20) == 1024  # 1024 logits of 1024 examples
    assert default_block_size(10**6, 256, 2**20) == 1024
    assert default_block_size(8, 8, 37) == 37
    assert default_block_size(0, 0, 37) == 37
