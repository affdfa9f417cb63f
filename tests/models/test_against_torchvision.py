"""The five ImageNet networks against torchvision's, with the same random weights in both.

Run with torch and torchvision installed: ``pytest -m slow tests/models/test_against_torchvision.py``. Both sides compute
in double precision, so that a difference is a difference of definition and not of rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax.models import MODELS, Classifier, published_variables

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)

NUM_CLASSES = 17
IMAGE_SIZES = {"alexnet": 224, "vgg16": 224, "inception_v3": 299, "resnet50": 224, "resnet101": 224}
# Double precision rounds at 1e-16; a hundred layers of sums over thousands of terms leave this much.
TOLERANCE = 1e-10


@pytest.fixture
def double_precision(x64):
    """Parameters start as float32 here, and Flax's own layers promote them when double ones take their place."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def random_torch_network(name, **options):
    """A torchvision network in double precision whose normalization layers are far from the identity."""
    torch.manual_seed(0)
    network = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES, **options).double()
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
            torch.nn.init.normal_(layer.bias, std=0.5)
            torch.nn.init.normal_(layer.running_mean, std=0.5)
            torch.nn.init.uniform_(layer.running_var, 0.5, 2.0)
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    return network


def copied_variables(model, name, images, network):
    """The torch network's parameters and running statistics under this model's names."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    arrays = {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}
    variables = published_variables(arrays, shapes, model=name)
    assert jax.tree.structure(variables) == jax.tree.structure(shapes)
    return jax.tree.map(jnp.asarray, variables)


def random_images(size):
    return np.random.default_rng(0).normal(size=(2, size, size, 3))


def for_torch(images):
    return torch.from_numpy(images.transpose(0, 3, 1, 2))


def assert_same(actual, expected):
    expected = expected.detach().numpy()
    assert np.std(expected) > 0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.max(np.abs(expected)))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_SIZES)
def test_evaluation_gives_torchvisions_logits(name, double_precision):
    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    network = random_torch_network(name, **options).eval()
    images = random_images(IMAGE_SIZES[name])
    model = Classifier(MODELS[name](), NUM_CLASSES)
    variables = copied_variables(model, name, jnp.asarray(images), network)
    with torch.no_grad():
        expected = network(for_torch(images))
    assert_same(jax.jit(model.apply)(variables, jnp.asarray(images)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inception_v3", "resnet50"])
def test_training_gives_torchvisions_logits_auxiliary_logits_and_running_means(name, double_precision):
    auxiliary = name == "inception_v3"
    network = random_torch_network(name, **({"init_weights": False} if auxiliary else {})).train()
    images = random_images(IMAGE_SIZES[name])
    options = {"auxiliary": True, "dropout_rate": 0.0} if auxiliary else {}
    model = Classifier(MODELS[name](**options), NUM_CLASSES)
    variables = copied_variables(model, name, jnp.asarray(images), network)

    @jax.jit
    def train_apply(variables, images):
        return model.apply(variables, images, train=True, mutable=["batch_stats", "auxiliary"])

    logits, updates = train_apply(variables, jnp.asarray(images))
    with torch.no_grad():
        expected = network(for_torch(images))
    if auxiliary:
        assert_same(updates["auxiliary"]["auxiliary_logits"], expected.aux_logits)
    assert_same(logits, expected.logits if auxiliary else expected)

    def means(batch_stats):
        return [leaf for path, leaf in jax.tree.leaves_with_path(batch_stats) if path[-1].key == "mean"]

    moved = copied_variables(model, name, jnp.asarray(images), network)["batch_stats"]
    for actual, expected_mean in zip(means(updates["batch_stats"]), means(moved), strict=True):
        # Running statistics are stored in float32.
        np.testing.assert_allclose(actual, expected_mean, rtol=1e-5, atol=1e-5)
