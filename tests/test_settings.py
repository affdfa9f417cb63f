"""Settings know the names of what they name without importing it; memory is asked before work starts."""

import types

import jax
import pytest

from pols_jax import memory
from pols_jax.errors import ConfigError
from pols_jax.losses import LOSSES
from pols_jax.models import MODELS
from pols_jax.settings import LOSS_NAMES, NETWORK_NAMES
from pols_jax.training import feasibility
from pols_jax.training.config import RunConfig


def test_the_names_that_settings_know_are_those_of_the_losses_and_networks():
    assert tuple(LOSSES) == LOSS_NAMES
    assert tuple(MODELS) == NETWORK_NAMES


def test_the_memory_of_an_accelerator_is_what_its_driver_says():
    device = types.SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"bytes_limit": 10, "bytes_in_use": 4}
    )
    assert memory.available_bytes(device) == 6
    assert memory.available_bytes(types.SimpleNamespace(platform="gpu", memory_stats=lambda: None)) is None


def test_where_the_memory_is_not_known_everything_fits(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    memory.check_fits(2**80, None, what="This", advice="ask for less")


def test_the_bytes_of_a_step_are_those_of_state_images_and_the_largest_layer(digits):
    config = RunConfig(hidden_sizes=(7,), optimizer="sgd", batch_size=8 * 3, steps=1)
    pixels = 32 * 32
    # Weights of the layer, scale and bias of its batch norm, and the output layer; each with its gradient.
    params = 4 * (pixels * 7 + 2 * 7 + 10 * 7 + 10)
    statistics = 4 * 2 * 7
    schedule = 4  # sgd's step count
    examples = 24 // jax.device_count()
    batch = examples * (4 * pixels + 2 * 4 * 10)  # 10 logits are more than 7 features
    expected = 2 * params + statistics + schedule + batch
    assert feasibility._bytes_per_device(config, 10, digits.image_shape) == expected


@pytest.mark.parametrize(("model", "smallest"), [("alexnet", 63), ("vgg16", 32), ("inception_v3", 75)])
def test_a_network_names_the_smallest_image_that_it_takes(model, smallest):
    backbone = MODELS[model](width=0.01)
    assert backbone.smallest_image == smallest
    image = jax.ShapeDtypeStruct((1, smallest, smallest, 3), "float32")
    jax.eval_shape(backbone.init, jax.random.key(0), image)
    image = jax.ShapeDtypeStruct((1, smallest - 1, smallest, 3), "float32")
    with pytest.raises(ValueError, match=f"at least {smallest} pixels"):
        jax.eval_shape(backbone.init, jax.random.key(0), image)


def test_an_auxiliary_classifier_needs_larger_images(digits):
    with pytest.raises(ConfigError, match="at least 299 x 299 pixels, and those of glyphs are 32 x 32"):
        feasibility.check_feasible(RunConfig(model="inception_v3", auxiliary=True), digits)
