"""The output layer: all logits, or only the asked ones, by gathering rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from pols_jax.heads import ClassHead, all_logits, class_logits, pad_classes, prior_bias

NUM_CLASSES, NUM_FEATURES = 1013, 24  # a prime, to be found again in the text of a program


def head(*batch_shape, num_classes=NUM_CLASSES, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(*batch_shape, NUM_FEATURES)).astype(np.float32)
    kernel = rng.normal(size=(num_classes, NUM_FEATURES)).astype(np.float32)
    return (
        jnp.asarray(features),
        jnp.asarray(kernel),
        jnp.asarray(rng.normal(size=num_classes).astype(np.float32)),
    )


def naive(features, kernel, bias):
    features, kernel, bias = (np.asarray(array, np.float64) for array in (features, kernel, bias))
    return features @ kernel.T + bias


@pytest.mark.parametrize("batch_shape", [(), (1,), (32,), (33,), (2, 3), (5, 4, 3), (0,)])
def test_all_logits_are_the_plain_product_for_any_number_of_examples(batch_shape):
    arrays = head(*batch_shape)
    logits = all_logits(*arrays)
    assert logits.shape == (*batch_shape, NUM_CLASSES)
    # Sums of 24 products of about 1, in float32.
    np.testing.assert_allclose(logits, naive(*arrays), atol=1e-5)


@pytest.mark.parametrize("num_examples", [1, 40])
def test_all_logits_have_the_gradients_of_the_plain_product(num_examples):
    arrays = head(num_examples, num_classes=7)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(num_examples, 7)).astype(np.float32))
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(weights * all_logits(*a)), argnums=(0, 1, 2)))(*arrays)
    features, kernel, _ = arrays
    for gradient, expected in zip(
        gradients, (weights @ kernel, weights.T @ features, weights.sum(axis=0)), strict=True
    ):
        np.testing.assert_allclose(gradient, expected, atol=1e-4)


def keeps_its_product_apart(program, *arrays):
    """Whether the product is an instruction of the entry computation, and not a part of a fusion."""
    hlo = jax.jit(program).lower(*arrays).compile().as_text()
    return hlo[hlo.index("ENTRY") :].count(" dot(") == hlo.count(" dot(") == 1


def test_all_logits_of_one_example_compile_to_a_dot_that_is_kept_apart_from_the_addition_of_the_bias():
    """XLA for CPU fuses `x @ W.T + b` of one example into a loop that is 25 times slower than its matrix product."""
    assert keeps_its_product_apart(all_logits, *head(1))
    # The control: should XLA stop fusing the plain form, then `all_logits` need not avoid it any more.
    assert not keeps_its_product_apart(lambda x, kernel, bias: x @ kernel.T + bias[None, :], *head(1))


def test_class_logits_of_one_class_and_of_many_are_columns_of_all_logits():
    arrays = head(5)
    everything = naive(*arrays)
    one = class_logits(*arrays, 7)
    many = class_logits(*arrays, jnp.array([7, 0, 1012, 7]))
    assert one.shape == (5,)
    assert many.shape == (5, 4)
    np.testing.assert_allclose(one, everything[:, 7], atol=1e-5)
    np.testing.assert_allclose(many, everything[:, [7, 0, 1012, 7]], atol=1e-5)


@pytest.mark.parametrize("batch_shape", [(), (2, 3)])
def test_class_logits_take_any_leading_axes(batch_shape):
    arrays = head(*batch_shape)
    assert class_logits(*arrays, 7).shape == batch_shape
    assert class_logits(*arrays, np.array([7, 8])).shape == (*batch_shape, 2)
    np.testing.assert_allclose(class_logits(*arrays, 7), naive(*arrays)[..., 7], atol=1e-5)


@pytest.mark.parametrize("class_ids", [np.int32(3), np.array([3, 4, 5], np.int32)], ids=["one", "three"])
def test_class_logits_compile_to_a_gather_of_rows_and_a_product_of_that_size(class_ids):
    arrays = head(2)
    hlo = jax.jit(class_logits).lower(*arrays, class_ids).compile().as_text()
    entry = hlo[hlo.index("ENTRY") :]
    # Only the two parameters themselves, and what reads their rows, may be as wide as there are classes.
    for line in hlo.splitlines():
        made = re.search(r"= \w+\[([\d,]*)\]", line)
        if made and str(NUM_CLASSES) in made.group(1).split(","):
            assert "parameter(" in line, line
    assert "gather" in hlo or "dynamic-slice" in hlo, entry
    cost = jax.jit(class_logits).lower(*arrays, class_ids).compile().cost_analysis()
    # Two examples, c classes, 24 features: 2 * 2 * c * 24 operations and some for the bounds; all k would be 97,248.
    assert cost["flops"] < 2 * 2 * np.size(class_ids) * NUM_FEATURES + 200


def test_changing_the_class_compiles_nothing():
    arrays = head(2)
    num_traces = 0

    @jax.jit
    def query(class_id):
        nonlocal num_traces
        num_traces += 1
        return class_logits(*arrays, class_id)

    answers = [query(class_id) for class_id in (0, 5, 1012, 1013, -1)]
    assert num_traces == 1
    np.testing.assert_allclose(np.stack(answers[:3], axis=1), naive(*arrays)[:, [0, 5, 1012]], atol=1e-5)
    assert np.isnan(answers[3:]).all()


@pytest.mark.parametrize("class_id", [2**32 + 2, -(2**32) + 2, 2**63 + 2, 2**70])
def test_a_known_id_that_int32_does_not_have_is_an_error_and_never_wraps(class_id):
    for known in (class_id, [class_id], np.array(class_id)):
        with pytest.raises(ValueError, match=rf"class_ids must be in \[0, 1013\), got {class_id}"):
            class_logits(*head(2), known)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_a_traced_64_bit_id_gives_nan_and_never_wraps(dtype, x64):
    ids = np.array([3, 2**32 + 2], dtype)
    np.testing.assert_array_equal(np.isnan(jax.jit(class_logits)(*head(1), ids)), [[False, True]])


def test_without_a_bias_the_logits_are_the_product_alone():
    features, kernel, _ = head(5)
    expected = naive(features, kernel, np.zeros(NUM_CLASSES))
    np.testing.assert_allclose(all_logits(features, kernel), expected, atol=1e-5)
    np.testing.assert_allclose(class_logits(features, kernel, None, [7, 9]), expected[:, [7, 9]], atol=1e-5)


@pytest.mark.parametrize("class_id", [-1, 1013, 2**31 - 1])
def test_an_id_out_of_range_gives_nan_under_jit_and_an_error_when_it_is_known(class_id):
    arrays = head(2)
    traced = jax.jit(class_logits)(*arrays, jnp.array([3, class_id]))
    assert np.isfinite(traced[:, 0]).all()
    assert np.isnan(traced[:, 1]).all()
    for known in (class_id, np.int32(class_id), np.array([3, class_id]), [3, class_id], (class_id,)):
        with pytest.raises(ValueError, match=r"class_ids must be in \[0, 1013\), got"):
            class_logits(*arrays, known)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_products_are_accumulated_and_returned_in_float32(dtype):
    arrays = [array.astype(dtype) for array in head(3)]
    expected = naive(*(array.astype(jnp.float32) for array in arrays))
    assert all_logits(*arrays).dtype == class_logits(*arrays, 7).dtype == jnp.float32
    # Far below the 16-bit rounding of a logit of about 5: 0.02 and 0.002.
    np.testing.assert_allclose(all_logits(*arrays), expected, atol=1e-5)
    np.testing.assert_allclose(class_logits(*arrays, 7), expected[:, 7], atol=1e-5)


def test_the_gradient_of_class_logits_is_zero_in_every_row_but_the_asked_ones():
    features, kernel, bias = head(4)
    ids = np.array([5, 900])
    kernel_gradient, bias_gradient = jax.grad(
        lambda kernel, bias: class_logits(features, kernel, bias, jnp.asarray(ids)).sum(), argnums=(0, 1)
    )(kernel, bias)
    np.testing.assert_array_equal(np.flatnonzero(bias_gradient), ids)
    np.testing.assert_array_equal(np.flatnonzero(np.abs(kernel_gradient).sum(axis=1)), ids)
    np.testing.assert_allclose(kernel_gradient[ids], np.tile(features.sum(axis=0), (2, 1)), rtol=1e-5)


def test_an_id_out_of_range_has_no_gradient_in_any_row():
    features, kernel, bias = head(4)
    gradient = jax.grad(lambda kernel: class_logits(features, kernel, bias, jnp.array(2000)).sum())(kernel)
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": np.ones((2, 3), np.float32)}, ValueError, r"features must have shape \[..., 24\]"),
        ({"features": np.float32(1)}, ValueError, r"features must have shape"),
        ({"features": np.ones((2, 24), np.int32)}, TypeError, "features must be floating-point"),
        ({"kernel": np.ones(24, np.float32)}, ValueError, r"kernel must have shape \[k, d\]"),
        (
            {"kernel": np.ones((24, 1013), np.float32)},
            ValueError,
            r"kernel must be \[k, d\].*looks transposed.*kernel.T",
        ),
        ({"bias": np.ones(3, np.float32)}, ValueError, r"bias must have shape \[1013\]"),
    ],
)
def test_wrong_shapes_and_dtypes_are_errors_that_name_the_argument(change, error, message):
    arrays = dict(zip(("features", "kernel", "bias"), head(2), strict=True)) | change
    with pytest.raises(error, match=message):
        all_logits(*arrays.values())
    with pytest.raises(error, match=message):
        class_logits(*arrays.values(), 0)


@pytest.mark.parametrize("class_ids", [1.0, np.array([True]), True, jnp.array([0.5])])
def test_class_ids_that_are_no_integers_are_refused(class_ids):
    with pytest.raises(TypeError, match="class_ids must be integers"):
        class_logits(*head(2), class_ids)


def test_class_ids_of_rank_two_are_refused():
    with pytest.raises(ValueError, match="class_ids must be one id or a vector of ids"):
        class_logits(*head(2), np.array([[0, 1]]))


def test_the_module_stores_one_row_per_class_and_computes_what_the_functions_do():
    features, _, _ = head(3)
    module = ClassHead(num_classes=11)
    params = module.init(jax.random.key(0), features)["params"]
    kernel, bias = params["kernel"], params["bias"]
    assert kernel.shape == (11, NUM_FEATURES)
    assert (bias == 0).all()
    # Lecun's initialization: variance 1 / d, whatever the number of classes.
    np.testing.assert_allclose(kernel.std(), NUM_FEATURES**-0.5, rtol=0.15)
    variables = {"params": params}
    np.testing.assert_array_equal(module.apply(variables, features), all_logits(features, kernel, bias))
    ids = jnp.array([4, 2])
    np.testing.assert_array_equal(
        module.apply(variables, features, ids, method="class_logits"),
        class_logits(features, kernel, bias, ids),
    )


def test_the_module_may_be_initialized_through_either_method():
    features, _, _ = head(3)
    module = ClassHead(num_classes=11)
    through_call = module.init(jax.random.key(0), features)
    through_class_logits = module.init(jax.random.key(0), features, 4, method="class_logits")
    jax.tree.map(np.testing.assert_array_equal, through_call, through_class_logits)


def test_the_module_multiplies_in_the_dtype_it_is_given_and_keeps_its_parameters_in_another():
    features, _, _ = head(3)
    module = ClassHead(num_classes=11, dtype=jnp.bfloat16)
    logits, variables = module.init_with_output(jax.random.key(0), features)
    params = variables["params"]
    assert params["kernel"].dtype == jnp.float32
    assert logits.dtype == jnp.float32
    rounded = [array.astype(jnp.bfloat16).astype(jnp.float32) for array in (features, params["kernel"])]
    np.testing.assert_allclose(logits, naive(*rounded, params["bias"]), atol=1e-5)
    gradients = jax.grad(lambda v: module.apply(v, features).sum())(variables)
    assert gradients["params"]["kernel"].dtype == jnp.float32


def test_16_bit_features_meet_float32_parameters_without_rounding_them():
    features, _, _ = head(3)
    features = features.astype(jnp.bfloat16)
    logits, variables = ClassHead(num_classes=11).init_with_output(jax.random.key(0), features)
    params = variables["params"]
    np.testing.assert_allclose(
        logits, naive(features.astype(jnp.float32), params["kernel"], params["bias"]), atol=1e-5
    )


def test_a_bias_that_starts_at_the_prior_makes_the_sigmoids_of_an_example_sum_to_one():
    module = ClassHead(num_classes=50, bias_init=prior_bias(50))
    logits, _ = module.init_with_output(jax.random.key(0), jnp.zeros((1, 8)))
    # sigmoid(-log(k - 1)) = 1 / (1 + (k - 1)) = 1 / k
    np.testing.assert_allclose(jax.nn.sigmoid(logits).sum(), 1.0, rtol=1e-5)
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        prior_bias(1)


def test_in_mixed_precision_only_the_asked_rows_are_cast():
    """Casting the kernel before the gather would make the cost of one logit grow with k."""

    def flops(num_classes):
        head = ClassHead(num_classes, dtype=jnp.bfloat16)
        features = jnp.ones((4, 16))
        variables = jax.eval_shape(head.init, jax.random.key(0), features)
        query = jax.jit(lambda v, f, c: head.apply(v, f, c, method="class_logits"))
        compiled = query.lower(variables, features, jnp.zeros((), jnp.int32)).compile()
        return compiled.cost_analysis()["flops"]

    assert flops(100_000) == flops(100)


def test_in_mixed_precision_one_logit_equals_its_column_of_all_logits():
    head = ClassHead(50, dtype=jnp.bfloat16)
    features = jax.random.normal(jax.random.key(1), (4, 16))
    variables = head.init(jax.random.key(0), features)
    one = head.apply(variables, features, 7, method="class_logits")
    # Both multiply the same bfloat16 numbers and add in float32, in an order of their own.
    np.testing.assert_allclose(one, head.apply(variables, features)[:, 7], rtol=1e-5, atol=1e-6)


def ask_on_mesh(*split):
    """`class_logits` of a layer whose rows are spread over a mesh, compiled."""
    mesh = jax.make_mesh(split, ("data", "class"), axis_types=(AxisType.Auto,) * 2)
    ask = functools.partial(class_logits, class_axis_name="class")
    specs = (P("data"), P("class"), P("class"), P())
    return jax.jit(jax.shard_map(ask, mesh=mesh, in_specs=specs, out_specs=P("data")))


@pytest.mark.parametrize("split", [(1, 8), (2, 4)], ids=str)
def test_class_shards_answer_a_query_as_one_device_does_and_compile_once(split):
    arrays = head(6, num_classes=16)
    expected = naive(*arrays)
    ask = ask_on_mesh(*split)
    for class_id in (0, 7, 15):
        np.testing.assert_allclose(ask(*arrays, jnp.int32(class_id)), expected[:, class_id], atol=1e-5)
    assert ask._cache_size() == 1
    ids = [15, 0, 3, 3]
    np.testing.assert_allclose(ask(*arrays, jnp.array(ids)), expected[:, ids], atol=1e-5)


def test_a_class_that_no_device_has_is_nan_whatever_the_integers_are():
    ask = ask_on_mesh(1, 8)
    logits = ask(*head(6, num_classes=16), jnp.array([3, 16, -1]))
    np.testing.assert_array_equal(np.isnan(logits), np.broadcast_to([False, True, True], (6, 3)))
    logits = ask(*head(6, num_classes=16), jnp.array([3, 16, 2**32 - 1], jnp.uint32))
    np.testing.assert_array_equal(np.isnan(logits), np.broadcast_to([False, True, True], (6, 3)))


def test_a_device_without_the_row_does_nothing_but_take_part_in_the_sum():
    """In the compiled program the product and the read of the kernel are inside one branch of a conditional."""
    text = ask_on_mesh(1, 8).lower(*head(128, num_classes=64), jnp.int32(3)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert "conditional(" in entry
    assert "all-reduce" in entry
    assert not re.search(r"\b(dot|gather)\(", entry)
    assert "dot(" in text


def test_padding_of_a_count_that_fits_changes_nothing_and_16_bit_padding_is_finite():
    _, kernel, bias = head(1, num_classes=16)
    assert pad_classes(kernel, bias, num_shards=8)[0].shape == kernel.shape
    _, low = pad_classes(kernel, bias.astype(jnp.float16), num_shards=10)
    assert low.shape == (20,)
    assert np.isfinite(low).all()
    with pytest.raises(ValueError, match="num_shards must be at least 1"):
        pad_classes(kernel, bias, num_shards=0)
