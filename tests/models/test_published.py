"""Published weights give the logits of the network that they came from, and what does not fit is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch_resnet import state_arrays, torch_logits, torch_resnet

from pols_jax.data import scale_pixels
from pols_jax.errors import ConfigError
from pols_jax.models import MODELS, PUBLISHED, Classifier, ResNet, published_variables
from pols_jax.models.published import _published_layer

# Entries of the backbone in the state dictionaries of torchvision 0.29, without the counters of batch norm.
NUM_ARRAYS = {"alexnet": 14, "vgg16": 30, "inception_v3": 470, "resnet50": 265, "resnet101": 520}


def shapes_of(backbone, num_classes=10, size=64):
    images = jnp.zeros((1, size, size, 3))
    return jax.eval_shape(Classifier(backbone, num_classes).init, jax.random.key(0), images)


@pytest.mark.parametrize("size", [64, pytest.param(224, marks=pytest.mark.slow)])
def test_logits_of_pictures_are_those_of_the_torch_network_the_weights_came_from(size):
    pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    # resnet50 itself, or its first blocks: the same layers, and programs that are compiled fast
    stages, width = ((3, 4, 6, 3), 1.0) if size == 224 else ((1, 1, 1, 1), 0.125)
    network = torch_resnet(stages, width, num_classes=10)
    pixels = np.random.default_rng(0).integers(0, 256, (2, size, size, 3), np.uint8)
    expected = torch_logits(network, pixels)
    backbone = ResNet(stage_sizes=stages, width=width, pixels=PUBLISHED["resnet50"])
    variables = published_variables(state_arrays(network), shapes_of(backbone), model="resnet50")
    logits = jax.jit(Classifier(backbone, 10).apply)(variables, scale_pixels(pixels))
    assert np.std(expected) > 0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.max(np.abs(expected)))


@pytest.mark.parametrize(
    "name",
    [
        "alexnet",
        "vgg16",
        "resnet50",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("inception_v3", "resnet101")),
    ],
)
def test_every_layer_of_the_five_networks_has_a_published_name(name):
    size = 75 if name == "inception_v3" else 64
    shapes = shapes_of(MODELS[name](), size=size)
    with pytest.raises(ConfigError, match=f"is missing, and {NUM_ARRAYS[name] - 1} more"):
        published_variables({}, shapes, model=name)


def test_names_that_need_more_than_counting():
    assert _published_layer("resnet101", ["backbone", "stage3_block23", "conv2", "norm"]) == "layer3.22.bn2"
    assert _published_layer("vgg16", ["backbone", "conv5_3"]) == "features.28"
    names = [
        ("stage1_block1", "branch4_step2", "Mixed_5b.branch_pool"),
        ("stage2_block4", "branch3_step5", "Mixed_6e.branch7x7dbl_5"),
    ]
    names += [
        ("reduction2", "branch2_step4", "Mixed_7a.branch7x7x3_4"),
        ("stage3_block1", "branch3_step3b", "Mixed_7b.branch3x3dbl_3b"),
    ]
    for block, branch, published in names:
        assert _published_layer("inception_v3", ["backbone", block, branch, "conv"]) == f"{published}.conv"
    assert _published_layer("inception_v3", ["auxiliary_head"]) == "AuxLogits.fc"


def small_vgg(names, rng):
    """Arrays for the narrowest vgg16 on pictures of 64 x 64 pixels: 2 x 2 positions go into its first dense layer."""
    arrays, inputs = {}, 3
    places = [
        (0, 1),
        (2, 1),
        (5, 1),
        (7, 1),
        (10, 2),
        (12, 2),
        (14, 2),
        *((p, 4) for p in (17, 19, 21, 24, 26, 28)),
    ]
    for place, channels in places:
        arrays[f"features.{place}.weight"] = rng.normal(size=(channels, inputs, 3, 3))
        arrays[f"features.{place}.bias"] = rng.normal(size=channels)
        inputs = channels
    for name, shape in zip(names, [(33, 4 * 2 * 2), (33, 33), (10, 33)], strict=True):
        arrays[f"{name}.weight"], arrays[f"{name}.bias"] = rng.normal(size=shape), rng.normal(size=shape[0])
    return arrays


def test_timms_names_and_shapes_of_vgg16_give_what_torchvisions_give():
    shapes = shapes_of(MODELS["vgg16"](width=0.008))
    torchvision = small_vgg(("classifier.0", "classifier.3", "classifier.6"), np.random.default_rng(0))
    timm = small_vgg(("pre_logits.fc1", "pre_logits.fc2", "head.fc"), np.random.default_rng(0))
    timm["pre_logits.fc1.weight"] = timm["pre_logits.fc1.weight"].reshape(33, 4, 2, 2)
    timm["pre_logits.fc2.weight"] = timm["pre_logits.fc2.weight"].reshape(33, 33, 1, 1)
    first, second = (published_variables(arrays, shapes, model="vgg16") for arrays in (torchvision, timm))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    # torch flattens [c, h, w], and a picture's features are [h, w, c] here
    weight = torchvision["classifier.0.weight"].reshape(33, 4, 2, 2)
    kernel = first["params"]["backbone"]["dense1"]["kernel"].reshape(2, 2, 4, 33)
    np.testing.assert_array_equal(kernel[1, 0, 3], weight[:, 3, 1, 0])


def test_an_output_layer_of_other_classes_or_none_is_left_out():
    names = ("classifier.0", "classifier.3", "classifier.6")
    arrays, shapes = small_vgg(names, np.random.default_rng(0)), shapes_of(MODELS["vgg16"](width=0.008), 11)
    assert "head" not in published_variables(arrays, shapes, model="vgg16")["params"]
    for part in ("weight", "bias"):
        del arrays[f"classifier.6.{part}"]
    assert "head" not in published_variables(arrays, shapes, model="vgg16")["params"]


def test_another_network_another_shape_and_another_layer_are_named():
    shapes = shapes_of(MODELS["vgg16"](width=0.008))
    arrays = small_vgg(("classifier.0", "classifier.3", "classifier.6"), np.random.default_rng(0))

    def problem(changed, model="vgg16", shapes=shapes):
        with pytest.raises(ConfigError) as raised:
            published_variables(changed, shapes, model=model, source="x.safetensors")
        return str(raised.value)

    assert problem(arrays, "resnet50") == "x.safetensors holds weights of vgg16, not of resnet50."
    narrow = shapes_of(MODELS["vgg16"](width=0.016))
    assert "features.5.bias has the shape [1], and the network here [2]" in problem(arrays, shapes=narrow)
    larger = shapes_of(MODELS["vgg16"](width=0.008), size=96)
    assert "classifier.0.weight has the shape [33, 16], and the network here [33, 36]" in problem(
        arrays, shapes=larger
    )
    assert "extra.weight is not known" in problem(arrays | {"extra.weight": np.ones(1)})
    del arrays["features.12.bias"]
    assert problem(arrays) == "x.safetensors holds no weights of vgg16: features.12.bias is missing."
