"""Can this be trained here? Whether the network takes images of that size, and whether a step fits in memory."""

import functools
import math

import jax

from pols_jax.data import ArraySplit, Dataset, find_augmentation
from pols_jax.errors import ConfigError
from pols_jax.memory import check_fits
from pols_jax.training.class_parallel import mesh_of
from pols_jax.training.config import RunConfig
from pols_jax.training.network import make_model, variable_shapes
from pols_jax.training.optimizers import make_optimizer, make_schedule
from pols_jax.training.row_optimizers import RowState, make_row_optimizer
from pols_jax.training.stored_arrays import tree_bytes


def check_feasible(config: RunConfig, dataset: Dataset) -> None:
    """Raises a `ConfigError` if the images do not suit the network or the settings, or a step does not fit in memory.

    Or if a mesh does not fit the devices. Compiles and allocates nothing.
    """
    train = dataset.train
    if config.head == "sampled" and (config.num_noise or 1) > dataset.num_classes:
        raise ConfigError(
            f"--num-noise {config.num_noise} draws more classes than the {dataset.num_classes:,} of {dataset.name}; draw "
            "fewer, or take all of them with --head blockwise."
        )
    if config.head == "sharded":
        mesh_of(config)
    if config.feature_passes and find_augmentation(config.augment, dataset) is None:
        raise ConfigError(f"--feature-passes: the training images of {dataset.name} are not augmented.")
    check_shape(
        config,
        name=dataset.name,
        num_classes=dataset.num_classes,
        image_shape=dataset.image_shape,
        resident_bytes=train.images.nbytes if isinstance(train, ArraySplit) else 0,
    )


def check_shape(
    config: RunConfig,
    *,
    name: str,
    num_classes: int,
    image_shape: tuple[int, int, int],
    resident_bytes: int,
) -> None:
    """Does what `check_feasible` does, for data that need not be loaded yet: ``resident_bytes`` of it stay in memory."""
    height, width, channels = image_shape
    smallest = make_model(config, num_classes).backbone.smallest_image
    if min(height, width) < smallest:
        raise ConfigError(
            f"--model {config.model} needs images of at least {smallest} x {smallest} pixels, and those of "
            f"{name} are {height} x {width}; choose another --model or a larger --image-size."
        )
    if config.pixels == "imagenet" and channels != 3:
        raise ConfigError(
            f"--pixels imagenet needs images in color, and those of {name} have {channels} channel."
        )
    if config.train == "head":  # no step goes through the backbone
        return
    devices = jax.local_devices()
    # The devices of a CPU share its memory.
    sharing = len(devices) if devices[0].platform == "cpu" else 1
    check_fits(
        sharing * (resident_bytes + _bytes_per_device(config, num_classes, image_shape)),
        devices[0],
        what=f"A step of --model {config.model} with --batch-size {config.batch_size} and {num_classes:,} classes",
        advice="choose a smaller --batch-size, --width or --hidden-sizes",
    )


def num_parameters(config: RunConfig, num_classes: int, image_shape: tuple[int, int, int]) -> int:
    """The number of parameters of a run's network, without those of batch statistics."""
    variables = variable_shapes(make_model(config, num_classes), image_shape)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))


def _bytes_per_device(config: RunConfig, num_classes: int, image_shape: tuple[int, int, int]) -> int:
    """What a device holds beside the data: state and gradient, and its part of the batch and of the largest layer."""
    state, layer = _sizes(config, num_classes, image_shape)
    if config.head == "sharded":
        state //= config.mesh_shape(jax.device_count())[1]
    examples = config.batch_size // jax.device_count()
    return state + examples * (4 * math.prod(image_shape) + 2 * layer)


@functools.lru_cache
def _sizes(config: RunConfig, num_classes: int, image_shape: tuple[int, int, int]) -> tuple[int, int]:
    """Bytes of parameters, their gradient and the optimizer's state; and of the largest layer's output for one image."""
    variables = dict(
        variable_shapes(make_model(config, num_classes), image_shape, capture_intermediates=True)
    )
    outputs = variables.pop("intermediates")
    if config.head != "dense":
        outputs = outputs["backbone"]  # all logits never exist
    params = dict(variables["params"])
    layers = [tree_bytes(leaf) for leaf in jax.tree.leaves(outputs)]
    state = 0
    if config.head == "sampled":  # a few rows have a gradient
        head = params.pop("head")
        optimizer = make_row_optimizer(config.optimizer, make_schedule(config), num_updates=1)
        state = tree_bytes(jax.eval_shape(functools.partial(RowState.init, optimizer), head))
    state += tree_bytes(params) + tree_bytes(jax.eval_shape(make_optimizer(config).init, params))
    return tree_bytes(variables) + state, max(layers, default=0)
