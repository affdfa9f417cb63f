"""Backbones that map images to features, and `Classifier`, a backbone with its output layer.

``MODELS`` maps the name of a network to its constructor. Every constructor takes ``width``, ``dtype`` and ``axis_name``
(see `Backbone`) beside the options of its own.
"""

from collections.abc import Callable, Mapping

from pols_jax.models.backbone import Backbone
from pols_jax.models.batch_norm import BatchNorm
from pols_jax.models.classifier import Classifier
from pols_jax.models.small import CNN, MLP

MODELS: Mapping[str, Callable[..., Backbone]] = {
    "mlp": MLP,
    "cnn": CNN,
}

__all__ = ["CNN", "MLP", "MODELS", "Backbone", "BatchNorm", "Classifier"]
