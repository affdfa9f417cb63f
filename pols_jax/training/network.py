"""From a config to its network: all that someone needs of training who asks a network that is trained already."""

from typing import Any

import jax
import jax.numpy as jnp

from pols_jax.models import MODELS, Classifier
from pols_jax.training.config import RunConfig


def make_model(config: RunConfig, num_classes: int, *, axis_name: str | None = None) -> Classifier:
    """Builds the network that a config asks for; batch norm synchronizes over ``axis_name`` while training."""
    dtype = jnp.dtype(config.dtype)
    options: dict[str, Any] = {"width": config.width, "dtype": dtype, "axis_name": axis_name}
    # Not every network has these: they are given only where they are set.
    set_ones = ((name, getattr(config, name)) for name in ("pixels", "hidden_sizes", "auxiliary"))
    options |= {name: value for name, value in set_ones if value}
    return Classifier(
        MODELS[config.model](**options), num_classes, bias_init=config.first_bias(num_classes), dtype=dtype
    )


def variable_shapes(model: Classifier, image_shape: tuple[int, int, int], **options: Any) -> Any:
    """The variables of a network, as shapes; compiles nothing, not even a key. The options are those of ``init``."""
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    return jax.eval_shape(lambda images: model.init(jax.random.key(0), images, **options), images)
