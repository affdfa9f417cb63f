"""Our convolution is Flax's, in parameters, values and gradients, in every form; accelerators get XLA's."""

import functools
import zipfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from pols_jax import ClassBank
from pols_jax.models import MODELS, products
from pols_jax.models.convolution import Conv, choose_form, convolve

# Kernel, stride, padding, image and inputs of every kind of layer that the networks have.
LAYERS = {
    "1x1": ((1, 1), 1, 0, (5, 6), 8),
    "1x1 stride 2": ((1, 1), 2, 0, (7, 6), 8),
    "3x3": ((3, 3), 1, 1, (9, 8), 8),
    "3x3 valid": ((3, 3), 1, "VALID", (9, 8), 8),
    "3x3 of few channels": ((3, 3), 1, "SAME", (6, 5), 3),
    "3x3 stride 2": ((3, 3), 2, 1, (9, 8), 8),
    "3x3 stride 2 valid": ((3, 3), 2, "VALID", (9, 8), 8),
    "3x3 stride 2 of few channels": ((3, 3), 2, "VALID", (15, 14), 3),
    "5x5": ((5, 5), 1, "SAME", (9, 7), 8),
    "5x5 valid": ((5, 5), 1, "VALID", (5, 5), 8),
    "1x3": ((1, 3), 1, "SAME", (5, 6), 8),
    "7x1": ((7, 1), 1, "SAME", (9, 5), 8),
    "7x7 stride 2": ((7, 7), 2, 3, (12, 13), 3),
    "11x11 stride 4": ((11, 11), 4, 2, (31, 30), 3),
}
FEATURES, IMAGES = 6, 4


def arrays(layer, dtype=np.float32):
    kernel_size, _, _, size, inputs = LAYERS[layer]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(IMAGES, *size, inputs))
    kernel = rng.normal(size=(*kernel_size, inputs, FEATURES)) / np.sqrt(np.prod(kernel_size) * inputs)
    return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)


def values_and_gradients(layer, form, x, kernel):
    _, stride, padding, _, _ = LAYERS[layer]

    @jax.jit
    def run(x, kernel):
        y, gradients = jax.vjp(
            lambda x, kernel: convolve(x, kernel, stride=stride, padding=padding, form=form), x, kernel
        )
        # A cotangent that does not depend on the rounding of y.
        return y, *gradients(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype))

    return run(x, kernel)


def forms_of(layer):
    return ("im2col", "winograd") if LAYERS[layer][1] == 1 and layer != "1x1" else ("im2col",)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_form_has_the_values_and_gradients_of_xlas_convolution(layer):
    x, kernel = arrays(layer)
    expected = values_and_gradients(layer, "xla", x, kernel)
    for form in forms_of(layer):
        for actual, wanted in zip(values_and_gradients(layer, form, x, kernel), expected, strict=True):
            # Sums of up to 400 float32 numbers in another order.
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-6 * np.max(np.abs(wanted)))


@pytest.mark.parametrize(
    ("layer", "form", "images"),
    [
        ("3x3", "winograd", 1),
        ("5x5", "im2col", 1),
        ("3x3 valid", "winograd", 4),
        ("7x7 stride 2", "im2col", 4),
    ],
)
def test_a_small_budget_changes_memory_and_not_values(layer, form, images, monkeypatch):
    x, kernel = arrays(layer)
    x = x[:images]
    expected = values_and_gradients(layer, "xla", x, kernel)
    monkeypatch.setitem(products.BUDGET_BYTES, form, 2000 if images == 1 else 20_000)
    jax.clear_caches()  # the budget is read when a function is traced
    program = jax.make_jaxpr(functools.partial(values_and_gradients, layer, form))(x, kernel)
    assert "scan[" in str(program)  # strips of one image, or groups of images
    for actual, wanted in zip(values_and_gradients(layer, form, x, kernel), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-6 * np.max(np.abs(wanted)))
    jax.clear_caches()


@pytest.mark.parametrize("layer", ["1x1", "3x3", "5x5", "7x7 stride 2"])
def test_bfloat16_is_as_near_to_exact_as_xlas(layer):
    x, kernel = arrays(layer, jnp.bfloat16)
    exact = values_and_gradients(layer, "xla", x.astype(jnp.float32), kernel.astype(jnp.float32))
    for actual, wanted in zip(values_and_gradients(layer, "products", x, kernel), exact, strict=True):
        assert actual.dtype == jnp.bfloat16
        # bfloat16 keeps 8 bits: a result is off by 0.4 % at most, and sums of rounded products by little more.
        error = np.max(np.abs(np.asarray(actual, np.float32) - wanted))
        assert error < 0.01 * np.max(np.abs(wanted))


@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_are_those_of_flax(use_bias):
    x, _ = arrays("3x3")
    ours = Conv(FEATURES, (3, 3), stride=1, padding=1, use_bias=use_bias)
    flax = nn.Conv(FEATURES, (3, 3), strides=1, padding=1, use_bias=use_bias)
    variables = ours.init(jax.random.key(3), x)
    jax.tree.map(np.testing.assert_array_equal, variables, flax.init(jax.random.key(3), x))
    np.testing.assert_allclose(ours.apply(variables, x), flax.apply(variables, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_accelerators_get_xlas_convolutions_and_a_cpu_products(platform):
    backbone = MODELS["cnn"](width=1 / 16)
    images = jnp.zeros((2, 8, 8, 3))
    variables = jax.eval_shape(backbone.init, jax.random.key(0), images)

    def gradient(variables, images):
        return jax.grad(lambda variables: jnp.sum(backbone.apply(variables, images)))(variables)

    for function, per_layer in ((backbone.apply, 1), (gradient, 2)):
        traced = jax.jit(function).trace(variables, images)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        # Six convolutions, each followed at least by one for its kernel's gradient; functions of equal layers are shared.
        assert text.count("stablehlo.convolution") >= 6 * per_layer
        assert "reduce_window" in text
        assert "stablehlo.convolution" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_one_exported_program_serves_all_platforms():
    x, kernel = arrays("3x3")
    exported = jax.export.export(jax.jit(convolve), platforms=("cpu", "cuda", "tpu"))(x, kernel)
    assert "stablehlo.convolution" in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(x, kernel), convolve(x, kernel, form="xla"), rtol=0, atol=1e-5)


def test_mapped_and_spread_over_devices_it_is_the_same():
    x, kernel = arrays("5x5")
    expected = convolve(x, kernel, form="xla")
    one_by_one = jax.vmap(lambda x: convolve(x[None], kernel)[0])(x)
    np.testing.assert_allclose(one_by_one, expected, rtol=0, atol=1e-5)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def loss(x, kernel):
        return jax.lax.psum(jnp.sum(jnp.square(convolve(x, kernel))), "data")

    spread = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    actual = jax.jit(jax.grad(spread, argnums=1))(x, kernel)
    wanted = jax.grad(lambda kernel: jnp.sum(jnp.square(convolve(x, kernel, form="xla"))))(kernel)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * np.max(np.abs(wanted)))


def test_a_training_step_and_what_asks_for_products_never_use_xlas_convolution():
    for layer, (kernel_size, stride, _, size, inputs) in LAYERS.items():
        shape, new = (*kernel_size, inputs, FEATURES), (IMAGES, *size)
        assert choose_form(shape, new, stride=stride, products=True) != "xla", layer
    x, kernel = (jnp.zeros(shape) for shape in ((32, 64, 64, 8), (7, 7, 8, 6)))
    for form, there in (("auto", 1), ("products", 0)):
        traced = jax.jit(functools.partial(convolve, stride=2, form=form)).trace(x, kernel)
        assert traced.lower().as_text().count("stablehlo.convolution") == there
    gradient = jax.grad(lambda kernel: jnp.sum(convolve(x, kernel, stride=2)))
    assert "stablehlo.convolution" not in jax.jit(gradient).lower(kernel).as_text()


def test_the_gradient_keeps_images_and_kernel_and_no_patches():
    x, kernel = arrays("3x3")
    residuals = jax.tree.leaves(jax.vjp(lambda x, kernel: convolve(x, kernel), x, kernel)[1])
    assert sum(leaf.size for leaf in residuals) <= x.size + kernel.size


def test_a_run_of_the_version_with_flaxs_convolutions_opens_and_gives_its_logits(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent / "run_of_version_0.1.0.zip") as files:
        files.extractall(tmp_path)
    bank = ClassBank.open(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1), dtype=np.uint8)
    # What that version printed for these images: a CNN of 1/32 of the width, 20 steps on five glyphs.
    logits = [
        [-0.05119905, -0.79941279, -0.60591590, 1.38744152, -0.27243921],
        [0.44570509, 0.20936884, -1.11815989, 0.78438729, -0.65063787],
        [-0.48153630, -0.57803643, -0.69394612, 1.22557986, -0.35993952],
    ]
    np.testing.assert_allclose(bank.logits(images, list(bank.names)), logits, rtol=0, atol=1e-5)
