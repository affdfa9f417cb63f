"""Published weights: from the layout of torchvision and timm to the variables of the networks here.

Both libraries store a network as a flat dictionary of arrays with names such as ``layer1.0.conv2.weight``. A rule per
network says what they call a layer; axes are reordered, because PyTorch keeps channels first.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import numpy as np

from pols_jax.errors import ConfigError

__all__ = ["PUBLISHED", "num_published_classes", "published_variables"]

PUBLISHED: Mapping[str, str] = {
    "alexnet": "imagenet",
    "vgg16": "imagenet",
    "inception_v3": "symmetric",  # torchvision's own transform_input undoes ImageNet's mean and deviation
    "resnet50": "imagenet",
    "resnet101": "imagenet",
}
"""The networks whose published weights can be read, and the pixels they were trained with (see `Backbone`)."""

# What timm calls some layers of vgg16.
_TIMM = {"classifier.0": "pre_logits.fc1", "classifier.3": "pre_logits.fc2", "classifier.6": "head.fc"}
# Our names of a layer's arrays -> PyTorch's.
_ARRAYS = {
    ("params", "kernel"): "weight",
    ("params", "scale"): "weight",
    ("params", "bias"): "bias",
    ("batch_stats", "mean"): "running_mean",
    ("batch_stats", "var"): "running_var",
}
_ALEXNET = {
    **{f"conv{i}": f"features.{place}" for i, place in enumerate((0, 3, 6, 8, 10), start=1)},
    "dense1": "classifier.1",
    "dense2": "classifier.4",
    "head": "classifier.6",
}
_VGG16 = {
    **{
        f"conv{stage}_{i + 1}": f"features.{first + 2 * i}"
        for stage, (first, size) in enumerate(((0, 2), (5, 2), (10, 3), (17, 3), (24, 3)), start=1)
        for i in range(size)
    },
    "dense1": "classifier.0",
    "dense2": "classifier.3",
    "head": "classifier.6",
}
_INCEPTION_PARTS = {
    **{
        f"stem{i}": f"Conv2d_{name}"
        for i, name in enumerate(["1a_3x3", "2a_3x3", "2b_3x3", "3b_1x1", "4a_3x3"], 1)
    },
    **{f"stage1_block{i}": f"Mixed_5{letter}" for i, letter in enumerate("bcd", 1)},
    **{f"stage2_block{i}": f"Mixed_6{letter}" for i, letter in enumerate("bcde", 1)},
    **{f"stage3_block{i}": f"Mixed_7{letter}" for i, letter in enumerate("bc", 1)},
    "reduction1": "Mixed_6a",
    "reduction2": "Mixed_7a",
    "auxiliary1": "AuxLogits.conv0",
    "auxiliary2": "AuxLogits.conv1",
    "auxiliary_head": "AuxLogits.fc",
    "head": "fc",
}
# The branches of each kind of block, in our order; {} is the number of the convolution.
_INCEPTION_BRANCHES = {
    "stage1": ("branch1x1", "branch5x5_{}", "branch3x3dbl_{}", "branch_pool"),
    "stage2": ("branch1x1", "branch7x7_{}", "branch7x7dbl_{}", "branch_pool"),
    "stage3": ("branch1x1", "branch3x3_{}", "branch3x3dbl_{}", "branch_pool"),
    "reduction1": ("branch3x3", "branch3x3dbl_{}"),
    "reduction2": ("branch3x3_{}", "branch7x7x3_{}"),
}
# A layer that tells the networks apart, those with more layers first.
_SIGNATURES = {
    "resnet101": "layer3.22.conv1.weight",
    "resnet50": "layer3.5.conv1.weight",
    "inception_v3": "Mixed_7c.branch1x1.conv.weight",
    "vgg16": "features.28.weight",
    "alexnet": "features.6.weight",
}


def published_variables(
    arrays: Mapping[str, np.ndarray], shapes: Any, *, model: str, source: str = "The file"
) -> dict[str, Any]:
    """Turns weights in the layout of torchvision or timm into variables of a network.

    The backbone has to be there and to fit. An output layer that is missing or of another number of classes, and an
    auxiliary classifier that one of both does not have, are left out.

    Args:
      arrays: The arrays by their published names.
      shapes: The variables of the `Classifier`, or their shapes as `jax.eval_shape` gives them.
      model: A key of `PUBLISHED`.
      source: What the arrays are called in messages.

    Returns:
      Variables as ``shapes`` has them, without what was left out.

    Raises:
      ConfigError: if the arrays are those of another network, a layer is missing or not known, or a shape does not fit.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from pols_jax.models import MODELS, Classifier
      >>> network = Classifier(MODELS["resnet50"](), num_classes=10)
      >>> shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.ones((1, 32, 32, 3)))
      >>> published_variables({"bn1.weight": np.ones(64)}, shapes, model="resnet50")
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: The file holds no weights of resnet50: layer1.0.conv1.weight is missing, and 263 more.
    """
    found = next((network for network, layer in _SIGNATURES.items() if layer in arrays), model)
    if found != model:
        raise ConfigError(f"{source} holds weights of {found}, not of {model}.")
    is_timm = "pre_logits.fc1.weight" in arrays
    # The feature maps of the last convolution, which the first dense layer of alexnet and vgg16 takes.
    *_, channels = (shape[-1] for _, shape in _in_order(shapes) if len(shape) == 4)
    taken, names, problems = {}, set(), []
    for path, shape in _in_order(shapes):
        collection, *layers, variable = path
        layer = _published_layer(model, layers)
        name = f"{_TIMM.get(layer, layer) if is_timm else layer}.{_ARRAYS[collection, variable]}"
        names.add(name)
        if name not in arrays:
            if layers[0] == "backbone" and not name.startswith("AuxLogits."):
                problems.append(f"{name} is missing")
            continue
        array = _our_axes(np.asarray(arrays[name]), path, channels=channels)
        if array.shape == shape:
            taken[path] = array
        elif layers[0] == "backbone":
            wanted = list(shape[::-1] if len(shape) < 4 else (shape[3], shape[2], *shape[:2]))
            problems.append(f"{name} has the shape {list(arrays[name].shape)}, and the network here {wanted}")
    problems += [
        f"{name} is not known"
        for name in arrays
        if name not in names
        and not name.startswith("AuxLogits.")
        and not name.endswith("num_batches_tracked")
    ]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ConfigError(f"{source} holds no weights of {model}: {problems[0]}{more}.")
    return flax.traverse_util.unflatten_dict(taken)


def num_published_classes(arrays: Mapping[str, np.ndarray]) -> int | None:
    """The number of classes of published weights; None if they have no output layer.

    Examples:
      >>> num_published_classes({"fc.bias": np.zeros(1000)})
      1000
    """
    heads = (f"{layer}.bias" for layer in ("fc", "classifier.6", "head.fc"))
    return next((len(arrays[name]) for name in heads if name in arrays), None)


def _in_order(shapes: Any) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The paths and shapes of all variables, parameters first and in the order of their names."""
    flat: dict[tuple[str, ...], Any] = flax.traverse_util.flatten_dict(dict(shapes))
    return [(path, flat[path].shape) for path in sorted(flat, key=lambda path: (path[0] != "params", path))]


def _published_layer(model: str, layers: Sequence[str]) -> str:
    """What torchvision calls a layer, from our path to it.

    Examples:
      >>> _published_layer("resnet50", ["backbone", "stage2_block1", "projection", "norm"])
      'layer2.0.downsample.1'
      >>> _published_layer("inception_v3", ["backbone", "stage3_block2", "branch2_step2a", "conv"])
      'Mixed_7c.branch3x3_2a.conv'
    """
    first, *rest = layers[1:] if layers[0] == "backbone" else layers
    if model in ("alexnet", "vgg16"):
        return (_ALEXNET if model == "alexnet" else _VGG16)[first]
    if first.endswith("head"):
        return _INCEPTION_PARTS[first] if model == "inception_v3" else "fc"
    kind = {"conv": "conv", "norm": "bn"}[rest[-1]]
    if model == "inception_v3":
        if len(rest) == 1:
            return f"{_INCEPTION_PARTS[first]}.{kind}"
        branch, step = re.fullmatch(r"branch(\d)_step(\w+)", rest[0]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        names = _INCEPTION_BRANCHES[first.partition("_")[0]]
        return f"{_INCEPTION_PARTS[first]}.{names[int(branch) - 1].format(step)}.{kind}"
    if first == "stem":
        return f"{kind}1"
    stage, block = first.removeprefix("stage").split("_block")
    conv = rest[0].removeprefix("conv")
    name = f"downsample.{int(kind == 'bn')}" if conv == "projection" else f"{kind}{conv}"
    return f"layer{stage}.{int(block) - 1}.{name}"


def _our_axes(array: np.ndarray, path: Sequence[str], *, channels: int) -> np.ndarray:
    """Reorders the axes of a published array; one that cannot be reordered stays as it is."""
    if path[-1] != "kernel" or path[1] != "backbone":
        return array
    if not path[2].startswith("dense"):
        return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array
    # PyTorch flattens [c, h, w], and the networks here [h, w, c]; timm stores dense layers as convolutions.
    rows = len(array) if array.ndim else 0
    inner = channels if path[2] == "dense1" else 1
    if not array.size or array.size % (rows * inner):
        return array
    return array.reshape(rows, inner, -1).transpose(2, 1, 0).reshape(-1, rows)
