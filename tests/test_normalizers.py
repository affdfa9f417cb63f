"""Normalizers: estimates of log Z that see no labels, cost a few rows, and are exact with all of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracles import logsumexp
from shares import together

from pols_jax.heads import all_logits, class_logits
from pols_jax.metrics import average_precision
from pols_jax.normalizers import (
    Clusters,
    Fit,
    Normalizer,
    estimates,
    fit_normalizer,
    fold,
    log_normalizer,
    rows_of_clusters,
)
from pols_jax.normalizers.normalizer import is_product_faster

NUM_CLASSES, NUM_FEATURES = 60, 8
# With eight rows all are those of clusters; with forty, half are rows of classes.
NUM_ROWS = [8, 40]
log_sum_exp = functools.partial(np.apply_along_axis, logsumexp, -1)


@pytest.fixture(scope="module")
def layer():
    """Features around 60 centers, and an output layer that points at them."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(NUM_CLASSES, NUM_FEATURES)).astype(np.float32)
    bias = rng.normal(size=NUM_CLASSES).astype(np.float32)
    labels = rng.integers(NUM_CLASSES, size=900)
    features = 2 * kernel[labels] + rng.normal(size=(900, NUM_FEATURES)).astype(np.float32)
    return features, kernel, bias, labels


fit = functools.partial(fit_normalizer, num_steps=100, batch_size=128)


def test_log_normalizer_is_that_of_float64_for_any_block_size(layer):
    features, kernel, bias, _ = layer
    logits = features.astype(np.float64) @ kernel.T.astype(np.float64) + bias
    for block_size in (None, 7, NUM_CLASSES):
        computed = log_normalizer(features, kernel, bias, block_size=block_size)
        np.testing.assert_allclose(computed, log_sum_exp(logits), rtol=1e-6, atol=1e-5)


def log_z_in_float64(features, kernel, bias):
    return log_sum_exp(features.astype(np.float64) @ kernel.T.astype(np.float64) + bias)


def test_more_rows_fit_better_and_every_fit_says_how_well(layer):
    features, kernel, bias, _ = layer
    fits = [fit(features, kernel, bias, num_rows=rows) for rows in (0, 8, 40)]
    assert [normalizer.num_rows for normalizer in fits] == [1, 8, 40]
    r_squared = [normalizer.fit.r_squared for normalizer in fits]
    assert r_squared == sorted(r_squared)
    assert 0 < r_squared[0] < r_squared[-1] < 1
    held_out = features[:100] + 0.1
    normalizer = fit(features, kernel, bias, num_rows=8, held_out=held_out)
    wanted = log_z_in_float64(held_out, kernel, bias)
    squares = np.square(np.asarray(normalizer(held_out), np.float64) - wanted)
    variance, error = np.var(wanted), np.mean(squares)
    np.testing.assert_allclose(normalizer.fit.error, np.sqrt(error), rtol=1e-4)
    np.testing.assert_allclose(normalizer.fit.r_squared, 1 - error / variance, rtol=1e-4)
    assert normalizer.fit.num_features == len(features)


def test_the_affine_one_is_the_least_squares_solution(layer):
    features, kernel, bias, _ = layer
    normalizer = fit(features, kernel, bias, num_rows=0, held_out=features[:9])
    wanted = log_z_in_float64(features, kernel, bias)
    columns = np.c_[features, np.ones(len(features))].astype(np.float64)
    solution, *_ = np.linalg.lstsq(columns, wanted)
    np.testing.assert_allclose(normalizer.kernel[0], solution[:-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(normalizer.bias[0], solution[-1], rtol=1e-4, atol=1e-4)


def opened_in_float64(features, normalizer, kernel, bias):
    """Clusters are opened one by one, the largest estimate first, as long as their classes are at most ``num_own``."""
    rows, row_bias = (np.asarray(part, np.float64) for part in (normalizer.kernel, normalizer.bias))
    estimates = features.astype(np.float64) @ rows.T + row_bias
    logits = features.astype(np.float64) @ kernel.T.astype(np.float64) + bias
    cluster_of, num_own = normalizer.clusters.cluster_of, normalizer.clusters.num_own
    found = []
    for example, classes in zip(estimates, logits, strict=True):
        left, terms = num_own, []
        is_full = False
        for cluster in np.argsort(-example):
            members = np.flatnonzero(cluster_of == cluster)
            is_full = is_full or (len(members) <= num_own and len(members) > left)
            if is_full or not len(members) or len(members) > num_own:
                terms.append(example[cluster])
            else:
                terms.extend(classes[members])
                left -= len(members)
        found.append(logsumexp(np.array(terms)))
    return np.array(found)


def test_the_classes_of_the_largest_clusters_are_read_themselves(layer):
    features, kernel, bias, _ = layer
    assert rows_of_clusters(NUM_CLASSES, num_rows=40) == (20, 20)
    normalizer = fit(features, kernel, bias, num_rows=40)
    assert (normalizer.num_rows, normalizer.clusters.num_own) == (40, 20)
    assert int(normalizer.clusters.sizes.sum()) == NUM_CLASSES
    expected = opened_in_float64(features, normalizer, kernel, bias)
    np.testing.assert_allclose(normalizer(features), expected, rtol=1e-5, atol=1e-4)
    closed = Normalizer(normalizer.kernel, normalizer.bias, normalizer.fit)
    wanted = log_z_in_float64(features, kernel, bias)
    errors = [np.sqrt(np.mean((np.asarray(each(features)) - wanted) ** 2)) for each in (closed, normalizer)]
    assert errors[1] < errors[0] / 2


def test_a_cluster_that_is_too_large_stays_closed_and_the_next_ones_are_opened(layer):
    features, kernel, bias, _ = layer
    cluster_of = np.repeat([0, 1, 2], [50, 6, 4])
    rows = jnp.zeros((4, NUM_FEATURES)), jnp.array([3.0, 2.0, 1.0, 0.0])  # the last cluster has no class
    clusters = Clusters.of(cluster_of, kernel, bias, num_clusters=4, num_own=10)
    normalizer = Normalizer(*rows, Fit(0.0, 0.0, 0), clusters)
    logits = features.astype(np.float64) @ kernel.T.astype(np.float64) + bias
    terms = np.concatenate([np.broadcast_to([3.0, 0.0], (len(features), 2)), logits[:, 50:]], axis=1)
    np.testing.assert_allclose(normalizer(features), log_sum_exp(terms), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(clusters.cluster_of, cluster_of)


def test_rows_stored_in_eight_bits_are_scaled_when_they_are_read(layer):
    features, _, bias, _ = layer
    rng = np.random.default_rng(1)
    stored, scales = (
        rng.integers(-127, 128, (NUM_CLASSES, NUM_FEATURES)),
        rng.uniform(0.001, 0.1, NUM_CLASSES),
    )
    kernel = (stored * scales[:, None]).astype(np.float32)
    plain = fit(features, kernel, bias, num_rows=40)
    clusters = dataclasses.replace(
        plain.clusters, kernel=jnp.asarray(stored, jnp.int8), scales=jnp.asarray(scales, jnp.float32)
    )
    scaled = dataclasses.replace(plain, clusters=clusters)
    for some in (features, features[0]):
        np.testing.assert_allclose(scaled(some), plain(some), rtol=1e-5, atol=1e-4)


def test_an_example_reads_the_rows_of_its_classes_and_many_pick_them_from_a_product(layer):
    features, kernel, bias, _ = layer
    normalizer = fit(features, kernel, bias, num_rows=40)
    faster = [is_product_faster(n, num_classes=NUM_CLASSES, num_own=20) for n in (1, 2, 3, 900)]
    assert faster == [False, False, True, True]
    together = normalizer(features[:20])
    np.testing.assert_allclose(
        [normalizer(example) for example in features[:20]], together, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(jax.vmap(normalizer)(features[:20]), together, rtol=1e-5, atol=1e-5)


def test_with_too_many_classes_for_the_own_rows_a_large_batch_gathers_them_too():
    assert is_product_faster(10_000, num_classes=640, num_own=20)
    assert not is_product_faster(10_000, num_classes=641, num_own=20)


@pytest.mark.parametrize("num_rows", [NUM_CLASSES, 10 * NUM_CLASSES])
def test_with_as_many_rows_as_classes_it_is_the_head_and_scores_as_all_logits_do(layer, num_rows):
    features, kernel, bias, labels = layer
    normalizer = fit(features, kernel, bias, num_rows=num_rows)
    np.testing.assert_array_equal(normalizer.kernel, kernel)
    np.testing.assert_array_equal(normalizer.bias, bias)
    logits = all_logits(features, kernel, bias)
    normalized = average_precision(logits - normalizer(features)[:, None], jnp.asarray(labels))
    all_of_them = average_precision(jax.nn.log_softmax(logits), jnp.asarray(labels))
    np.testing.assert_allclose(normalized, all_of_them, atol=1e-6)
    assert normalizer.fit.r_squared > 1 - 1e-9


def test_folding_the_affine_one_changes_no_probability_and_no_prediction(layer):
    features, kernel, bias, _ = layer
    normalizer = fit(features, kernel, bias, num_rows=0)
    folded = all_logits(features, *fold(normalizer, kernel, bias))
    logits = all_logits(features, kernel, bias)
    np.testing.assert_allclose(jax.nn.softmax(folded), jax.nn.softmax(logits), atol=1e-5)
    np.testing.assert_array_equal(folded.argmax(-1), logits.argmax(-1))
    np.testing.assert_allclose(folded, logits - normalizer(features)[:, None], atol=1e-4)
    without_bias, _ = fold(normalizer, kernel)
    np.testing.assert_array_equal(without_bias, fold(normalizer, kernel, bias)[0])


def test_only_one_row_can_be_folded(layer):
    features, kernel, bias, _ = layer
    with pytest.raises(ValueError, match=r"Only an affine normalizer can be folded .* 8 rows"):
        fold(fit(features, kernel, bias, num_rows=8), kernel, bias)


def test_the_same_seed_gives_the_same_bits_and_another_one_others(layer):
    features, kernel, bias, _ = layer
    first, second, other = (fit(features, kernel, bias, num_rows=40, seed=seed) for seed in (3, 3, 4))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.kernel, other.kernel)


def test_batches_give_what_the_array_gives(layer):
    features, kernel, bias, _ = layer
    whole = fit(features, kernel, bias, num_rows=8)
    batches = fit((features[i : i + 70] for i in range(0, len(features), 70)), kernel, bias, num_rows=8)
    np.testing.assert_allclose(whole.kernel, batches.kernel, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_call_is_pure_and_traces_under_jit_vmap_and_grad(layer, num_rows):
    features, kernel, bias, _ = layer
    normalizer = fit(features, kernel, bias, num_rows=num_rows)
    called = normalizer(features)
    np.testing.assert_allclose(jax.jit(lambda n, f: n(f))(normalizer, features), called, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(normalizer)(jnp.asarray(features)), called, rtol=1e-5)
    assert normalizer(jnp.zeros((2, 3, NUM_FEATURES))).shape == (2, 3)
    assert np.isfinite(jax.grad(lambda f: normalizer(f).sum())(jnp.asarray(features))).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_heads_and_features_give_float32(layer, dtype):
    features, kernel, bias, _ = layer
    kernel, bias = jnp.asarray(kernel, dtype), jnp.asarray(bias, dtype)
    normalizer = fit(features, kernel, bias, num_rows=40)
    assert normalizer.clusters.kernel.dtype == dtype
    assert normalizer.fit.r_squared > 0.9
    assert normalizer(jnp.asarray(features, dtype)).dtype == jnp.float32
    logits = all_logits(features.astype(np.float32), kernel.astype(jnp.float32), bias.astype(jnp.float32))
    exact = jax.nn.logsumexp(logits, axis=-1)
    np.testing.assert_allclose(log_normalizer(features, kernel, bias), exact, rtol=1e-5, atol=1e-4)
    whole = fit(features, kernel, bias, num_rows=NUM_CLASSES)
    assert whole.kernel.dtype == dtype
    folded, _ = fold(fit(features, kernel, bias, num_rows=0), kernel, bias)
    assert folded.dtype == jnp.float32


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_gives_what_one_device_gives(layer, num_rows, axis_type):
    features, kernel, bias, _ = layer
    mesh = jax.make_mesh((4,), ("class",), devices=jax.devices()[:4], axis_types=(axis_type,))
    spread = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec("class", *[None] * (array.ndim - 1))))
        for array in (kernel, bias)
    ]
    alone = fit(features, kernel, bias, num_rows=num_rows)
    on_mesh = fit(features, *spread, num_rows=num_rows)
    for some in (features, features[:1]):
        np.testing.assert_allclose(on_mesh(some), alone(some), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [0, 6, 40, 10**6], ids=["affine", "rows", "own rows", "exact"])
def test_processes_that_share_out_the_classes_fit_what_one_fits(layer, num_rows):
    features, kernel, bias, _ = layer
    options = {"num_rows": num_rows, "num_steps": 40, "batch_size": 128}
    alone = fit_normalizer(features, kernel, bias, **options)

    def fit(share):
        own = slice(share.classes.start, share.classes.stop)
        fitted = fit_normalizer(features, kernel[own], bias[own], share=share, **options)
        return fitted, [estimates(fitted, some, share=share) for some in (features, features[:1])]

    found = together(fit, num_classes=len(kernel), count=2)
    for each, estimated in found:
        # Sums over classes are added up in another order, and 40 steps of Adam carry that on.
        rounding = 1e-2 if num_rows in (6, 40) else 1e-4
        for found_of, some in zip(estimated, (features, features[:1]), strict=True):
            np.testing.assert_allclose(found_of, estimates(alone, some), rtol=rounding, atol=rounding)
        np.testing.assert_allclose(each.fit, alone.fit, rtol=1e-2, atol=1e-3)
        if each.clusters is not None:
            assert each.clusters.kernel.shape[0] == NUM_CLASSES // 2
    np.testing.assert_array_equal(found[0][0].kernel, found[1][0].kernel)


def test_the_score_of_one_class_reads_its_row_and_the_normalizer_alone(layer):
    features, kernel, bias, _ = layer
    normalizer = fit(features, kernel, bias, num_rows=40)

    @jax.jit
    def score(features, kernel, bias, class_id):
        own = dataclasses.replace(normalizer.clusters, kernel=kernel, bias=bias)
        return class_logits(features, kernel, bias, class_id) - dataclasses.replace(normalizer, clusters=own)(
            features
        )

    shapes = (
        jax.ShapeDtypeStruct((4, NUM_FEATURES), jnp.float32),
        jax.ShapeDtypeStruct((2**20, NUM_FEATURES), jnp.float32),
        jax.ShapeDtypeStruct((2**20,), jnp.float32),
        0,
    )
    cost = score.lower(*shapes).compile().cost_analysis()
    assert cost["flops"] < 50_000, "of a million rows, one and those of the normalizer are read"


def test_progress_is_reported_until_all_is_done(layer):
    features, kernel, bias, _ = layer
    reports = []
    fit(features, kernel, bias, num_rows=8, on_progress=lambda *report: reports.append(report))
    assert reports[0] == ("all logits of the examples", 810, 810)
    assert reports[-1] == ("8 rows", 100, 100)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kernel": np.ones((NUM_FEATURES, NUM_CLASSES), np.float32)}, ValueError, "bias must have shape"),
        (
            {"kernel": np.ones((NUM_FEATURES, NUM_CLASSES), np.float32), "bias": None},
            ValueError,
            "features must have shape",
        ),
        ({"kernel": np.ones((NUM_CLASSES, 5), np.float32)}, ValueError, r"features must have shape \[n, 5\]"),
        (
            {"kernel": np.full((NUM_CLASSES, NUM_FEATURES), np.nan, np.float32)},
            ValueError,
            "kernel and bias must be",
        ),
        (
            {"features": np.full((900, NUM_FEATURES), np.nan, np.float32)},
            ValueError,
            "features must be finite",
        ),
        ({"features": np.ones((900, NUM_FEATURES), np.int32)}, TypeError, "features must be floating-point"),
        (
            {"features": np.ones((5, NUM_FEATURES), np.float32)},
            ValueError,
            "at least as many features, got 5",
        ),
        ({"features": iter(())}, ValueError, "at least as many features, got 0"),
        ({"features": np.ones(NUM_FEATURES, np.float32)}, ValueError, "features must have shape"),
        ({"num_rows": -1}, ValueError, "num_rows must be at least 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(layer, change, error, message):
    features, kernel, bias, _ = layer
    arguments = {"features": features, "kernel": kernel, "bias": bias, "num_rows": 8} | change
    with pytest.raises(error, match=message):
        fit(**arguments)


def test_a_normalizer_is_a_pytree_of_its_rows():
    normalizer = Normalizer(jnp.ones((2, 3)), jnp.zeros(2), Fit(1.0, 0.0, 7))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, normalizer)
    assert isinstance(doubled, Normalizer)
    assert doubled.fit.num_features == 14
