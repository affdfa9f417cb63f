"""What every network promises, on narrow and shallow variants of the same code, and the classifier around it."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.models import MODELS, Classifier

# Name and options, image size, features of the published network, parameters with 1,000 classes.
PUBLISHED = {
    # 784*500 + 500*500 weights, 2*2*500 for batch norm, 501*1000 for the head.
    "mlp": ("mlp", {}, (28, 28, 1), 500, 784 * 500 + 500 * 500 + 2000 + 501_000),
    # Convolutions and dense layer, batch norm (scale and bias of 1,792 maps and 1,024 units), head.
    "cnn": (
        "cnn",
        {},
        (32, 32, 3),
        1024,
        25 * (3 * 128 + 128 * 256 + 256 * 512)
        + (128 * 128 + 256 * 256 + 512 * 512)
        + 4 * 4 * 512 * 1024
        + 2 * (1792 + 1024)
        + 1_025_000,
    ),
    "alexnet": ("alexnet", {}, (224, 224, 3), 4096, 61_100_840),
    "vgg16": ("vgg16", {}, (224, 224, 3), 4096, 138_357_544),
    "inception_v3": ("inception_v3", {}, (299, 299, 3), 2048, 23_834_568),
    "inception_v3 with auxiliary": ("inception_v3", {"auxiliary": True}, (299, 299, 3), 2048, 27_161_264),
    "resnet50": ("resnet50", {}, (224, 224, 3), 2048, 25_557_032),
    "resnet101": ("resnet101", {}, (224, 224, 3), 2048, 44_549_160),
}

# Name -> options and image size of a variant that is small enough for a test.
SMALL = {
    "mlp": ({"width": 0.03}, (8, 8, 1)),
    "cnn": ({"width": 1 / 32}, (16, 16, 3)),
    "alexnet": ({"width": 1 / 32}, (63, 63, 3)),
    "vgg16": ({"width": 1 / 32, "stage_sizes": (1, 2)}, (16, 16, 3)),
    "inception_v3": ({"width": 1 / 32, "stage_sizes": (1, 1, 1)}, (75, 75, 3)),
    "resnet50": ({"width": 1 / 16, "stage_sizes": (1, 1)}, (32, 32, 3)),
    "resnet101": ({"width": 1 / 16, "stage_sizes": (2,)}, (32, 32, 3)),
}
WITH_BATCH_NORM = ("mlp", "cnn", "inception_v3", "resnet50", "resnet101")
WITH_DROPOUT = ("alexnet", "vgg16", "inception_v3")
NUM_CLASSES = 7
NUM_IMAGES = 6


def small_classifier(name, *, num_classes=NUM_CLASSES, **options):
    return Classifier(MODELS[name](**(SMALL[name][0] | options)), num_classes)


def random_images(name, num_images=NUM_IMAGES):
    values = np.random.default_rng(0).normal(size=(num_images, *SMALL[name][1]))
    return jnp.asarray(values, jnp.float32)


def random_variables(model, images):
    """Random parameters and running statistics; much faster than compiling init."""
    rng = np.random.default_rng(1)

    def fill(path, leaf):
        match path[-1].key:
            case "kernel":
                values = rng.normal(size=leaf.shape) * math.sqrt(2 / math.prod(leaf.shape[:-1]))
            case "scale" | "var":
                values = rng.uniform(0.5, 1.5, leaf.shape)
            case _:
                values = 0.3 * rng.normal(size=leaf.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0), images))


@functools.cache
def initialized(name):
    """A small classifier, random variables for it, and its evaluation, compiled once for all tests."""
    model = small_classifier(name)
    return model, random_variables(model, random_images(name)), jax.jit(model.apply)


@functools.cache
def compiled_training(name):
    """Maps (variables, images, where, key) to logits and updated running statistics, compiled once for all tests."""
    return jax.jit(functools.partial(train_apply, small_classifier(name)))


def train_apply(model, variables, images, where=None, key=None):
    """Logits and updated collections in training mode."""
    rngs = None if key is None else {"dropout": key}
    return model.apply(
        variables, images, train=True, where=where, rngs=rngs, mutable=["batch_stats", "auxiliary"]
    )


def num_parameters(variables):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))


def test_the_small_variants_cover_every_network():
    assert set(SMALL) == set(MODELS) == {name for name, *_ in PUBLISHED.values()}


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_published_network_has_its_number_of_parameters_and_features(case):
    name, options, image_shape, num_features, expected = PUBLISHED[case]
    model = Classifier(MODELS[name](**options), num_classes=1000)
    images = jax.ShapeDtypeStruct((2, *image_shape), jnp.float32)
    logits, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), images)
    assert num_parameters(variables) == expected
    assert variables["params"]["head"]["kernel"].shape == (1000, num_features)
    assert variables["params"]["head"]["bias"].shape == (1000,)
    assert logits.shape == (2, 1000)
    features = jax.eval_shape(functools.partial(model.apply, method="features"), variables, images)
    assert features.shape == (2, num_features)


@pytest.mark.parametrize(
    "name",
    # Outside jit every operation is compiled for every shape that it meets, and Inception-v3 has many.
    [pytest.param(name, marks=pytest.mark.slow if name == "inception_v3" else ()) for name in SMALL],
)
def test_the_jitted_function_is_the_eager_function(name):
    model, variables, apply = initialized(name)
    images = random_images(name)
    # XLA reorders float32 sums; logits are of order one.
    np.testing.assert_allclose(apply(variables, images), model.apply(variables, images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "inception_v3" else ()) for name in SMALL]
)
def test_in_training_the_gradient_reaches_every_parameter(name):
    _, variables, _ = initialized(name)
    images = random_images(name)
    rest = {collection: tree for collection, tree in variables.items() if collection != "params"}
    # Without dropout: at these widths it can switch a whole layer off.
    model = small_classifier(name, **({"dropout_rate": 0.0} if name in WITH_DROPOUT else {}))

    @jax.jit
    @jax.grad
    def gradient(params):
        logits, _ = train_apply(model, {"params": params, **rest}, images)
        return jnp.mean(jnp.square(logits - 1.0))

    for path, leaf in jax.tree.leaves_with_path(gradient(variables["params"])):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)
        assert np.any(leaf), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", SMALL)
def test_the_evaluation_of_an_image_does_not_depend_on_the_other_images(name):
    _, variables, apply = initialized(name)
    images = random_images(name)
    logits, with_others = apply(variables, images), apply(variables, images.at[1:].set(5.0))
    np.testing.assert_array_equal(logits[0], with_others[0])
    assert np.any(logits[1] != with_others[1])


@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_training_updates_the_running_statistics_and_leaves_masked_images_out(name):
    _, variables, _ = initialized(name)
    run, key, images = compiled_training(name), jax.random.key(1), random_images(name)
    where = jnp.arange(NUM_IMAGES) < 4
    other_padding = jnp.where(where[:, None, None, None], images, 5.0)

    logits, updates = run(variables, images, where, key)
    other_logits, other_updates = run(variables, other_padding, where, key)
    jax.tree.map(np.testing.assert_array_equal, (logits[:4], updates), (other_logits[:4], other_updates))
    changed = jax.tree.map(
        lambda old, new: bool(np.any(old != new)), variables["batch_stats"], updates["batch_stats"]
    )
    assert all(jax.tree.leaves(changed))
    unmasked_logits, _ = run(variables, images, jnp.ones(NUM_IMAGES, bool), key)
    assert np.max(np.abs(unmasked_logits[:4] - logits[:4])) > 1e-3


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_draws_from_its_random_stream_in_training(name):
    _, variables, _ = initialized(name)
    run, where = compiled_training(name), jnp.ones(NUM_IMAGES, bool)
    one, again, other = (
        run(variables, random_images(name), where, jax.random.key(seed))[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)


@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_every_batch_norm_adds_up_over_the_device_axis(name):
    _, variables, _ = initialized(name)
    model = small_classifier(name, axis_name="data")
    run = functools.partial(train_apply, model, key=jax.random.key(1))
    jaxpr = jax.make_jaxpr(run, axis_env=[("data", 8)])(variables, random_images(name))
    num_layers = len(jax.tree.leaves(variables["batch_stats"])) // 2
    # A count, a sum, and a sum of squares.
    assert len(re.findall(r"\bpsum\w*\[", str(jaxpr))) == 3 * num_layers


@pytest.mark.parametrize("name", ["mlp", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_eight_devices_train_as_one_with_an_uneven_mask(name):
    devices, per_device = 8, 2
    images = random_images(name, 16)
    where = jnp.array([1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1], bool)
    _, variables, _ = initialized(name)

    def loss(model, add_up, params, images, where):
        logits, updates = train_apply(model, variables | {"params": params}, images, where)
        total = add_up(jnp.sum(jnp.square(logits - 1.0), where=where[:, None]))
        return total / add_up(jnp.sum(where.astype(jnp.float32))), updates["batch_stats"]

    on_one = functools.partial(loss, small_classifier(name), lambda total: total)
    expected = jax.jit(jax.value_and_grad(on_one, has_aux=True))(variables["params"], images, where)

    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0, 0), out_axes=None)
    def on_all(params, images, where):
        model = small_classifier(name, axis_name="data")
        part = functools.partial(loss, model, lambda total: jax.lax.psum(total, "data"))
        value, grads = jax.value_and_grad(part, has_aux=True)(params, images, where)
        return value, jax.lax.pmean(grads, "data")

    def split(array):
        return array.reshape(devices, per_device, *array.shape[1:])

    actual = on_all(variables["params"], split(images), split(where))

    def assert_same_up_to_rounding(actual, expected):
        # Float32 sums in another order, through several layers.
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.max(np.abs(expected)) + 1e-7)

    jax.tree.map(assert_same_up_to_rounding, actual, expected)


@pytest.mark.parametrize("name", SMALL)
def test_bfloat16_computes_in_16_bits_and_stores_32_and_logits_have_32(name):
    images = random_images(name)
    backbone = MODELS[name](**SMALL[name][0], dtype=jnp.bfloat16)
    features, variables = jax.eval_shape(backbone.init_with_output, jax.random.key(0), images)
    assert features.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    lowered = jax.jit(backbone.apply).lower(variables, images).as_text()
    products = [line for line in lowered.splitlines() if "convolution(" in line or "dot_general" in line]
    assert products
    assert all("bf16" in line and "f32" not in line for line in products)
    logits, _ = jax.eval_shape(Classifier(backbone, NUM_CLASSES).init_with_output, jax.random.key(0), images)
    assert logits.dtype == jnp.float32


def test_bfloat16_features_are_near_the_float32_ones():
    model, variables, _ = initialized("resnet50")
    images = random_images("resnet50")
    features = jax.jit(functools.partial(model.apply, method="features"))(variables, images)
    narrow = small_classifier("resnet50", dtype=jnp.bfloat16)
    rounded = jax.jit(functools.partial(narrow.apply, method="features"))(variables, images)
    # bfloat16 keeps 8 bits: 0.4 % a rounding, over about ten layers.
    error = np.max(np.abs(np.asarray(rounded, np.float32) - features))
    assert 0 < error < 0.05 * np.max(np.abs(features))


@pytest.mark.parametrize("name", ["mlp", "resnet50"])
def test_class_logits_are_columns_of_all_logits(name):
    model, variables, apply = initialized(name)
    images = random_images(name)
    logits = apply(variables, images)
    ask = jax.jit(functools.partial(model.apply, method="class_logits"))
    np.testing.assert_allclose(ask(variables, images, 5), logits[:, 5], rtol=1e-4, atol=1e-5)
    ids = jnp.array([6, 0, 6])
    np.testing.assert_allclose(ask(variables, images, ids), logits[:, ids], rtol=1e-4, atol=1e-5)


def test_the_program_for_one_class_has_no_product_over_all_classes():
    num_classes, images = 1013, random_images("mlp")
    model = small_classifier("mlp", num_classes=num_classes)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def products_over_all_classes(**method):
        lowered = jax.jit(functools.partial(model.apply, **method)).lower(
            variables, images, *([jnp.int32(3)] if method else [])
        )
        lines = lowered.as_text().splitlines()
        return [
            line
            for line in lines
            if "dot_general" in line and re.search(rf"\b{num_classes}x|x{num_classes}x", line)
        ]

    assert products_over_all_classes()
    assert not products_over_all_classes(method="class_logits")


def test_the_cost_of_one_class_does_not_depend_on_the_number_of_classes():
    images = random_images("mlp")

    def flops(num_classes, **method):
        model = small_classifier("mlp", num_classes=num_classes)
        variables = jax.eval_shape(model.init, jax.random.key(0), images)
        asked = [jnp.int32(3)] if method else []
        compiled = (
            jax.jit(functools.partial(model.apply, **method)).lower(variables, images, *asked).compile()
        )
        return compiled.cost_analysis()["flops"]

    assert flops(10, method="class_logits") == flops(10_000, method="class_logits")
    assert flops(10_000) > 10 * flops(10)


def test_another_class_compiles_nothing():
    model, variables, _ = initialized("mlp")
    ask = jax.jit(functools.partial(model.apply, method="class_logits"))
    for class_id in range(NUM_CLASSES):
        ask(variables, random_images("mlp"), jnp.int32(class_id))
    assert ask._cache_size() == 1


def test_the_bias_of_the_head_starts_where_it_is_told():
    model = Classifier(MODELS["mlp"](**SMALL["mlp"][0]), NUM_CLASSES, bias_init=-2.5)
    params = model.init(jax.random.key(0), random_images("mlp"))["params"]
    np.testing.assert_array_equal(params["head"]["bias"], np.full(NUM_CLASSES, -2.5, np.float32))


def test_the_mlp_takes_any_number_of_layers():
    backbone = MODELS["mlp"](hidden_sizes=(64, 32, 16))
    features = jax.eval_shape(backbone.init_with_output, jax.random.key(0), random_images("mlp"))[0]
    assert features.shape == (NUM_IMAGES, 16)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error", "message"),
    [
        ("mlp", (2, 784), "float32", ValueError, r"shape \[m, h, w, c\]"),
        ("cnn", (2, 32, 32, 3), "uint8", TypeError, "scale them first"),
        ("alexnet", (2, 62, 64, 3), "float32", ValueError, "at least 63 pixels"),
        ("vgg16", (2, 31, 31, 3), "float32", ValueError, "at least 32 pixels"),
        ("inception_v3", (2, 74, 74, 3), "float32", ValueError, "at least 75 pixels"),
    ],
)
def test_wrong_images_are_refused_in_one_sentence(name, shape, dtype, error, message):
    images = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(error, match=message):
        jax.eval_shape(MODELS[name]().init, jax.random.key(0), images)


@pytest.mark.parametrize(
    ("name", "smallest"), [("alexnet", 63), ("vgg16", 32), ("inception_v3", 75), ("resnet50", 1)]
)
def test_the_smallest_images_leave_at_least_one_position(name, smallest):
    images = jax.ShapeDtypeStruct((1, smallest, smallest, 3), jnp.float32)
    variables = jax.eval_shape(MODELS[name](width=1 / 64).init, jax.random.key(0), images)
    assert all(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables))


WITH_AUXILIARY = small_classifier("inception_v3", dropout_rate=0.0, auxiliary=True)
LARGE_IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(3, 299, 299, 3)), jnp.float32)


@pytest.fixture(scope="module")
def auxiliary_variables():
    return random_variables(WITH_AUXILIARY, LARGE_IMAGES)


def test_the_variables_are_the_same_however_init_is_called():
    def shapes(train):
        init = functools.partial(WITH_AUXILIARY.init, train=train)
        return jax.tree.map(jnp.shape, jax.eval_shape(init, jax.random.key(0), LARGE_IMAGES))

    assert shapes(train=False) == shapes(train=True)
    assert set(shapes(train=False)) == {"params", "batch_stats"}
    assert shapes(train=False)["params"]["auxiliary_head"] == {"kernel": (7, 24), "bias": (7,)}


def test_training_stores_the_auxiliary_logits_and_their_gradient_reaches_the_side_branch(auxiliary_variables):
    def auxiliary_loss(params):
        logits, updates = WITH_AUXILIARY.apply(
            auxiliary_variables | {"params": params},
            LARGE_IMAGES,
            train=True,
            mutable=["batch_stats", "auxiliary"],
        )
        auxiliary_logits = updates["auxiliary"]["auxiliary_logits"]
        return jnp.mean(jnp.square(auxiliary_logits - 1.0)), (logits, auxiliary_logits)

    grads, (logits, auxiliary_logits) = jax.jit(jax.grad(auxiliary_loss, has_aux=True))(
        auxiliary_variables["params"]
    )
    assert logits.shape == auxiliary_logits.shape == (3, 7)
    assert np.any(logits != auxiliary_logits)
    reached = {
        name
        for name, tree in grads["backbone"].items()
        if any(np.any(leaf) for leaf in jax.tree.leaves(tree))
    }
    after_the_branch = {"reduction2", "stage3_block1"}
    assert reached == set(grads["backbone"]) - after_the_branch
    assert np.any(grads["auxiliary_head"]["kernel"])
    assert not np.any(grads["head"]["kernel"])


def test_evaluation_stores_nothing_and_has_the_program_of_the_network_without_side_branch(
    auxiliary_variables,
):
    images = LARGE_IMAGES[:1]
    logits, updates = jax.jit(functools.partial(WITH_AUXILIARY.apply, mutable=["auxiliary"]))(
        auxiliary_variables, images
    )
    assert not updates
    plain = Classifier(WITH_AUXILIARY.backbone.clone(auxiliary=False), WITH_AUXILIARY.num_classes)
    shapes = jax.eval_shape(plain.init, jax.random.key(0), images)

    def only(tree, wanted):
        return {
            key: only(tree[key], below) if isinstance(below, dict) else tree[key]
            for key, below in wanted.items()
        }

    fewer = only(auxiliary_variables, shapes)
    assert len(jax.tree.leaves(fewer)) < len(jax.tree.leaves(auxiliary_variables))
    np.testing.assert_array_equal(logits, jax.jit(plain.apply)(fewer, images))


def test_training_images_that_are_too_small_for_the_side_branch_are_refused():
    with pytest.raises(ValueError, match="at least 299 pixels"):
        jax.eval_shape(WITH_AUXILIARY.init, jax.random.key(0), LARGE_IMAGES[:, :298])


def test_evaluation_takes_smaller_images(auxiliary_variables):
    assert jax.eval_shape(WITH_AUXILIARY.apply, auxiliary_variables, LARGE_IMAGES[:, :75, :75]).shape == (
        3,
        7,
    )
