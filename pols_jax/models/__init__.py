"""Backbones that map images to features, and `Classifier`, a backbone with its output layer.

``MODELS`` maps the name of a network to its constructor. Every constructor takes ``width``, ``dtype``, ``axis_name`` and
``convolution`` (see `Backbone`) beside the options of its own.
"""

from collections.abc import Callable, Mapping
from functools import partial

from pols_jax.models.backbone import AsFeatures, Backbone
from pols_jax.models.batch_norm import BatchNorm
from pols_jax.models.classic import VGG, AlexNet
from pols_jax.models.classifier import Classifier
from pols_jax.models.convolution import Conv
from pols_jax.models.inception import InceptionV3
from pols_jax.models.published import PUBLISHED, num_published_classes, published_variables
from pols_jax.models.resnet import ResNet
from pols_jax.models.small import CNN, MLP

MODELS: Mapping[str, Callable[..., Backbone]] = {
    "mlp": MLP,
    "cnn": CNN,
    "alexnet": AlexNet,
    "vgg16": VGG,
    "inception_v3": InceptionV3,
    "resnet50": ResNet,
    "resnet101": partial(ResNet, stage_sizes=(3, 4, 23, 3)),
}
"""Every backbone by its name; call it with its options."""

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "PUBLISHED",
    "VGG",
    "AlexNet",
    "AsFeatures",
    "Backbone",
    "BatchNorm",
    "Classifier",
    "Conv",
    "InceptionV3",
    "ResNet",
    "num_published_classes",
    "published_variables",
]
